//! What each client needs to be told, and where it reads it.

use super::file::Format;
use serde_json::{Value, json};
use std::path::PathBuf;

/// What a client is pointed at.
#[derive(Clone, Debug)]
pub struct Target {
    /// `http://host:port`
    pub url: String,
    /// The model's name there.
    pub model: String,
    /// The key to send.
    pub key: String,
    /// Tokens of the model's context.
    pub context: usize,
}

impl Target {
    /// The address that OpenAI's clients want.
    fn v1(&self) -> String {
        format!("{}/v1", self.url)
    }

    /// Tokens of a reply.
    fn most(&self) -> usize {
        (self.context / 4).clamp(1, 8192)
    }
}

/// Where the user keeps things: home and environment.
pub struct Home<'a> {
    /// The home folder.
    pub dir: PathBuf,
    /// An environment variable.
    pub variable: &'a dyn Fn(&str) -> Option<String>,
}

impl Home<'_> {
    /// The folder that a variable names, else one under home.
    fn folder(&self, variable: &str, under: &str) -> PathBuf {
        let named = (self.variable)(variable).filter(|v| !v.is_empty());
        named.map_or_else(|| self.dir.join(under), PathBuf::from)
    }
}

/// A value at a path.
pub struct Edit {
    /// Where.
    pub at: Vec<String>,
    /// What; null takes it out.
    pub value: Value,
    /// Left alone when something stands here.
    pub unless: Option<Vec<String>>,
}

/// How a client is told.
pub enum Way {
    /// In a file of its own.
    File(Format, fn(&Home<'_>) -> PathBuf, fn(&Target) -> Vec<Edit>),
    /// By variables of the shell that starts it.
    Variables(fn(&Target) -> Vec<(&'static str, String)>),
}

/// A client.
pub struct Client {
    /// As people call it.
    pub name: &'static str,
    /// How it is told.
    pub way: Way,
    /// How it is started then.
    pub start: &'static str,
    /// Tokens it sends before a word is said.
    pub opening: usize,
}

fn path(keys: &[&str]) -> Vec<String> {
    keys.iter().map(|key| (*key).to_owned()).collect()
}

fn at(keys: &[&str], value: Value) -> Edit {
    Edit {
        at: path(keys),
        value,
        unless: None,
    }
}

/// All that are known.
pub const CLIENTS: &[Client] = &[
    Client {
        name: "openclaw",
        way: Way::File(
            Format::Json,
            |home| {
                let named = (home.variable)("OPENCLAW_CONFIG_PATH").filter(|v| !v.is_empty());
                named.map_or_else(
                    || {
                        home.folder("OPENCLAW_STATE_DIR", ".openclaw")
                            .join("openclaw.json")
                    },
                    PathBuf::from,
                )
            },
            openclaw,
        ),
        start: "openclaw agent --local --agent main --message \"hi\"  (a running gateway reads it anew)",
        opening: 15_000,
    },
    Client {
        name: "codex",
        way: Way::File(
            Format::Toml,
            |home| home.folder("CODEX_HOME", ".codex").join("config.toml"),
            codex,
        ),
        start: "codex",
        opening: 6_000,
    },
    Client {
        name: "claude-code",
        way: Way::File(
            Format::Json,
            |home| {
                home.folder("CLAUDE_CONFIG_DIR", ".claude")
                    .join("settings.json")
            },
            claude_code,
        ),
        start: "claude",
        opening: 12_000,
    },
    Client {
        name: "opencode",
        way: Way::File(
            Format::Json,
            |home| {
                let named = (home.variable)("OPENCODE_CONFIG").filter(|v| !v.is_empty());
                let folder = || home.folder("XDG_CONFIG_HOME", ".config").join("opencode");
                named.map_or_else(|| folder().join("opencode.json"), PathBuf::from)
            },
            opencode,
        ),
        start: "opencode",
        opening: 8_000,
    },
    Client {
        name: "zeroclaw",
        way: Way::File(
            Format::Toml,
            |home| {
                home.folder("ZEROCLAW_CONFIG_DIR", ".zeroclaw")
                    .join("config.toml")
            },
            zeroclaw,
        ),
        start: "zeroclaw agent -a main",
        opening: 15_000,
    },
    Client {
        name: "aider",
        way: Way::File(
            Format::Lines(": "),
            |home| home.dir.join(".aider.conf.yml"),
            |t| {
                vec![
                    at(&["openai-api-base"], json!(t.v1())),
                    at(&["openai-api-key"], json!(t.key)),
                    at(&["model"], json!(format!("openai/{}", t.model))),
                ]
            },
        ),
        start: "aider",
        opening: 2_000,
    },
    Client {
        name: "mini-swe-agent",
        way: Way::File(
            Format::Lines("="),
            |home| {
                home.folder("MSWEA_GLOBAL_CONFIG_DIR", ".config/mini-swe-agent")
                    .join(".env")
            },
            |t| {
                vec![
                    at(&["OPENAI_API_BASE"], json!(t.v1())),
                    at(&["OPENAI_API_KEY"], json!(t.key)),
                    at(&["MSWEA_MODEL_NAME"], json!(format!("openai/{}", t.model))),
                    at(&["MSWEA_COST_TRACKING"], json!("ignore_errors")),
                    at(&["MSWEA_CONFIGURED"], json!("true")),
                ]
            },
        ),
        start: "mini -t \"…\"",
        opening: 1_000,
    },
    Client {
        name: "openai",
        way: Way::Variables(openai),
        start: "any program on OpenAI's SDKs",
        opening: 0,
    },
    Client {
        name: "langchain",
        way: Way::Variables(openai),
        start: "ChatOpenAI(model=…)",
        opening: 0,
    },
    Client {
        name: "openai-agents",
        way: Way::Variables(openai),
        start: "Agent(model=…)",
        opening: 0,
    },
    Client {
        name: "anthropic",
        way: Way::Variables(|t| {
            vec![
                ("ANTHROPIC_BASE_URL", t.url.clone()),
                ("ANTHROPIC_AUTH_TOKEN", t.key.clone()),
            ]
        }),
        start: "any program on Anthropic's SDKs",
        opening: 0,
    },
];

fn openai(t: &Target) -> Vec<(&'static str, String)> {
    vec![
        ("OPENAI_BASE_URL", t.v1()),
        ("OPENAI_API_KEY", t.key.clone()),
        ("OPENAI_DEFAULT_MODEL", t.model.clone()),
    ]
}

fn openclaw(t: &Target) -> Vec<Edit> {
    let named = format!("chela/{}", t.model);
    let provider = json!({
        "baseUrl": t.v1(), "apiKey": t.key, "api": "openai-completions", "timeoutSeconds": 900,
        "models": [{
            "id": t.model, "name": t.model, "reasoning": false, "input": ["text"],
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            "contextWindow": t.context, "maxTokens": t.most(),
            // The session's id comes with each request.
            "compat": {"sendSessionAffinityHeaders": true, "supportsPromptCacheKey": true},
        }],
    });
    vec![
        at(&["models", "mode"], json!("merge")),
        at(&["models", "providers", "chela"], provider),
        at(&["agents", "defaults", "model", "primary"], json!(named)),
        at(&["agents", "defaults", "models", &named], json!({})),
    ]
}

fn codex(t: &Target) -> Vec<Edit> {
    let provider = |key: &str, value: Value| at(&["model_providers", "chela", key], value);
    vec![
        at(&["model"], json!(t.model)),
        at(&["model_provider"], json!("chela")),
        at(&["model_context_window"], json!(t.context)),
        provider("name", json!("chela")),
        provider("base_url", json!(t.v1())),
        provider("wire_api", json!("responses")),
        provider("experimental_bearer_token", json!(t.key)),
    ]
}

fn claude_code(t: &Target) -> Vec<Edit> {
    let variable = |name: &str, value: &str| at(&["env", name], json!(value));
    vec![
        variable("ANTHROPIC_BASE_URL", &t.url),
        variable("ANTHROPIC_AUTH_TOKEN", &t.key),
        variable("ANTHROPIC_MODEL", &t.model),
        variable("ANTHROPIC_SMALL_FAST_MODEL", &t.model),
        variable("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
        // Beside the token it would be sent too, and it is another server's.
        at(&["env", "ANTHROPIC_API_KEY"], Value::Null),
    ]
}

fn opencode(t: &Target) -> Vec<Edit> {
    let model = json!({
        "limit": {"context": t.context, "output": t.most()}, "tool_call": true,
    });
    let provider = json!({
        "npm": "@ai-sdk/openai-compatible", "name": "chela",
        "options": {"baseURL": t.v1(), "apiKey": t.key},
        "models": {(t.model.as_str()): model},
    });
    vec![
        at(&["provider", "chela"], provider),
        at(&["model"], json!(format!("chela/{}", t.model))),
    ]
}

fn zeroclaw(t: &Target) -> Vec<Edit> {
    let provider =
        |key: &str, value: Value| at(&["providers", "models", "custom", "chela", key], value);
    // It starts no agent without a profile of what the agent may do; one that stands there is the user's decision.
    let profile = ["agents", "main", "risk_profile"];
    let without_profile = |edit: Edit| Edit {
        unless: Some(path(&profile)),
        ..edit
    };
    vec![
        at(&["schema_version"], json!(3)),
        without_profile(at(
            &["risk_profiles", "chela", "level"],
            json!("supervised"),
        )),
        without_profile(at(&profile, json!("chela"))),
        provider("uri", json!(t.v1())),
        provider("api_key", json!(t.key)),
        provider("model", json!(t.model)),
        provider("native_tools", json!(true)),
        at(&["agents", "main", "enabled"], json!(true)),
        at(&["agents", "main", "model_provider"], json!("custom.chela")),
    ]
}
