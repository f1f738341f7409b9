//! Adapters from elsewhere: what is taken, what is refused and in which words, and that a refusal changes nothing.

use crate::common::{options, score, tiny_files, version};
use chela_core::{PolicyEngine, PolicyRef, Profile, Weights};
use chela_engine::{
    LocalEngine,
    adapter::{AdapterInfo, inspect, write_synced},
};
use chela_model::{Model, ModelConfig};
use futures_executor::block_on;
use half::{bf16, f16};
use proptest::prelude::*;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use std::{collections::BTreeMap, path::Path, sync::Arc};

const MODULES: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// An adapter to spoil: rank 2 over the tiny model.
#[derive(Clone)]
struct Folder {
    config: Value,
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
    others: Vec<(&'static str, String)>,
}

fn tiny() -> (ModelConfig, Arc<LocalEngine>) {
    let dir = tempfile::tempdir().unwrap();
    let model = Model::open(&tiny_files(dir.path(), 1)).unwrap();
    let engine = LocalEngine::open(&model, options()).unwrap();
    (model.config().clone(), engine)
}

/// Numbers that every storage type has exactly.
fn value(i: usize) -> f32 {
    ((i * 37 % 31) as f32 - 15.0) / 64.0
}

fn name(layer: usize, module: &str, side: &str) -> String {
    format!("base_model.model.model.layers.{layer}.{module}.lora_{side}.weight")
}

fn good(config: &ModelConfig) -> Folder {
    let mut tensors = BTreeMap::new();
    let (q, kv) = (
        config.heads * config.head_dim,
        config.kv_heads * config.head_dim,
    );
    for layer in 0..config.layers {
        for module in MODULES {
            let (out, input) = match module {
                "self_attn.q_proj" => (q, config.hidden),
                "self_attn.k_proj" | "self_attn.v_proj" => (kv, config.hidden),
                "self_attn.o_proj" => (config.hidden, q),
                "mlp.down_proj" => (config.hidden, config.intermediate),
                _ => (config.intermediate, config.hidden),
            };
            for (side, shape) in [("A", vec![2, input]), ("B", vec![out, 2])] {
                let count: usize = shape.iter().product();
                let bytes = (0..count).flat_map(|i| value(i).to_le_bytes()).collect();
                tensors.insert(name(layer, module, side), (Dtype::F32, shape, bytes));
            }
        }
    }
    let names: Vec<&str> = MODULES
        .iter()
        .map(|m| m.split('.').nth(1).unwrap())
        .collect();
    let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": names,
        "base_model_name_or_path": "tiny", "bias": "none", "rank_pattern": {}, "alpha_pattern": {},
        "modules_to_save": null, "use_dora": false, "init_lora_weights": true, "auto_mapping": {"base_model_class": "X"}});
    let others = Vec::new();
    Folder {
        config,
        tensors,
        others,
    }
}

impl Folder {
    fn write(&self, dir: &Path) {
        let config = self.config.to_string();
        std::fs::write(dir.join("adapter_config.json"), config).unwrap();
        let views = self.tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        let bytes = safetensors::serialize(views, None).unwrap();
        std::fs::write(dir.join("adapter_model.safetensors"), bytes).unwrap();
        for (name, text) in &self.others {
            std::fs::write(dir.join(name), text).unwrap();
        }
    }

    fn set(mut self, key: &str, value: Value) -> Self {
        self.config[key] = value;
        self
    }

    fn with(mut self, name: &'static str, value: &Value) -> Self {
        self.others.push((name, value.to_string()));
        self
    }

    fn edit(
        mut self,
        edit: impl FnOnce(&mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>),
    ) -> Self {
        edit(&mut self.tensors);
        self
    }

    fn rename(self, rename: impl Fn(&str) -> String) -> Self {
        self.edit(|tensors| {
            let old = std::mem::take(tensors);
            tensors.extend(
                old.into_iter()
                    .map(|(name, tensor)| (rename(&name), tensor)),
            );
        })
    }

    fn cast(self, dtype: Dtype, cast: impl Fn(f32) -> [u8; 2]) -> Self {
        self.edit(|tensors| {
            for tensor in tensors.values_mut() {
                let floats = tensor.2.chunks_exact(4);
                let floats = floats.map(|c| f32::from_le_bytes(c.try_into().unwrap()));
                tensor.2 = floats.flat_map(&cast).collect();
                tensor.0 = dtype;
            }
        })
    }
}

fn look(folder: &Folder, config: &ModelConfig) -> Result<AdapterInfo, String> {
    let dir = tempfile::tempdir().unwrap();
    folder.write(dir.path());
    inspect(dir.path(), config).map_err(|e| e.to_string())
}

/// The folder is refused by both readers in these words, and the engine has what it had.
fn refused(engine: &LocalEngine, config: &ModelConfig, folder: &Folder, words: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    folder.write(dir.path());
    refused_dir(engine, config, dir.path(), words);
}

fn refused_dir(engine: &LocalEngine, config: &ModelConfig, dir: &Path, words: &[&str]) {
    let first = inspect(dir, config).unwrap_err().to_string();
    let load = engine.load(version(2), Weights::Folder(dir.to_owned()));
    let second = block_on(load).unwrap_err().to_string();
    assert_eq!(first, second);
    for word in words {
        assert!(first.contains(word), "{first:?} has no {word:?}");
    }
    assert_eq!(engine.served(&Profile::default()).number, 1);
    assert!(score(engine, PolicyRef::Version(version(2)), &[1, 2], 1).is_err());
}

/// With version 1 loaded and served, so that there is something to change.
fn serving() -> (ModelConfig, Arc<LocalEngine>, Vec<f32>) {
    let (config, engine) = tiny();
    let dir = tempfile::tempdir().unwrap();
    good(&config).write(dir.path());
    block_on(engine.load(version(1), Weights::Folder(dir.path().to_owned()))).unwrap();
    engine.serve(&version(1)).unwrap();
    let served = PolicyRef::Served(Profile::default());
    let scores = score(&engine, served, &[3, 1, 4, 1, 5], 1)
        .unwrap()
        .logprobs;
    (config, engine, scores)
}

#[test]
fn an_adapter_is_described() {
    let (config, _) = tiny();
    let info = look(&good(&config), &config).unwrap();
    let expected = AdapterInfo {
        rank: 2,
        alpha: 4.0,
        targets: MODULES
            .map(|m| m.split('.').nth(1).unwrap().to_owned())
            .to_vec(),
        dtype: "F32".to_owned(),
        base_model: Some("tiny".to_owned()),
        bytes: info.bytes,
    };
    assert_eq!(info, expected);
    assert!(info.bytes > 2 * 4 * 1000);
    let scaled = good(&config).set("use_rslora", json!(true));
    let alpha = look(&scaled, &config).unwrap().alpha;
    assert!((alpha - 4.0 * 2f32.sqrt()).abs() < 1e-6);
}

#[test]
fn another_base_model_is_a_warning() {
    let (config, _) = tiny();
    let info =
        |name: Value| look(&good(&config).set("base_model_name_or_path", name), &config).unwrap();
    for (there, here) in [
        ("tiny", "tiny"),
        (
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "SmolLM2-135M-Instruct.Q4_1",
        ),
        ("/models/SmolLM2-135M-Instruct/", "smollm2-135m-instruct"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("", "anything"),
    ] {
        assert_eq!(info(json!(there)).other_base(here), None, "{there} {here}");
    }
    assert_eq!(info(Value::Null).other_base("x"), None);
    let warning = info(json!("org/Qwen3-0.6B"))
        .other_base("SmolLM2-135M")
        .unwrap();
    assert!(
        warning.contains("org/Qwen3-0.6B") && warning.contains("SmolLM2-135M"),
        "{warning}"
    );
}

#[test]
fn other_spellings_are_the_same_adapter() {
    let (config, engine, expected) = serving();
    let base = good(&config);
    let all = [
        base.clone().set("target_modules", json!("all-linear")),
        base.clone().set("target_modules", json!(MODULES)),
        base.clone().rename(|n| n.replace("base_model.model.", "")),
        base.clone()
            .rename(|n| n.replace(".weight", ".default.weight")),
        base.clone()
            .cast(Dtype::F16, |x| f16::from_f32(x).to_le_bytes()),
        base.clone()
            .cast(Dtype::BF16, |x| bf16::from_f32(x).to_le_bytes()),
        base.clone()
            .set("r", json!(2))
            .set("lora_alpha", json!(4.0)),
    ];
    for (i, folder) in all.iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        folder.write(dir.path());
        let info = inspect(dir.path(), &config).unwrap();
        assert_eq!(info.targets.len(), 7);
        assert_eq!(info.dtype, ["F32", "F16", "BF16"][[0, 0, 0, 0, 1, 2, 0][i]]);
        let number = 10 + i as u64;
        block_on(engine.load(version(number), Weights::Folder(dir.path().to_owned()))).unwrap();
        let policy = PolicyRef::Version(version(number));
        let scores = score(&engine, policy, &[3, 1, 4, 1, 5], 1)
            .unwrap()
            .logprobs;
        assert_eq!(scores, expected, "{i}");
    }
}

#[test]
fn options_that_change_the_numbers_are_refused() {
    let (config, engine, _) = serving();
    let cases = [
        ("peft_type", json!("IA3")),
        ("use_dora", json!(true)),
        ("rank_pattern", json!({"q_proj": 8})),
        ("alpha_pattern", json!({"q_proj": 8})),
        ("layers_to_transform", json!([0])),
        ("modules_to_save", json!(["lm_head"])),
        ("exclude_modules", json!("q_proj")),
        ("layer_replication", json!([[0, 2], [1, 2]])),
        ("trainable_token_indices", json!([1])),
        ("target_parameters", json!(["experts.w"])),
        ("alora_invocation_tokens", json!([1])),
        ("lora_bias", json!(true)),
        ("use_qalora", json!(true)),
        ("use_bdlora", json!({"nblocks": 2})),
        ("arrow_config", json!({"top_k": 3})),
        ("kasa_config", json!({"x": 3})),
        ("monteclora_config", json!({"x": 3})),
        ("fan_in_fan_out", json!(true)),
        ("bias", json!("all")),
        ("bias", json!(3)),
        ("init_lora_weights", json!("pissa_niter_16")),
        ("init_lora_weights", json!("olora")),
        ("use_rslora", json!("yes")),
        ("r", json!(0)),
        ("r", json!(-4)),
        ("r", json!(2.5)),
        ("r", json!(null)),
        ("lora_alpha", json!(0)),
        ("lora_alpha", json!(-1)),
        ("lora_alpha", json!(1e300)),
        ("lora_alpha", json!("4")),
        ("target_modules", json!("model\\.layers\\..*(q|v)_proj")),
        ("target_modules", json!([])),
        ("target_modules", json!(null)),
        ("target_modules", json!([1])),
    ];
    for (key, value) in cases {
        let word = if value == json!([]) {
            "target modules"
        } else {
            key
        };
        let folder = good(&config).set(key, value);
        refused(&engine, &config, &folder, &["adapter_config.json: ", word]);
    }
    let folder = good(&config).set("target_modules", json!(["q_proj", "lm_head"]));
    refused(
        &engine,
        &config,
        &folder,
        &["unknown target module \"lm_head\"", "q_proj, k_proj"],
    );
}

#[test]
fn adapters_of_other_models_are_refused() {
    let (config, engine, _) = serving();
    let other = |change: &dyn Fn(&mut ModelConfig)| {
        let mut other = config.clone();
        change(&mut other);
        good(&other)
    };
    let more = other(&|c| c.layers = 3);
    refused(
        &engine,
        &config,
        &more,
        &["layers.2.mlp.down_proj.lora_A", "2 layers", "another model"],
    );
    let fewer = other(&|c| c.layers = 1);
    refused(
        &engine,
        &config,
        &fewer,
        &["layers.1.self_attn.q_proj.lora_A.weight is missing"],
    );
    let wider = other(&|c| c.hidden = 96);
    refused(
        &engine,
        &config,
        &wider,
        &["q_proj.lora_A.weight has the shape [2, 96]", "need [2, 64]"],
    );
    let rank = good(&config).set("r", json!(4));
    refused(
        &engine,
        &config,
        &rank,
        &["lora_A.weight has the shape [2, 64]", "need [4, 64]"],
    );
    let targets = good(&config).set("target_modules", json!(["q_proj"]));
    refused(
        &engine,
        &config,
        &targets,
        &["belongs to none of the target modules"],
    );
}

#[test]
fn broken_tensors_are_refused_by_name() {
    let (config, engine, _) = serving();
    let key = name(1, "mlp.up_proj", "B");
    let base = good(&config);
    let put = |at: usize, value: f32| {
        base.clone().edit(|t| {
            t.get_mut(&key).unwrap().2[4 * at..4 * at + 4].copy_from_slice(&value.to_le_bytes());
        })
    };
    refused(
        &engine,
        &config,
        &put(7, f32::NAN),
        &[&key, "NaN at row 3, column 1"],
    );
    refused(
        &engine,
        &config,
        &put(0, f32::INFINITY),
        &[&key, "inf at row 0, column 0"],
    );
    let half = |value: f16| {
        base.clone()
            .cast(Dtype::F16, |x| f16::from_f32(x).to_le_bytes())
            .edit(|t| {
                t.get_mut(&key).unwrap().2[2..4].copy_from_slice(&value.to_le_bytes());
            })
    };
    refused(
        &engine,
        &config,
        &half(f16::NEG_INFINITY),
        &[&key, "-inf at row 0, column 1"],
    );
    let missing = base.clone().edit(|t| drop(t.remove(&key)));
    refused(&engine, &config, &missing, &[&format!("{key} is missing")]);
    let surplus = base.clone().edit(|t| {
        t.insert(
            "base_model.model.lm_head.weight".to_owned(),
            (Dtype::F32, vec![1], vec![0; 4]),
        );
    });
    refused(
        &engine,
        &config,
        &surplus,
        &["lm_head.weight", "belongs to none"],
    );
    let twice = base.clone().edit(|t| {
        let copy = t[&key].clone();
        t.insert(key.replace("base_model.model.", ""), copy);
    });
    refused(&engine, &config, &twice, &["are the same tensor"]);
    let turned = base.clone().edit(|t| t.get_mut(&key).unwrap().1.reverse());
    refused(
        &engine,
        &config,
        &turned,
        &[&key, "has the shape [2, 128]", "need [128, 2]"],
    );
    let deep = base.clone().edit(|t| t.get_mut(&key).unwrap().1.push(1));
    refused(
        &engine,
        &config,
        &deep,
        &[&key, "has the shape [128, 2, 1]"],
    );
    let whole = base
        .clone()
        .edit(|t| t.get_mut(&key).unwrap().0 = Dtype::I32);
    refused(
        &engine,
        &config,
        &whole,
        &[&key, "I32", "BF16 are supported"],
    );
}

#[test]
fn adapters_of_other_tokenizers_are_refused() {
    let (config, engine, _) = serving();
    let vocab = |n: usize| -> Value {
        let map: serde_json::Map<_, _> = (0..n).map(|i| (format!("t{i}"), json!(i))).collect();
        json!({"model": {"type": "BPE", "vocab": map}, "added_tokens": []})
    };
    let n = config.vocab;
    let base = good(&config);
    assert!(look(&base.clone().with("tokenizer.json", &vocab(n)), &config).is_ok());
    assert!(look(&base.clone().with("tokenizer.json", &vocab(n - 3)), &config).is_ok());
    let words = ["tokenizer.json", "made for another tokenizer", "this model"];
    for tokens in [n + 1, n / 2] {
        refused(
            &engine,
            &config,
            &base.clone().with("tokenizer.json", &vocab(tokens)),
            &words,
        );
    }
    let list = json!({"model": {"type": "Unigram", "vocab": vec![json!(["a", 0.0]); 2 * n]}});
    refused(
        &engine,
        &config,
        &base.clone().with("tokenizer.json", &list),
        &words,
    );
    let mut added = vocab(n);
    added["added_tokens"] = json!([{"id": n, "content": "<pad>"}]);
    refused(
        &engine,
        &config,
        &base.clone().with("tokenizer.json", &added),
        &words,
    );
    let decoder =
        |id: usize| json!({"added_tokens_decoder": {id.to_string(): {"content": "<pad>"}}});
    assert!(
        look(
            &base.clone().with("tokenizer_config.json", &decoder(n - 1)),
            &config
        )
        .is_ok()
    );
    let later = base.clone().with("tokenizer_config.json", &decoder(n));
    refused(
        &engine,
        &config,
        &later,
        &["tokenizer_config.json", "made for another tokenizer"],
    );
    let mut broken = base;
    broken.others.push(("tokenizer.json", "{".to_owned()));
    refused(
        &engine,
        &config,
        &broken,
        &["tokenizer.json: not valid JSON"],
    );
}

#[test]
fn broken_files_are_refused() {
    let (config, engine, served) = serving();
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    good(&config).write(dir);
    let (text, tensors) = (
        dir.join("adapter_config.json"),
        dir.join("adapter_model.safetensors"),
    );
    let whole = std::fs::read(&tensors).unwrap();
    let with = |head: u64, rest: &[u8], words: &[&str]| {
        write_synced(&tensors, &[&head.to_le_bytes()[..], rest].concat()).unwrap();
        refused_dir(&engine, &config, dir, words);
    };
    with(
        u64::MAX,
        b"{}",
        &["a header of 18446744073709551615 bytes in a file of 10"],
    );
    with(100, b"{}", &["a header of 100 bytes in a file of 10"]);
    with(4, b"[1] ", &["broken safetensors header"]);
    with(0, b"", &["broken safetensors header"]);
    // Each size is possible, together they are beyond 64 bits.
    let step = (1_u64 << 61) - 8;
    let entry = |i: u64| {
        format!(
            r#""{i}":{{"dtype":"U8","shape":[{step}],"data_offsets":[{},{}]}}"#,
            i * step,
            (i + 1) * step
        )
    };
    let huge = format!("{{{}}}", (0..8).map(entry).collect::<Vec<_>>().join(","));
    with(
        huge.len() as u64,
        huge.as_bytes(),
        &["the file is cut or damaged"],
    );
    let odd = br#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}"#;
    with(odd.len() as u64, odd, &["broken safetensors header"]);
    std::fs::write(&tensors, &whole[..whole.len() - 1]).unwrap();
    refused_dir(&engine, &config, dir, &["the file is cut or damaged"]);
    std::fs::write(&tensors, &whole[..5]).unwrap();
    refused_dir(
        &engine,
        &config,
        dir,
        &["shorter than a safetensors header"],
    );
    std::fs::remove_file(&tensors).unwrap();
    refused_dir(
        &engine,
        &config,
        dir,
        &["adapter_model.safetensors", "No such file"],
    );
    std::fs::write(dir.join("adapter_model.bin"), b"PK").unwrap();
    refused_dir(
        &engine,
        &config,
        dir,
        &["only adapter_model.bin", "safe_serialization=True"],
    );
    std::fs::write(&tensors, &whole).unwrap();
    for (bytes, words) in [
        (&b"{"[..], "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe", "not valid JSON"),
        (&[b' '; (1 << 20) + 1], "longer than 1048576 bytes"),
    ] {
        std::fs::write(&text, bytes).unwrap();
        refused_dir(&engine, &config, dir, &["adapter_config.json", words]);
    }
    std::fs::remove_file(&text).unwrap();
    refused_dir(
        &engine,
        &config,
        dir,
        &["adapter_config.json", "No such file"],
    );
    let policy = PolicyRef::Served(Profile::default());
    let scores = score(&engine, policy, &[3, 1, 4, 1, 5], 1)
        .unwrap()
        .logprobs;
    assert_eq!(scores, served);
}

proptest! {
    /// Any bytes changed, cut or put in: an answer, never a panic.
    #[test]
    fn mutated_folders_never_panic(
        in_config in any::<bool>(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4u8), 1..6),
    ) {
        let config = chela_model::testing::TinySpec::default().config();
        let home = tempfile::tempdir().unwrap();
        good(&config).write(home.path());
        let path = home.path().join(if in_config { "adapter_config.json" } else { "adapter_model.safetensors" });
        let mut bytes = std::fs::read(&path).unwrap();
        // The header and its length, not the numbers behind them.
        let head = if in_config { bytes.len() } else {
            8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize
        };
        for (at, byte, what) in edits {
            let at = at.index(head).min(bytes.len().saturating_sub(1));
            match what {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                2 => drop(bytes.remove(at)),
                _ => bytes[at] = b"0123456789-.eE\"{}[],:"[usize::from(byte) % 21],
            }
        }
        std::fs::write(&path, bytes).unwrap();
        let _ = inspect(home.path(), &config);
    }
}
