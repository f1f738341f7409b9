//! The model's own chat template, rendered as Hugging Face renders it.

use crate::error::ChatError;
use chela_core::{Conversation, Message, Role};
use minijinja::{
    Environment, Error, ErrorKind, Value,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde},
};
use serde_json::{Value as Json, json};

/// A compiled template.
pub struct Template {
    environment: Environment<'static>,
    /// It names `tools`.
    pub tools: bool,
    bos: String,
    eos: String,
}

const NAME: &str = "chat";

impl Template {
    /// Compiles it. `{% generation %}` marks (which only training scripts read) are taken out.
    pub fn new(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Self, ChatError> {
        let source = source
            .replace("{% generation %}", "")
            .replace("{% endgeneration %}", "");
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .keep_trailing_newline(false)
            .build()
            .map_err(|e| ChatError::Template(e.to_string()))?;
        environment.set_syntax(syntax);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<Value, Error> {
                Err(Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        environment
            .add_template_owned(NAME, source.clone())
            .map_err(|e| ChatError::Template(e.to_string()))?;
        Ok(Self {
            environment,
            tools: source.contains("tools"),
            bos: bos.unwrap_or_default().to_owned(),
            eos: eos.unwrap_or_default().to_owned(),
        })
    }

    /// Renders; system messages that the template would refuse where they stand are joined into one leading message.
    pub fn render(&self, conversation: &Conversation, generate: bool) -> Result<String, ChatError> {
        match self.render_as_is(conversation, generate) {
            Err(ChatError::Refused(why)) => match lead(&conversation.messages) {
                Some(messages) => {
                    let merged = Conversation {
                        messages,
                        ..conversation.clone()
                    };
                    self.render_as_is(&merged, generate)
                }
                None => Err(ChatError::Refused(why)),
            },
            other => other,
        }
    }

    fn render_as_is(&self, c: &Conversation, generate: bool) -> Result<String, ChatError> {
        let messages: Vec<Json> = c
            .messages
            .iter()
            .enumerate()
            .map(message)
            .collect::<Result<_, _>>()?;
        let mut context = serde_json::Map::new();
        if let Some(args) = &c.template_args {
            match parse(args, "chat_template_kwargs")? {
                Json::Object(map) => context.extend(map),
                _ => {
                    return Err(ChatError::Json {
                        what: "chat_template_kwargs".to_owned(),
                        error: "must be an object".to_owned(),
                    });
                }
            }
        }
        let tools: Vec<Json> = c
            .tools
            .iter()
            .enumerate()
            .map(|(i, t)| parse(&t.definition, &format!("tools[{i}]")))
            .collect::<Result<_, _>>()?;
        context.insert("messages".to_owned(), Json::Array(messages));
        context.insert("add_generation_prompt".to_owned(), json!(generate));
        context.insert("bos_token".to_owned(), json!(self.bos));
        context.insert("eos_token".to_owned(), json!(self.eos));
        if !tools.is_empty() {
            context.insert("tools".to_owned(), Json::Array(tools));
        }
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|e| ChatError::Template(e.to_string()))?;
        template
            .render(Value::from(Serde(Json::Object(context))))
            .map_err(|e| ChatError::Refused(e.detail().unwrap_or(&e.to_string()).to_owned()))
    }
}

fn parse(text: &str, what: &str) -> Result<Json, ChatError> {
    serde_json::from_str(text).map_err(|e| ChatError::Json {
        what: what.to_owned(),
        error: e.to_string(),
    })
}

fn message((index, m): (usize, &Message)) -> Result<Json, ChatError> {
    let mut map = serde_json::Map::new();
    map.insert("role".to_owned(), json!(m.role.as_str()));
    map.insert("content".to_owned(), json!(m.content));
    if let Some(reasoning) = &m.reasoning {
        map.insert("reasoning_content".to_owned(), json!(reasoning));
    }
    if !m.tool_calls.is_empty() {
        let call = |(i, c): (usize, &chela_core::ToolCall)| {
            let arguments = parse(
                &c.arguments,
                &format!("messages[{index}].tool_calls[{i}].arguments"),
            )?;
            Ok(json!({"id": c.id, "type": "function",
                      "function": {"name": c.name, "arguments": arguments}}))
        };
        let calls: Vec<Json> = m
            .tool_calls
            .iter()
            .enumerate()
            .map(call)
            .collect::<Result<_, ChatError>>()?;
        map.insert("tool_calls".to_owned(), Json::Array(calls));
    }
    if let Some(id) = &m.tool_call_id {
        map.insert("tool_call_id".to_owned(), json!(id));
    }
    if let Some(name) = &m.name {
        map.insert("name".to_owned(), json!(name));
    }
    Ok(Json::Object(map))
}

/// All system messages as one at the start; `None` when that is how it stands already.
fn lead(messages: &[Message]) -> Option<Vec<Message>> {
    let out_of_place = messages.iter().skip(1).any(|m| m.role == Role::System);
    if !out_of_place {
        return None;
    }
    let (system, rest): (Vec<_>, Vec<_>) = messages
        .iter()
        .cloned()
        .partition(|m| m.role == Role::System);
    let text: Vec<String> = system.into_iter().map(|m| m.content).collect();
    let mut all = vec![Message::system(text.join("\n\n"))];
    all.extend(rest);
    Some(all)
}

/// Python's `json.dumps(ensure_ascii=False)`: `, ` and `: ` between, keys in wire order, nothing escaped for HTML.
fn to_json(value: Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let _: Option<bool> = kwargs.get("ensure_ascii")?;
    kwargs.assert_all_used()?;
    let json = serde_json::to_value(&value)
        .map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    let mut out = String::new();
    write_json(&json, indent, 0, &mut out);
    Ok(Value::from(out))
}

fn write_json(value: &Json, indent: Option<usize>, depth: usize, out: &mut String) {
    let line = |out: &mut String, depth: usize| {
        if let Some(n) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', n * depth));
        }
    };
    let gap = if indent.is_some() { "," } else { ", " };
    match value {
        Json::Array(items) if !items.is_empty() => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push_str(gap);
                }
                line(out, depth + 1);
                write_json(item, indent, depth + 1, out);
            }
            line(out, depth);
            out.push(']');
        }
        Json::Object(map) if !map.is_empty() => {
            out.push('{');
            for (i, (key, item)) in map.iter().enumerate() {
                if i > 0 {
                    out.push_str(gap);
                }
                line(out, depth + 1);
                out.push_str(&Json::String(key.clone()).to_string());
                out.push_str(": ");
                write_json(item, indent, depth + 1, out);
            }
            line(out, depth);
            out.push('}');
        }
        other => out.push_str(&other.to_string()),
    }
}

/// Today as the template wants it. Only the directives that templates in use have; others are an error, not a guess.
fn strftime_now(format: String) -> Result<String, Error> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let days = now.map_or(0, |d| d.as_secs() / 86_400) as i64;
    let (year, month, day) = civil(days);
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let name = MONTHS[(month - 1) as usize];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('b') => out.push_str(&name[..3]),
            Some('B') => out.push_str(name),
            other => {
                let what = format!(
                    "strftime_now: directive %{} is not supported",
                    other.unwrap_or(' ')
                );
                return Err(Error::new(ErrorKind::InvalidOperation, what));
            }
        }
    }
    Ok(out)
}

/// Year, month, day of a day number since 1970 (H. Hinnant, "chrono-compatible low-level date algorithms").
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = doy - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(20_787), (2026, 11, 30));
        assert!(strftime_now("%Q".to_owned()).is_err());
    }

    #[test]
    fn tojson_is_pythons_and_keeps_wire_order() {
        let tool = chela_core::Tool {
            name: "f".to_owned(),
            definition: r#"{"zeta":{"b":1,"a":[1,2]},"alpha":"<é&你'>","mid":{}}"#.to_owned(),
        };
        let c = Conversation {
            messages: vec![Message::user("x")],
            tools: vec![tool],
            template_args: None,
        };
        let t = Template::new("{{ tools[0] | tojson }}", None, None).unwrap();
        assert_eq!(
            t.render(&c, true).unwrap(),
            r#"{"zeta": {"b": 1, "a": [1, 2]}, "alpha": "<é&你'>", "mid": {}}"#
        );
    }

    #[test]
    fn system_messages_are_joined_only_where_the_template_refuses() {
        let strict = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must come first') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}";
        let c = Conversation {
            messages: vec![
                Message::system("a"),
                Message::user("u"),
                Message::system("b"),
            ],
            ..Conversation::default()
        };
        let t = Template::new(strict, None, None).unwrap();
        assert_eq!(t.render(&c, false).unwrap(), "[system:a\n\nb][user:u]");
        let lax = Template::new(
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            None,
            None,
        );
        assert_eq!(lax.unwrap().render(&c, false).unwrap(), "aub");
        let never = Template::new("{{ raise_exception('no') }}", None, None).unwrap();
        assert_eq!(
            never.render(&c, false),
            Err(ChatError::Refused("no".to_owned()))
        );
        assert!(Template::new("{% if %}", None, None).is_err());
    }
}
