//! A reply as nothing but text: no thinking, no calls, only stop strings.

use chela_chat::TextDecoder;
use chela_core::TokenId;

/// Follows a reply and holds back what may become a stop string.
pub(crate) struct Plain {
    decoder: TextDecoder,
    stops: Vec<String>,
    held: String,
    /// All that was let out.
    text: String,
    stopped: bool,
}

impl Plain {
    pub(crate) fn new(decoder: TextDecoder, stops: Vec<String>) -> Self {
        Self {
            decoder,
            stops,
            held: String::new(),
            text: String::new(),
            stopped: false,
        }
    }

    /// The text that this token makes certain.
    pub(crate) fn push(&mut self, id: TokenId) -> String {
        let text = self.decoder.push(id);
        self.take(&text, false)
    }

    /// The rest, and the whole text.
    pub(crate) fn finish(&mut self) -> (String, String) {
        let text = self.decoder.finish();
        let rest = self.take(&text, true);
        (rest, std::mem::take(&mut self.text))
    }

    fn take(&mut self, text: &str, last: bool) -> String {
        if self.stopped {
            return String::new();
        }
        self.held.push_str(text);
        let found = self
            .stops
            .iter()
            .filter_map(|s| self.held.find(s.as_str()))
            .min();
        let certain = match found {
            Some(at) => {
                self.stopped = true;
                at
            }
            None if last => self.held.len(),
            None => {
                self.held.len()
                    - self
                        .stops
                        .iter()
                        .map(|s| begun(&self.held, s))
                        .max()
                        .unwrap_or(0)
            }
        };
        let rest = self.held.split_off(certain);
        let out = std::mem::replace(&mut self.held, rest);
        self.text.push_str(&out);
        out
    }
}

/// Bytes at the end of `text` that begin `stop`.
fn begun(text: &str, stop: &str) -> usize {
    stop.char_indices()
        .map(|(at, _)| at)
        .rev()
        .find(|at| text.ends_with(&stop[..*at]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::begun;

    #[test]
    fn what_may_become_a_stop_string_is_held_back() {
        assert_eq!(begun("ab<|", "<|end"), 2);
        assert_eq!(begun("ab", "<|end"), 0);
        assert_eq!(begun("x界", "界界"), "界".len());
    }
}
