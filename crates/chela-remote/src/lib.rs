//! Judges and engines in another process, over the APIs they speak.
