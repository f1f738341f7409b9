//! Files made to break the reader: an error, never a panic, never a large allocation.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use chela_model::testing::{TinySpec, write_tiny_gguf, write_tiny_llama};
use chela_model::{Layout, Model, ModelFiles};
use proptest::prelude::*;

fn small() -> TinySpec {
    TinySpec {
        layers: 1,
        hidden: 32,
        heads: 2,
        kv_heads: 1,
        intermediate: 32,
        ..TinySpec::default()
    }
}

/// Opens the file and reads all there is to read.
fn read_all(path: &Path) {
    let files = ModelFiles {
        name: "x".into(),
        layout: Layout::Gguf(path.to_owned()),
    };
    let Ok(model) = Model::open(&files) else {
        return;
    };
    for name in model.config().tensor_names() {
        if let Ok(tensor) = model.tensor(name) {
            assert_eq!(tensor.to_f32().len(), tensor.shape[0] * tensor.shape[1]);
        }
    }
    let _ = model
        .tokenizer()
        .map(|tokenizer| tokenizer.encode("hello", false).is_ok());
}

static GGUF: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    write_tiny_gguf(dir.path(), 1, &small()).unwrap();
    fs::read(dir.path().join("tiny.gguf")).unwrap()
});

/// A folder whose weights the test overwrites, and the bytes they had.
static FOLDER: LazyLock<(tempfile::TempDir, ModelFiles, Vec<u8>)> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let files = write_tiny_llama(dir.path(), 1, &small()).unwrap();
    let whole = fs::read(dir.path().join("model.safetensors")).unwrap();
    (dir, files, whole)
});

/// Changes at places of the header: the strings in between are long, so most small numbers are hit
/// by offsets near the start and near the tensor table too.
fn changes(within: usize) -> impl Strategy<Value = Vec<(usize, u8)>> {
    prop::collection::vec((0..within, any::<u8>()), 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_changed_gguf_never_panics(changes in changes(14_000), cut in prop::option::of(0_usize..20_000)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.gguf");
        let mut bytes = GGUF.clone();
        for (at, byte) in changes {
            let at = at % bytes.len();
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut);
        }
        fs::write(&path, bytes).unwrap();
        read_all(&path);
    }

    #[test]
    fn a_changed_safetensors_never_panics(changes in changes(1200)) {
        let (dir, files, whole) = &*FOLDER;
        let mut bytes = whole.clone();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        if let Ok(model) = Model::open(files) {
            for name in model.config().tensor_names() {
                let _ = model.tensor(name);
            }
        }
    }
}

/// A GGUF file of `body` behind magic and version 3.
fn message(body: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.gguf");
    fs::write(&path, [b"GGUF\x03\0\0\0", body].concat()).unwrap();
    let files = ModelFiles {
        name: "x".into(),
        layout: Layout::Gguf(path),
    };
    Model::open(&files).unwrap_err().to_string()
}

fn words(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

#[test]
fn counts_beyond_the_file_are_refused_before_anything_is_allocated() {
    for counts in [[u64::MAX, 0], [0, u64::MAX], [1 << 40, 1], [1, 1 << 40]] {
        let text = message(&words(&counts));
        assert!(text.contains("cannot fit"), "{text}");
    }
    // One pair whose key is said to be very long.
    let text = message(&[words(&[0, 1, u64::MAX]), vec![0; 64]].concat());
    assert!(text.contains("a name of"), "{text}");
    // One pair "k" that is a list of 2^60 texts.
    let list = [
        words(&[0, 1, 1]),
        b"k\x09\0\0\0\x08\0\0\0".to_vec(),
        words(&[1 << 60]),
    ]
    .concat();
    assert!(message(&[list, vec![0; 64]].concat()).contains("cannot fit"));
    // A text of 2^62 bytes.
    let long = [
        words(&[0, 1, 1]),
        b"k\x08\0\0\0".to_vec(),
        words(&[1 << 62]),
    ]
    .concat();
    assert!(message(&[long, vec![0; 64]].concat()).contains("cannot fit"));
    // A list of lists.
    let nested = [
        words(&[0, 1, 1]),
        b"k\x09\0\0\0\x09\0\0\0".to_vec(),
        words(&[1]),
    ]
    .concat();
    assert!(message(&[nested, vec![0; 64]].concat()).contains("list of unknown type"));
}

#[test]
fn tensor_sizes_that_overflow_are_refused() {
    let tensor = |dims: &[u64], offset: u64| {
        let mut body = words(&[1, 0, 1]);
        body.extend(b"t");
        body.extend((dims.len() as u32).to_le_bytes());
        body.extend(words(dims));
        body.extend(0_u32.to_le_bytes());
        body.extend(words(&[offset]));
        body.extend([0; 64]);
        message(&body)
    };
    assert!(tensor(&[1 << 40, 1 << 40], 0).contains("tensor t: "));
    assert!(tensor(&[4, 1 << 33, 1 << 33], 0).contains("has the sizes"));
    assert!(tensor(&[4, u64::MAX / 16], 0).contains("tensor t: "));
    assert!(tensor(&[4], u64::MAX - 31).contains("truncated"));
    assert!(tensor(&[4], 7).contains("not a multiple of 32"));
    assert!(tensor(&[1, 1, 1, 1, 1], 0).contains("has 5 dimensions"));
}
