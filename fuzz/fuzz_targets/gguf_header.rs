//! The header of a GGUF file: any bytes give tensors that lie apart within the file, or an error that names it.
#![no_main]

use std::path::Path;

use chela_model::testing::gguf_header;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match gguf_header(bytes, Path::new("x.gguf")) {
        Ok(tensors) => chela_fuzz::check(&tensors, bytes.len()),
        Err(error) => assert!(error.to_string().starts_with("x.gguf: ")),
    }
});
