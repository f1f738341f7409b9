//! A conversation as every API means it.

/// Who speaks. An API's `developer` is `System`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Instructions.
    System,
    /// The person, or whoever plays that part.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name that chat templates and wires use.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }

    /// The reverse of [`Role::as_str`]; `developer` is a system message.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "system" | "developer" => Some(Self::System),
            "user" => Some(Self::User),
            "assistant" => Some(Self::Assistant),
            "tool" | "function" => Some(Self::Tool),
            _ => None,
        }
    }
}

/// One call of a tool that the model asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Unique in the session.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// Its arguments as JSON text, as the model wrote them.
    pub arguments: String,
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said; empty when the wire had null or nothing.
    pub content: String,
    /// Thinking, kept apart from what is said.
    pub reasoning: Option<String>,
    /// Calls of an assistant message, in order.
    pub tool_calls: Vec<ToolCall>,
    /// Which call a tool message answers.
    pub tool_call_id: Option<String>,
    /// The speaker's or tool's name when the wire had one.
    pub name: Option<String>,
    /// A tool message whose tool reported an error.
    pub is_error: bool,
}

impl Message {
    /// A message of plain text.
    pub fn text(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
            is_error: false,
        }
    }

    /// A system message.
    pub fn system(content: impl Into<String>) -> Self {
        Self::text(Role::System, content)
    }

    /// A user message.
    pub fn user(content: impl Into<String>) -> Self {
        Self::text(Role::User, content)
    }

    /// An assistant message.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::text(Role::Assistant, content)
    }
}

/// A tool the client offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The whole definition as JSON text, keys in wire order at every depth.
    pub definition: String,
}

/// What a chat template renders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversation {
    /// In order.
    pub messages: Vec<Message>,
    /// In order.
    pub tools: Vec<Tool>,
    /// `chat_template_kwargs` as JSON text of an object.
    pub template_args: Option<String>,
}

/// Where a session id came from; kept as the reason shown to people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionClaim {
    /// Like `header x-session-id`.
    pub source: &'static str,
    /// The id as sent.
    pub id: String,
}

/// What the client itself said about the kind of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeclaredKind {
    /// May be trained on.
    Main,
    /// Served and kept, never trained on.
    Side,
    /// Served; recorded nowhere.
    Private,
}

/// What a request says about itself beside its conversation. Header names are in lower case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestHints {
    /// The first session id present, in the order of the API's documentation.
    pub session: Option<SessionClaim>,
    /// `X-Turn-Type`.
    pub kind: Option<DeclaredKind>,
    /// `X-Session-Done`: the session ends with this request.
    pub session_done: bool,
    /// All headers that client rules may read, except those with secrets.
    pub headers: Vec<(String, String)>,
}

/// Sampling as a client asks for it; `None` = the model's or server's default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingRequest {
    /// 0 = greedy.
    pub temperature: Option<f32>,
    /// Keep the smallest set with at least this mass.
    pub top_p: Option<f32>,
    /// Keep this many; 0 = all.
    pub top_k: Option<u32>,
    /// Keep tokens with at least this share of the most likely one's probability.
    pub min_p: Option<f32>,
    /// On tokens already in the reply, by count.
    pub frequency_penalty: Option<f32>,
    /// On tokens already in the reply, once.
    pub presence_penalty: Option<f32>,
    /// Added to the logits of these ids.
    pub logit_bias: Vec<(u32, f32)>,
    /// Same seed, same reply.
    pub seed: Option<u64>,
    /// Most tokens of the reply.
    pub max_tokens: Option<usize>,
    /// Texts that end the reply and are not part of it.
    pub stop: Vec<String>,
    /// Alternatives per token to report; `None` = no log-probs asked for.
    pub top_logprobs: Option<u8>,
    /// What the reply must look like.
    pub constraint: Option<Constraint>,
}

/// A form that sampling keeps a reply to. Thinking comes before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Constraint {
    /// JSON that holds to a schema.
    Schema {
        /// JSON Schema, as text.
        schema: String,
        /// Calls of the offered tools do as well.
        or_calls: bool,
    },
    /// The whole reply matches this regular expression.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Calls of the offered tools and nothing else.
    Calls {
        /// Of this tool; `None`: of any.
        tool: Option<String>,
        /// As many as the model likes, else one.
        many: bool,
    },
}

/// A request for a reply; which API it came by is no longer known.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatRequest {
    /// The `model` field as sent.
    pub model: String,
    /// What to answer.
    pub conversation: Conversation,
    /// How to sample.
    pub sampling: SamplingRequest,
    /// Number of replies, at least 1.
    pub choices: usize,
    /// What it says about itself.
    pub hints: RequestHints,
}
