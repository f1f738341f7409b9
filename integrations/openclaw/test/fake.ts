import { createServer, type IncomingHttpHeaders, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";

/** What arrived. */
export type Call = { path: string; headers: IncomingHttpHeaders; body: any };
type Reply = { text?: string; tool?: { id: string; args: object }; used?: number };

/** A stand-in for Chela that speaks its three APIs and notes every request. */
export class Fake {
  readonly calls: Call[] = [];
  /** What a model call is answered with. */
  reply: (call: Call) => Reply = () => ({});
  /** What feedback is answered with. */
  judged: { status: number; body: unknown } = { status: 200, body: { turn: "turn_1", verdict: 1 } };
  /** Answered with 503 before the next model calls are. */
  refuse = 0;
  #server = createServer((request, response) => {
    let text = "";
    request.on("data", (chunk) => (text += chunk));
    request.on("end", () => {
      const body = text ? JSON.parse(text) : undefined;
      this.#answer({ path: request.url ?? "", headers: request.headers, body }, response);
    });
  });

  async listen(): Promise<string> {
    await new Promise<void>((done) => this.#server.listen(0, "127.0.0.1", done));
    return `http://127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
  }

  close(): void {
    this.#server.close();
    this.#server.closeAllConnections();
  }

  /** Model calls since the last `clear`. */
  get turns(): Call[] {
    return this.calls.filter((call) => call.body?.model);
  }

  clear(): void {
    this.calls.length = 0;
  }

  #answer(call: Call, response: ServerResponse): void {
    this.calls.push(call);
    const json = (status: number, body: unknown) =>
      response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(body));
    if (call.path === "/v1/feedback") return void json(this.judged.status, this.judged.body);
    if (!call.body?.model) return void json(200, { object: "list", data: [{ id: "m" }] });
    if (!call.body.stream) return void json(200, { choices: [{ message: { role: "assistant", content: "." } }] });
    if (this.refuse > 0) {
      this.refuse--;
      return void json(503, { error: { message: "busy, retry-after: 1" } });
    }
    response.writeHead(200, { "content-type": "text/event-stream" });
    const reply = { text: `Reply ${this.calls.length}`, used: 500, ...this.reply(call) };
    const api = { "/v1/messages": messages, "/v1/responses": responses }[call.path] ?? completions;
    for (const [type, event] of api(reply)) {
      response.write(`${type ? `event: ${type}\n` : ""}data: ${JSON.stringify(type ? { type, ...event } : event)}\n\n`);
    }
    response.end(api === completions ? "data: [DONE]\n\n" : "");
  }
}

type Events = [type: string, event: Record<string, unknown>][];
type Said = { text: string; tool?: Reply["tool"]; used: number };

function completions({ text, tool, used }: Said): Events {
  const chunk = (rest: object): [string, Record<string, unknown>] => [
    "",
    { id: "c", object: "chat.completion.chunk", created: 1, model: "m", ...rest },
  ];
  const call = tool && {
    tool_calls: [{ index: 0, id: "call_1", type: "function", function: { name: "tool_call", arguments: JSON.stringify(tool) } }],
  };
  return [
    chunk({ choices: [{ index: 0, delta: { role: "assistant", ...(call ?? { content: text }) }, finish_reason: null }] }),
    chunk({ choices: [{ index: 0, delta: {}, finish_reason: tool ? "tool_calls" : "stop" }] }),
    chunk({ choices: [], usage: { prompt_tokens: used, completion_tokens: 2, total_tokens: used + 2 } }),
  ];
}

function responses({ text, used }: Said): Events {
  const base = { id: "resp_1", object: "response", created_at: 1, model: "m" };
  const part = { type: "output_text", text, annotations: [] };
  const item = { id: "msg_1", type: "message", role: "assistant", status: "completed", content: [part] };
  const at = { output_index: 0, item_id: item.id, content_index: 0 };
  const usage = { input_tokens: used, output_tokens: 2, total_tokens: used + 2 };
  return [
    ["response.created", { response: { ...base, status: "in_progress", output: [] } }],
    ["response.output_item.added", { output_index: 0, item: { ...item, status: "in_progress", content: [] } }],
    ["response.content_part.added", { ...at, part: { ...part, text: "" } }],
    ["response.output_text.delta", { ...at, delta: text }],
    ["response.output_text.done", { ...at, text }],
    ["response.output_item.done", { output_index: 0, item }],
    ["response.completed", { response: { ...base, status: "completed", output: [item], usage } }],
  ];
}

function messages({ text, used }: Said): Events {
  const usage = { input_tokens: used, output_tokens: 1 };
  return [
    ["message_start", { message: { id: "m", type: "message", role: "assistant", content: [], model: "m", usage } }],
    ["content_block_start", { index: 0, content_block: { type: "text", text: "" } }],
    ["content_block_delta", { index: 0, delta: { type: "text_delta", text } }],
    ["content_block_stop", { index: 0 }],
    ["message_delta", { delta: { stop_reason: "end_turn" }, usage: { output_tokens: 2 } }],
    ["message_stop", {}],
  ];
}
