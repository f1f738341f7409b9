//! Adapters written here and read by PEFT: the folders are rebuilt, and their log-probs compared with those that PEFT computed.

use crate::{
    common::{golden_model, options, score, version},
    golden::{NAMES, numbers, root, token_ids},
};
use chela_core::{AdapterSpec, PolicyEngine, PolicyRef, Weights};
use chela_engine::{LocalEngine, adapter::Adapter};
use chela_kernels::{Cpu, Kernels};
use futures_executor::block_on;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::Path;

/// The adapter of a tiny checkpoint: A as a fresh one has it, B by a formula without rounding; rank, scale and maps differ from one
/// checkpoint to the next.
pub fn write_adapter(name: &str, dir: &Path) {
    let model = golden_model(&root().join(name));
    let number = NAMES.iter().position(|n| *n == name).unwrap();
    let all = AdapterSpec::default().targets;
    let spec = AdapterSpec {
        whole: false,
        rank: 2 + number,
        alpha: [4.0, 4.5, 8.0, 5.0, 6.0, 16.0, 3.0, 7.0, 10.0, 12.0][number],
        targets: if number % 2 == 0 {
            all
        } else {
            all[number % 3..number % 3 + 4].to_vec()
        },
        seed: number as u64,
        value_head: false,
    };
    let k = Cpu::new(1);
    let mut adapter = Adapter::fresh(&k, model.config(), &spec).unwrap();
    let rank = adapter.rank;
    for (place, lora) in adapter.layers.iter_mut().flatten().flatten().enumerate() {
        let value = |i: usize| ((i * 7919 + place * 104_729) % 257) as f32 / 1024.0 - 0.125;
        let b: Vec<f32> = (0..lora.out * rank).map(value).collect();
        lora.b = k.upload(&b).unwrap();
    }
    std::fs::create_dir_all(dir).unwrap();
    adapter.write(&k, name, dir).unwrap();
}

fn sha256(path: &Path) -> String {
    let hash = Sha256::digest(std::fs::read(path).unwrap());
    hash.iter().map(|b| format!("{b:02x}")).collect()
}

/// Writes the folders that golden/peft_export.py reads, into the folder that CHELA_EXPORTS names.
#[test]
#[ignore = "makes the input of golden/peft_export.py"]
fn peft_export_folders() {
    let home = std::env::var("CHELA_EXPORTS").unwrap();
    for name in NAMES {
        write_adapter(name, &Path::new(&home).join(name));
    }
}

#[test]
fn an_exported_adapter_scores_as_in_peft() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/peft_export.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for name in NAMES {
        let golden = &golden[name];
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join(name);
        write_adapter(name, &dir);
        // PEFT read these very bytes.
        for file in ["adapter_config.json", "adapter_model.safetensors"] {
            assert_eq!(
                golden["sha256"][file],
                sha256(&dir.join(file)),
                "{name} {file}"
            );
        }
        let engine = LocalEngine::open(&golden_model(&root().join(name)), options()).unwrap();
        block_on(engine.load(version(1), Weights::Folder(dir))).unwrap();
        let text = std::fs::read_to_string(root().join(format!("{name}.json"))).unwrap();
        let tiny: Value = serde_json::from_str(&text).unwrap();
        for (i, want) in golden["logprobs"].as_array().unwrap().iter().enumerate() {
            let tokens = token_ids(&tiny["texts"][i]["ids"]);
            let policy = PolicyRef::Version(version(1));
            let got = score(&engine, policy, &tokens, 1).unwrap().logprobs;
            let base = score(&engine, PolicyRef::Base, &tokens, 1)
                .unwrap()
                .logprobs;
            let most = |a: &[f32], b: &[f32]| {
                assert_eq!(a.len(), b.len());
                a.iter()
                    .zip(b)
                    .map(|(a, b)| (a - b).abs())
                    .fold(0.0f32, f32::max)
            };
            let gap = most(&got, &numbers(want));
            assert!(gap < 1e-4, "{name} text {i}: {gap}");
            assert!(
                most(&got, &base) > 0.1,
                "{name}: the adapter does something"
            );
        }
    }
}
