import { kindOf, type Kind, type Run } from "./kind.ts";

/** What is known of one OpenClaw session. */
type Conversation = {
  /** Its name at Chela. */
  id: string;
  /** Of the run that began last in it. */
  kind: Kind;
  /** When that was, by the counter. */
  began: number;
  /** A person spoke in it. */
  spoken: boolean;
  /** Who answered last. */
  provider?: string;
  model?: string;
};

/** The store row that says since when a session id has its present conversation. */
export type Row = { sessionId?: string; sessionStartedAt?: number } | undefined;

const MOST = 4096;

/**
 * The name of a conversation at Chela. OpenClaw keeps the session id over /new and /reset and only moves `sessionStartedAt`; a
 * compaction moves neither, and both survive a restart of the gateway. Escaped, since it becomes a header; a UUID stays as it is.
 */
export function nameOf(sessionId: string, row: Row): string {
  const id = encodeURIComponent(sessionId).slice(0, 200);
  return row?.sessionId === sessionId && row.sessionStartedAt ? `${id}:${row.sessionStartedAt}` : id;
}

/** Joins what the hooks say of a run with the model calls it makes: they share only the session id. */
export class Conversations {
  #known = new Map<string, Conversation>();
  #count = 0;
  /** Whether OpenClaw lets us see runs at all. */
  seeing = false;

  /** A mark to tell before from after. */
  now(): number {
    return ++this.#count;
  }

  /** A run begins in a session. */
  begin(sessionId: string, row: Row, run: Run): void {
    this.seeing = true;
    const [id, kind, before] = [nameOf(sessionId, row), kindOf(run), this.#known.get(sessionId)];
    const same = before?.id === id ? before : undefined;
    const spoken = kind === "main" || same?.spoken === true;
    this.#known.delete(sessionId);
    this.#known.set(sessionId, { ...same, id, kind, spoken, began: this.now() });
    for (const oldest of this.#known.keys()) {
      if (this.#known.size <= MOST) break;
      this.#known.delete(oldest);
    }
  }

  get(sessionId: string): Conversation | undefined {
    return this.#known.get(sessionId);
  }

  /** What the running conversation of a session is called. */
  name(sessionId: string): string {
    return this.#known.get(sessionId)?.id ?? nameOf(sessionId, undefined);
  }

  forget(sessionId: string): void {
    this.#known.delete(sessionId);
  }

  /**
   * The headers of a model call. `made` is when OpenClaw set up the stream of the run that calls, always just before that run begins.
   * A memory flush has a session of its own for the hooks but calls under its parent's id: no run began there since, so it is side.
   * A compaction calls without an id.
   */
  headers(sessionId: string | undefined, made: number, provider: string, model: string): Record<string, string> {
    const headers: Record<string, string> = {};
    const here = sessionId ? this.#known.get(sessionId) : undefined;
    if (sessionId) headers["X-Session-Id"] = this.name(sessionId);
    const running = here !== undefined && here.began > made;
    if (running) Object.assign(here, { provider, model });
    // Without the hooks nothing is known of the run, and Chela's own rules are the better guess.
    if (this.seeing) headers["X-Turn-Type"] = running ? here.kind : "side";
    return headers;
  }
}

/** OpenClaw loads a plugin several times into one process, its commands apart from its provider hooks: they meet here. */
export function conversations(): Conversations {
  const place = globalThis as { [key: symbol]: Conversations | undefined };
  return (place[Symbol.for("chela-openclaw.conversations")] ??= new Conversations());
}
