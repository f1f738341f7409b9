//! Which adapters (or whole models that were trained) are in memory, where the others lie, what each profile is served, and who waits
//! for which.
//!
//! A plain structure without threads and files: whoever owns it locks it, reads the folders it names and tells it what was read.
//! Adapters that it lets go of are returned, so that freeing them happens outside of the lock.

use chela_core::{EngineError, PolicyVersion, Profile};
use std::{
    collections::{HashMap, hash_map::Entry},
    path::PathBuf,
    sync::Arc,
};

/// Where a version lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home {
    /// The folder.
    pub dir: PathBuf,
    /// What is read must have this hash. Known from the first read on at the latest, so that a version that left memory comes back
    /// as what it was.
    pub hash: Option<String>,
    /// A number of this home: another folder or another load of the same version gets another one. What was computed with the
    /// weights of a home is filed under its number and stays right when they leave memory and come back.
    pub id: u64,
}

/// What was read from a home.
#[derive(Debug)]
pub struct Loaded<A> {
    /// The weights.
    pub adapter: Arc<A>,
    /// Their size.
    pub bytes: usize,
    /// Their hash.
    pub hash: String,
}

/// What is known of a version.
#[derive(Debug)]
pub enum Found<A> {
    /// In memory, with its home's number.
    Here(u64, Arc<A>),
    /// On disk.
    Away(Home),
    /// Nobody registered or loaded it.
    Unknown,
}

struct Resident<A> {
    id: u64,
    adapter: Arc<A>,
    bytes: usize,
    hash: String,
    used: u64,
}

/// `A` are adapters, `W` is who waits for one.
pub struct Residents<A, W> {
    homes: HashMap<PolicyVersion, Home>,
    resident: HashMap<PolicyVersion, Resident<A>>,
    served: HashMap<Profile, PolicyVersion>,
    /// By number of the home that is being read.
    waiting: HashMap<u64, Vec<W>>,
    budget: usize,
    bytes: usize,
    clock: u64,
    ids: u64,
}

impl<A, W> Residents<A, W> {
    /// With so many bytes for adapters that nobody uses. (What requests use stays whatever it takes.)
    pub fn new(budget: usize) -> Self {
        Self {
            homes: HashMap::new(),
            resident: HashMap::new(),
            served: HashMap::new(),
            waiting: HashMap::new(),
            budget,
            bytes: 0,
            clock: 0,
            ids: 0,
        }
    }

    /// What a profile's requests get now.
    pub fn served(&self, profile: &Profile) -> PolicyVersion {
        let served = self.served.get(profile).cloned();
        served.unwrap_or_else(|| PolicyVersion::base(profile.clone()))
    }

    /// Swaps a profile's pointer to a version that is in memory, registered or the base.
    pub fn serve(&mut self, version: &PolicyVersion) -> Result<(), EngineError> {
        if version.number != 0 && !self.homes.contains_key(version) {
            return Err(EngineError::NotLoaded(version.clone()));
        }
        self.served.insert(version.profile.clone(), version.clone());
        Ok(())
    }

    /// Looks a version up, as its latest user.
    pub fn find(&mut self, version: &PolicyVersion) -> Found<A> {
        self.clock += 1;
        if let Some(resident) = self.resident.get_mut(version) {
            resident.used = self.clock;
            return Found::Here(resident.id, resident.adapter.clone());
        }
        match self.homes.get(version) {
            Some(home) => Found::Away(home.clone()),
            None => Found::Unknown,
        }
    }

    /// Remembers where a version lies. What is in memory stays when it is the same.
    pub fn register(
        &mut self,
        version: PolicyVersion,
        dir: PathBuf,
        hash: Option<String>,
    ) -> Vec<Arc<A>> {
        if let Some(home) = self.homes.get_mut(&version) {
            let same = home.hash.is_none() || hash.is_none() || home.hash == hash;
            if home.dir == dir && same {
                let resident = self.resident.get(&version);
                let held = resident.map(|r| r.hash.clone());
                if held.is_none() || hash.is_none() || held == hash {
                    home.hash = hash.or(home.hash.take());
                    return Vec::new();
                }
            }
        }
        self.settle(version.clone(), dir, hash);
        self.remove(&version).into_iter().collect()
    }

    fn settle(&mut self, version: PolicyVersion, dir: PathBuf, hash: Option<String>) -> u64 {
        self.ids += 1;
        let id = self.ids;
        self.homes.insert(version, Home { dir, hash, id });
        id
    }

    /// A caller waits until a home is read. True for the first one: somebody has to read it.
    pub fn wait(&mut self, home: &Home, who: W) -> bool {
        match self.waiting.entry(home.id) {
            Entry::Occupied(mut others) => {
                others.get_mut().push(who);
                false
            }
            Entry::Vacant(none) => {
                none.insert(vec![who]);
                true
            }
        }
    }

    /// All who wait.
    pub fn waiters(&mut self) -> impl Iterator<Item = &mut W> {
        self.waiting.values_mut().flatten()
    }

    /// Lets those who have gone away leave the queue. False when nobody is left and the home need not be read.
    pub fn still_wanted(&mut self, home: &Home, gone: impl Fn(&W) -> bool) -> bool {
        let Some(all) = self.waiting.get_mut(&home.id) else {
            return false;
        };
        all.retain(|w| !gone(w));
        let wanted = !all.is_empty();
        if !wanted {
            self.waiting.remove(&home.id);
        }
        wanted
    }

    /// Reading a home is over, for better or worse: who waited for it.
    pub fn release(&mut self, home: &Home) -> Vec<W> {
        self.waiting.remove(&home.id).unwrap_or_default()
    }

    /// A home was read. It stays in memory unless the version was let go of or lies elsewhere since.
    pub fn arrived(
        &mut self,
        version: &PolicyVersion,
        home: &Home,
        loaded: Loaded<A>,
    ) -> Vec<Arc<A>> {
        match self.homes.get_mut(version) {
            Some(now) if now.id == home.id => now.hash = Some(loaded.hash.clone()),
            _ => return Vec::new(),
        }
        self.insert(version.clone(), home.id, loaded)
    }

    /// A version was read to be published: it lies there from now on.
    pub fn publish(
        &mut self,
        version: PolicyVersion,
        dir: PathBuf,
        loaded: Loaded<A>,
    ) -> Vec<Arc<A>> {
        let id = self.settle(version.clone(), dir, Some(loaded.hash.clone()));
        self.insert(version, id, loaded)
    }

    fn insert(&mut self, version: PolicyVersion, id: u64, loaded: Loaded<A>) -> Vec<Arc<A>> {
        let mut gone: Vec<_> = self.remove(&version).into_iter().collect();
        self.clock += 1;
        self.bytes += loaded.bytes;
        let resident = Resident {
            id,
            adapter: loaded.adapter,
            bytes: loaded.bytes,
            hash: loaded.hash,
            used: self.clock,
        };
        self.resident.insert(version.clone(), resident);
        gone.extend(self.shrink(Some(&version)));
        gone
    }

    fn remove(&mut self, version: &PolicyVersion) -> Option<Arc<A>> {
        let resident = self.resident.remove(version)?;
        self.bytes -= resident.bytes;
        Some(resident.adapter)
    }

    /// Lets the least recently used leave memory until the budget holds: of those that no request uses, and not `newest`, whose
    /// requests are about to come.
    pub fn shrink(&mut self, newest: Option<&PolicyVersion>) -> Vec<Arc<A>> {
        let mut gone = Vec::new();
        while self.bytes > self.budget {
            let idle = self
                .resident
                .iter()
                .filter(|(v, r)| Some(*v) != newest && Arc::strong_count(&r.adapter) == 1);
            let Some(oldest) = idle.min_by_key(|(_, r)| r.used).map(|(v, _)| v.clone()) else {
                break;
            };
            gone.extend(self.remove(&oldest));
        }
        gone
    }

    /// More is in memory than the budget allows.
    pub fn over(&self) -> bool {
        self.bytes > self.budget
    }

    /// Requests use as many adapters as can run at once and these fill the budget: one more would only wait in memory.
    pub fn crowded(&self, lanes: usize) -> bool {
        let used = self.resident.values();
        let used = used.filter(|r| Arc::strong_count(&r.adapter) > 1);
        let (count, bytes) = used.fold((0, 0), |(n, b), r| (n + 1, b + r.bytes));
        count >= lanes && bytes >= self.budget
    }

    /// Lets go of a version that is not served and forgets where it lies. `None` when it is served or unknown.
    pub fn unload(&mut self, version: &PolicyVersion) -> Option<Option<Arc<A>>> {
        if self.served.get(&version.profile) == Some(version) {
            return None;
        }
        self.homes.remove(version)?;
        Some(self.remove(version))
    }

    /// Bytes of adapters in memory, and their number.
    pub fn held(&self) -> (usize, usize) {
        (self.bytes, self.resident.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Plain = Residents<&'static str, u32>;

    fn version(profile: &str, number: u64) -> PolicyVersion {
        PolicyVersion {
            profile: Profile::new(profile).unwrap_or_default(),
            number,
        }
    }

    fn loaded(what: &'static str, bytes: usize) -> Loaded<&'static str> {
        Loaded {
            adapter: Arc::new(what),
            bytes,
            hash: what.to_owned(),
        }
    }

    fn away(all: &mut Plain, v: &PolicyVersion) -> Home {
        match all.find(v) {
            Found::Away(home) => home,
            other => unreachable!("{v}: {other:?}"),
        }
    }

    fn here(all: &mut Plain, v: &PolicyVersion) -> bool {
        matches!(all.find(v), Found::Here(..))
    }

    #[test]
    fn the_least_recently_used_leaves_and_comes_back_under_its_number() {
        let mut all = Plain::new(20);
        let versions: Vec<_> = ["a", "b", "c"].map(|p| version(p, 1)).into();
        for v in &versions {
            all.register(v.clone(), "there".into(), None);
            assert!(all.serve(v).is_ok());
        }
        let first = away(&mut all, &versions[0]);
        assert!(all.wait(&first, 1) && !all.wait(&first, 2));
        all.arrived(&versions[0], &first, loaded("a", 10));
        assert_eq!(all.release(&first), [1, 2]);
        for v in &versions[1..] {
            let home = away(&mut all, v);
            all.arrived(v, &home, loaded("x", 10));
        }
        assert_eq!(all.held(), (20, 2));
        let again = away(&mut all, &versions[0]);
        assert_eq!((again.id, again.hash.as_deref()), (first.id, Some("a")));
        assert!(here(&mut all, &versions[1]) && here(&mut all, &versions[2]));
    }

    #[test]
    fn what_a_request_uses_stays_and_goes_when_it_ends() {
        let mut all = Plain::new(10);
        let (a, b) = (version("a", 1), version("b", 1));
        all.publish(a.clone(), "a".into(), loaded("a", 10));
        let Found::Here(_, used) = all.find(&a) else {
            unreachable!("a is here")
        };
        assert!(all.crowded(1) && !all.crowded(2));
        assert!(
            all.publish(b.clone(), "b".into(), loaded("b", 10))
                .is_empty()
        );
        assert!(all.over() && all.shrink(Some(&b)).is_empty());
        drop(used);
        assert_eq!(all.shrink(Some(&b)).len(), 1);
        assert!(!all.over() && here(&mut all, &b) && !here(&mut all, &a));
    }

    #[test]
    fn weights_from_elsewhere_are_other_weights() {
        let mut all = Plain::new(100);
        let v = version("a", 1);
        all.register(v.clone(), "old".into(), None);
        let old = away(&mut all, &v);
        assert!(all.wait(&old, 1));
        all.register(v.clone(), "new".into(), None);
        let new = away(&mut all, &v);
        assert!(
            all.wait(&new, 2),
            "who asks now must not get the old folder's"
        );
        all.arrived(&v, &old, loaded("old", 1));
        assert!(!here(&mut all, &v));
        all.arrived(&v, &new, loaded("new", 1));
        assert!(here(&mut all, &v));
        assert!(
            all.register(v.clone(), "new".into(), Some("new".into()))
                .is_empty()
        );
        assert!(here(&mut all, &v));
        assert_eq!(
            all.register(v.clone(), "new".into(), Some("other".into()))
                .len(),
            1
        );
        assert!(!here(&mut all, &v));
    }

    #[test]
    fn a_version_let_go_of_is_unknown_also_when_its_read_ends_later() {
        let mut all = Plain::new(100);
        let v = version("a", 1);
        all.register(v.clone(), "a".into(), None);
        let home = away(&mut all, &v);
        assert!(all.wait(&home, 1));
        assert!(all.unload(&v).is_some());
        all.arrived(&v, &home, loaded("a", 1));
        assert_eq!(all.release(&home), [1]);
        assert!(matches!(all.find(&v), Found::Unknown));
        assert!(all.serve(&v).is_err());
        assert_eq!(all.held(), (0, 0));
    }

    #[test]
    fn a_home_that_nobody_waits_for_any_more_is_not_read() {
        let mut all = Plain::new(100);
        let v = version("a", 1);
        all.register(v.clone(), "a".into(), None);
        let home = away(&mut all, &v);
        all.wait(&home, 1);
        all.wait(&home, 2);
        assert!(all.still_wanted(&home, |w| *w == 1));
        assert!(!all.still_wanted(&home, |_| true));
        assert!(all.release(&home).is_empty());
        assert!(all.wait(&home, 3), "the next one starts a read");
    }
}
