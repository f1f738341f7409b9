//! What a reply must look like, in each API's words: a JSON Schema, a pattern, a choice, a call.

use crate::{
    problem::Problem,
    wire::{Fields, invalid},
};
use chela_core::{Constraint, Tool};
use serde_json::{Map, Value, json};

/// Whether and how a reply may call tools.
pub(crate) struct Calls {
    /// Calls are looked for in the reply.
    pub(crate) may: bool,
    /// It must be calls.
    pub(crate) forced: Option<Constraint>,
}

/// A form, and the field that asks for it.
#[derive(Debug)]
pub(crate) struct Form {
    pub(crate) constraint: Constraint,
    pub(crate) field: &'static str,
}

impl Calls {
    /// Left to the model.
    pub(crate) fn auto(tools: &[Tool]) -> Self {
        Self {
            may: !tools.is_empty(),
            forced: None,
        }
    }

    /// The tools still stand in the prompt: what was read before stays the same, and text that looks like a call stays text.
    pub(crate) fn none() -> Self {
        Self {
            may: false,
            forced: None,
        }
    }

    /// Of any tool, or of this one.
    pub(crate) fn forced(field: &str, tool: Option<&str>, tools: &[Tool]) -> Result<Self, Problem> {
        match tool {
            _ if tools.is_empty() => {
                return Err(invalid(field, "a call is asked for without tools"));
            }
            Some(name) if !tools.iter().any(|t| t.name == name) => {
                return Err(invalid(field, format!("{name:?} is not among the tools")));
            }
            _ => {}
        }
        let tool = tool.map(str::to_owned);
        let many = tool.is_none();
        Ok(Self {
            may: true,
            forced: Some(Constraint::Calls { tool, many }),
        })
    }

    /// A word: auto, none, required.
    pub(crate) fn word(field: &str, word: &str, tools: &[Tool]) -> Result<Self, Problem> {
        match word {
            "auto" => Ok(Self::auto(tools)),
            "none" => Ok(Self::none()),
            "required" => Self::forced(field, None, tools),
            other => Err(invalid(
                field,
                format!("{other:?}: use auto, none, required, or name a function"),
            )),
        }
    }

    /// With what the request asks of the reply's text. A call that must be made is the whole reply.
    pub(crate) fn with(&self, form: Option<Form>, parallel: bool) -> Option<Form> {
        let mut form = match self.forced.clone() {
            Some(constraint) => Form {
                constraint,
                field: "tool_choice",
            },
            None => form?,
        };
        match &mut form.constraint {
            Constraint::Calls { many, .. } => *many &= parallel,
            Constraint::Schema { or_calls, .. } => *or_calls = self.may,
            Constraint::Regex(_) | Constraint::Choice(_) => {}
        }
        Some(form)
    }
}

fn schema(schema: &Value) -> Constraint {
    Constraint::Schema {
        schema: schema.to_string(),
        or_calls: false,
    }
}

/// `{"type": "text" | "json_object" | "json_schema"}`; where the schema stands differs between the APIs.
fn of_format(
    (at, schema_at): (&str, &str),
    format: &Map<String, Value>,
    place: fn(&Map<String, Value>) -> Option<&Value>,
) -> Result<Option<Constraint>, Problem> {
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(schema(&json!({"type": "object"})))),
        Some("json_schema") => match place(format) {
            Some(found) if found.is_object() => Ok(Some(schema(found))),
            _ => Err(invalid(schema_at, "must be an object")),
        },
        other => Err(invalid(
            format!("{at}.type"),
            format!(
                "{}: use text, json_object or json_schema",
                other.unwrap_or("no type")
            ),
        )),
    }
}

fn of(constraint: Option<Constraint>, field: &'static str) -> Option<Form> {
    constraint.map(|constraint| Form { constraint, field })
}

/// `response_format` of a chat completion, or vLLM's `guided_…`.
pub(crate) fn chat(fields: &Fields) -> Result<Option<Form>, Problem> {
    if let Some(asked) = fields.object("response_format")? {
        let names = ("response_format", "response_format.json_schema.schema");
        let constraint = of_format(names, asked, |f| f.get("json_schema")?.get("schema"))?;
        return Ok(of(constraint, "response_format"));
    }
    if let Some(asked) = fields.get("guided_json") {
        let parsed = match asked {
            Value::String(text) => serde_json::from_str(text)
                .map_err(|e| invalid("guided_json", format!("is not JSON: {e}")))?,
            other => other.clone(),
        };
        return Ok(of(Some(schema(&parsed)), "guided_json"));
    }
    if let Some(pattern) = fields.text("guided_regex")? {
        let constraint = Constraint::Regex(pattern.to_owned());
        return Ok(of(Some(constraint), "guided_regex"));
    }
    let Some(choice) = fields.get("guided_choice") else {
        return Ok(None);
    };
    let texts = choice.as_array().filter(|list| !list.is_empty());
    let texts: Option<Vec<String>> = texts.and_then(|list| {
        let text = |v: &Value| v.as_str().filter(|t| !t.is_empty()).map(str::to_owned);
        list.iter().map(text).collect()
    });
    let texts = texts.ok_or_else(|| {
        invalid(
            "guided_choice",
            "must be a list of texts that are not empty",
        )
    })?;
    Ok(of(Some(Constraint::Choice(texts)), "guided_choice"))
}

/// `text.format` of a response.
pub(crate) fn responses(fields: &Fields) -> Result<Option<Form>, Problem> {
    let text = fields.object("text")?;
    let Some(asked) = text.and_then(|t| t.get("format")).filter(|f| !f.is_null()) else {
        return Ok(None);
    };
    let asked = asked
        .as_object()
        .ok_or_else(|| invalid("text.format", "must be an object"))?;
    let names = ("text.format", "text.format.schema");
    let constraint = of_format(names, asked, |f| f.get("schema"))?;
    Ok(of(constraint, "text.format"))
}

/// `output_config.format` of a message request, or `output_format` as it was called first.
pub(crate) fn anthropic(fields: &Fields) -> Result<Option<Form>, Problem> {
    let config = fields.object("output_config")?;
    let newer = config
        .and_then(|c| c.get("format"))
        .filter(|f| !f.is_null());
    let Some((asked, field)) = newer
        .map(|f| (f, "output_config.format"))
        .or_else(|| fields.get("output_format").map(|f| (f, "output_format")))
    else {
        return Ok(None);
    };
    let asked = asked
        .as_object()
        .ok_or_else(|| invalid(field, "must be an object"))?;
    let schema_at = format!("{field}.schema");
    let constraint = of_format((field, &schema_at), asked, |f| f.get("schema"))?;
    Ok(of(constraint, field))
}
