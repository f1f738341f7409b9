//! Messages as they are compared: what clients rewrite between two requests is taken out first.

use chela_core::{Conversation, Message, Role, ToolCall};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Equal keys = the same message, however a client re-serialised it. 128 bits, so that nobody can make two meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key([u8; 16]);

impl Key {
    /// The beginning of every chain.
    pub const START: Self = Self([0; 16]);

    /// The key of a sequence, one element longer.
    pub fn then(self, next: Self) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0);
        hash.update(next.0);
        Self::of(hash)
    }

    fn of(hash: Sha256) -> Self {
        let mut key = [0; 16];
        key.iter_mut()
            .zip(hash.finalize())
            .for_each(|(k, h)| *k = h);
        Self(key)
    }
}

/// Marks of texts that a client rewrites with each request.
const INTERNAL_CONTEXT: &str = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>";
const DYNAMIC_BLOCK: &str = "<!-- openclaw:attempt:DYNAMIC";
const ANY_BLOCK: &str = "<!-- openclaw:attempt:";
const BILLING_LINE: &str = "x-anthropic-billing-header:";
const RUNTIME_LINE: &str = "Runtime:";
/// aider's reminder behind the last thing that was said.
const EDIT_RULES: &str = "\n\n# *SEARCH/REPLACE block* Rules:";
/// What ZeroClaw puts before the newest message and leaves out of it in later requests: how it begins and what ends it.
const PREAMBLES: [(&str, &str); 2] = [
    ("[Memory context]\n", "[/Memory context]\n\n"),
    ("[turn-context] ", "\n\n\n\n"),
];

/// A message that stands in one request only and in no later one.
pub fn is_passing(message: &Message) -> bool {
    message.role == Role::User && message.content.trim_start().starts_with(INTERNAL_CONTEXT)
}

/// The text without what changes from request to request.
pub fn text(message: &Message) -> String {
    let content = message.content.trim();
    match message.role {
        Role::System => system_text(content),
        Role::User => {
            let said = without_preambles(content);
            let said = said.split_once(EDIT_RULES).map_or(said, |(said, _)| said);
            without_runtime_line(said).trim().to_owned()
        }
        Role::Assistant | Role::Tool => content.to_owned(),
    }
}

/// What a person typed: without the time and the context that some clients put before it.
pub fn spoken(content: &str) -> &str {
    let content = without_preambles(content.trim());
    let Some(rest) = content.strip_prefix('[') else {
        return content;
    };
    let Some((stamp, after)) = rest.split_once(']') else {
        return content;
    };
    if stamp.len() <= 48 && has_date(stamp) {
        after.trim_start()
    } else {
        content
    }
}

/// Holds a date like 2026-11-30.
fn has_date(stamp: &str) -> bool {
    stamp.as_bytes().windows(10).any(|w| {
        w.iter().enumerate().all(|(i, b)| match i {
            4 | 7 => *b == b'-',
            _ => b.is_ascii_digit(),
        })
    })
}

fn system_text(content: &str) -> String {
    let mut text = content.to_owned();
    if text.starts_with(BILLING_LINE) {
        text = text
            .split_once('\n')
            .map_or("", |(_, rest)| rest)
            .to_owned();
    }
    while let Some(begin) = text.find(DYNAMIC_BLOCK) {
        let after = begin + DYNAMIC_BLOCK.len();
        let end = text[after..]
            .find(ANY_BLOCK)
            .map_or(text.len(), |i| after + i);
        text.replace_range(begin..end, "");
    }
    text.trim().to_owned()
}

fn without_preambles(content: &str) -> &str {
    PREAMBLES.iter().fold(content, |text, (begin, end)| {
        let rest = text.strip_prefix(begin);
        rest.and_then(|rest| rest.split_once(end))
            .map_or(text, |(_, said)| said.trim_start())
    })
}

fn without_runtime_line(content: &str) -> &str {
    let last = content.rfind('\n').map_or(0, |i| i + 1);
    if last > 0 && content[last..].trim_start().starts_with(RUNTIME_LINE) {
        &content[..last]
    } else {
        content
    }
}

/// A call id without what clients strip or add.
fn bare_id(id: &str) -> String {
    id.chars().filter(char::is_ascii_alphanumeric).collect()
}

/// JSON arguments with keys in order and no spaces; text that is no JSON as it is. Nothing at all is an empty object.
fn canonical_arguments(arguments: &str) -> String {
    let trimmed = arguments.trim();
    if trimmed.is_empty() {
        return "{}".to_owned();
    }
    serde_json::from_str::<Value>(trimmed)
        .map_or_else(|_| trimmed.to_owned(), |v| sorted(v).to_string())
}

fn sorted(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.into_iter().map(|(k, v)| (k, sorted(v))).collect();
            entries.sort_by(|a, b| a.0.cmp(&b.0));
            Value::Object(entries.into_iter().collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sorted).collect()),
        other => other,
    }
}

/// Name and arguments of a call, comparable; its id left out.
pub fn call(call: &ToolCall) -> (String, String) {
    (call.name.clone(), canonical_arguments(&call.arguments))
}

/// The key of one message. Thinking is never sent back, so it does not count; neither do names.
pub fn key(message: &Message) -> Key {
    keyed(message, &text(message))
}

/// The key of a message as it stands: what clients rewrite counts, for the model reads it.
fn exact_key(message: &Message) -> Key {
    keyed(message, message.content.trim())
}

fn keyed(message: &Message, text: &str) -> Key {
    let mut hash = Sha256::new();
    let mut part = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    };
    part(message.role.as_str());
    part(text);
    for one in &message.tool_calls {
        let (name, arguments) = call(one);
        part(&name);
        part(&arguments);
        part(&bare_id(&one.id));
    }
    if let Some(id) = &message.tool_call_id {
        part(&bare_id(id));
    }
    Key::of(hash)
}

/// A request, ready to be compared.
#[derive(Clone, Debug)]
pub struct Outline {
    /// Keys of the messages that count: neither system messages nor passing ones.
    pub keys: Vec<Key>,
    /// Where each of them stands among the request's messages.
    pub places: Vec<usize>,
    /// `chain[i]` = the key of the first i of them.
    pub chain: Vec<Key>,
    /// `raw[i]` = the key of the first i messages of the request, whatever they are and as they stand.
    pub raw: Vec<Key>,
    /// All system messages together.
    pub system: Key,
    /// The tools together.
    pub tools: Key,
    /// There are tools.
    pub has_tools: bool,
    /// Number of assistant messages among the first i that count.
    assistants: Vec<usize>,
    /// Texts of those that a user said.
    users: Vec<Option<String>>,
}

impl Outline {
    /// Reads a conversation.
    pub fn of(conversation: &Conversation) -> Self {
        let mut outline = Self {
            keys: Vec::new(),
            places: Vec::new(),
            chain: vec![Key::START],
            raw: vec![Key::START],
            system: Key::START,
            tools: tools_key(conversation),
            has_tools: !conversation.tools.is_empty(),
            assistants: vec![0],
            users: Vec::new(),
        };
        let (mut chain, mut raw, mut assistants) = (Key::START, Key::START, 0);
        for (place, message) in conversation.messages.iter().enumerate() {
            let key = key(message);
            raw = raw.then(exact_key(message));
            outline.raw.push(raw);
            if message.role == Role::System {
                outline.system = outline.system.then(key);
            } else if !is_passing(message) {
                chain = chain.then(key);
                assistants += usize::from(message.role == Role::Assistant);
                outline.keys.push(key);
                outline
                    .users
                    .push((message.role == Role::User).then(|| text(message)));
                outline.places.push(place);
                outline.chain.push(chain);
                outline.assistants.push(assistants);
            }
        }
        outline
    }

    /// Number of messages that count.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// What a user said at this index (of those that count).
    pub fn user_text(&self, index: usize) -> Option<&str> {
        self.users.get(index)?.as_deref()
    }

    /// Nothing was said.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The key of all that counts.
    pub fn whole(&self) -> Key {
        self.chain.last().copied().unwrap_or(Key::START)
    }

    /// Whether the message at this index (of those that count) is an assistant's.
    pub fn is_assistant(&self, index: usize) -> bool {
        index + 1 < self.assistants.len() && self.assistants[index + 1] > self.assistants[index]
    }
}

fn tools_key(conversation: &Conversation) -> Key {
    conversation.tools.iter().fold(Key::START, |chain, tool| {
        chain.then(key(&Message::text(
            Role::Tool,
            format!("{}\n{}", tool.name, tool.definition),
        )))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn called(id: &str, arguments: &str) -> Message {
        let mut message = Message::assistant("");
        message.tool_calls.push(ToolCall {
            id: id.to_owned(),
            name: "f".to_owned(),
            arguments: arguments.to_owned(),
        });
        message
    }

    #[test]
    fn clients_may_respace_arguments_and_strip_ids() {
        let sent = called("call_4ff7", r#"{"a": 1, "b": [ 2 ]}"#);
        assert_eq!(key(&sent), key(&called("call4ff7", r#"{"b":[2],"a":1}"#)));
        assert_ne!(key(&sent), key(&called("call4ff8", r#"{"b":[2],"a":1}"#)));
        assert_ne!(key(&sent), key(&called("call4ff7", r#"{"b":[2],"a":2}"#)));
        assert_eq!(key(&called("x", "")), key(&called("x", "{}")));
    }

    #[test]
    fn text_counts_trimmed_and_roles_count() {
        assert_eq!(key(&Message::user(" hi\n")), key(&Message::user("hi")));
        assert_ne!(key(&Message::user("hi")), key(&Message::assistant("hi")));
        let mut thought = Message::assistant("hi");
        thought.reasoning = Some("hm".to_owned());
        assert_eq!(key(&thought), key(&Message::assistant("hi")));
    }

    #[test]
    fn lines_that_clients_rewrite_do_not_count() {
        let a = Message::system("x-anthropic-billing-header: cc_version=1.2; cch=aaaa;\nBe kind.");
        let b = Message::system("x-anthropic-billing-header: cc_version=1.2; cch=bbbb;\nBe kind.");
        assert_eq!(key(&a), key(&b));
        let user = |line: &str| Message::user(format!("hello\nRuntime: {line}"));
        assert_eq!(key(&user("channel=a")), key(&user("model=b")));
        assert_ne!(
            key(&Message::user("Runtime: x")),
            key(&Message::user("Runtime: y"))
        );
        let system = |d: &str| {
            Message::system(format!(
                "<!-- openclaw:attempt:STABLE -->\nbase\n<!-- openclaw:attempt:DYNAMIC -->\n{d}"
            ))
        };
        assert_eq!(key(&system("Monday")), key(&system("Tuesday")));
    }

    #[test]
    fn what_counts_as_the_same_is_still_read_as_it_stands() {
        let rules = "what is 2+2?\n\n# *SEARCH/REPLACE block* Rules:\n\nEvery block";
        let (long, short) = (Message::user(rules), Message::user("what is 2+2?"));
        assert_eq!(key(&long), key(&short));
        let raw = |message: Message| {
            let messages = vec![message];
            Outline::of(&Conversation {
                messages,
                ..Conversation::default()
            })
            .raw[1]
        };
        assert_ne!(raw(long), raw(short));
    }

    #[test]
    fn what_a_client_takes_back_out_of_a_message_does_not_count() {
        let memory = "[Memory context]\n- [from 2026-11-30] fruit: kiwi\n[/Memory context]\n\n";
        let turn =
            "[turn-context] time=15:16:06 channel=webhook. Use it.\n\nYour handle: x.\n\n\n\n";
        let said = "[2026-11-30 15:16:06 UTC] good day\n\nto you";
        for before in [memory, turn, &format!("{memory}{turn}")] {
            let long = format!("{before}{said}");
            assert_eq!(key(&Message::user(&*long)), key(&Message::user(said)));
            assert_eq!(spoken(&long), "good day\n\nto you");
        }
        for own in ["[Memory context] is what?", "[turn-context] is\n\nwhat?"] {
            assert_eq!(spoken(own), own);
        }
    }

    #[test]
    fn only_a_leading_time_is_taken_from_what_was_said() {
        assert_eq!(spoken("[Mon 2026-11-30 02:07 UTC] too long"), "too long");
        assert_eq!(spoken("[2026-11-30 02:26:56 +00:00] hi"), "hi");
        assert_eq!(spoken("[cron:12 daily] go"), "[cron:12 daily] go");
        assert_eq!(
            spoken("[界界界界界界界界界界界] x"),
            "[界界界界界界界界界界界] x"
        );
    }

    #[test]
    fn an_outline_leaves_out_system_and_passing_messages() {
        let conversation = Conversation {
            messages: vec![
                Message::system("s"),
                Message::user("u"),
                Message::assistant("a"),
                Message::user("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>> now"),
            ],
            ..Conversation::default()
        };
        let outline = Outline::of(&conversation);
        assert_eq!(
            (outline.len(), outline.places.as_slice()),
            (2, [1, 2].as_slice())
        );
        assert!(!outline.is_assistant(0) && outline.is_assistant(1) && !outline.is_assistant(2));
        assert_eq!(outline.raw.len(), 5);
    }
}
