//! The header of a safetensors file: any bytes give tensors that lie apart within the file, or an error that names it.
#![no_main]

use std::path::Path;

use chela_model::testing::safetensors_header;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match safetensors_header(bytes, Path::new("x.safetensors")) {
        Ok(tensors) => chela_fuzz::check(&tensors, bytes.len()),
        Err(error) => assert!(error.to_string().starts_with("x.safetensors: ")),
    }
});
