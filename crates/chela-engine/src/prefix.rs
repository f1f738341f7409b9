//! Keys and values of ended requests, kept for whoever continues or shares their text under the same weights.
//!
//! A radix tree for each [`CacheKey`]: a node is a page, an edge the tokens in it (as in vLLM and SGLang), so that texts that begin
//! alike share nodes, and looking a text up costs what the text is long.
//!
//! A reused prefix equals a cold run within rounding, not bit for bit: some of its rows were decoded one at a time, and what follows
//! is cut into other chunks. Equal seeds give equal replies whatever else is in the batch, from equal caches.

use crate::{
    error::kernel,
    pages::{KvCache, PAGE, Page, Pool},
};
use chela_core::{EngineError, PolicyVersion, Profile, TokenId};
use chela_kernels::Kernels;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Bound,
    sync::Arc,
};

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

type Id = u64;

/// Nodes by the tokens of their page. In this order the longest common beginning with any text stands beside the place where that
/// text would stand.
type Children = BTreeMap<Box<[TokenId]>, Id>;

struct Node<K: Kernels> {
    parent: Parent,
    /// At most [`PAGE`]; a page that is not full has no children.
    tokens: Box<[TokenId]>,
    page: Arc<Page<K>>,
    children: Children,
    used: u64,
}

#[derive(Clone, PartialEq, Eq)]
enum Parent {
    Root(CacheKey),
    Node(Id),
}

/// Bounded by the pool's budget; the least recently used goes first, the ends of texts before what they begin with.
pub struct PrefixCache<K: Kernels> {
    roots: BTreeMap<CacheKey, Children>,
    nodes: HashMap<Id, Node<K>>,
    /// Nodes without children, least recently used first.
    leaves: BTreeSet<(u64, Id)>,
    clock: u64,
    ids: Id,
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
            roots: BTreeMap::new(),
            nodes: HashMap::new(),
            leaves: BTreeSet::new(),
            clock: 0,
            ids: 0,
        }
    }
}

/// The child that begins with the most tokens of `text`, and how many.
fn nearest(children: &Children, text: &[TokenId]) -> Option<(usize, Id)> {
    let from = (Bound::Included(text), Bound::Unbounded);
    let to = (Bound::Unbounded, Bound::Excluded(text));
    let after = children.range::<[TokenId], _>(from).next();
    let before = children.range::<[TokenId], _>(to).next_back();
    let both = before.into_iter().chain(after);
    both.map(|(tokens, id)| (common(tokens, text), *id)).max()
}

impl<K: Kernels> PrefixCache<K> {
    /// A cache that begins with as much of `tokens` as is known under the key; `None` when that is not worth it. It holds the pages
    /// that are kept, and takes none.
    pub fn find(
        &mut self,
        pool: &Pool<K>,
        key: &CacheKey,
        tokens: &[TokenId],
    ) -> Option<KvCache<K>> {
        self.clock += 1;
        let (mut pages, mut len) = (Vec::new(), 0);
        let mut path = Vec::new();
        let mut children = self.roots.get(key)?;
        for text in tokens.chunks(PAGE) {
            let Some((shared, id)) = nearest(children, text).filter(|(shared, _)| *shared > 0)
            else {
                break;
            };
            let node = self.nodes.get(&id)?;
            pages.push(node.page.clone());
            path.push(id);
            len += shared;
            children = &node.children;
            if shared < PAGE {
                break;
            }
        }
        if len < SHORTEST {
            return None;
        }
        path.into_iter().for_each(|id| self.touch(id));
        Some(KvCache::new(pool, pages, len))
    }

    /// Marks a node as used now.
    fn touch(&mut self, id: Id) {
        let Some(node) = self.nodes.get_mut(&id) else {
            return;
        };
        if self.leaves.remove(&(node.used, id)) {
            self.leaves.insert((self.clock, id));
        }
        node.used = self.clock;
    }

    /// Keeps an ended request's cache; `tokens` are those it holds. What is known of the text stays, what the text continues goes.
    pub fn keep(&mut self, key: CacheKey, mut tokens: Vec<TokenId>, cache: &KvCache<K>) {
        tokens.truncate(cache.len());
        if tokens.len() < SHORTEST {
            return;
        }
        self.clock += 1;
        let mut parent = Parent::Root(key);
        for (text, page) in tokens.chunks(PAGE).zip(cache.pages()) {
            match self.step(parent, text, page) {
                Some(id) => parent = Parent::Node(id),
                None => return,
            }
        }
    }

    /// The node of `text` below `parent`, made when it is not there; `None` when a node there already begins with a text that is
    /// shorter than a page.
    fn step(&mut self, parent: Parent, text: &[TokenId], page: &Arc<Page<K>>) -> Option<Id> {
        if let Some((shared, id)) = nearest(self.children(&parent)?, text) {
            if shared == text.len() {
                self.touch(id);
                return (text.len() == PAGE).then_some(id);
            }
            if self
                .nodes
                .get(&id)
                .is_some_and(|n| n.tokens.len() == shared)
            {
                self.remove(id);
            }
        }
        self.ids += 1;
        let id = self.ids;
        if let Parent::Node(above) = &parent
            && let Some(above_node) = self.nodes.get(above)
        {
            self.leaves.remove(&(above_node.used, *above));
        }
        self.children(&parent)?.insert(text.into(), id);
        self.leaves.insert((self.clock, id));
        let node = Node {
            parent,
            tokens: text.into(),
            page: page.clone(),
            children: Children::new(),
            used: self.clock,
        };
        self.nodes.insert(id, node);
        Some(id)
    }

    fn children(&mut self, parent: &Parent) -> Option<&mut Children> {
        match parent {
            Parent::Root(key) => Some(self.roots.entry(key.clone()).or_default()),
            Parent::Node(id) => self.nodes.get_mut(id).map(|n| &mut n.children),
        }
    }

    /// Lets go of a leaf.
    fn remove(&mut self, id: Id) {
        let Some(node) = self.nodes.remove(&id) else {
            return;
        };
        self.leaves.remove(&(node.used, id));
        match &node.parent {
            Parent::Root(key) => {
                if let Some(children) = self.roots.get_mut(key) {
                    children.remove(&node.tokens);
                    if children.is_empty() {
                        self.roots.remove(key);
                    }
                }
            }
            Parent::Node(above) => {
                if let Some(parent) = self.nodes.get_mut(above) {
                    parent.children.remove(&node.tokens);
                    if parent.children.is_empty() {
                        self.leaves.insert((parent.used, *above));
                    }
                }
            }
        }
    }

    /// Whether letting go of all that is kept would give back `pages` pages: those that no request holds.
    fn could_free(&self, pages: usize) -> bool {
        let sole = self.nodes.values();
        let sole = sole.filter(|n| Arc::strong_count(&n.page) == 1);
        sole.take(pages).count() == pages
    }

    /// Lets go of the least recently used until the pool has `pages` free. False, and everything stays, when it would not be enough.
    pub fn make_room(&mut self, pool: &Pool<K>, pages: usize) -> bool {
        // What a request holds beyond the budget has to come back first.
        let missing = (pages + pool.excess()).saturating_sub(pool.free());
        if !self.could_free(missing) {
            return false;
        }
        self.give_back(missing);
        true
    }

    /// Lets go of what is kept, the least recently used first, until `pages` pages went back to the pool or nothing is left.
    pub fn give_back(&mut self, pages: usize) {
        for _ in 0..pages {
            // The page of a leaf that a request holds too would not come back.
            let sole = |id: &Id| {
                let node = self.nodes.get(id);
                node.is_some_and(|n| Arc::strong_count(&n.page) == 1)
            };
            let oldest = self.leaves.iter().map(|(_, id)| *id).find(sole);
            let Some(id) = oldest else { return };
            self.remove(id);
        }
    }

    /// Drops the texts of some keys.
    fn drop_keys(&mut self, gone: impl Fn(&CacheKey) -> bool) {
        let keys: Vec<_> = self.roots.keys().filter(|k| gone(k)).cloned().collect();
        let roots = keys.iter().filter_map(|key| self.roots.remove(key));
        let mut ids: Vec<Id> = roots.flat_map(Children::into_values).collect();
        while let Some(id) = ids.pop() {
            if let Some(node) = self.nodes.remove(&id) {
                self.leaves.remove(&(node.used, id));
                ids.extend(node.children.into_values());
            }
        }
    }

    /// Drops everything of a version.
    pub fn forget(&mut self, version: &PolicyVersion) {
        self.drop_keys(|key| &key.version == version);
    }

    /// Drops everything that may be a profile's text.
    pub fn forget_texts(&mut self, profile: &Profile) {
        self.drop_keys(|key| key.may_be_of(profile));
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

#[cfg(test)]
#[path = "prefix_tests.rs"]
mod tests;
