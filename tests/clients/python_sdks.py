"""The openai and anthropic Python SDKs against a server with a scripted engine.

    pip install openai==3.57.0 anthropic==2.14.0
    cargo build --release && python tests/clients/python_sdks.py [MODEL]

MODEL names a model whose template knows tools (default: the second starter); only its tokenizer and template are used. Each API
is asked for a tool call, a round trip with the result, a streamed text and a streamed call; at the end the recorded sessions
must hold the right turns, linked, of the right kind.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request

import anthropic
import openai

HERE = pathlib.Path(__file__).resolve().parent
BINARY = HERE.parent.parent / "target" / "release" / "chela"
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


def recorded(url, key):
    def get(path):
        request = urllib.request.Request(url + path, headers={"authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    for name, count in [("chat", 2), ("chat-stream", 1), ("responses", 3), ("messages", 2)]:
        turns = get(f"/v1/sessions/{name}")["turns"]
        assert len(turns) == count, (name, len(turns))
        assert all(turn["kind"] == "main" for turn in turns), name
        for earlier, later in zip(turns, turns[1:]):
            assert later["parent"] == earlier["id"] and earlier["next_state"], name


def main():
    model = sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b"
    with tempfile.TemporaryDirectory() as data:
        script = f"script:{HERE / 'script.jsonl'}"
        command = [BINARY, "serve", "--engine", script, "--model", model, "--data-dir", data, "--port", "0"]
        server = subprocess.Popen(command)
        try:
            note = pathlib.Path(data, "server.json")
            while not note.exists():
                assert server.poll() is None, "the server ended"
                time.sleep(0.1)
            url = json.loads(note.read_text())["address"]
            chat(openai.OpenAI(base_url=f"{url}/v1", api_key="local"))
            responses(openai.OpenAI(base_url=f"{url}/v1", api_key="local"))
            messages(anthropic.Anthropic(base_url=url, api_key="local"))
            recorded(url, pathlib.Path(data, "admin.key").read_text().strip())
        finally:
            server.terminate()
            server.wait()
    print("all well")


if __name__ == "__main__":
    main()
