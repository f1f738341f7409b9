"""agents_client.py URL: with each model class an agent that calls a tool, and a streamed second run in the same session."""

import asyncio
import sys

import agents
from openai import AsyncOpenAI

COUNT = "one two three four five"


@agents.function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"weather result: sunny in {city}"


async def talk(model):
    agent = agents.Agent(name="Helper", instructions="Be nice.", model=model, tools=[get_weather])
    session = agents.SQLiteSession("one")
    first = await agents.Runner.run(agent, "weather in Ulm?", session=session)
    assert first.final_output == "It is sunny in Ulm.", first.final_output
    second = agents.Runner.run_streamed(agent, "count", session=session)
    deltas = [
        event.data.delta
        async for event in second.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == COUNT and len(deltas) > 3, deltas
    assert second.final_output == COUNT, second.final_output


async def main():
    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="local")
    await talk(agents.OpenAIResponsesModel("my-model", client))
    await talk(agents.OpenAIChatCompletionsModel("my-model", client))
    print("all well")


asyncio.run(main())
