// node node_sdks.mjs URL: the steps of python_sdks.py with the SDKs for Node.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const url = process.argv[2];
const model = "my-model";
const QUESTION = "weather in Ulm?";
const RESULT = "weather result: sunny";
const COUNT = "one two three four five";
const schema = { type: "object", properties: { city: { type: "string" } } };
const session = (name) => ({ headers: { "X-Session-Id": name } });

async function text(stream) {
  let all = "";
  for await (const chunk of stream) all += chunk.choices[0]?.delta.content ?? "";
  return all;
}

async function chat(client) {
  const tools = [{ type: "function", function: { name: "get_weather", description: "w", parameters: schema } }];
  const messages = [{ role: "user", content: QUESTION }];
  const create = (more) => client.chat.completions.create({ model, messages, tools, ...more }, session("chat"));
  const choice = (await create()).choices[0];
  assert.equal(choice.finish_reason, "tool_calls");
  const call = choice.message.tool_calls[0];
  assert.deepEqual(JSON.parse(call.function.arguments), { city: "Ulm" });
  messages.push(choice.message, { role: "tool", tool_call_id: call.id, content: RESULT });
  const reply = (await create()).choices[0].message;
  assert.match(reply.content, /sunny/);
  messages.push(reply, { role: "user", content: "count" });
  assert.equal(await text(await create({ stream: true })), COUNT);

  const runner = client.chat.completions.stream(
    { model, messages: [{ role: "user", content: "count" }], stream_options: { include_usage: true } },
    session("chat-stream"),
  );
  assert.equal(await runner.finalContent(), COUNT);
  assert.ok((await runner.totalUsage()).completion_tokens > 4);
}

async function responses(client) {
  const tools = [{ type: "function", name: "get_weather", description: "w", parameters: schema }];
  const create = (more) => client.responses.create({ model, tools, ...more }, session("responses"));
  const first = await create({ input: QUESTION });
  const call = first.output.find((item) => item.type === "function_call");
  assert.deepEqual(JSON.parse(call.arguments), { city: "Ulm" });
  const result = { type: "function_call_output", call_id: call.call_id, output: RESULT };
  const second = await create({ input: [{ role: "user", content: QUESTION }, ...first.output, result] });
  assert.match(second.output_text, /sunny/);
  const third = await client.responses.create({ model, tools, input: "count", previous_response_id: second.id });
  assert.equal(third.output_text, COUNT);

  const kinds = [];
  let final;
  for await (const event of await client.responses.create({ model, input: "count", stream: true })) {
    kinds.push(event.type);
    final = event.response ?? final;
  }
  assert.equal(kinds.at(-1), "response.completed");
  assert.equal(final.output.at(-1).content[0].text, COUNT);
  const called = await client.responses.stream({ model, tools, input: QUESTION }).finalResponse();
  assert.ok(called.output.some((item) => item.type === "function_call"));
}

async function messages(client) {
  const tools = [{ name: "get_weather", description: "w", input_schema: schema }];
  const create = (said) =>
    client.messages.create({ model, max_tokens: 100, messages: said, tools, system: "Be nice." }, session("messages"));
  const said = [{ role: "user", content: QUESTION }];
  const first = await create(said);
  assert.equal(first.stop_reason, "tool_use");
  const call = first.content.find((block) => block.type === "tool_use");
  assert.deepEqual(call.input, { city: "Ulm" });
  said.push({ role: "assistant", content: first.content });
  said.push({ role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: RESULT }] });
  assert.match((await create(said)).content[0].text, /sunny/);

  const count = { model, max_tokens: 100, messages: [{ role: "user", content: "count" }] };
  const counting = client.messages.stream(count);
  let heard = "";
  counting.on("text", (more) => (heard += more));
  const final = await counting.finalMessage();
  assert.equal(heard, COUNT);
  assert.equal(final.stop_reason, "end_turn");
  assert.ok(final.usage.output_tokens > 4);
  const asked = client.messages.stream({ model, max_tokens: 100, messages: said.slice(0, 1), tools });
  const block = (await asked.finalMessage()).content.find((one) => one.type === "tool_use");
  assert.deepEqual(block.input, { city: "Ulm" });

  const counted = await client.messages.countTokens({ model, messages: [{ role: "user", content: "hi" }] });
  assert.ok(counted.input_tokens > 3);
  assert.ok((await client.models.list()).data[0].id);
  const image = { type: "image", source: { type: "url", url: "http://127.0.0.1/x" } };
  await assert.rejects(create([{ role: "user", content: [image] }]), (error) => {
    assert.ok(error instanceof Anthropic.BadRequestError, String(error));
    assert.match(error.message, /text only/);
    return true;
  });
}

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "local" });
await chat(openai);
await responses(openai);
await messages(new Anthropic({ baseURL: url, apiKey: "local" }));
console.log("all well");
