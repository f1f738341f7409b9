//! Replies kept to a form: a JSON Schema, a regular expression, a choice of texts, calls of tools.
//!
//! The grammars are llguidance's; this says what to ask of it and follows a reply: thinking comes before the form and is free.

use crate::{
    answer::THINK,
    call::CallFormat,
    decode::{Bytes, TextDecoder},
    error::ChatError,
    stop::StopGuide,
};
use chela_core::{Constraint, Flow, Guide, TokenId, Tool};
use llguidance::{
    Matcher, ParserFactory,
    api::TopLevelGrammar,
    toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie},
};
use serde_json::{Value as Json, json};
use std::{collections::BTreeMap, sync::Arc};

/// Line ends between a thought and the reply.
const MOST_LINES: usize = 2;
/// Tools that a call may be forced among.
const MOST_TOOLS: usize = 512;

/// A model's tokens as grammars know them.
pub struct Vocabulary {
    factory: ParserFactory,
    bytes: Arc<Bytes>,
    end_ids: Vec<TokenId>,
    /// The tokens that open and close a thought, where these are tokens.
    think: Option<(TokenId, TokenId)>,
    /// Tokens of line ends only.
    lines: Vec<TokenId>,
    controls: BTreeMap<TokenId, String>,
}

impl Vocabulary {
    /// Prepares them.
    pub fn new(
        bytes: Arc<Bytes>,
        controls: &BTreeMap<TokenId, String>,
        end_ids: &[TokenId],
    ) -> Result<Self, ChatError> {
        let failed = |e: anyhow::Error| ChatError::Tokenizer(format!("grammars: {e}"));
        let Some(&end) = end_ids.first() else {
            return Err(ChatError::Tokenizer(
                "grammars need an end token".to_owned(),
            ));
        };
        let size = bytes.len().max(end as usize + 1);
        let word = |id: TokenId| match controls.get(&id) {
            Some(text) => [&[TokTrie::SPECIAL_TOKEN_MARKER], text.as_bytes()].concat(),
            None => bytes.of(id).to_vec(),
        };
        let words: Vec<Vec<u8>> = (0..size as TokenId).map(word).collect();
        let trie = TokTrie::from(&TokRxInfo::new(size as u32, end), &words);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).map_err(failed)?;
        factory.quiet();
        // Schemas of thousands of alternatives are lawful; at 20,000 items a millisecond a token still takes little.
        factory.limits_mut().max_items_in_row = 20_000;
        factory.limits_mut().step_max_items = 400_000;
        let named = |text: &str| {
            let control = controls.iter().find(|(_, t)| *t == text).map(|(id, _)| *id);
            control.or_else(|| {
                let plain = words.iter().position(|word| word == text.as_bytes())?;
                Some(plain as TokenId)
            })
        };
        let lines = words.iter().enumerate().filter(|(_, word)| {
            (1..=MOST_LINES).contains(&word.len()) && word.iter().all(|byte| *byte == b'\n')
        });
        Ok(Self {
            lines: lines.map(|(id, _)| id as TokenId).collect(),
            think: named(THINK.0).zip(named(THINK.1)),
            controls: controls.clone(),
            end_ids: end_ids.to_vec(),
            bytes,
            factory,
        })
    }

    /// Compiles a form. Calls are of these tools.
    pub fn grammar(
        self: &Arc<Self>,
        constraint: &Constraint,
        tools: &[Tool],
        format: CallFormat,
    ) -> Result<Grammar, ChatError> {
        let refused = |tool: Option<usize>| {
            move |error: anyhow::Error| ChatError::Grammar {
                tool,
                error: in_short(&error),
            }
        };
        let top = match constraint {
            Constraint::Schema { schema, or_calls } => {
                let schema = serde_json::from_str(schema).map_err(|e| refused(None)(e.into()))?;
                let form = format!("form: %json {}\n", compact(schema));
                let offered: Vec<(usize, &Tool)> = tools.iter().enumerate().collect();
                // Where no call can be described there is the schema alone.
                let calls = or_calls
                    .then(|| self.calls(&offered, true, format).ok())
                    .flatten();
                TopLevelGrammar::from_lark(match calls {
                    Some(calls) => format!("start: form | calls\n{form}{calls}"),
                    None => format!("start: form\n{form}"),
                })
            }
            Constraint::Regex(pattern) => TopLevelGrammar::from_regex(pattern),
            // As one pattern: rules for thousands of texts are more than a parser follows at once.
            Constraint::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|t| regex::escape(t)).collect();
                TopLevelGrammar::from_regex(&format!("({})", texts.join("|")))
            }
            Constraint::Calls { tool, many } => {
                let offered = tools.iter().enumerate();
                let meant: Vec<(usize, &Tool)> = offered
                    .filter(|(_, t)| tool.as_ref().is_none_or(|name| *name == t.name))
                    .collect();
                let lark = |tools: &[(usize, &Tool)], many| {
                    let calls = self.calls(tools, many, format)?;
                    Ok(TopLevelGrammar::from_lark(format!("start: calls\n{calls}")))
                };
                if meant.len() > MOST_TOOLS {
                    let error = format!(
                        "a call cannot be forced among {} tools; name one of them",
                        meant.len()
                    );
                    return Err(ChatError::Grammar { tool: None, error });
                }
                let all = self.compile(lark(&meant, *many)?);
                if all.is_err() {
                    // Which tool's schema is at fault.
                    for one in &meant {
                        let alone = lark(&[*one], false)?;
                        self.compile(alone).map_err(refused(Some(one.0)))?;
                    }
                }
                return Ok(self.kept(all.map_err(refused(None))?));
            }
        };
        Ok(self.kept(self.compile(top).map_err(refused(None))?))
    }

    fn kept(self: &Arc<Self>, matcher: Matcher) -> Grammar {
        Grammar {
            matcher,
            vocabulary: self.clone(),
        }
    }

    fn compile(&self, top: TopLevelGrammar) -> anyhow::Result<Matcher> {
        let mut matcher = Matcher::new(self.factory.create_parser(top));
        match matcher.get_error() {
            Some(error) => Err(anyhow::anyhow!(error)),
            // The first mask finds what cannot be satisfied at all.
            None => matcher.compute_mask().map(|_| matcher),
        }
    }

    /// The rule `calls`: calls as the model writes them.
    fn calls(
        &self,
        tools: &[(usize, &Tool)],
        many: bool,
        format: CallFormat,
    ) -> Result<String, ChatError> {
        let (open, arguments, close) = match format {
            // XML's values stand as they are, which no schema can describe; JSON between its tags is understood as well.
            CallFormat::Hermes | CallFormat::QwenXml => (
                format!("{} \"\\n\"", self.mark("<tool_call>")),
                "arguments",
                format!("\"\\n\" {}", self.mark("</tool_call>")),
            ),
            CallFormat::Llama => (String::new(), "parameters", String::new()),
            CallFormat::Gemma(_) => {
                let error = "a call cannot be forced in this model's way of writing calls";
                return Err(ChatError::Grammar {
                    tool: None,
                    error: format!("{error}; ask for it in words"),
                });
            }
        };
        let mut lark = match (many, format) {
            (true, CallFormat::Hermes | CallFormat::QwenXml) => "calls: call (\"\\n\" call)*\n",
            _ => "calls: call\n",
        }
        .to_owned();
        let names: Vec<String> = tools.iter().map(|(at, _)| format!("tool_{at}")).collect();
        lark += &format!("call: {open} ({}) {close}\n", names.join(" | "));
        for (at, tool) in tools {
            let definition: Json = serde_json::from_str(&tool.definition).unwrap_or_default();
            let function = definition.get("function").unwrap_or(&definition);
            let schema = function.get("parameters").filter(|s| s.is_object());
            let schema = compact(schema.cloned().unwrap_or_else(|| json!({"type": "object"})));
            let name = Json::from(tool.name.as_str());
            let begin = literal(&format!("{{\"name\": {name}, \"{arguments}\": "));
            lark += &format!("tool_{at}: {begin} %json {schema} \"}}\"\n");
        }
        Ok(lark)
    }

    /// A tag in a grammar: a control token by its id, else its text.
    fn mark(&self, text: &str) -> String {
        match self.controls.iter().find(|(_, t)| *t == text) {
            Some((id, _)) => format!("<[{id}]>"),
            None => literal(text),
        }
    }
}

/// The complaint without the grammar that was made of the request.
fn in_short(error: &anyhow::Error) -> String {
    let all = error.to_string();
    let line = all.lines().next().unwrap_or_default();
    match line.split_once("): ") {
        Some((place, said)) if place.starts_with("at ") => said.to_owned(),
        _ => line.to_owned(),
    }
}

/// A text in a grammar.
fn literal(text: &str) -> String {
    Json::from(text).to_string()
}

/// White space only where Python's `json.dumps` writes it: a model left to itself can fill its whole reply with it.
fn compact(mut schema: Json) -> Json {
    if let Json::Object(map) = &mut schema {
        let spaces =
            json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        map.insert("x-guidance".to_owned(), spaces);
    }
    schema
}

/// A compiled form.
pub struct Grammar {
    matcher: Matcher,
    vocabulary: Arc<Vocabulary>,
}

impl Grammar {
    /// Keeps one reply to it; stop strings end it earlier.
    pub fn guide(&self, stop: Option<StopGuide>) -> Box<dyn Guide> {
        Box::new(GrammarGuide {
            matcher: self.matcher.deep_clone(),
            decoder: TextDecoder::new(self.vocabulary.bytes.clone()),
            vocabulary: self.vocabulary.clone(),
            place: Place::Start,
            stop,
        })
    }
}

enum Place {
    Start,
    /// The end of what was thought.
    Thinking(String),
    /// After a thought, and so many line ends.
    Thought(usize),
    Form,
}

struct GrammarGuide {
    matcher: Matcher,
    vocabulary: Arc<Vocabulary>,
    decoder: TextDecoder,
    place: Place,
    stop: Option<StopGuide>,
}

impl GrammarGuide {
    /// A thought may say anything but the end: the form is still to come.
    fn go_on(&self, logits: &mut [f32]) -> usize {
        for end in &self.vocabulary.end_ids {
            if let Some(logit) = logits.get_mut(*end as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        logits.len() - self.vocabulary.end_ids.len().min(logits.len())
    }
}

impl Guide for GrammarGuide {
    fn mask(&mut self, logits: &mut [f32]) -> Option<usize> {
        let more: &[TokenId] = match (&self.place, &self.vocabulary.think) {
            (Place::Thinking(_), _) => return Some(self.go_on(logits)),
            (Place::Start, Some((open, _))) => std::slice::from_ref(open),
            (Place::Thought(n), _) if *n < MOST_LINES => &self.vocabulary.lines,
            _ => &[],
        };
        // When a mask costs too much nothing is allowed, and the engine gives the reply up.
        let allowed = self.matcher.compute_mask_or_eos().ok();
        let ends = &self.vocabulary.end_ids;
        let may_end = ends.first().is_some_and(|end| {
            let end = *end as usize;
            allowed
                .as_ref()
                .is_some_and(|a| end < a.len() && a.get(end))
        });
        let mut left = 0;
        for (id, logit) in logits.iter_mut().enumerate() {
            let token = id as TokenId;
            let lawful = allowed.as_ref().is_some_and(|a| id < a.len() && a.get(id))
                || more.contains(&token)
                || (may_end && ends.contains(&token));
            if lawful {
                left += 1;
            } else {
                *logit = f32::NEG_INFINITY;
            }
        }
        Some(left)
    }

    fn accept(&mut self, token: TokenId) -> Flow {
        match (&mut self.place, self.vocabulary.think) {
            (Place::Start, Some((open, _))) if token == open => {
                self.place = Place::Thinking(String::new());
            }
            (Place::Thinking(tail), Some((_, close))) => {
                tail.push_str(&self.decoder.push(token));
                if token == close || tail.ends_with(THINK.1) {
                    self.place = Place::Thought(0);
                } else if tail.len() > 4 * THINK.1.len() {
                    let mut cut = tail.len() - THINK.1.len();
                    while !tail.is_char_boundary(cut) {
                        cut -= 1;
                    }
                    tail.drain(..cut);
                }
            }
            (Place::Thought(n), _) if *n < MOST_LINES && self.vocabulary.lines.contains(&token) => {
                *n += self.vocabulary.bytes.of(token).len();
            }
            _ => {
                self.place = Place::Form;
                // It was allowed; where it was not, the next mask allows nothing.
                let _ = self.matcher.consume_token(token);
            }
        }
        match &mut self.stop {
            Some(stop) => stop.accept(token),
            None => Flow::Continue,
        }
    }
}
