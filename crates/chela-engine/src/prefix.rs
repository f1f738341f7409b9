//! Keys and values of ended requests, kept for whoever continues or shares their text under the same weights.
//!
//! A reused prefix equals a cold run within rounding, not bit for bit: some of its rows were decoded one at a time, and what follows
//! is cut into other chunks. Equal seeds give equal replies whatever else is in the batch, from equal caches.

use crate::{error::kernel, forward::KvCache};
use chela_core::{EngineError, PolicyVersion, Profile, TokenId};
use chela_kernels::Kernels;

/// Whose text a cache was made of, and with which weights. A version that is loaded again counts as other weights, so that a cache
/// of other numbers cannot be met; one that left memory and came back has the same hash and counts as the same.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CacheKey {
    /// Profile and number.
    pub version: PolicyVersion,
    /// Number of its home ([`crate::resident::Home`]); 0 for the base.
    pub load: u64,
    /// A profile's own text. False for judges and references, who ask for the base model in nobody's name: what they leave may hold
    /// anybody's text, so no profile's request meets it, and any profile's wish to be forgotten drops it.
    pub named: bool,
}

impl CacheKey {
    /// Whether the text may be that profile's.
    pub fn may_be_of(&self, profile: &Profile) -> bool {
        !self.named || self.version.profile == *profile
    }
}

struct Stored<K: Kernels> {
    key: CacheKey,
    tokens: Vec<TokenId>,
    cache: KvCache<K>,
    used: u64,
}

/// Bounded by bytes; the least recently used goes first.
pub struct PrefixCache<K: Kernels> {
    stored: Vec<Stored<K>>,
    bytes: usize,
    clock: u64,
}

/// Shorter common prefixes are not worth a copy.
pub const SHORTEST: usize = 16;

/// Tokens that both texts begin with.
pub fn common(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

impl<K: Kernels> Default for PrefixCache<K> {
    fn default() -> Self {
        Self {
            stored: Vec::new(),
            bytes: 0,
            clock: 0,
        }
    }
}

impl<K: Kernels> PrefixCache<K> {
    /// A cache that begins with as much of `tokens` as is known under the key and has room for `capacity`; `None` when that is
    /// not worth it. An entry that is a prefix of the text is handed over when `take` is set, else copied.
    pub fn find(
        &mut self,
        k: &K,
        key: &CacheKey,
        tokens: &[TokenId],
        (take, capacity): (bool, usize),
    ) -> Result<Option<KvCache<K>>, EngineError> {
        let best = self
            .stored
            .iter()
            .enumerate()
            .filter(|(_, s)| &s.key == key)
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
        self.stored[index]
            .cache
            .prefix(k, shared, capacity)
            .map(Some)
    }

    /// Keeps an ended request's cache; `tokens` are those it holds. Entries that it continues are let go.
    pub fn keep(&mut self, key: CacheKey, mut tokens: Vec<TokenId>, cache: KvCache<K>) {
        tokens.truncate(cache.len());
        let known = |s: &Stored<K>| s.key == key && s.tokens.starts_with(&tokens);
        if tokens.len() < SHORTEST || self.stored.iter().any(known) {
            return;
        }
        self.stored
            .retain(|s| s.key != key || !tokens.starts_with(&s.tokens));
        self.clock += 1;
        self.stored.push(Stored {
            key,
            tokens,
            cache,
            used: self.clock,
        });
        self.bytes = self.stored.iter().map(|s| s.cache.bytes()).sum();
    }

    /// Lets go of the least recently used until at most `budget` bytes are held.
    pub fn shrink(&mut self, budget: usize) {
        while self.bytes > budget {
            let oldest = self.stored.iter().enumerate().min_by_key(|(_, s)| s.used);
            let Some(index) = oldest.map(|(i, _)| i) else {
                break;
            };
            self.bytes -= self.stored.swap_remove(index).cache.bytes();
        }
    }

    /// Drops everything of a version.
    pub fn forget(&mut self, version: &PolicyVersion) {
        self.stored.retain(|s| &s.key.version != version);
        self.bytes = self.stored.iter().map(|s| s.cache.bytes()).sum();
    }

    /// Drops everything that may be a profile's text.
    pub fn forget_texts(&mut self, profile: &Profile) {
        self.stored.retain(|s| !s.key.may_be_of(profile));
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
    k.copy(from, row * width, &mut to, 0, width)
        .map_err(kernel)?;
    Ok(to)
}
