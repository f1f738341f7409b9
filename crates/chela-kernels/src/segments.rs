//! Who attends to whom: one description for causal, ragged, tree and chunked attention.

use core::ops::Range;

use crate::error::{KernelError, Result};

/// Rows of queries that attend to rows of keys.
///
/// Query `i` of `q` stands at position `offset + i` when the first key of `k` stands at position 0;
/// it sees key `j` iff (`causal` implies `j <= offset + i`) and (a `window` implies
/// `offset + i - j < window`). A query may occur in several segments (its own node and each
/// ancestor of a token tree): it attends to the union, and key ranges of one query must not overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Rows of the query buffer.
    pub q: Range<usize>,
    /// Rows of the key and value buffers.
    pub k: Range<usize>,
    /// Position of the first query minus position of the first key.
    pub offset: usize,
    /// Whether keys after the query are hidden.
    pub causal: bool,
    /// How many positions back a query sees, itself included.
    pub window: Option<usize>,
}

impl Segment {
    /// One text of rows `rows` that attends to itself, each token to its past.
    pub fn causal(rows: Range<usize>) -> Self {
        Self {
            q: rows.clone(),
            k: rows,
            offset: 0,
            causal: true,
            window: None,
        }
    }

    /// The last `q.len()` tokens of a text whose keys are rows `k` (a chunk of a prefill).
    /// `None` when there are more queries than keys.
    pub fn chunk(q: Range<usize>, k: Range<usize>) -> Option<Self> {
        let offset = k.len().checked_sub(q.len())?;
        Some(Self {
            q,
            k,
            offset,
            causal: true,
            window: None,
        })
    }

    /// Tokens `q` that attend to all of an ancestor's tokens `k`, whose first one stands `offset`
    /// positions before the first query.
    pub fn ancestor(q: Range<usize>, k: Range<usize>, offset: usize) -> Self {
        Self {
            q,
            k,
            offset,
            causal: false,
            window: None,
        }
    }

    /// The same with a sliding window.
    pub fn with_window(mut self, window: Option<usize>) -> Self {
        self.window = window;
        self
    }

    /// The keys (relative to `k.start`) that query `i` (relative to `q.start`) sees.
    pub fn keys_of(&self, i: usize) -> Range<usize> {
        let position = self.offset + i;
        let end = if self.causal {
            self.k.len().min(position + 1)
        } else {
            self.k.len()
        };
        let start = self.window.map_or(0, |w| (position + 1).saturating_sub(w));
        start.min(end)..end
    }
}

/// Checks that all ranges lie inside buffers of `q_rows` and `k_rows` rows.
pub fn check_segments(segments: &[Segment], q_rows: usize, k_rows: usize) -> Result {
    for s in segments {
        for (what, range, limit) in [("query row", &s.q, q_rows), ("key row", &s.k, k_rows)] {
            if range.start > range.end || range.end > limit {
                return Err(KernelError::Index {
                    op: "attention",
                    what,
                    index: range.end,
                    limit,
                });
            }
        }
    }
    Ok(())
}
