//! Keeps turns, verdicts, samples, versions: durable, exactly once.
