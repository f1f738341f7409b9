//! The model's own chat template, rendered as Hugging Face renders it.

use crate::{
    encode::Encoder,
    error::ChatError,
    python::{strftime, to_json},
};
use chela_core::{Conversation, Message, Role};
use minijinja::{Environment, Error, ErrorKind, Value, syntax::SyntaxConfig, value::Serde};
use regex::Regex;
use serde_json::{Map, Value as Json, json};
use std::{sync::Arc, time::SystemTime};

/// Tells the time to templates that ask for it.
pub type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

/// A compiled template.
pub struct Template {
    environment: Environment<'static>,
    /// It names `tools`.
    pub tools: bool,
    bos: Option<String>,
    eos: Option<String>,
}

const NAME: &str = "chat";

/// Tells what `raise_exception` raised from other failures.
#[derive(Debug)]
struct Raised;

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("raised by the template")
    }
}

impl std::error::Error for Raised {}

/// A conversation as a template reads it, its typed text guarded; made once and rendered in parts.
pub struct Prepared {
    messages: Vec<(Role, Value)>,
    /// Texts of the system messages, in order of `messages`.
    system: Vec<String>,
    tools: Value,
    args: Map<String, Json>,
}

impl Prepared {
    /// Reads the conversation's JSON and guards every typed text.
    pub fn new(conversation: &Conversation, encoder: &Encoder) -> Result<Self, ChatError> {
        let guarded = |mut json: Json| {
            encoder.guard_json(&mut json);
            json
        };
        let mut messages = Vec::with_capacity(conversation.messages.len());
        let mut system = Vec::new();
        for m in &conversation.messages {
            if m.role == Role::System {
                system.push(encoder.guard(&m.content));
            }
            let value = Value::from(Serde(message(m, encoder)));
            messages.push((m.role, value));
        }
        let mut tools = Vec::with_capacity(conversation.tools.len());
        for (i, tool) in conversation.tools.iter().enumerate() {
            tools.push(guarded(parse(&tool.definition, || format!("tools[{i}]"))?));
        }
        // Transformers passes None where there are none.
        let tools = if tools.is_empty() {
            Json::Null
        } else {
            Json::Array(tools)
        };
        let what = || "chat_template_kwargs".to_owned();
        let args = match conversation.template_args.as_deref() {
            None => Map::new(),
            Some(text) => match guarded(parse(text, what)?) {
                Json::Object(map) => map,
                _ => {
                    return Err(ChatError::Json {
                        what: what(),
                        error: "must be an object".to_owned(),
                    });
                }
            },
        };
        Ok(Self {
            messages,
            system,
            tools: Value::from(Serde(tools)),
            args,
        })
    }

    /// Number of messages.
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Who speaks in a message.
    pub fn role(&self, at: usize) -> Option<Role> {
        self.messages.get(at).map(|(role, _)| *role)
    }

    fn first(&self, count: usize) -> Vec<Value> {
        let covered = self.messages.iter().take(count);
        covered.map(|(_, value)| value.clone()).collect()
    }

    /// The first messages with all their system messages as one at the start; `None` when that is how they stand already.
    fn led(&self, count: usize) -> Option<Vec<Value>> {
        let system = |m: &&(Role, Value)| m.0 == Role::System;
        let covered = &self.messages[..count.min(self.messages.len())];
        covered.iter().skip(1).find(system)?;
        let texts = &self.system[..covered.iter().filter(system).count()];
        let lead = json!({"role": Role::System.as_str(), "content": texts.join("\n\n")});
        let rest = covered.iter().filter(|m| !system(m));
        let rest = rest.map(|(_, value)| value.clone());
        Some(
            std::iter::once(Value::from(Serde(lead)))
                .chain(rest)
                .collect(),
        )
    }
}

impl Template {
    /// Compiles it.
    pub fn new(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Self, ChatError> {
        let bad = |e: &dyn std::fmt::Display| ChatError::Template(e.to_string());
        // `{% generation %}` marks what training scripts learn from; to a reader it is a block like any other.
        let marks =
            Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").map_err(|e| bad(&e))?;
        let source = marks.replace_all(source, "{%$1 ${2}with $3%}").into_owned();
        let tools = source.contains("tools");
        let mut environment = environment()?;
        environment
            .add_template_owned(NAME, source)
            .map_err(|e| ChatError::Template(with_line(&e)))?;
        let mut template = Self {
            environment,
            tools,
            bos: bos.map(str::to_owned),
            eos: eos.map(str::to_owned),
        };
        template.set_clock(Arc::new(SystemTime::now));
        Ok(template)
    }

    /// What `strftime_now` reads.
    pub fn set_clock(&mut self, clock: Clock) {
        let now = move |format: String| strftime(clock(), &format);
        self.environment.add_function("strftime_now", now);
    }

    /// Renders the first messages. Where the template refuses them and system messages stand elsewhere than at the start,
    /// these are joined by two newlines into one leading message.
    pub fn render(
        &self,
        prepared: &Prepared,
        count: usize,
        generate: bool,
    ) -> Result<String, ChatError> {
        let as_is = self.render_messages(prepared, prepared.first(count), generate);
        match (&as_is, prepared.led(count)) {
            (Err(_), Some(messages)) => self.render_messages(prepared, messages, generate),
            _ => as_is,
        }
    }

    fn render_messages(
        &self,
        prepared: &Prepared,
        messages: Vec<Value>,
        generate: bool,
    ) -> Result<String, ChatError> {
        let mut context = vec![("documents".to_owned(), Value::from(()))];
        let args = prepared.args.iter();
        context.extend(args.map(|(k, v)| (k.clone(), Value::from(Serde(v.clone())))));
        // What the server decides comes last and wins.
        let mut own = |key: &str, value: Value| context.push((key.to_owned(), value));
        own("messages", Value::from(messages));
        own("tools", prepared.tools.clone());
        own("add_generation_prompt", Value::from(generate));
        if let Some(bos) = &self.bos {
            own("bos_token", Value::from(bos.as_str()));
        }
        if let Some(eos) = &self.eos {
            own("eos_token", Value::from(eos.as_str()));
        }
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|e| ChatError::Template(with_line(&e)))?;
        template
            .render(Value::from_pairs(context))
            .map_err(|e| refusal(&e))
    }
}

/// Jinja as Transformers sets it up.
fn environment() -> Result<Environment<'static>, ChatError> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .keep_trailing_newline(false)
        .build()
        .map_err(|e| ChatError::Template(e.to_string()))?;
    environment.set_syntax(syntax);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    let raise = |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message).with_source(Raised))
    };
    environment.add_function("raise_exception", raise);
    environment.add_filter("tojson", to_json);
    // A value that is not there is never the word None.
    environment.set_formatter(|out, state, value| {
        let value = if value.is_none() {
            &Value::UNDEFINED
        } else {
            value
        };
        minijinja::escape_formatter(out, state, value)
    });
    Ok(environment)
}

/// The template's own words, or where it failed.
fn refusal(error: &Error) -> ChatError {
    let mut at: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(e) = at {
        if let Some(e) = e.downcast_ref::<Error>()
            && std::error::Error::source(e).is_some_and(|s| s.is::<Raised>())
        {
            return ChatError::Refused(e.detail().unwrap_or_default().to_owned());
        }
        at = e.source();
    }
    ChatError::Refused(with_line(error))
}

fn with_line(error: &Error) -> String {
    let mut text = error.kind().to_string();
    if let Some(line) = error.line() {
        text = format!("line {line}: {text}");
    }
    if let Some(detail) = error.detail() {
        text = format!("{text}: {detail}");
    }
    match std::error::Error::source(error) {
        Some(source) => format!("{text} ({source})"),
        None => text,
    }
}

fn parse(text: &str, what: impl Fn() -> String) -> Result<Json, ChatError> {
    serde_json::from_str(text).map_err(|e| ChatError::Json {
        what: what(),
        error: format!("is not JSON: {e}"),
    })
}

fn message(m: &Message, encoder: &Encoder) -> Json {
    let typed = |text: &str| Json::String(encoder.guard(text));
    let mut map = Map::new();
    map.insert("role".to_owned(), json!(m.role.as_str()));
    // Templates have no place for it, and a model must see that a tool failed.
    let failed = m.is_error && !m.content.to_ascii_lowercase().starts_with("error");
    let content = match failed {
        true => typed(&format!("Error: {}", m.content)),
        false => typed(&m.content),
    };
    map.insert("content".to_owned(), content);
    if let Some(reasoning) = &m.reasoning {
        map.insert("reasoning_content".to_owned(), typed(reasoning));
    }
    let mut calls = Vec::with_capacity(m.tool_calls.len());
    for call in &m.tool_calls {
        // Some clients send nothing for a call without arguments.
        // What a model wrote as no JSON is a text, as for Transformers: refusing it would stop the agent for good.
        let mut arguments = match call.arguments.trim() {
            "" => json!({}),
            text => serde_json::from_str(text).unwrap_or_else(|_| json!(call.arguments)),
        };
        encoder.guard_json(&mut arguments);
        let function = json!({"name": typed(&call.name), "arguments": arguments});
        calls.push(json!({"id": typed(&call.id), "type": "function", "function": function}));
    }
    if !calls.is_empty() {
        map.insert("tool_calls".to_owned(), Json::Array(calls));
    }
    if let Some(id) = &m.tool_call_id {
        map.insert("tool_call_id".to_owned(), typed(id));
    }
    if let Some(name) = &m.name {
        map.insert("name".to_owned(), typed(name));
    }
    Json::Object(map)
}

#[cfg(test)]
mod tests;
