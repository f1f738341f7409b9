//! Headers of both formats with places, sizes and counts that lie: an error that names file and tensor, never a panic.
//!
//! The fuzzers in `fuzz/` look for more, with the same checks.

use std::path::Path;
use std::sync::LazyLock;

use chela_model::Result;
use chela_model::testing::{
    Place, TinySpec, gguf_header, safetensors_header, write_tiny_gguf, write_tiny_llama,
};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

type Parse = fn(&[u8], &Path) -> Result<Vec<Place>>;

/// A parser, and a file that it reads.
fn formats() -> [(Parse, &'static [u8]); 2] {
    static FILES: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| {
        let dir = tempfile::tempdir().unwrap();
        let spec = TinySpec {
            layers: 1,
            hidden: 32,
            ..TinySpec::default()
        };
        write_tiny_gguf(dir.path(), 1, &spec).unwrap();
        write_tiny_llama(dir.path(), 1, &spec).unwrap();
        ["tiny.gguf", "model.safetensors"].map(|file| std::fs::read(dir.path().join(file)).unwrap())
    });
    [(gguf_header, &FILES[0]), (safetensors_header, &FILES[1])]
}

/// What must hold of any bytes: tensors within the file that share no byte, or an error of one line that names it.
fn check(parse: Parse, bytes: &[u8]) -> Option<String> {
    match parse(bytes, Path::new("a.file")) {
        Ok(mut tensors) => {
            tensors.retain(|(_, place)| !place.is_empty());
            tensors.sort_by_key(|(_, place)| place.start);
            for pair in tensors.windows(2) {
                assert!(pair[0].1.end <= pair[1].1.start, "{pair:?}");
            }
            assert!(
                tensors
                    .iter()
                    .all(|(_, place)| place.end <= bytes.len() as u64)
            );
            None
        }
        Err(error) => {
            let message = error.to_string();
            assert!(message.starts_with("a.file: "), "{message}");
            Some(message)
        }
    }
}

/// Numbers at which parsers break.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(1),
        Just(u64::MAX),
        Just(u64::MAX - 31),
        (0_u32..64).prop_map(|bit| 1 << bit),
        (0_u32..64).prop_map(|bit| (1 << bit) - 1),
        any::<u64>(),
    ]
}

/// A change of a file: a word somewhere, a piece copied elsewhere, or the end cut off.
#[derive(Debug, Clone)]
enum Change {
    Word(prop::sample::Index, u64, usize),
    Copy(prop::sample::Index, prop::sample::Index, usize),
    Cut(prop::sample::Index),
}

fn change() -> impl Strategy<Value = Change> {
    let at = any::<prop::sample::Index>;
    prop_oneof![
        6 => (at(), word(), 1_usize..=8).prop_map(|(at, word, width)| Change::Word(at, word, width)),
        2 => (at(), at(), 1_usize..64).prop_map(|(from, to, len)| Change::Copy(from, to, len)),
        1 => at().prop_map(Change::Cut),
    ]
}

/// The file after the change; words and copies fall within its first `header` bytes.
fn apply(bytes: &mut Vec<u8>, header: usize, change: &Change) {
    let header = header.min(bytes.len());
    if header < 72 {
        return;
    }
    match change {
        Change::Word(at, word, width) => {
            let at = at.index(header - 8);
            bytes[at..at + width].copy_from_slice(&word.to_le_bytes()[..*width]);
        }
        Change::Copy(from, to, len) => {
            let (from, to) = (from.index(header - len), to.index(header - len));
            bytes.copy_within(from..from + len, to);
        }
        Change::Cut(at) => bytes.truncate(at.index(bytes.len())),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_headers_give_tensors_that_lie_apart_or_an_error(changes in prop::collection::vec(change(), 1..6)) {
        for (parse, whole) in formats() {
            let data = parse(whole, Path::new("x")).unwrap();
            let header = data.iter().map(|(_, place)| place.start).min().unwrap() as usize;
            let mut bytes = whole.to_vec();
            for change in &changes {
                apply(&mut bytes, header, change);
            }
            check(parse, &bytes);
        }
    }

    #[test]
    fn any_bytes_are_no_header(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        for (parse, _) in formats() {
            check(parse, &bytes);
        }
        check(gguf_header, &[b"GGUF\x03\0\0\0", bytes.as_slice()].concat());
    }
}

#[test]
fn a_file_cut_anywhere_in_its_header_is_refused() {
    for (parse, whole) in formats() {
        check(parse, whole).ok_or(()).unwrap_err();
        let tensors = parse(whole, Path::new("x")).unwrap();
        let header = tensors.iter().map(|(_, place)| place.start).min().unwrap() as usize;
        for len in (0..header).step_by(7).chain(header..header + 1) {
            check(parse, &whole[..len]).unwrap();
        }
        let last = check(parse, &whole[..whole.len() - 40]).unwrap();
        assert!(
            last.contains(": tensor ") && last.contains("truncated"),
            "{last}"
        );
    }
}

/// A safetensors file with these entries and so many bytes of data.
fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

/// An entry of F32.
fn entry(shape: Value, offsets: [u64; 2]) -> Value {
    json!({ "dtype": "F32", "shape": shape, "data_offsets": offsets })
}

#[test]
fn safetensors_entries_that_lie_are_refused_by_name() {
    let max = u64::MAX;
    let cases = [
        (entry(json!([4]), [8, 24]), "within tensor a"),
        (entry(json!([4]), [0, 16]), "within tensor a"),
        (entry(json!([4]), [max - 15, max]), "impossible offsets"),
        (entry(json!([4]), [32, 16]), "impossible offsets"),
        (
            entry(json!([1_u64 << 40]), [16, 16 + (1 << 42)]),
            "truncated",
        ),
        (entry(json!([max, max]), [16, 32]), "bytes for the shape"),
        (entry(json!([max, 0]), [16, 32]), "bytes for the shape"),
        (entry(json!([-4]), [16, 32]), "broken header entry"),
        (entry(json!([4.5]), [16, 32]), "broken header entry"),
        (entry(json!("4"), [16, 32]), "broken header entry"),
        (json!({ "dtype": "F32" }), "broken header entry"),
        (json!(null), "broken header entry"),
    ];
    for (bad, reason) in cases {
        let mut header = Map::new();
        header.insert("a".into(), entry(json!([4]), [0, 16]));
        header.insert("b".into(), bad);
        let file = safetensors(&Value::Object(header).to_string(), 48);
        let message = check(safetensors_header, &file).unwrap();
        // Of two tensors at one place either may be the one that is named first.
        assert!(
            message.contains(": tensor b: ") || message.contains("within tensor b"),
            "{message}"
        );
        assert!(
            message.contains(reason) || message.contains("within tensor b"),
            "{message}"
        );
    }
}

#[test]
fn a_safetensors_name_given_twice_is_refused() {
    let one = entry(json!([4]), [0, 16]);
    let two = entry(json!([4]), [16, 32]);
    let file = safetensors(&format!("{{\"a\":{one},\"a\":{two}}}"), 32);
    let message = check(safetensors_header, &file).unwrap();
    assert!(message.contains("tensor a: appears twice"), "{message}");
    let nested = "[".repeat(100_000);
    let message = check(safetensors_header, &safetensors(&nested, 0)).unwrap();
    assert!(message.contains("broken safetensors header"), "{message}");
    let deep = format!("{{\"a\":{nested}");
    check(safetensors_header, &safetensors(&deep, 0)).unwrap();
}

/// A GGUF file of F32 tensors named a, b, …, each `(sizes, offset)`, and 64 bytes of data.
fn gguf(tensors: &[(&[u64], u64)]) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    let word = |bytes: &mut Vec<u8>, n: u64| bytes.extend(n.to_le_bytes());
    word(&mut bytes, tensors.len() as u64);
    word(&mut bytes, 0);
    for (name, (sizes, offset)) in (b'a'..).zip(tensors) {
        word(&mut bytes, 1);
        bytes.push(name);
        bytes.extend((sizes.len() as u32).to_le_bytes());
        sizes.iter().for_each(|size| word(&mut bytes, *size));
        bytes.extend(0_u32.to_le_bytes());
        word(&mut bytes, *offset);
    }
    bytes.resize(bytes.len().next_multiple_of(32) + 64, 0);
    bytes
}

#[test]
fn gguf_tensors_that_lie_are_refused_by_name() {
    let apart = gguf(&[(&[8], 0), (&[8], 32)]);
    assert_eq!(check(gguf_header, &apart), None);
    let huge = 1 << 40;
    let cases: [(&[u64], u64, &str); 5] = [
        (&[8], 0, "within tensor"),
        (&[16], 32, "truncated"),
        (&[8], u64::MAX - 31, "beyond any file"),
        (&[4, 0, huge, huge], 32, "has the sizes"),
        (&[0, huge, huge, 1], 32, "has the sizes"),
    ];
    for (sizes, offset, reason) in cases {
        let message = check(gguf_header, &gguf(&[(&[8], 0), (sizes, offset)])).unwrap();
        assert!(message.contains(": tensor "), "{message}");
        assert!(message.contains(reason), "{message}");
    }
    let within = check(gguf_header, &gguf(&[(&[16], 0), (&[8], 32)])).unwrap();
    assert!(
        within.contains("tensor b: starts at byte") && within.contains("within tensor a"),
        "{within}"
    );
}
