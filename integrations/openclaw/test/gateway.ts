import { execFile, spawn, type ChildProcess } from "node:child_process";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { createServer, type AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

const HERE = fileURLToPath(new URL("..", import.meta.url));
const OPENCLAW = join(HERE, "node_modules/openclaw/openclaw.mjs");
const TOKEN = "test";

export async function freePort(): Promise<number> {
  const server = createServer();
  await new Promise<void>((done) => server.listen(0, "127.0.0.1", done));
  const { port } = server.address() as AddressInfo;
  await new Promise((done) => server.close(done));
  return port;
}

/** Waits for something to become true. */
export async function until<T>(what: string, probe: () => T | Promise<T>, seconds = 60): Promise<NonNullable<T>> {
  for (const end = Date.now() + seconds * 1000; Date.now() < end; ) {
    const found = await probe();
    if (found) return found;
    await new Promise((done) => setTimeout(done, 100));
  }
  throw new Error(`waited ${seconds} s in vain for ${what}`);
}

/** Starts a program and stops it with all that it started. */
export class Program {
  output = "";
  readonly #child: ChildProcess;

  constructor(command: string, args: string[], env: NodeJS.ProcessEnv = process.env) {
    this.#child = spawn(command, args, { env, detached: true, stdio: ["ignore", "pipe", "pipe"] });
    for (const stream of [this.#child.stdout, this.#child.stderr]) {
      stream?.on("data", (chunk) => (this.output += chunk));
    }
  }

  /** Waits for a line of its output. */
  async says(pattern: RegExp): Promise<void> {
    await until(`${pattern} in:\n${this.output}`, () => {
      if (this.#child.exitCode !== null) throw new Error(`ended with ${this.#child.exitCode}:\n${this.output}`);
      return pattern.test(this.output);
    }, 120);
  }

  async stop(): Promise<void> {
    const { pid, exitCode, signalCode } = this.#child;
    if (!pid || exitCode !== null || signalCode !== null) return;
    const gone = new Promise((done) => this.#child.once("exit", done));
    process.kill(-pid, "SIGKILL");
    await gone;
  }
}

export type Provider = { api: string; baseUrl: string; apiKey?: string; model?: string };

/** A real OpenClaw gateway with this plugin, and nothing of the person's own OpenClaw. */
export class Gateway {
  readonly #url: string;
  readonly #home: string;
  readonly #env: NodeJS.ProcessEnv;
  readonly program: Program;

  private constructor(url: string, home: string, env: NodeJS.ProcessEnv) {
    [this.#url, this.#home, this.#env] = [url, home, env];
    this.program = new Program(process.execPath, [OPENCLAW, "gateway", "run"], env);
  }

  static async start(providers: Record<string, Provider>, plugin: { access?: boolean } = {}): Promise<Gateway> {
    const home = await mkdtemp(join(tmpdir(), "chela-openclaw-"));
    const port = await freePort();
    const models = Object.entries(providers).map(([id, { model = "m" }]) => `${id}/${model}`);
    const config = {
      models: { mode: "merge", providers: Object.fromEntries(Object.entries(providers).map(([id, p]) => [id, provider(p)])) },
      agents: {
        defaults: {
          model: { primary: models[0] },
          models: Object.fromEntries(models.map((model) => [model, {}])),
          workspace: join(home, "workspace"),
        },
      },
      gateway: {
        mode: "local",
        bind: "loopback",
        port,
        auth: { mode: "token", token: TOKEN },
        http: { endpoints: { chatCompletions: { enabled: true } } },
      },
      logging: { file: join(home, "log") },
      plugins: {
        load: { paths: [join(HERE, "plugin")] },
        entries: {
          chela: {
            enabled: true,
            hooks: { allowConversationAccess: plugin.access ?? true },
            config: { providers: Object.keys(providers) },
          },
        },
      },
    };
    await writeFile(join(home, "openclaw.json"), JSON.stringify(config));
    const own = { HOME: home, OPENCLAW_STATE_DIR: join(home, "state"), OPENCLAW_CONFIG_PATH: join(home, "openclaw.json") };
    const gateway = new Gateway(`http://127.0.0.1:${port}`, home, { PATH: process.env["PATH"], NO_COLOR: "1", ...own });
    await gateway.program.says(/\[gateway\] ready/);
    return gateway;
  }

  async stop(): Promise<void> {
    await this.program.stop();
    await rm(this.#home, { recursive: true, force: true, maxRetries: 5, retryDelay: 200 });
  }

  /** A person says something and reads the reply. */
  async say(sessionKey: string, content: string, model?: string): Promise<string> {
    const response = await fetch(`${this.#url}/v1/chat/completions`, {
      method: "POST",
      headers: {
        "Content-Type": "application/json",
        Authorization: `Bearer ${TOKEN}`,
        "x-openclaw-session-key": sessionKey,
        ...(model ? { "x-openclaw-model": model } : {}),
      },
      body: JSON.stringify({ model: "openclaw", messages: [{ role: "user", content }] }),
    });
    const body: any = await response.json();
    if (!response.ok) throw new Error(`OpenClaw said ${response.status}: ${JSON.stringify(body)}`);
    return body.choices[0].message.content;
  }

  /** One of OpenClaw's own methods. */
  async call(method: string, params: object): Promise<any> {
    const rest = ["--params", JSON.stringify(params), "--token", TOKEN, "--json", "--timeout", "60000"];
    const stdout = await this.run("gateway", "call", method, ...rest);
    return JSON.parse(stdout.slice(stdout.indexOf("{")));
  }

  /** Another process of OpenClaw's with the same state. */
  async run(...args: string[]): Promise<string> {
    return (await promisify(execFile)(process.execPath, [OPENCLAW, ...args], { env: this.#env })).stdout;
  }

  /** A person types a command in the web chat; gives back what the chat then shows. */
  async command(sessionKey: string, message: string): Promise<string> {
    await this.call("chat.send", { sessionKey, message, idempotencyKey: crypto.randomUUID() });
    return until(`an answer to ${message}`, async () => {
      const { messages } = await this.call("chat.history", { sessionKey, limit: 2 });
      const last = messages.at(-1);
      return last?.role === "assistant" && messages.at(-2)?.content === message ? last.content[0].text : undefined;
    });
  }
}

function provider({ api, baseUrl, apiKey = "local", model = "m" }: Provider): object {
  const cost = { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 };
  const limits = { contextWindow: 131072, maxTokens: 4096 };
  return {
    api,
    baseUrl,
    apiKey,
    timeoutSeconds: 60,
    models: [{ id: model, name: model, reasoning: false, input: ["text"], cost, ...limits }],
  };
}
