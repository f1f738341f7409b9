/** A Chela server as the plugin calls it. */
export type Server = { url: string; key: string | undefined };

type Answer = { status: number; body: unknown };

const PATIENCE_MS = 10_000;
const KEY_HELP =
  "Make a key with `chela key new --scope feedback` and put it into openclaw.json as the provider's apiKey, as plugins.entries.chela.config.apiKey, or into OPENCLAW_CHELA_API_KEY.";

/** `http://host:port`, with or without a slash or `/v1` behind it, as the API's root. */
export function root(url: string): string {
  return `${url.trim().replace(/\/+$/, "").replace(/\/v1$/, "")}/v1`;
}

async function post(server: Server, path: string, body: object): Promise<Answer> {
  const response = await fetch(server.url + path, {
    method: "POST",
    headers: {
      "Content-Type": "application/json",
      ...(server.key ? { Authorization: `Bearer ${server.key}` } : {}),
    },
    body: JSON.stringify(body),
    signal: AbortSignal.timeout(PATIENCE_MS),
  });
  const text = await response.text();
  try {
    return { status: response.status, body: JSON.parse(text) };
  } catch {
    return { status: response.status, body: text };
  }
}

/** What the person reads when Chela says no. */
function refusal(server: Server, { status, body }: Answer): string {
  const said = (body as { error?: { message?: unknown } } | null)?.error?.message ?? body;
  const why = `Chela said no (${status}): ${String(said).replace(/\s+/g, " ").slice(0, 300)}`;
  if (status === 401 || status === 403) return `${why}. ${KEY_HELP}`;
  if (status === 404 && typeof body === "string")
    return `${why}. ${server.url} seems to be no Chela server: check plugins.entries.chela.config.baseUrl in openclaw.json.`;
  if (status === 404) return `${why}. Nothing that this key may see was answered here yet: talk first, then judge.`;
  if (status === 503) return `${why}. Try again in a moment.`;
  return why;
}

function unreachable(server: Server, error: unknown): string {
  const { message, cause } = error as { message?: string; cause?: { code?: string; message?: string } };
  const why = cause?.code ?? cause?.message ?? message ?? String(error);
  return `Chela does not answer at ${server.url} (${why}). Is \`chela serve\` running there? The address is plugins.entries.chela.config.baseUrl or the provider's baseUrl in openclaw.json.`;
}

/** Judges the last reply of a conversation; the answer is one line for the person. */
export async function feedback(server: Server, session: string, thumb: "up" | "down", text: string): Promise<string> {
  try {
    const answer = await post(server, "/feedback", { session, thumb, ...(text ? { text } : {}) });
    const turn = (answer.body as { turn?: unknown } | null)?.turn;
    if (answer.status !== 200 || typeof turn !== "string") return `Not noted. ${refusal(server, answer)}`;
    return `Noted: the last reply was ${thumb === "up" ? "good" : "bad"}${text ? `, "${text}"` : ""} (${turn}).`;
  } catch (error) {
    return `Not noted. ${unreachable(server, error)}`;
  }
}

/** Ends a conversation. Gives back what went wrong, if anything did. */
export async function end(server: Server, session: string): Promise<string | undefined> {
  try {
    const answer = await post(server, `/sessions/${encodeURIComponent(session)}/end`, {});
    return answer.status === 200 ? undefined : refusal(server, answer);
  } catch (error) {
    return unreachable(server, error);
  }
}
