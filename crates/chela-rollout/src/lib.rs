//! Follows sessions, pairs each turn with what came next, has it judged.
