import assert from "node:assert/strict";
import { after, before, beforeEach, describe, test } from "node:test";
import { Fake, type Call } from "./fake.ts";
import { Gateway, until } from "./gateway.ts";

const MAIN = "agent:main:main";
const kind = (call: Call | undefined) => call?.headers["x-turn-type"];
const session = (call: Call | undefined) => call?.headers["x-session-id"];
const said = (call: Call) => JSON.stringify(call.body.messages ?? call.body.input);
const history = (call: Call | undefined) => JSON.stringify(call?.body.messages.slice(1));

describe("in a real OpenClaw gateway", () => {
  const fake = new Fake();
  let gateway: Gateway;
  before(async () => {
    const url = await fake.listen();
    gateway = await Gateway.start({
      chela: { api: "openai-completions", baseUrl: `${url}/v1` },
      "chela-responses": { api: "openai-responses", baseUrl: `${url}/v1` },
      "chela-messages": { api: "anthropic-messages", baseUrl: url },
    });
  });
  after(async () => {
    await gateway?.stop();
    fake.close();
  });
  beforeEach(() => {
    fake.clear();
    fake.reply = () => ({});
  });
  const turns = (n: number) => until(`${n} model calls`, () => (fake.turns.length < n ? undefined : fake.turns));

  for (const model of ["chela/m", "chela-responses/m", "chela-messages/m"]) {
    test(`a person's turns are main and of one session: ${model}`, async () => {
      const key = `agent:main:${model.replace(/\W/g, "-")}`;
      await gateway.say(key, "one", model);
      await gateway.say(key, "two", model);
      const [one, two] = await turns(2);
      assert.match(String(session(one)), /^[0-9a-f-]{36}:\d+$/);
      assert.equal(session(two), session(one));
      assert.deepEqual([kind(one), kind(two)], ["main", "main"]);
      await gateway.say(`${key}-other`, "three", model);
      assert.notEqual(session(fake.turns[2]), session(one));
    });
  }

  test("what follows a tool is main, the sub-agent and its announcement are side", async () => {
    const spawn = { id: "sessions_spawn", args: { task: "count to three" } };
    fake.reply = (call) => (fake.turns.indexOf(call) === 0 ? { tool: spawn } : {});
    await gateway.say(MAIN, "spawn one");
    const calls = await turns(4);
    const own = calls.filter((call) => session(call) === session(calls[0]));
    const child = calls.find((call) => session(call) !== session(calls[0]));
    assert.deepEqual(own.map(kind), ["main", "main", "side"]);
    assert.match(said(own[1]!), /"role":"tool"/);
    assert.match(said(own[2]!), /A background task completed/);
    assert.match(said(child!), /Subagent Context/);
    assert.equal(kind(child), "side");
  });

  test("a heartbeat is a side turn of the same session", async () => {
    await gateway.say(MAIN, "before");
    await gateway.call("wake", { text: "something happened", mode: "now" });
    const [before, beat] = await turns(2);
    await until("the heartbeat's end", () => /something happened/.test(said(beat!)));
    await gateway.say(MAIN, "after");
    const [, , later] = await turns(3);
    assert.deepEqual([kind(before), kind(beat), kind(later)], ["main", "side", "main"]);
    assert.equal(new Set([before, beat, later].map(session)).size, 1);
  });

  test("cron is side", async () => {
    const job = await gateway.call("cron.add", {
      name: "test",
      schedule: { kind: "at", at: new Date(Date.now() + 3_600_000).toISOString() },
      sessionTarget: "isolated",
      wakeMode: "now",
      payload: { kind: "agentTurn", message: "do it" },
      delivery: { mode: "none" },
    });
    await gateway.call("cron.run", { id: job.id ?? job.job?.id, mode: "force" });
    const [call] = await turns(1);
    assert.match(said(call!), /\[cron:/);
    assert.equal(kind(call), "side");
    assert.ok(session(call));
  });

  test("memory flush and compaction are side and leave the session its name", async () => {
    const key = "agent:main:long";
    await gateway.say(key, "first");
    await gateway.say(key, "second");
    fake.reply = () => ({ used: 125_000 });
    await gateway.say(key, "third");
    fake.reply = () => ({});
    await gateway.say(key, "fourth");
    const asked = (pattern: RegExp) => fake.turns.filter((call) => pattern.test(said(call)));
    const flush = asked(/Pre-compaction memory flush/)[0];
    const compaction = asked(/You are a context summarization assistant/);
    const person = asked(/fourth/).at(-1);
    assert.ok(flush && compaction.length > 0 && person, `${fake.turns.map((call) => said(call).slice(-300))}`);
    assert.deepEqual([kind(flush), ...new Set(compaction.map(kind)), kind(person)], ["side", "side", "main"]);
    assert.equal(new Set([flush, ...compaction, ...asked(/third/)].map(session)).size, 1);
  });

  test("a turn that OpenClaw tries again stays main", async () => {
    fake.refuse = 1;
    await gateway.say(MAIN, "once more");
    assert.deepEqual((await turns(2)).map(kind), ["main", "main"]);
  });

  test("/good and /bad judge the conversation in which they are said", async () => {
    await gateway.say(MAIN, "hello");
    assert.match(await gateway.command(MAIN, "/good nice and short"), /^Noted: the last reply was good, "nice and short" \(turn_1\)\.$/);
    assert.match(await gateway.command(MAIN, "/bad"), /^Noted: the last reply was bad \(turn_1\)\.$/);
    const judged = fake.calls.filter((call) => call.path === "/v1/feedback");
    assert.deepEqual(judged.map((call) => call.body), [
      { session: session(fake.turns[0]), thumb: "up", text: "nice and short" },
      { session: session(fake.turns[0]), thumb: "down" },
    ]);
    assert.equal(judged[0]?.headers.authorization, "Bearer local");

    fake.judged = { status: 401, body: { error: { message: "this needs a key of scope feedback" } } };
    assert.match(await gateway.command(MAIN, "/good again"), /^Not noted\. Chela said no \(401\): this needs .* `chela key new --scope feedback`/);
    assert.equal(fake.turns.length, 1, "commands reach no model at once");
    await gateway.say(MAIN, "and on");
    assert.doesNotMatch(history(fake.turns[1]), /Noted/, "nor do their answers, later");
  });

  test("a reset ends the session at Chela and begins another", async () => {
    await gateway.say(MAIN, "last words");
    const [last] = await turns(1);
    await gateway.call("sessions.reset", { key: MAIN, reason: "new" });
    const done = await until("the end", () => fake.calls.find((call) => call.path.endsWith("/end")));
    assert.equal(decodeURIComponent(done.path.split("/")[3] ?? ""), session(last));
    await gateway.say(MAIN, "first words");
    const first = fake.turns.at(-1);
    assert.equal(kind(first), "main");
    assert.notEqual(session(first), session(last));
  });

  test("another process goes on in the same session", async () => {
    await gateway.say(MAIN, "one");
    await gateway.program.stop();
    await gateway.run("agent", "--local", "--session-key", MAIN, "--message", "two");
    const [one, two] = await turns(2);
    assert.equal(session(two), session(one));
    assert.equal(kind(two), "main");
  });
});

test("without access to conversations the kind is left to Chela", async (t) => {
  const fake = new Fake();
  const gateway = await Gateway.start({ chela: { api: "openai-completions", baseUrl: `${await fake.listen()}/v1` } }, { access: false });
  t.after(async () => {
    await gateway.stop();
    fake.close();
  });
  assert.match(await gateway.say(MAIN, "hello"), /^Reply/);
  assert.ok(session(fake.turns[0]));
  assert.equal(kind(fake.turns[0]), undefined);
  assert.match(gateway.program.output, /chela: OpenClaw shows this plugin no runs.*allowConversationAccess/);
});
