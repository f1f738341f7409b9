//! Cutting work into tiles, and writing one buffer from several of them.
#![allow(unsafe_code)]

use core::ops::Range;

use super::Cpu;
use crate::error::Result;

/// A mutable slice that several tiles write, each its own part.
pub(crate) struct Shared<T> {
    ptr: *mut T,
    len: usize,
}

// SAFETY: a `Shared` is only a pointer and a length; `part` states what its users owe.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(crate) fn new(slice: &mut [T]) -> Self {
        Self {
            ptr: slice.as_mut_ptr(),
            len: slice.len(),
        }
    }

    pub(crate) fn ptr(&self) -> *mut T {
        self.ptr
    }

    /// The part `range` of the slice; a range outside it panics.
    ///
    /// # Safety
    /// The slice outlives the result, and no other part in use overlaps it.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "a tile leaves its buffer"
        );
        // SAFETY: inside the slice by the check above; disjoint and alive by the caller's promise.
        unsafe { core::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }

    /// Writes one element.
    ///
    /// # Safety
    /// As for [`Shared::part`].
    #[inline]
    pub(crate) unsafe fn put(&self, at: usize, value: T) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.part(at..at + 1)[0] = value };
    }
}

/// Wanted length of a tile, and the shortest worth handing out, in nanoseconds.
const TILE_NS: f64 = 150_000.0;
const MIN_TILE_NS: f64 = 4_000.0;

impl Cpu {
    /// How many items of `cost` nanoseconds make a good tile, in multiples of `step`.
    pub(crate) fn tile_items(&self, items: usize, cost: f64, step: usize) -> usize {
        let threads = self.pool().threads() as f64;
        let total = items as f64 * cost;
        let wanted = (total / (threads * 4.0)).clamp(MIN_TILE_NS, TILE_NS);
        let count = (wanted / cost.max(1e-3)).ceil().max(1.0) as usize;
        count.next_multiple_of(step).min(items.max(1))
    }

    /// Runs `task` over `0..items` in ranges of about equal, short length.
    pub(crate) fn ranges(
        &self,
        items: usize,
        cost: f64,
        task: impl Fn(Range<usize>) + Sync,
    ) -> Result {
        if items == 0 {
            return Ok(());
        }
        let size = self.tile_items(items, cost, 1);
        self.run_tiles(items.div_ceil(size), |tile| {
            task(tile * size..((tile + 1) * size).min(items));
        })
    }

    /// Runs `task(0..tiles)` at this handle's priority.
    pub(crate) fn run_tiles(&self, tiles: usize, task: impl Fn(usize) + Sync) -> Result {
        self.pool().run(self.priority, tiles, task)
    }
}

/// Lends this thread's scratch of `len` numbers (contents arbitrary).
pub(crate) fn with_scratch<R>(len: usize, use_it: impl FnOnce(&mut [f32]) -> R) -> R {
    thread_local! {
        static SCRATCH: core::cell::RefCell<Vec<Vec<f32>>> = const {
            core::cell::RefCell::new(Vec::new())
        };
    }
    let mut scratch = SCRATCH.with(|s| s.borrow_mut().pop()).unwrap_or_default();
    if scratch.len() < len {
        scratch.resize(len, 0.0);
    }
    let result = use_it(&mut scratch[..len]);
    SCRATCH.with(|s| s.borrow_mut().push(scratch));
    result
}
