//! What the tree finds, shares and lets go of, against a list of all texts.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::pages::pages;
use chela_kernels::Cpu;

struct Kept {
    k: Cpu,
    pool: Pool<Cpu>,
    tree: PrefixCache<Cpu>,
}

fn key(profile: &str, number: u64) -> CacheKey {
    let profile = Profile::new(profile).unwrap();
    CacheKey {
        version: PolicyVersion { profile, number },
        load: 0,
        named: true,
    }
}

impl Kept {
    fn new(pages: usize) -> Self {
        Self {
            k: Cpu::new(1),
            pool: Pool::new(1, 1, pages * 2 * PAGE * 4),
            tree: PrefixCache::default(),
        }
    }

    fn found(&mut self, key: &CacheKey, tokens: &[TokenId]) -> usize {
        let found = self.tree.find(&self.pool, key, tokens);
        found.map_or(0, |cache| cache.len())
    }

    /// What a request leaves that reads a text with what is known of it.
    fn read(&mut self, key: &CacheKey, tokens: &[TokenId]) {
        let found = self.tree.find(&self.pool, key, tokens);
        let mut cache = found.unwrap_or_else(|| KvCache::new(&self.pool, Vec::new(), 0));
        let more = tokens.len() - cache.len();
        cache.reserve(&self.k, more).unwrap();
        cache.advance(more);
        self.tree.keep(key.clone(), tokens.to_vec(), &cache);
        drop(cache);
        self.tree.give_back(self.pool.excess());
        self.check();
    }

    /// Pages, leaves and parents agree.
    fn check(&self) {
        let tree = &self.tree;
        let held = self.pool.usage();
        assert_eq!(tree.nodes.len() * held.page, held.held);
        let leaves = tree.nodes.iter().filter(|(_, n)| n.children.is_empty());
        let leaves: BTreeSet<_> = leaves.map(|(id, n)| (n.used, *id)).collect();
        assert_eq!(leaves, tree.leaves);
        assert!(tree.roots.values().all(|c| !c.is_empty()));
        for (id, node) in &tree.nodes {
            assert!(node.children.is_empty() || node.tokens.len() == PAGE);
            let siblings = match &node.parent {
                Parent::Root(key) => &tree.roots[key],
                Parent::Node(above) => &tree.nodes[above].children,
            };
            assert_eq!(siblings.get(&node.tokens), Some(id));
        }
    }
}

fn text(parts: &[(u32, usize)]) -> Vec<TokenId> {
    let part = |(token, n): &(u32, usize)| vec![*token; *n];
    parts.iter().flat_map(part).collect()
}

#[test]
fn the_longest_common_beginning_is_found() {
    let mut kept = Kept::new(100);
    let a = key("a", 1);
    kept.read(&a, &text(&[(1, 300)]));
    kept.read(&a, &text(&[(1, 200), (2, 150)]));
    kept.read(&a, &text(&[(3, 40)]));
    assert_eq!(kept.tree.nodes.len(), 3 + 2 + 1, "the first page is shared");
    for (asked, finds) in [
        (text(&[(1, 300), (9, 9)]), 300),
        (text(&[(1, 400)]), 300),
        (text(&[(1, 256), (4, 4)]), 256),
        (text(&[(1, 200), (2, 5)]), 205),
        (text(&[(1, 190), (7, 5)]), 190),
        (text(&[(1, 128)]), 128),
        (text(&[(1, SHORTEST)]), SHORTEST),
        (text(&[(1, SHORTEST - 1), (2, 100)]), 0),
        (text(&[(3, 39), (4, 1)]), 39),
        (text(&[(4, 500)]), 0),
    ] {
        assert_eq!(kept.found(&a, &asked), finds);
        assert_eq!(kept.found(&key("b", 1), &asked), 0);
        assert_eq!(kept.found(&key("a", 2), &asked), 0);
    }
}

#[test]
fn what_is_continued_goes_and_what_is_known_is_not_kept_twice() {
    let mut kept = Kept::new(100);
    let a = key("a", 1);
    for n in [100, 128, 130, 250, 300, 300, 90, 256] {
        kept.read(&a, &text(&[(1, n)]));
    }
    assert_eq!(kept.tree.nodes.len(), 3);
    assert_eq!(kept.found(&a, &text(&[(1, 999)])), 300);
}

#[test]
fn the_ends_that_were_not_used_for_longest_go_first() {
    let mut kept = Kept::new(4);
    let a = key("a", 1);
    let (one, two, three) = (
        text(&[(1, 128), (2, 100)]),
        text(&[(1, 128), (3, 100)]),
        text(&[(4, 100)]),
    );
    for text in [&one, &two, &three] {
        kept.read(&a, text);
    }
    assert_eq!(kept.pool.free(), 0);
    kept.found(&a, &one);
    kept.read(&a, &text(&[(5, 100)]));
    let found = [&one, &two, &three].map(|t| kept.found(&a, t));
    assert_eq!(found, [228, 128, 100], "the end of the second went");
    // A request that runs keeps its pages, and nothing goes when it would not be enough.
    let runs = kept.tree.find(&kept.pool, &a, &one).unwrap();
    assert!(!kept.tree.make_room(&kept.pool, 3));
    assert_eq!(kept.pool.free(), 0);
    assert!(kept.tree.make_room(&kept.pool, 2));
    assert_eq!((kept.pool.free(), kept.found(&a, &one)), (2, 228));
    drop(runs);
    assert!(kept.tree.make_room(&kept.pool, 4));
    assert_eq!((kept.tree.nodes.len(), kept.tree.roots.len()), (0, 0));
}

#[test]
fn a_version_and_a_profile_are_forgotten_alone() {
    let mut kept = Kept::new(100);
    let nobodys = CacheKey {
        named: false,
        ..key("b", 0)
    };
    let keys = [key("a", 1), key("a", 2), key("b", 1), nobodys];
    let long = text(&[(1, 300)]);
    let fill = |kept: &mut Kept| keys.iter().for_each(|k| kept.read(k, &long));
    let found = |kept: &mut Kept| keys.each_ref().map(|k| kept.found(k, &long));
    fill(&mut kept);
    kept.tree.forget(&keys[1].version);
    kept.check();
    assert_eq!(found(&mut kept), [300, 0, 300, 300]);
    fill(&mut kept);
    kept.tree.forget_texts(&Profile::new("a").unwrap());
    kept.check();
    assert_eq!(found(&mut kept), [0, 0, 300, 0]);
}

proptest::proptest! {
    /// Texts over two tokens in blocks, so that they share much and branch anywhere.
    #[test]
    fn it_finds_what_a_list_of_all_texts_finds(
        texts in proptest::collection::vec(
            (0..2_u64, proptest::collection::vec((0..3_u32, 1..150_usize), 1..6)),
            1..25,
        ),
    ) {
        let mut kept = Kept::new(10_000);
        let mut all: Vec<(u64, Vec<TokenId>)> = Vec::new();
        for (version, parts) in texts {
            let tokens = text(&parts);
            let known = all.iter().filter(|(v, _)| *v == version);
            let best = known.map(|(_, t)| common(t, &tokens)).max().unwrap_or(0);
            let best = if best < SHORTEST { 0 } else { best };
            let key = key("a", version);
            assert_eq!(kept.found(&key, &tokens), best);
            kept.read(&key, &tokens);
            if tokens.len() >= SHORTEST {
                assert_eq!(kept.found(&key, &tokens), tokens.len());
                all.push((version, tokens));
            }
        }
        let whole: usize = all.iter().map(|(_, t)| pages(t.len())).sum();
        assert!(kept.tree.nodes.len() <= whole);
    }
}
