"""langchain_client.py URL: a tool round trip and a streamed turn without a session id, then a streamed turn with one."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

COUNT = "one two three four five"


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"weather result: sunny in {city}"


def main():
    url = sys.argv[1]
    model = ChatOpenAI(model="my-model", base_url=f"{url}/v1", api_key="local")
    bound = model.bind_tools([get_weather])
    said = [HumanMessage("weather in Ulm?")]
    said.append(bound.invoke(said))
    (call,) = said[-1].tool_calls
    assert call["name"] == "get_weather" and call["args"] == {"city": "Ulm"}, call
    said.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))
    said.append(bound.invoke(said))
    assert said[-1].text == "It is sunny in Ulm.", said[-1]
    assert said[-1].usage_metadata["output_tokens"] > 4, said[-1]
    said.append(HumanMessage("count"))
    parts = [part.text for part in bound.stream(said)]
    assert "".join(parts) == COUNT and len(parts) > 3, parts
    named = ChatOpenAI(
        model="my-model", base_url=f"{url}/v1", api_key="local", default_headers={"X-Session-Id": "named"}
    )
    assert "".join(part.text for part in named.stream("count")) == COUNT
    print("all well")


main()
