//! Merged models: opened again by this engine they say what base and adapter say together.

use crate::{
    common::{golden_model, open, options, score, version},
    golden::{NAMES, root, token_ids},
};
use chela_core::{AdapterSpec, PolicyEngine, PolicyRef, Weights};
use chela_engine::{
    LocalEngine,
    adapter::Adapter,
    merge::{Form, merge},
};
use chela_kernels::{Cpu, Kernels};
use chela_model::{
    DType, Family, LayerTensor, Layout, Model, ModelFiles, NoProgress, Progress, TensorName,
    testing,
};
use futures_executor::block_on;
use std::path::{Path, PathBuf};

fn files(form: Form, path: &Path) -> ModelFiles {
    let layout = match form {
        Form::Folder => Layout::Folder(path.to_owned()),
        Form::Gguf => Layout::Gguf(path.to_owned()),
    };
    ModelFiles {
        name: "merged".to_owned(),
        layout,
    }
}

/// Log-probs of a text under the model and an adapter.
fn with_adapter(model: &Model, adapter: &Path, tokens: &[u32]) -> Vec<f32> {
    let engine = LocalEngine::open(model, options()).unwrap();
    block_on(engine.load(version(1), Weights::Folder(adapter.to_owned()))).unwrap();
    let policy = PolicyRef::Version(version(1));
    score(&engine, policy, tokens, 1).unwrap().logprobs
}

fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

/// Merges, opens, scores; how far the log-probs are from `want`.
fn gap(
    (model, adapter): (&Model, &Path),
    (form, dtype): (Form, Option<DType>),
    (tokens, want): (&[u32], &[f32]),
) -> (f32, Model) {
    let home = tempfile::tempdir().unwrap();
    let to = home.path().join("merged.gguf");
    merge(model, adapter, (form, dtype), &to, &mut NoProgress).unwrap();
    let merged = Model::open(&files(form, &to)).unwrap();
    let engine = LocalEngine::open(&merged, options()).unwrap();
    let got = score(&engine, PolicyRef::Base, tokens, 1).unwrap().logprobs;
    let names: Vec<_> = std::fs::read_dir(home.path()).unwrap().collect();
    assert_eq!(names.len(), 1, "only the result is left");
    std::mem::forget(home); // the merged model reads its tensors on demand
    let most = apart(&got, want);
    let mean = got
        .iter()
        .zip(want)
        .map(|(a, b)| (a - b).abs())
        .sum::<f32>()
        / want.len() as f32;
    // One position of a random model may be far off, all may not.
    (most.max(4.0 * mean), merged)
}

/// llama.cpp knows no other scale of a Gemma's attention than that of the published models, and divides experts' weights always.
const NO_GGUF: [(&str, &str); 2] = [
    (
        "gemma3-scaled",
        "a query_pre_attn_scalar of 24 instead of 16",
    ),
    ("qwen3moe-plain", "norm_topk_prob false"),
];

fn no_gguf(name: &str) -> bool {
    NO_GGUF.iter().any(|(no, _)| *no == name)
}

#[test]
fn merged_checkpoints_say_what_base_and_adapter_say() {
    for name in NAMES {
        let dir = root().join(name);
        let (model, adapter) = (golden_model(&dir), dir.join("adapter"));
        let text = std::fs::read_to_string(root().join(format!("{name}.json"))).unwrap();
        let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
        let tokens = token_ids(&golden["texts"][1]["ids"]);
        let want = with_adapter(&model, &adapter, &tokens);
        // How far rounding goes: f32 not at all, f16 and bf16 by 2^-12 and 2^-9 of a weight, q8_0 by 2^-8 of a block's largest.
        let cases = [
            (Form::Folder, Some(DType::F32), 1e-4),
            (Form::Gguf, Some(DType::F32), 1e-4),
            (Form::Folder, Some(DType::F16), 0.02),
            (Form::Gguf, None, 0.02),
            (Form::Folder, None, 0.2),
            (Form::Gguf, Some(DType::BF16), 0.2),
            (Form::Gguf, Some(DType::Q8_0), 1.0),
        ];
        for (form, dtype, most) in cases {
            if form == Form::Gguf && no_gguf(name) {
                continue;
            }
            let (gap, merged) = gap((&model, &adapter), (form, dtype), (&tokens, &want));
            // A rounded weight may send a token to another expert.
            let far = model.config().experts.is_some() && most > 0.1;
            let most = if far { 3.0 } else { most };
            assert!(gap < most, "{name} {form:?} {dtype:?}: {gap}");
            let hash = |m: &Model| m.tokenizer_hash().unwrap();
            assert_eq!(hash(&merged), hash(&model), "{name} {form:?}");
            assert_eq!(merged.chat_template(), model.chat_template());
            let rope = |m: &Model| m.config().rope.inverse_frequencies(m.config().head_dim);
            let local = |m: &Model| m.config().local_rope.clone();
            assert_eq!(local(&merged), local(&model), "{name} {form:?}");
            let (ours, theirs) = (rope(&model), rope(&merged));
            assert!(apart(&ours.0, &theirs.0) < 1e-6 && (ours.1 - theirs.1).abs() < 1e-6);
            let mut config = merged.config().clone();
            config.rope = model.config().rope.clone();
            assert_eq!(&config, model.config(), "{name} {form:?}");
        }
    }
}

/// Writes each tiny checkpoint with its adapter merged in, in F32, as `<name>` and `<name>.gguf` into the folder that CHELA_EXPORTS
/// names.
#[test]
#[ignore = "makes the input of golden/merged_tiny.py"]
fn merged_tiny_files() {
    let home = PathBuf::from(std::env::var("CHELA_EXPORTS").unwrap());
    for name in NAMES {
        let dir = root().join(name);
        let (model, adapter) = (golden_model(&dir), dir.join("adapter"));
        for (form, file) in [
            (Form::Folder, name.to_owned()),
            (Form::Gguf, format!("{name}.gguf")),
        ] {
            if form == Form::Gguf && no_gguf(name) {
                continue;
            }
            let what = (form, Some(DType::F32));
            merge(&model, &adapter, what, &home.join(file), &mut NoProgress).unwrap();
        }
    }
}

/// A random adapter on these maps of a model.
fn adapter(model: &Model, targets: &[&str], dir: &Path) -> PathBuf {
    let k = Cpu::new(1);
    let spec = AdapterSpec {
        whole: false,
        rank: 3,
        alpha: 5.0,
        targets: targets.iter().map(|t| (*t).to_owned()).collect(),
        seed: 4,
        value_head: false,
    };
    let mut adapter = Adapter::fresh(&k, model.config(), &spec).unwrap();
    for lora in adapter.layers.iter_mut().flatten().flatten() {
        let b: Vec<f32> = (0..lora.out * 3)
            .map(|i| ((i * 53 % 97) as f32 - 48.0) / 300.0)
            .collect();
        lora.b = k.upload(&b).unwrap();
    }
    let dir = dir.join("adapter");
    std::fs::create_dir(&dir).unwrap();
    adapter.write(&k, "tiny", &dir).unwrap();
    dir
}

const TOKENS: [u32; 12] = [7, 3, 250, 41, 41, 9, 260, 100, 12, 5, 77, 281];

#[test]
fn gguf_models_are_merged_into_both_forms() {
    for family in [
        Family::Llama,
        Family::Qwen2,
        Family::Qwen3,
        Family::Gemma3,
        Family::Qwen3Moe,
    ] {
        for dtype in [DType::F32, DType::Q4_0] {
            let home = tempfile::tempdir().unwrap();
            let spec = testing::TinySpec {
                dtype,
                tie_embeddings: family != Family::Qwen3,
                ..testing::TinySpec::of(family)
            };
            let files = testing::write_tiny_gguf(home.path(), 6, &spec).unwrap();
            let model = Model::open(&files).unwrap();
            let all = AdapterSpec::default().targets;
            let all: Vec<&str> = all.iter().map(String::as_str).collect();
            let dir = adapter(&model, &all, home.path());
            let want = with_adapter(&model, &dir, &TOKENS);
            let base = LocalEngine::open(&model, options()).unwrap();
            let base = score(&base, PolicyRef::Base, &TOKENS, 1).unwrap().logprobs;
            assert!(apart(&base, &want) > 0.1, "the adapter does something");
            for form in [Form::Folder, Form::Gguf] {
                for (dtype, most) in [(Some(DType::F32), 1e-3), (None, 0.03)] {
                    let (gap, merged) = gap((&model, &dir), (form, dtype), (&TOKENS, &want));
                    assert!(gap < most, "{family:?} {form:?} {dtype:?}: {gap}");
                    assert_eq!(merged.config(), model.config());
                    assert_eq!(
                        merged.tokenizer_hash().unwrap(),
                        model.tokenizer_hash().unwrap()
                    );
                    assert_eq!(merged.chat_template(), model.chat_template());
                    assert_eq!(merged.special_tokens(), model.special_tokens());
                }
            }
        }
    }
}

#[test]
fn what_the_adapter_leaves_alone_keeps_its_bytes() {
    let home = tempfile::tempdir().unwrap();
    let spec = testing::TinySpec {
        dtype: DType::Q4_0,
        ..testing::TinySpec::default()
    };
    let model = Model::open(&testing::write_tiny_gguf(home.path(), 6, &spec).unwrap()).unwrap();
    let dir = adapter(&model, &["q_proj", "down_proj"], home.path());
    let want = with_adapter(&model, &dir, &TOKENS);
    let (gap, merged) = gap(
        (&model, &dir),
        (Form::Gguf, Some(DType::Q8_0)),
        (&TOKENS, &want),
    );
    assert!(gap < 0.3, "{gap}");
    for name in model.config().tensor_names() {
        let touched = matches!(
            name,
            TensorName::Layer(_, LayerTensor::Q | LayerTensor::Down)
        );
        if touched {
            assert_eq!(merged.dtype(name), Some(DType::Q8_0), "{name}");
        } else {
            let (a, b) = (merged.tensor(name).unwrap(), model.tensor(name).unwrap());
            assert_eq!((a.dtype, a.bytes), (b.dtype, b.bytes), "{name}");
        }
    }
}

#[test]
fn refusals_leave_nothing_behind() {
    let home = tempfile::tempdir().unwrap();
    let spec = testing::TinySpec::default();
    let files = testing::write_tiny_llama(&home.path().join("tiny"), 6, &spec).unwrap();
    let model = Model::open(&files).unwrap();
    let dir = adapter(&model, &["q_proj"], home.path());
    let out = home.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let attempt = |adapter: &Path, form, dtype, name: &str| {
        let merged = merge(
            &model,
            adapter,
            (form, dtype),
            &out.join(name),
            &mut NoProgress,
        );
        merged.unwrap_err().to_string()
    };
    let error = attempt(&dir, Form::Folder, Some(DType::Q8_0), "x");
    assert!(
        error.contains("Q8_0 in a Hugging Face folder is not supported"),
        "{error}"
    );
    let error = attempt(&dir, Form::Gguf, Some(DType::Q4_K), "x");
    assert!(error.contains("writing Q4_K into a GGUF file"), "{error}");
    // The embedding is written already when the first map's numbers are beyond f16.
    let path = dir.join("adapter_config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(
        &path,
        text.replace("\"lora_alpha\": 5.0", "\"lora_alpha\": 5e9"),
    )
    .unwrap();
    for form in [Form::Folder, Form::Gguf] {
        let error = attempt(&dir, form, Some(DType::F16), "x");
        assert!(error.contains("does not fit F16"), "{error}");
    }
    let error = attempt(home.path(), Form::Gguf, None, "x");
    assert!(error.contains("adapter_config.json"), "{error}");
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), 0);
    std::fs::write(out.join("there"), "mine").unwrap();
    std::fs::write(&path, text).unwrap();
    let error = attempt(&dir, Form::Gguf, None, "there");
    assert!(error.contains("already there"), "{error}");
    assert_eq!(std::fs::read(out.join("there")).unwrap(), b"mine");
}

#[test]
fn what_gguf_has_no_words_for_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let window = testing::TinySpec {
        sliding_window: Some(8),
        ..testing::TinySpec::of(Family::Qwen2)
    };
    let refused = |spec: &testing::TinySpec, name: &str, tokenizer: &dyn Fn(String) -> String| {
        let folder = home.path().join(name);
        let files = testing::write_tiny_llama(&folder, 6, spec).unwrap();
        let path = folder.join("tokenizer.json");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, tokenizer(text)).unwrap();
        let model = Model::open(&files).unwrap();
        let dir = adapter(&model, &["q_proj"], &folder);
        let to = home.path().join("x.gguf");
        let merged = merge(&model, &dir, (Form::Gguf, None), &to, &mut NoProgress);
        // A folder takes any tokenizer as it is.
        let other = home.path().join(format!("{name}-folder"));
        merge(&model, &dir, (Form::Folder, None), &other, &mut NoProgress).unwrap();
        merged.unwrap_err().to_string()
    };
    let error = refused(&window, "window", &|text| text);
    assert!(error.contains("a sliding window"), "{error}");
    for (name, what) in NO_GGUF {
        let dir = root().join(name);
        let (model, to) = (golden_model(&dir), home.path().join("x.gguf"));
        let adapter = dir.join("adapter");
        let error = merge(&model, &adapter, (Form::Gguf, None), &to, &mut NoProgress);
        let error = error.unwrap_err().to_string();
        let said = format!("a GGUF file of a model with {what} is not supported");
        assert!(error.contains(&said), "{error}");
        assert!(error.contains("write a Hugging Face folder"), "{error}");
    }
    let plain = testing::TinySpec::default();
    let prefix =
        |text: String| text.replace("\"add_prefix_space\":false", "\"add_prefix_space\":true");
    let error = refused(&plain, "pre", &prefix);
    assert!(error.contains("its pre-tokenizer is none of"), "{error}");
    let strip = |text: String| text.replace("\"lstrip\":false", "\"lstrip\":true");
    let error = refused(&plain, "strip", &strip);
    assert!(error.contains("with lstrip"), "{error}");
}

/// Keeps what it was told.
#[derive(Default)]
struct Told(Vec<(String, Option<u64>)>, u64, usize);

impl Progress for Told {
    fn start(&mut self, what: &str, total: Option<u64>) {
        self.0.push((what.to_owned(), total));
    }
    fn set(&mut self, done: u64) {
        self.1 = done;
    }
    fn finish(&mut self) {
        self.2 += 1;
    }
    fn note(&mut self, _line: &str) {}
}

#[test]
fn progress_is_told_to_the_end() {
    let home = tempfile::tempdir().unwrap();
    let spec = testing::TinySpec::default();
    let files = testing::write_tiny_llama(&home.path().join("tiny"), 6, &spec).unwrap();
    let engine = open(&files);
    drop(engine);
    let model = Model::open(&files).unwrap();
    let dir = adapter(&model, &["v_proj"], home.path());
    for form in [Form::Folder, Form::Gguf] {
        let mut told = Told::default();
        let to = home.path().join(format!("{form:?}"));
        let merged = merge(&model, &dir, (form, None), &to, &mut told).unwrap();
        assert_eq!(merged.maps, model.config().layers);
        assert_eq!(merged.adapter.unwrap().targets, ["v_proj"]);
        assert_eq!((told.0.len(), told.2), (1, 1));
        assert_eq!(told.0[0].1, Some(told.1));
    }
}
