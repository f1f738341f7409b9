//! Turns a conversation into the exact tokens the policy reads, and tokens back into text and tool calls.
