//! Integration tests of the engine: golden numbers of an independent implementation, serving, learning.

mod common;
mod golden;
mod learning;
mod requests;
mod serving;
mod starter;
