import assert from "node:assert/strict";
import { test } from "node:test";
import { Conversations, nameOf } from "../plugin/src/conversations.ts";
import { kindOf, type Kind, type Run } from "../plugin/src/kind.ts";

const MAIN = "agent:main:main";

/** As captured from OpenClaw 2026.9.6. */
const RUNS: [string, Kind, Run][] = [
  ["a person", "main", { trigger: "user", sessionKey: MAIN }],
  ["a person, named as such", "main", { trigger: "user", sessionKey: MAIN, inputProvenance: { kind: "external_user" } }],
  ["a person in a group", "main", { trigger: "user", sessionKey: "agent:main:telegram:group:-1" }],
  ["a person, key unknown", "main", { trigger: "user" }],
  ["heartbeat", "side", { trigger: "heartbeat", sessionKey: MAIN, inputProvenance: { kind: "internal_system" } }],
  ["cron", "side", { trigger: "cron", sessionKey: "agent:main:cron:1:run:2" }],
  ["what goes on in a cron session", "side", { trigger: "user", sessionKey: "agent:main:cron:1" }],
  ["memory flush", "side", { trigger: "memory", sessionKey: "agent:main:internal-session-effects:1" }],
  ["sub-agent", "side", { trigger: "user", sessionKey: "agent:main:subagent:1" }],
  ["a sub-agent's result", "side", { trigger: "user", sessionKey: MAIN, inputProvenance: { kind: "inter_session" } }],
  ["after a restart", "side", { trigger: "user", sessionKey: MAIN, inputProvenance: { kind: "internal_system" } }],
  ["compaction", "side", { trigger: "manual", sessionKey: MAIN }],
  ["overflow", "side", { trigger: "overflow", sessionKey: MAIN }],
  ["nothing known", "side", {}],
];

for (const [what, kind, run] of RUNS) test(`${what} is ${kind}`, () => assert.equal(kindOf(run), kind));

test("a name changes with the start of the conversation only", () => {
  assert.equal(nameOf("u", { sessionId: "u", sessionStartedAt: 7 }), "u:7");
  assert.equal(nameOf("u", { sessionId: "other", sessionStartedAt: 7 }), "u");
  assert.equal(nameOf("u", undefined), "u");
  assert.equal(nameOf("ü\n", undefined), "%C3%BC%0A");
});

test("only calls of a run that began after its stream was set up are that run's", () => {
  const known = new Conversations();
  const call = (session: string | undefined, made: number) => known.headers(session, made, "chela", "m");
  assert.deepEqual(call("u", known.now()), { "X-Session-Id": "u" }, "no hooks: Chela decides");

  const user = known.now();
  known.begin("u", { sessionId: "u", sessionStartedAt: 7 }, { trigger: "user", sessionKey: MAIN });
  const main = { "X-Session-Id": "u:7", "X-Turn-Type": "main" };
  assert.deepEqual(call("u", user), main);
  assert.deepEqual(call("u", user), main, "after a tool");

  const flush = known.now();
  known.begin("internal-session-effects-1", undefined, { trigger: "memory" });
  assert.deepEqual(call("u", flush), { "X-Session-Id": "u:7", "X-Turn-Type": "side" });
  assert.deepEqual(call(undefined, known.now()), { "X-Turn-Type": "side" }, "compaction");

  const beat = known.now();
  known.begin("u", { sessionId: "u", sessionStartedAt: 7 }, { trigger: "heartbeat", sessionKey: MAIN });
  assert.equal(call("u", beat)["X-Turn-Type"], "side");
  assert.deepEqual([known.get("u")?.provider, known.get("u")?.model], ["chela", "m"]);
});
