//! The turns used last, whole: the next turn of a session is compared with its parent without walking the chain.

use chela_core::{Turn, TurnId};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

const MOST_TURNS: usize = 1024;
const MOST_BYTES: usize = 64 << 20;

#[derive(Default)]
struct Inner {
    turns: HashMap<TurnId, (u64, usize, Arc<Turn>)>,
    /// By when they were used last.
    order: BTreeMap<u64, TurnId>,
    bytes: usize,
    clock: u64,
    generation: u64,
}

/// Least recently used goes first. Holds only what is committed.
#[derive(Default)]
pub(crate) struct TurnCache {
    inner: Mutex<Inner>,
}

impl TurnCache {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes when something was forgotten. What was read before must not be kept after.
    pub fn generation(&self) -> u64 {
        self.lock().generation
    }

    pub fn get(&self, id: TurnId) -> Option<Arc<Turn>> {
        let mut inner = self.lock();
        inner.clock += 1;
        let clock = inner.clock;
        let (used, _, turn) = inner.turns.get_mut(&id)?;
        let before = std::mem::replace(used, clock);
        let turn = turn.clone();
        inner.order.remove(&before);
        inner.order.insert(clock, id);
        Some(turn)
    }

    pub fn put(&self, generation: u64, turn: Arc<Turn>) {
        let mut inner = self.lock();
        let size = size(&turn);
        if inner.generation != generation || size > MOST_BYTES / 4 {
            return;
        }
        inner.clock += 1;
        let clock = inner.clock;
        inner.bytes += size;
        let id = turn.id;
        if let Some((used, old, _)) = inner.turns.insert(id, (clock, size, turn)) {
            inner.bytes -= old;
            inner.order.remove(&used);
        }
        inner.order.insert(clock, id);
        while inner.turns.len() > MOST_TURNS || inner.bytes > MOST_BYTES {
            let Some((_, oldest)) = inner.order.pop_first() else {
                break;
            };
            if let Some((_, size, _)) = inner.turns.remove(&oldest) {
                inner.bytes -= size;
            }
        }
    }

    /// Forgets everything.
    pub fn clear(&self) {
        let mut inner = self.lock();
        inner.turns.clear();
        inner.order.clear();
        inner.bytes = 0;
        inner.generation += 1;
    }
}

/// About how much memory it takes.
fn size(turn: &Turn) -> usize {
    let messages: usize = turn
        .messages
        .iter()
        .map(|m| {
            let calls: usize = m.tool_calls.iter().map(|c| c.arguments.len() + 128).sum();
            m.content.len() + m.reasoning.as_ref().map_or(0, String::len) + calls + 256
        })
        .sum();
    let tools: usize = turn.tools.iter().map(|t| t.definition.len() + 128).sum();
    turn.prompt.len() * 4 + turn.reply.len() * 17 + messages + tools + 512
}

#[cfg(test)]
mod tests {
    use super::*;
    use chela_core::testing::{first_turn, session};

    fn turn(id: u64) -> Arc<Turn> {
        Arc::new(first_turn(
            TurnId(id),
            &chela_core::Profile::default(),
            &session("s"),
        ))
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let cache = TurnCache::default();
        for id in 0..MOST_TURNS as u64 {
            cache.put(0, turn(id));
        }
        assert!(cache.get(TurnId(0)).is_some());
        cache.put(0, turn(MOST_TURNS as u64));
        assert!(cache.get(TurnId(0)).is_some() && cache.get(TurnId(1)).is_none());
    }

    #[test]
    fn what_was_forgotten_does_not_come_back() {
        let cache = TurnCache::default();
        let before = cache.generation();
        cache.clear();
        cache.put(before, turn(1));
        assert!(cache.get(TurnId(1)).is_none());
    }

    #[test]
    fn large_turns_push_others_out() {
        let cache = TurnCache::default();
        for id in 0..20 {
            let mut large = (*turn(id)).clone();
            large.prompt = vec![1; 1 << 20];
            cache.put(0, Arc::new(large));
        }
        assert!(cache.lock().bytes <= MOST_BYTES);
        assert!(cache.get(TurnId(19)).is_some());
    }
}
