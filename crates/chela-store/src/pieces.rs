//! Pieces of what is being forgotten, as they lie in the file: afterwards they are looked for.

use std::collections::HashSet;

/// A shorter text is no evidence: it may stand anywhere by chance.
const SHORTEST: usize = 16;

/// Short enough to lie within one page of the file most of the time.
const LONGEST: usize = 32;

/// More would not prove more. Of a large profile every second, fourth, … piece is kept.
const MOST: usize = 20_000;

/// What to look for.
pub(crate) struct Pieces {
    found: HashSet<Vec<u8>>,
    seen: u64,
    every: u64,
}

impl Default for Pieces {
    fn default() -> Self {
        Self {
            found: HashSet::new(),
            seen: 0,
            every: 1,
        }
    }
}

impl Pieces {
    /// The strings of a JSON text, escaped as they are there.
    pub fn json(&mut self, text: &str) {
        let bytes = text.as_bytes();
        let mut begin = None;
        let mut escaped = false;
        for (at, byte) in bytes.iter().enumerate() {
            match (begin, byte) {
                (Some(_), _) if escaped => escaped = false,
                (Some(_), b'\\') => escaped = true,
                (Some(from), b'"') => {
                    self.text(&bytes[from..at]);
                    begin = None;
                }
                (None, b'"') => begin = Some(at + 1),
                _ => {}
            }
        }
    }

    /// A text as it is there.
    pub fn text(&mut self, text: &[u8]) {
        for window in windows(text, 1) {
            let different: HashSet<&u8> = window.iter().collect();
            if different.len() >= 4 {
                self.add(window);
            }
        }
    }

    /// Token ids, four bytes each. Ids that count up are left out: the numbers of SQLite's pages look the same.
    pub fn tokens(&mut self, blob: &[u8]) {
        for window in windows(blob, 4) {
            let ids = window.as_chunks::<4>().0.iter();
            let ids: Vec<i64> = ids.map(|id| u32::from_le_bytes(*id).into()).collect();
            let jumps = ids.windows(2).filter(|w| (w[1] - w[0]).abs() > 1);
            if jumps.count() >= 2 {
                self.add(window);
            }
        }
    }

    fn add(&mut self, piece: &[u8]) {
        self.seen += 1;
        if self.seen.is_multiple_of(self.every) {
            self.found.insert(piece.to_vec());
        }
        if self.found.len() > MOST {
            self.every *= 2;
            let mut keep = false;
            self.found.retain(|_| {
                keep = !keep;
                keep
            });
        }
    }

    /// Each once.
    pub fn into_vec(self) -> Vec<Vec<u8>> {
        self.found.into_iter().collect()
    }
}

/// From the beginning, the middle and the end.
fn windows(bytes: &[u8], step: usize) -> impl Iterator<Item = &[u8]> {
    let size = bytes.len().min(LONGEST);
    let middle = (bytes.len() - size) / 2 / step * step;
    let mut starts = vec![0, middle, bytes.len() - size];
    starts.dedup();
    if size < SHORTEST {
        starts.clear();
    }
    starts.into_iter().map(move |at| &bytes[at..at + size])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(pieces: Pieces) -> Vec<String> {
        let pieces = pieces.into_vec().into_iter();
        let mut all: Vec<String> = pieces.map(|p| String::from_utf8(p).unwrap()).collect();
        all.sort();
        all
    }

    #[test]
    fn strings_are_taken_as_they_lie_in_the_file() {
        let mut pieces = Pieces::default();
        pieces.json(r#"[{"content":"she said \"heron\" twice\n","role":"user"}]"#);
        assert_eq!(texts(pieces), [r#"she said \"heron\" twice\n"#]);
    }

    #[test]
    fn long_texts_give_three_pieces_and_short_or_empty_ones_none() {
        let mut pieces = Pieces::default();
        pieces.text("abcdefghij".repeat(10).as_bytes());
        pieces.text(b"too short a text".split_at(15).0);
        pieces.text(&[b'x'; 99]);
        pieces.tokens(&[0; 64]);
        pieces.tokens(&crate::records::u32_blob(&[1, 2, 3, 4, 5, 7, 8, 9]));
        let all = texts(pieces);
        assert_eq!(all.len(), 3);
        assert!(all.iter().all(|p| p.len() == LONGEST));
    }

    #[test]
    fn a_large_profile_is_thinned_out() {
        let mut pieces = Pieces::default();
        for i in 0..3 * MOST {
            pieces.text(format!("the text with number {i}").as_bytes());
        }
        let left = pieces.into_vec().len();
        assert!((MOST / 4..=MOST).contains(&left), "{left}");
    }
}
