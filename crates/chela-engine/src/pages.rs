//! Keys and values in pages of one pool: what a text takes, shares and gives back.
//!
//! A page holds the keys and values of [`PAGE`] tokens in a row for every layer. Texts that begin alike hold the same pages; a page is
//! written only by its sole holder, so that whoever goes on inside a shared page first takes a page of its own.

use crate::error::kernel;
use chela_core::EngineError;
use chela_kernels::{Kernels, KvPiece};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Tokens of a page: as many as attention looks at at a time, so that a text in pages has the bits of one in a long buffer.
pub const PAGE: usize = 128;

/// Keys and values `[PAGE, W]` of each layer.
type Layers<B> = Vec<(B, B)>;

struct Shelf<B> {
    /// Given back and ready to be taken.
    free: Vec<Layers<B>>,
    /// Pages that somebody holds.
    held: usize,
    /// The most that were ever held.
    peak: usize,
}

/// The pages of one model. A clone is the same pool.
pub struct Pool<K: Kernels> {
    shelf: Arc<Mutex<Shelf<K::Buf>>>,
    layers: usize,
    width: usize,
    budget: usize,
}

impl<K: Kernels> Clone for Pool<K> {
    fn clone(&self) -> Self {
        Self {
            shelf: self.shelf.clone(),
            ..*self
        }
    }
}

/// A page that somebody holds; it goes back to its pool when the last holder lets go.
pub struct Page<K: Kernels> {
    layers: Layers<K::Buf>,
    shelf: Arc<Mutex<Shelf<K::Buf>>>,
    budget: usize,
}

fn lock<B>(shelf: &Mutex<Shelf<B>>) -> MutexGuard<'_, Shelf<B>> {
    shelf.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<K: Kernels> Drop for Page<K> {
    fn drop(&mut self) {
        let layers = std::mem::take(&mut self.layers);
        let mut shelf = lock(&self.shelf);
        shelf.held -= 1;
        // What was taken beyond the budget goes back to the system.
        if shelf.held + shelf.free.len() < self.budget {
            shelf.free.push(layers);
        }
    }
}

/// What the pool holds, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUse {
    /// Held by requests and kept prefixes now.
    pub held: usize,
    /// The most that was ever held.
    pub peak: usize,
    /// What may be held, up to whole pages; one text alone may exceed it.
    pub budget: usize,
    /// One page.
    pub page: usize,
}

/// Pages that so many tokens fill.
pub fn pages(tokens: usize) -> usize {
    tokens.div_ceil(PAGE)
}

impl<K: Kernels> Pool<K> {
    /// For keys and values of `width` numbers in each of `layers`, with `bytes` for all pages.
    pub fn new(layers: usize, width: usize, bytes: usize) -> Self {
        let shelf = Shelf {
            free: Vec::new(),
            held: 0,
            peak: 0,
        };
        Self {
            shelf: Arc::new(Mutex::new(shelf)),
            layers,
            width,
            budget: bytes / (layers * 2 * PAGE * width * 4).max(1),
        }
    }

    /// Bytes held, and of the budget.
    pub fn usage(&self) -> PoolUse {
        let page = self.layers * 2 * PAGE * self.width * 4;
        let shelf = lock(&self.shelf);
        PoolUse {
            held: shelf.held * page,
            peak: shelf.peak * page,
            budget: self.budget * page,
            page,
        }
    }

    /// Pages that may be taken within the budget.
    pub fn free(&self) -> usize {
        self.budget.saturating_sub(lock(&self.shelf).held)
    }

    /// Pages held beyond the budget.
    pub fn excess(&self) -> usize {
        lock(&self.shelf).held.saturating_sub(self.budget)
    }

    /// Takes a page, also beyond the budget: who asks has looked at [`Pool::free`]. Its contents are arbitrary.
    fn take(&self, k: &K) -> Result<Arc<Page<K>>, EngineError> {
        let used = lock(&self.shelf).free.pop();
        let layers = match used {
            Some(layers) => layers,
            None => {
                let size = PAGE * self.width;
                let layer = |_| Ok((k.zeros(size)?, k.zeros(size)?));
                let layers = (0..self.layers).map(layer);
                layers.collect::<Result<_, _>>().map_err(kernel)?
            }
        };
        let mut shelf = lock(&self.shelf);
        shelf.held += 1;
        shelf.peak = shelf.peak.max(shelf.held);
        drop(shelf);
        Ok(Arc::new(Page {
            layers,
            shelf: self.shelf.clone(),
            budget: self.budget,
        }))
    }
}

/// Cached keys and values of one sequence, for every layer.
pub struct KvCache<K: Kernels> {
    pool: Pool<K>,
    pages: Vec<Arc<Page<K>>>,
    len: usize,
}

impl<K: Kernels> KvCache<K> {
    /// One that holds `len` tokens in pages that others may hold too.
    pub fn new(pool: &Pool<K>, pages: Vec<Arc<Page<K>>>, len: usize) -> Self {
        Self {
            pool: pool.clone(),
            len: len.min(pages.len() * PAGE),
            pages,
        }
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Its pages, in order of the text.
    pub fn pages(&self) -> &[Arc<Page<K>>] {
        &self.pages
    }

    /// Whether the next token goes into a page that others hold too.
    fn shares_end(&self) -> bool {
        let end = self.pages.get(self.len / PAGE);
        end.is_some_and(|page| Arc::strong_count(page) > 1)
    }

    /// Pages that taking `more` tokens takes from the pool.
    pub fn growth(&self, more: usize) -> usize {
        if more == 0 {
            return 0;
        }
        let whole = pages(self.len + more).saturating_sub(self.pages.len());
        whole + usize::from(self.shares_end())
    }

    /// Makes room for `more` tokens.
    pub fn reserve(&mut self, k: &K, more: usize) -> Result<(), EngineError> {
        if more == 0 {
            return Ok(());
        }
        if self.shares_end() {
            self.own_end(k)?;
        }
        while self.pages.len() < pages(self.len + more) {
            self.pages.push(self.pool.take(k)?);
        }
        Ok(())
    }

    /// Replaces a shared last page by a copy.
    fn own_end(&mut self, k: &K) -> Result<(), EngineError> {
        let mut own = self.pool.take(k)?;
        let (at, rows) = (self.len / PAGE, self.len % PAGE);
        let to = Arc::get_mut(&mut own).ok_or_else(shared)?;
        let n = rows * self.pool.width;
        for (from, to) in self.pages[at].layers.iter().zip(&mut to.layers) {
            k.copy(&from.0, 0, &mut to.0, 0, n).map_err(kernel)?;
            k.copy(&from.1, 0, &mut to.1, 0, n).map_err(kernel)?;
        }
        self.pages[at] = own;
        Ok(())
    }

    /// Writes the next `n` tokens' rows of one layer, `[.., W]` from row `at` of keys and values on. Every layer is written before
    /// [`KvCache::advance`]; room was made by [`KvCache::reserve`].
    pub fn append(
        &mut self,
        k: &K,
        layer: usize,
        (keys, values): (&K::Buf, &K::Buf),
        (mut at, n): (usize, usize),
    ) -> Result<(), EngineError> {
        let width = self.pool.width;
        let (mut token, end) = (self.len, self.len + n);
        while token < end {
            let row = token % PAGE;
            let rows = (PAGE - row).min(end - token);
            let page = self.pages.get_mut(token / PAGE).and_then(Arc::get_mut);
            let (to_keys, to_values) = &mut page.ok_or_else(shared)?.layers[layer];
            let (from, to, count) = (at * width, row * width, rows * width);
            k.copy(keys, from, to_keys, to, count).map_err(kernel)?;
            k.copy(values, from, to_values, to, count).map_err(kernel)?;
            at += rows;
            token += rows;
        }
        Ok(())
    }

    /// The next `n` tokens stand.
    pub fn advance(&mut self, n: usize) {
        self.len += n;
    }

    /// The first `tokens` rows of one layer, as attention reads them.
    pub fn pieces(&self, layer: usize, tokens: usize) -> Vec<KvPiece<'_, K::Buf>> {
        let pages = self.pages.iter().zip((0..tokens).step_by(PAGE));
        pages
            .map(|(page, first)| KvPiece {
                k: &page.layers[layer].0,
                v: &page.layers[layer].1,
                at: 0,
                len: PAGE.min(tokens - first),
            })
            .collect()
    }
}

fn shared() -> EngineError {
    EngineError::Stopped("a page of keys and values was not made ready to be written".to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use chela_kernels::Cpu;

    const WIDTH: usize = 4;

    fn pool(pages: usize) -> (Cpu, Pool<Cpu>) {
        let bytes = pages * 2 * 2 * PAGE * WIDTH * 4;
        (Cpu::new(1), Pool::new(2, WIDTH, bytes))
    }

    /// Appends tokens whose keys are their number, and their values minus that.
    fn extend(k: &Cpu, cache: &mut KvCache<Cpu>, tokens: &[u32]) {
        let numbers = |sign: f32| {
            let all = tokens.iter().flat_map(|t| [sign * *t as f32; WIDTH]);
            k.upload(&all.collect::<Vec<_>>()).unwrap()
        };
        cache.reserve(k, tokens.len()).unwrap();
        for layer in 0..2 {
            let rows = (&numbers(1.0), &numbers(-1.0));
            cache.append(k, layer, rows, (0, tokens.len())).unwrap();
        }
        cache.advance(tokens.len());
    }

    fn read(k: &Cpu, cache: &KvCache<Cpu>) -> Vec<u32> {
        let mut tokens = Vec::new();
        for piece in cache.pieces(1, cache.len()) {
            let (keys, values) = (k.download(piece.k).unwrap(), k.download(piece.v).unwrap());
            for row in piece.at..piece.at + piece.len {
                assert_eq!(keys[row * WIDTH], -values[row * WIDTH]);
                tokens.push(keys[row * WIDTH] as u32);
            }
        }
        tokens
    }

    #[test]
    fn texts_that_begin_alike_share_pages_and_write_only_their_own() {
        let (k, pool) = pool(10);
        let mut first = KvCache::new(&pool, Vec::new(), 0);
        let text: Vec<u32> = (1..=300).collect();
        assert_eq!(first.growth(300), 3);
        extend(&k, &mut first, &text[..100]);
        extend(&k, &mut first, &text[100..]);
        assert_eq!((read(&k, &first), pool.free()), (text.clone(), 7));
        for at in [1, 128, 200, 256, 300] {
            let mut other = KvCache::new(&pool, first.pages()[..pages(at)].to_vec(), at);
            assert_eq!((read(&k, &other), pool.free()), (text[..at].to_vec(), 7));
            assert_eq!(other.growth(1), 1, "after {at}");
            extend(&k, &mut other, &[900; 5]);
            assert_eq!(read(&k, &other), [&text[..at], &[900; 5]].concat());
            assert_eq!((read(&k, &first), pool.free()), (text.clone(), 6));
        }
        extend(&k, &mut first, &[301]);
        assert_eq!((first.growth(83), first.growth(84)), (0, 1));
        drop(first);
        assert_eq!((pool.free(), pool.usage().held), (10, 0));
        assert_eq!(pool.usage().peak, 4 * pool.usage().page);
    }

    #[test]
    fn what_is_taken_beyond_the_budget_is_not_kept() {
        let (k, pool) = pool(2);
        let mut text = KvCache::new(&pool, Vec::new(), 0);
        extend(&k, &mut text, &(0..500).collect::<Vec<_>>());
        assert_eq!((pool.free(), pool.excess()), (0, 2));
        drop(text);
        assert_eq!((pool.free(), pool.excess()), (2, 0));
        assert_eq!(lock(&pool.shelf).free.len(), 2);
    }
}
