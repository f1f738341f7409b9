//! Tiny models are read back as they were written, from folders and from GGUF files.

use chela_model::testing::{
    TINY_END, TINY_VOCAB, TinySpec, tiny_values, write_tiny_gguf, write_tiny_llama,
};
use chela_model::{DType, Family, LayerTensor, Model, ModelSource, NoProgress, RopeScaling};
use chela_model::{TensorName, resolve, tokenizer_hash};

const FAMILIES: [Family; 5] = [
    Family::Llama,
    Family::Qwen2,
    Family::Qwen3,
    Family::Gemma3,
    Family::Qwen3Moe,
];

#[test]
fn folders_of_every_family_give_back_their_weights() {
    for family in FAMILIES {
        let dir = tempfile::tempdir().unwrap();
        let spec = TinySpec {
            tie_embeddings: false,
            shards: 3,
            ..TinySpec::of(family)
        };
        write_tiny_llama(dir.path(), 7, &spec).unwrap();
        let source = ModelSource::parse(&dir.path().to_string_lossy()).unwrap();
        let model = Model::open(&resolve(&source, dir.path(), &mut NoProgress).unwrap()).unwrap();
        assert_eq!(model.config(), &spec.config());
        for name in spec.config().tensor_names() {
            let tensor = model.tensor(name).unwrap();
            assert_eq!(Some(tensor.shape), spec.config().shape(name));
            assert_eq!(
                tensor.to_f32(),
                tiny_values(&spec.config(), name, 7),
                "{family:?} {name}"
            );
        }
        let bytes: u64 = spec.config().parameters() * 4;
        assert_eq!(model.weight_bytes(), bytes);
    }
}

#[test]
fn a_gguf_is_the_same_model_as_its_folder() {
    for family in FAMILIES {
        let dir = tempfile::tempdir().unwrap();
        let spec = TinySpec::of(family);
        let folder = Model::open(&write_tiny_llama(dir.path(), 3, &spec).unwrap()).unwrap();
        let gguf = Model::open(&write_tiny_gguf(dir.path(), 3, &spec).unwrap()).unwrap();
        assert_eq!(gguf.config(), folder.config());
        for name in spec.config().tensor_names() {
            let (a, b) = (gguf.tensor(name).unwrap(), folder.tensor(name).unwrap());
            assert_eq!(a.bytes, b.bytes, "{family:?} {name}");
        }
        assert_eq!(
            gguf.tokenizer_hash().unwrap(),
            folder.tokenizer_hash().unwrap()
        );
        assert_eq!(gguf.chat_template(), folder.chat_template());
        assert_eq!(gguf.special_tokens(), folder.special_tokens());
        assert_eq!(gguf.eos_token(), Some("<|im_end|>"));
        assert_eq!(folder.eos_token(), Some("<|im_end|>"));
        assert_eq!((gguf.bos_token(), folder.bos_token()), (None, None));
    }
}

#[test]
fn block_formats_are_handed_out_as_stored_and_unpermuted() {
    // Steps of each format, relative to the largest number of a block.
    for (dtype, step) in [
        (DType::Q8_0, 1.0 / 127.0),
        (DType::Q4_0, 1.0 / 8.0),
        (DType::Q4_1, 2.0 / 15.0),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let spec = TinySpec {
            dtype,
            ..TinySpec::default()
        };
        let model = Model::open(&write_tiny_gguf(dir.path(), 5, &spec).unwrap()).unwrap();
        for name in spec.config().tensor_names() {
            let tensor = model.tensor(name).unwrap();
            let [rows, cols] = tensor.shape;
            let expected = if rows == 1 { DType::F32 } else { dtype };
            assert_eq!(
                (tensor.dtype, model.dtype(name)),
                (expected, Some(expected))
            );
            assert_eq!(tensor.bytes.len(), rows * expected.row_bytes(cols).unwrap());
            let truth = tiny_values(&spec.config(), name, 5);
            for (got, want) in tensor.to_f32().chunks(32).zip(truth.chunks(32)) {
                let largest = want.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
                for (x, y) in got.iter().zip(want) {
                    assert!(
                        (x - y).abs() <= largest * step * 1.01,
                        "{dtype} {name}: {x} {y}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_does_not() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let spec = TinySpec {
        dtype: DType::BF16,
        ..TinySpec::default()
    };
    let weights = |dir: &std::path::Path, seed| {
        write_tiny_llama(dir, seed, &spec).unwrap();
        std::fs::read(dir.join("model.safetensors")).unwrap()
    };
    let first = weights(a.path(), 1);
    assert_eq!(first, weights(b.path(), 1));
    assert_ne!(first, weights(b.path(), 2));
}

#[test]
fn rope_scaling_and_windows_survive_the_folder() {
    let scalings = [
        RopeScaling::Linear { factor: 2.0 },
        RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 128,
        },
        RopeScaling::Yarn {
            factor: 4.0,
            original_context: 128,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.25,
        },
        RopeScaling::Linear { factor: 8.0 },
    ];
    for (rope_scaling, family) in scalings.into_iter().zip(FAMILIES) {
        let dir = tempfile::tempdir().unwrap();
        let spec = TinySpec {
            rope_scaling,
            sliding_window: Some(64),
            ..TinySpec::of(family)
        };
        let model = Model::open(&write_tiny_llama(dir.path(), 1, &spec).unwrap()).unwrap();
        assert_eq!(model.config(), &spec.config());
    }
}

#[test]
fn a_gemma_says_which_layers_have_a_window() {
    let spec = TinySpec {
        layers: 5,
        ..TinySpec::of(Family::Gemma3)
    };
    let dir = tempfile::tempdir().unwrap();
    let folder = Model::open(&write_tiny_llama(dir.path(), 1, &spec).unwrap()).unwrap();
    let gguf = Model::open(&write_tiny_gguf(dir.path(), 1, &spec).unwrap()).unwrap();
    for model in [folder, gguf] {
        let config = model.config();
        let windows: Vec<_> = (0..5).map(|layer| config.window(layer)).collect();
        assert_eq!(windows, [Some(8), None, Some(8), None, Some(8)]);
        let local = config.local_rope.as_ref().unwrap();
        assert_eq!((local.theta, config.rope.theta), (1e4, 1e6));
        assert_eq!(config.embed_scale(), 8.0);
    }
    let all = TinySpec {
        sliding_window: None,
        ..spec
    };
    let dir = tempfile::tempdir().unwrap();
    let folder = Model::open(&write_tiny_llama(dir.path(), 1, &all).unwrap()).unwrap();
    let gguf = Model::open(&write_tiny_gguf(dir.path(), 1, &all).unwrap()).unwrap();
    assert_eq!(
        (folder.config(), gguf.config()),
        (&all.config(), &all.config())
    );
}

#[test]
fn the_tiny_tokenizer_reads_special_tokens_and_every_byte() {
    let dir = tempfile::tempdir().unwrap();
    let model =
        Model::open(&write_tiny_llama(dir.path(), 1, &TinySpec::default()).unwrap()).unwrap();
    let tokenizer = model.tokenizer().unwrap();
    assert_eq!(tokenizer.get_vocab_size(true), TINY_VOCAB);
    let text = "the answer: hello world, Grüße 蟹\n<|im_end|>";
    let ids = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
    assert_eq!(ids.last(), Some(&TINY_END));
    assert!(ids.len() < text.len() - "<|im_end|>".len());
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    assert_eq!(tokenizer_hash(&tokenizer), model.tokenizer_hash().unwrap());
    assert!(
        model
            .special_tokens()
            .contains(&(TINY_END, "<|im_end|>".to_owned()))
    );
}

#[test]
fn templates_are_found_in_their_order() {
    let dir = tempfile::tempdir().unwrap();
    let files = write_tiny_llama(dir.path(), 1, &TinySpec::default()).unwrap();
    let from_file = Model::open(&files).unwrap().chat_template().unwrap();
    let config = dir.path().join("tokenizer_config.json");
    let list = r#"{"eos_token": {"content": "<|im_end|>"}, "chat_template": [
        {"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}"#;
    std::fs::write(&config, list).unwrap();
    assert_eq!(
        Model::open(&files).unwrap().chat_template().unwrap(),
        from_file
    );
    std::fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
    let model = Model::open(&files).unwrap();
    assert_eq!(model.chat_template().as_deref(), Some("D"));
    assert_eq!(model.tool_template().as_deref(), Some("T"));
    assert_eq!(model.eos_token(), Some("<|im_end|>"));
    std::fs::write(&config, r#"{"chat_template": "one"}"#).unwrap();
    assert_eq!(
        Model::open(&files).unwrap().chat_template().as_deref(),
        Some("one")
    );
    std::fs::remove_file(&config).unwrap();
    let model = Model::open(&files).unwrap();
    assert_eq!((model.chat_template(), model.eos_token()), (None, None));
    assert_eq!(model.config().end_ids[0], TINY_END);
}

#[test]
fn names_read_as_documented() {
    let q = TensorName::Layer(3, LayerTensor::Q);
    assert_eq!(q.to_string(), "layers.3.attn.q.weight");
    assert_eq!(
        TensorName::Layer(0, LayerTensor::Gate).to_string(),
        "layers.0.mlp.gate"
    );
    assert_eq!(
        q.hugging_face(Family::Llama),
        "model.layers.3.self_attn.q_proj.weight"
    );
    assert_eq!(q.gguf(), "blk.3.attn_q.weight");
}
