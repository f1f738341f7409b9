//! Keys and values of ended requests, kept for whoever continues or shares their text under the same version.

use crate::{error::kernel, forward::KvCache};
use chela_core::{EngineError, PolicyVersion, TokenId};
use chela_kernels::Kernels;

struct Stored<K: Kernels> {
    version: PolicyVersion,
    tokens: Vec<TokenId>,
    cache: KvCache<K>,
    used: u64,
}

/// Bounded by bytes; the least recently used goes first. The version is part of the key, so that a cache of other weights
/// cannot be met.
pub struct PrefixCache<K: Kernels> {
    stored: Vec<Stored<K>>,
    budget: usize,
    bytes: usize,
    clock: u64,
}

/// Shorter common prefixes are not worth a copy.
const SHORTEST: usize = 16;

fn common(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

impl<K: Kernels> PrefixCache<K> {
    /// Holds at most `budget` bytes.
    pub fn new(budget: usize) -> Self {
        Self { stored: Vec::new(), budget, bytes: 0, clock: 0 }
    }

    /// A cache that begins with as much of `tokens[..most]` as is known under the version; `None` when that is not worth it. An
    /// entry that is a prefix of the text is handed over when `take` is set, else copied.
    pub fn find(
        &mut self,
        k: &K,
        version: &PolicyVersion,
        tokens: &[TokenId],
        take: bool,
    ) -> Result<Option<KvCache<K>>, EngineError> {
        let best = self
            .stored
            .iter()
            .enumerate()
            .filter(|(_, s)| &s.version == version)
            .map(|(i, s)| (common(&s.tokens, tokens), i))
            .max();
        let Some((shared, index)) = best.filter(|(shared, _)| *shared >= SHORTEST) else {
            return Ok(None);
        };
        self.clock += 1;
        if take && shared == self.stored[index].tokens.len() {
            let stored = self.stored.swap_remove(index);
            self.bytes -= stored.cache.bytes();
            return Ok(Some(stored.cache));
        }
        self.stored[index].used = self.clock;
        let copy = self.stored[index].cache.prefix(k, shared, tokens.len() + 64)?;
        Ok(Some(copy))
    }

    /// Keeps an ended request's cache; `tokens` are those it holds.
    pub fn keep(&mut self, version: PolicyVersion, mut tokens: Vec<TokenId>, cache: KvCache<K>) {
        tokens.truncate(cache.len());
        if tokens.len() < SHORTEST || cache.bytes() > self.budget {
            return;
        }
        self.clock += 1;
        self.bytes += cache.bytes();
        self.stored.push(Stored { version, tokens, cache, used: self.clock });
        while self.bytes > self.budget {
            let oldest = self.stored.iter().enumerate().min_by_key(|(_, s)| s.used);
            let Some(index) = oldest.map(|(i, _)| i) else { break };
            self.bytes -= self.stored.swap_remove(index).cache.bytes();
        }
    }

    /// Drops everything of a version.
    pub fn forget(&mut self, version: &PolicyVersion) {
        self.stored.retain(|s| &s.version != version);
        self.bytes = self.stored.iter().map(|s| s.cache.bytes()).sum();
    }
}

/// Copies one row of `width` out of a buffer into a buffer of its own.
pub fn row<K: Kernels>(
    k: &K,
    from: &K::Buf,
    row: usize,
    width: usize,
) -> Result<K::Buf, EngineError> {
    let mut to = k.zeros(width).map_err(kernel)?;
    k.copy(from, row * width, &mut to, 0, width).map_err(kernel)?;
    Ok(to)
}
