//! The local model: serves and trains at once from one copy of the base weights.
