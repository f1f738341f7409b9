//! The allocator that a program of the project may choose, and how long it keeps freed memory.
#![allow(unsafe_code)] // mimalloc's options are C functions

use libmimalloc_sys::{mi_option_set, mi_option_t};

pub use mimalloc::MiMalloc;

/// `mi_option_purge_delay` in the pinned version's `mimalloc.h`; the crate names only the options that no version moves.
const PURGE_DELAY: mi_option_t = 15;

/// A person's word for it.
const VARIABLE: &str = "MIMALLOC_PURGE_DELAY";

/// Freed pages go back to the system after ten seconds instead of one. A training step takes seconds and takes again what it has
/// freed; pages that went meanwhile come back to be cleared by the kernel, a sixth of the step's time (docs/log.md). To be called
/// before other threads begin, by a program whose allocator is [`MiMalloc`].
pub fn keep_freed_pages() {
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: takes two numbers; an option that does not exist is left alone.
        unsafe { mi_option_set(PURGE_DELAY, 10_000) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use libmimalloc_sys::mi_option_get;

    #[global_allocator]
    static ALLOCATOR: MiMalloc = MiMalloc;

    #[test]
    fn it_is_the_purge_delay_that_is_set() {
        // SAFETY: takes a number.
        let now = || unsafe { mi_option_get(PURGE_DELAY) };
        if std::env::var_os(VARIABLE).is_none() {
            assert_eq!(now(), 1000, "mimalloc's own delay: the option has moved");
            keep_freed_pages();
            assert_eq!(now(), 10_000);
        }
    }
}
