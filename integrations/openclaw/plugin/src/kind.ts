/** What OpenClaw's prompt hooks tell of a run. */
export type Run = {
  trigger?: string | undefined;
  sessionKey?: string | undefined;
  inputProvenance?: { kind: string } | undefined;
};

export type Kind = "main" | "side";

/** Session keys of work that no person reads: sub-agents, cron jobs, memory flushes, other programs. */
const BEHIND = /:(subagent|cron|hook|acp|internal-session-effects):/;

/**
 * `main` is what a person said to the agent and what the agent did about it; only that may be learnt from. OpenClaw also uses the
 * trigger "user" for sub-agents and for what one session tells another, so the key and the origin have a say. An origin that is not
 * named is a person's: OpenClaw names it for everything else.
 */
export function kindOf(run: Run): Kind {
  const person = (run.inputProvenance?.kind ?? "external_user") === "external_user";
  return run.trigger === "user" && person && !BEHIND.test(run.sessionKey ?? "") ? "main" : "side";
}
