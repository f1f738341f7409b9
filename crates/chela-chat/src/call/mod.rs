//! Tool calls in a model's own way of writing them, which its chat template shows.

mod gemma;
mod json;
mod xml;

use chela_core::Tool;
use serde_json::Value as Json;

pub use json::{bare, may_be_bare};

/// How a family of models writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen2.5, Qwen3).
    Hermes,
    /// `<tool_call><function=…><parameter=…>…</parameter></function></tool_call>` (Qwen3-Coder).
    QwenXml,
    /// `{"name": …, "parameters": {…}}` as the whole reply, or after `<|python_tag|>` (Llama 3).
    Llama,
    /// `call:name{key:value}` between control tokens, with texts between quotes of their own (Gemma).
    Gemma(Marks),
}

/// Control texts around a call of Gemma's and around a text inside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    open: &'static str,
    close: &'static str,
    quote: &'static str,
}

const FUNCTION_GEMMA: Marks = Marks {
    open: "<start_function_call>",
    close: "<end_function_call>",
    quote: "<escape>",
};
const GEMMA_4: Marks = Marks {
    open: "<|tool_call>",
    close: "<tool_call|>",
    quote: "<|\"|>",
};
/// Opens calls of Llama's.
const PYTHON_TAG: &str = "<|python_tag|>";

/// A call as written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The tool.
    pub name: String,
    /// JSON text of an object; where the model wrote JSON, as it wrote it.
    pub arguments: String,
}

/// What the text from an opening mark on is.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// Calls, and how many bytes they take with their close.
    Calls(Vec<Call>, usize),
    /// No lawful call; so many bytes of it are text.
    Text(usize),
    /// Not known yet. The search may go on from this byte.
    More(usize),
}

impl CallFormat {
    /// What the template shows its model.
    pub fn of_template(template: &str) -> Self {
        if template.contains("<function=") {
            Self::QwenXml
        } else if template.contains(FUNCTION_GEMMA.open) {
            Self::Gemma(FUNCTION_GEMMA)
        } else if template.contains(GEMMA_4.open) {
            Self::Gemma(GEMMA_4)
        } else if !template.contains(json::OPEN)
            && (template.contains(PYTHON_TAG) || template.contains("\"parameters\": dictionary"))
        {
            Self::Llama
        } else {
            Self::Hermes
        }
    }

    /// What may open a call.
    pub fn opens(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &[json::OPEN],
            // The outer tag is forgotten now and then.
            Self::QwenXml => &[json::OPEN, xml::OPEN],
            Self::Llama => &[PYTHON_TAG],
            Self::Gemma(FUNCTION_GEMMA) => &[FUNCTION_GEMMA.open],
            Self::Gemma(_) => &[GEMMA_4.open],
        }
    }

    /// Every text with a meaning, which a tokenizer may have as a control token.
    pub fn marks(self) -> Vec<&'static str> {
        let more: &[&str] = match self {
            Self::Hermes | Self::QwenXml => &[json::CLOSE],
            Self::Llama => &[],
            Self::Gemma(marks) => &[marks.close, marks.quote],
        };
        self.opens().iter().chain(more).copied().collect()
    }

    /// Reads the text after `open`; `last`: nothing follows. An earlier search got as far as `from`.
    pub fn find(self, open: &str, text: &str, from: usize, last: bool, tools: &[Tool]) -> Found {
        match self {
            Self::Hermes => json::find(text, from, last),
            Self::QwenXml if json::opens_object(text) => json::find(text, from, last),
            Self::QwenXml => xml::find(open, text, from, last, tools),
            Self::Llama => json::find_list(text, last),
            Self::Gemma(marks) => gemma::find(marks, text, from, last),
        }
    }
}

/// The end of text that is no call: past the first close, or everything.
fn first_close(text: &str, close: &str) -> usize {
    text.find(close).map_or(text.len(), |at| at + close.len())
}

/// Where a search for `close` goes on when more text has come: its beginning may stand at the end.
fn rest_from(text: &str, from: usize, close: &str) -> usize {
    let mut end = text.len().saturating_sub(close.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    from.max(end)
}

/// The schema of a tool's parameter.
fn parameter<'a>(definition: &'a Json, name: &str) -> Option<&'a Json> {
    let function = definition.get("function").unwrap_or(definition);
    function.get("parameters")?.get("properties")?.get(name)
}

/// `call_` and 24 letters and digits, from the reply's seed and the call's place.
pub fn id(seed: u64, index: usize) -> String {
    const LETTERS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    // SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators").
    const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |mut x: u64| {
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    let mut state = mix(seed ^ mix(index as u64 + 1));
    let mut id = String::from("call_");
    for _ in 0..24 {
        state = state.wrapping_add(GAMMA);
        id.push(char::from(LETTERS[(mix(state) % 36) as usize]));
    }
    id
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FORMATS: [CallFormat; 5] = [
        CallFormat::Hermes,
        CallFormat::QwenXml,
        CallFormat::Llama,
        CallFormat::Gemma(FUNCTION_GEMMA),
        CallFormat::Gemma(GEMMA_4),
    ];

    #[test]
    fn ids_are_unique() {
        let ids: std::collections::HashSet<String> = (0..40)
            .flat_map(|seed| (0..5).map(move |i| id(seed, i)))
            .collect();
        assert_eq!(ids.len(), 200);
        assert!(ids.iter().all(|i| i.len() == 29));
    }

    #[test]
    fn templates_show_their_format() {
        for (template, format) in [
            ("<tool_call>{\"name\"", CallFormat::Hermes),
            ("<tool_call><function=x>", CallFormat::QwenXml),
            (
                "{\"name\": x, \"parameters\": dictionary of",
                CallFormat::Llama,
            ),
            ("<start_function_call>", CallFormat::Gemma(FUNCTION_GEMMA)),
            ("<|tool_call>call:", CallFormat::Gemma(GEMMA_4)),
            ("no tools at all", CallFormat::Hermes),
        ] {
            assert_eq!(CallFormat::of_template(template), format);
        }
    }

    proptest! {
        /// Whatever is written, and however it comes, a search ends, within the text, and a call's arguments are an object.
        #[test]
        fn any_text_is_understood(
            text in "(<tool_call>|</tool_call>|<function=f>|</function>|<parameter=a>|</parameter>|call:f\\{|<escape>|<end_function_call>|<\\|\"\\|>|\\{|\\}|\"name\":|\"f\"|\"arguments\":|\\[|,|:|;|1|界|\n| ){0,16}",
            which in 0usize..5,
        ) {
            let format = FORMATS[which];
            for open in format.opens() {
                let mut from = 0;
                for end in (0..=text.len()).filter(|end| text.is_char_boundary(*end)) {
                    match format.find(open, &text[..end], from, false, &[]) {
                        Found::More(next) => {
                            prop_assert!(next <= end && text.is_char_boundary(next));
                            from = next;
                        }
                        Found::Text(n) => prop_assert!(n <= end && text.is_char_boundary(n)),
                        Found::Calls(calls, n) => {
                            prop_assert!(n <= end && text.is_char_boundary(n) && !calls.is_empty());
                            for call in calls {
                                prop_assert!(serde_json::from_str::<serde_json::Map<String, Json>>(&call.arguments).is_ok());
                            }
                        }
                    }
                }
                let more = matches!(format.find(open, &text, 0, true, &[]), Found::More(_));
                prop_assert!(!more, "nothing follows");
            }
        }
    }
}
