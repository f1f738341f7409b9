import assert from "node:assert/strict";
import { after, before, beforeEach, test } from "node:test";
import { end, feedback, root } from "../plugin/src/chela.ts";
import { Fake } from "./fake.ts";

const fake = new Fake();
let server: { url: string; key: string };
before(async () => void (server = { url: root(await fake.listen()), key: "k" }));
after(() => fake.close());
beforeEach(() => fake.clear());

test("the root is found from any form of the address", () => {
  for (const url of ["http://h:1", "http://h:1/", "http://h:1/v1", " http://h:1/v1/ "]) assert.equal(root(url), "http://h:1/v1");
});

test("feedback names the session, the thumb and the words", async () => {
  assert.equal(await feedback(server, "u:7", "up", ""), "Noted: the last reply was good (turn_1).");
  assert.equal(await feedback(server, "u:7", "down", "too long"), 'Noted: the last reply was bad, "too long" (turn_1).');
  assert.deepEqual(fake.calls.map((c) => c.body), [
    { session: "u:7", thumb: "up" },
    { session: "u:7", thumb: "down", text: "too long" },
  ]);
  assert.equal(fake.calls[0]?.headers.authorization, "Bearer k");
});

test("the end names the session", async () => {
  assert.equal(await end(server, "u:7"), undefined);
  const [call] = fake.calls;
  assert.equal(call?.path, "/v1/sessions/u%3A7/end");
  assert.equal(call?.headers.authorization, "Bearer k");
});

const REFUSALS: [number, unknown, RegExp][] = [
  [401, { error: { message: "no such key" } }, /^Not noted\. Chela said no \(401\): no such key\. Make a key with `chela key new --scope feedback`/],
  [403, { error: { message: "scope chat" } }, /\(403\): scope chat\. Make a key/],
  [404, { error: { message: "session u:7 is not known here" } }, /not known here\. Nothing .* talk first/],
  [404, "<html>\n not found", /<html> not found\. .* no Chela server: check plugins\.entries\.chela\.config\.baseUrl/],
  [503, { error: { message: "store" } }, /\(503\): store\. Try again/],
  [400, { error: { message: "bad thumb" } }, /\(400\): bad thumb$/],
  [200, "something else", /\(200\): something else$/],
];
for (const [status, body, line] of REFUSALS) {
  test(`a refusal says what to do: ${status} ${JSON.stringify(body)}`, async (t) => {
    const judged = fake.judged;
    t.after(() => void (fake.judged = judged));
    fake.judged = { status, body };
    const said = await feedback(server, "u:7", "up", "");
    assert.match(said, line);
    assert.doesNotMatch(said, /\n/);
  });
}

test("a server that is not there is named", async () => {
  const nobody = { url: "http://127.0.0.1:9/v1", key: undefined };
  assert.match(await feedback(nobody, "u", "up", ""), /^Not noted\. Chela does not answer at http:\/\/127\.0\.0\.1:9\/v1 \(.+\)\. Is `chela serve` running/);
  assert.match((await end(nobody, "u")) ?? "", /does not answer/);
});
