//! Finds, fetches, verifies and reads a model: config, tensors, tokenizer and template files.
