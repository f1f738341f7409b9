"""python_sdks.py URL: asks each API for a tool call, a round trip with the result, a streamed text and a streamed call."""

import json
import sys

import anthropic
import openai

MODEL = "my-model"
QUESTION = "weather in Ulm?"
RESULT = "weather result: sunny"
COUNT = "one two three four five"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def session(name):
    return {"X-Session-Id": name}


def chat(client):
    tools = [{"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": SCHEMA}}]
    create = client.chat.completions.create
    messages = [{"role": "user", "content": QUESTION}]
    choice = create(model=MODEL, messages=messages, tools=tools, extra_headers=session("chat")).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    call = choice.message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Ulm"}
    messages.append(choice.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
    reply = create(model=MODEL, messages=messages, tools=tools, extra_headers=session("chat"))
    assert "sunny" in reply.choices[0].message.content
    messages.append(reply.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "user", "content": "count"})
    stream = create(model=MODEL, messages=messages, tools=tools, stream=True, extra_headers=session("chat"))
    assert "".join(c.choices[0].delta.content or "" for c in stream) == COUNT
    chunks = list(
        create(
            model=MODEL,
            messages=[{"role": "user", "content": "count"}],
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=session("chat-stream"),
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == COUNT
    assert chunks[-1].usage.completion_tokens > 4


def responses(client):
    tools = [{"type": "function", "name": "get_weather", "description": "w", "parameters": SCHEMA}]
    create = client.responses.create
    first = create(model=MODEL, input=QUESTION, tools=tools, extra_headers=session("responses"))
    call = next(item for item in first.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"city": "Ulm"}
    items = [{"role": "user", "content": QUESTION}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
    second = create(model=MODEL, input=items, tools=tools, extra_headers=session("responses"))
    assert "sunny" in second.output_text
    third = create(model=MODEL, input="count", previous_response_id=second.id, tools=tools)
    assert third.output_text == COUNT
    with client.responses.stream(model=MODEL, input="count") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == COUNT and kinds[-1] == "response.completed", kinds
    with client.responses.stream(model=MODEL, input=QUESTION, tools=tools) as stream:
        stream.until_done()
        final = stream.get_final_response()
    assert any(item.type == "function_call" for item in final.output)


def messages(client):
    tools = [{"name": "get_weather", "description": "w", "input_schema": SCHEMA}]

    def create(messages):
        return client.messages.create(
            model=MODEL, max_tokens=100, messages=messages, tools=tools, system="Be nice.",
            extra_headers=session("messages"),
        )

    said = [{"role": "user", "content": QUESTION}]
    first = create(said)
    assert first.stop_reason == "tool_use", first
    call = next(block for block in first.content if block.type == "tool_use")
    assert call.input == {"city": "Ulm"}
    said.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in first.content]})
    said.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT}]})
    assert "sunny" in create(said).content[0].text
    with client.messages.stream(
        model=MODEL, max_tokens=100, messages=[{"role": "user", "content": "count"}]
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == COUNT and final.stop_reason == "end_turn" and final.usage.output_tokens > 4
    with client.messages.stream(
        model=MODEL, max_tokens=100, messages=[{"role": "user", "content": QUESTION}], tools=tools
    ) as stream:
        final = stream.get_final_message()
    assert any(b.type == "tool_use" and b.input == {"city": "Ulm"} for b in final.content)
    counted = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert counted.input_tokens > 3
    assert client.models.list().data[0].id
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x"}}
    try:
        create([{"role": "user", "content": [image]}])
        raise AssertionError("an image was taken")
    except anthropic.BadRequestError as error:
        assert "text only" in str(error), error


def main():
    url = sys.argv[1]
    chat(openai.OpenAI(base_url=f"{url}/v1", api_key="local"))
    responses(openai.OpenAI(base_url=f"{url}/v1", api_key="local"))
    messages(anthropic.Anthropic(base_url=url, api_key="local"))
    print("all well")


if __name__ == "__main__":
    main()
