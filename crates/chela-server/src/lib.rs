//! Speaks the OpenAI API and the RL control API.
