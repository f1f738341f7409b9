//! Stop strings: found exactly, also across tokens, and never shown.

use crate::decode::TextDecoder;
use chela_core::{Flow, Guide, TokenId};

/// Finds stop strings in a growing text and says how much of it is safe to show.
#[derive(Clone, Debug, Default)]
pub struct StopText {
    stops: Vec<String>,
    held: String,
    hit: Option<usize>,
}

impl StopText {
    /// Watches for these.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|s| !s.is_empty()).cloned().collect();
        Self {
            stops,
            held: String::new(),
            hit: None,
        }
    }

    /// A stop string was completed; nothing comes out any more.
    pub fn hit(&self) -> bool {
        self.hit.is_some()
    }

    /// The stop string that was completed.
    pub fn stop(&self) -> Option<&str> {
        self.stops.get(self.hit?).map(String::as_str)
    }

    /// Takes text in; what is certain not to belong to a stop string comes out.
    pub fn push(&mut self, text: &str) -> String {
        if self.hit() {
            return String::new();
        }
        self.held.push_str(text);
        let first = self
            .stops
            .iter()
            .enumerate()
            .filter_map(|(i, s)| Some((self.held.find(s.as_str())?, i)))
            .min();
        if let Some((at, which)) = first {
            self.hit = Some(which);
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let keep = self
            .stops
            .iter()
            .map(|s| overlap(&self.held, s))
            .max()
            .unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// What was held back in vain.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that begins `word` (and is not all of it).
pub fn overlap(text: &str, word: &str) -> usize {
    (1..word.len())
        .rev()
        .filter(|n| word.is_char_boundary(*n))
        .find(|n| text.ends_with(&word[..*n]))
        .unwrap_or(0)
}

/// Tells the engine when a stop string is complete.
pub struct StopGuide {
    decoder: TextDecoder,
    text: StopText,
}

impl StopGuide {
    /// Watches for these.
    pub fn new(decoder: TextDecoder, stops: &[String]) -> Self {
        Self {
            decoder,
            text: StopText::new(stops),
        }
    }
}

impl Guide for StopGuide {
    fn accept(&mut self, token: TokenId) -> Flow {
        let text = self.decoder.push(token);
        self.text.push(&text);
        if self.text.hit() {
            Flow::Stop
        } else {
            Flow::Continue
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// However the text is cut, what comes out is the text before the first stop string.
        #[test]
        fn cuts_do_not_matter(text in "[ab界]{0,30}", cuts in prop::collection::vec(0usize..4, 0..30), stop in "[ab界]{1,4}") {
            let want = text.find(&stop).map_or(text.clone(), |at| text[..at].to_owned());
            let mut s = StopText::new(&[stop]);
            let (mut out, mut chars) = (String::new(), text.chars());
            for n in cuts {
                let part: String = chars.by_ref().take(n).collect();
                out += &s.push(&part);
            }
            out += &s.push(&chars.collect::<String>());
            out += &s.finish();
            prop_assert_eq!(out, want);
        }
    }
}
