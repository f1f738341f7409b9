import { definePluginEntry, type OpenClawPluginApi } from "openclaw/plugin-sdk/plugin-entry";
import { end, feedback, root, type Server } from "./chela.ts";
import { conversations, nameOf, type Row } from "./conversations.ts";

type Provider = Parameters<OpenClawPluginApi["registerProvider"]>[0];
type Wrap = NonNullable<Provider["wrapStreamFn"]>;
type Settings = { providers?: string[]; baseUrl?: string; apiKey?: string };

/** Ends after which the same conversation does not go on. */
const OVER = new Set(["new", "reset", "idle", "daily", "deleted"]);

export default definePluginEntry({
  id: "chela",
  name: "Chela",
  description: "Tells Chela which calls are a person's conversation; adds /good and /bad.",
  register(api) {
    const settings = (api.pluginConfig ?? {}) as Settings;
    const ids = settings.providers?.length ? settings.providers : ["chela"];
    const known = conversations();

    const server = (provider: string | undefined): Server => {
      const own = api.config.models?.providers?.[provider ?? ids[0]!];
      const key = settings.apiKey || process.env["OPENCLAW_CHELA_API_KEY"] || own?.apiKey;
      return {
        url: root(settings.baseUrl || own?.baseUrl || "http://127.0.0.1:30000"),
        key: typeof key === "string" ? key : undefined,
      };
    };
    const row = (agentId: string | undefined, sessionKey: string | undefined): Row => {
      if (!sessionKey) return undefined;
      return api.runtime.agent.session.getSessionEntry({ ...(agentId ? { agentId } : {}), sessionKey });
    };
    const name = (sessionId: string, agentId: string | undefined, sessionKey: string | undefined): string =>
      nameOf(sessionId, row(agentId, sessionKey));
    /** Nothing here may stop a turn of the agent. */
    const safely = <T>(what: string, otherwise: T, run: () => T): T => {
      try {
        return run();
      } catch (error) {
        api.logger.warn(`chela: ${what} failed, the turn goes on without it: ${String(error)}`);
        return otherwise;
      }
    };

    api.on("before_prompt_build", (_event, ctx) =>
      safely("reading a run's origin", undefined, () => {
        if (ctx.sessionId) known.begin(ctx.sessionId, row(ctx.agentId, ctx.sessionKey), ctx);
      }),
    );

    if (api.registrationMode === "full" && !api.config.plugins?.entries?.["chela"]?.hooks?.allowConversationAccess) {
      api.logger.warn(
        "chela: OpenClaw shows this plugin no runs, so X-Turn-Type is not sent. Set plugins.entries.chela.hooks.allowConversationAccess to true in openclaw.json.",
      );
    }

    const headersAround: Wrap = ({ streamFn: inner }) => {
      if (!inner) return undefined;
      const made = known.now();
      return (model, context, options) => {
        const headers = safely("marking a model call", {}, () =>
          known.headers(options?.sessionId, made, model.provider, model.id),
        );
        return inner(model, context, { ...options, headers: { ...options?.headers, ...headers } });
      };
    };

    for (const id of ids) {
      api.registerProvider({
        id,
        label: "Chela",
        auth: [],
        wrapStreamFn: headersAround,
        // A compaction's session is known only here (and not with anthropic-messages).
        resolveTransportTurnState: ({ sessionId }) =>
          sessionId ? { headers: { "X-Session-Id": known.name(sessionId) } } : undefined,
      });
    }

    const judge = (command: string, thumb: "up" | "down", description: string): void =>
      api.registerCommand({
        name: command,
        description,
        acceptsArgs: true,
        handler: async ({ sessionId, sessionKey, agentId, args }) => {
          if (!sessionId) return { text: "Not noted: no conversation has begun here. Talk first, then judge." };
          const session = name(sessionId, agentId, sessionKey);
          return { text: await feedback(server(known.get(sessionId)?.provider), session, thumb, args?.trim() ?? "") };
        },
      });
    judge("good", "up", "Tell Chela that the last reply was good, and why if you like");
    judge("bad", "down", "Tell Chela that the last reply was bad, and what you wanted instead");

    api.on("session_end", async ({ sessionId, sessionKey, reason }, ctx) => {
      // The store has the next conversation already, so only one that this process saw can be named.
      const ended = known.get(sessionId);
      if (!ended?.spoken || !ended.provider || !OVER.has(reason ?? "")) return;
      if (ended.id === name(sessionId, ctx.agentId, sessionKey)) return;
      known.forget(sessionId);
      const problem = await end(server(ended.provider), ended.id);
      if (problem) api.logger.warn(`chela: the conversation ended but Chela was not told: ${problem}`);
    });
  },
});
