//! Gemma 3 and mixtures of experts: what differs from other families, beyond what golden numbers show.

use crate::common::{begin, collect, greedy, options, prompt, score};
use chela_core::{AdapterSpec, PolicyRef};
use chela_engine::{LocalEngine, adapter::Adapter};
use chela_kernels::Cpu;
use chela_model::{Family, Model, testing};
use serde_json::{Value, json};

#[test]
fn replies_do_not_depend_on_what_else_is_decoded() {
    for kind in [Family::Gemma3, Family::Qwen3Moe] {
        let home = tempfile::tempdir().unwrap();
        let spec = testing::TinySpec::of(kind);
        let files = testing::write_tiny_gguf(home.path(), 9, &spec).unwrap();
        let engine = LocalEngine::open(&Model::open(&files).unwrap(), options()).unwrap();
        // Longer than a Gemma's window, all of another length.
        let prompts: Vec<Vec<u32>> = (0..5).map(|i| prompt(17 * i, 11 + 9 * i)).collect();
        let start = |tokens: &Vec<u32>| begin(&engine, PolicyRef::Base, tokens, greedy(24));
        let alone: Vec<_> = prompts.iter().map(|p| collect(start(p).unwrap())).collect();
        let streams: Vec<_> = prompts.iter().map(|p| start(p).unwrap()).collect();
        for ((tokens, alone), stream) in prompts.iter().zip(alone).zip(streams) {
            let together = collect(stream);
            let ids = |said: &[chela_core::SampledToken]| -> Vec<u32> {
                said.iter().map(|t| t.id).collect()
            };
            assert_eq!(ids(&together), ids(&alone), "{kind:?}");
            // One token at a time and all at once are the same model.
            let whole = [&tokens[..], &ids(&alone)].concat();
            let scored = score(&engine, PolicyRef::Base, &whole, tokens.len()).unwrap();
            for (token, scored) in alone.iter().zip(&scored.logprobs) {
                let gap = (token.logprob_t1 - scored).abs();
                assert!(gap < 2e-4, "{kind:?}: {gap}");
            }
        }
    }
}

#[test]
fn experts_take_no_adapter_and_all_maps_means_those_of_attention() {
    let home = tempfile::tempdir().unwrap();
    let spec = testing::TinySpec::of(Family::Qwen3Moe);
    let files = testing::write_tiny_llama(&home.path().join("moe"), 3, &spec).unwrap();
    let model = Model::open(&files).unwrap();
    let (k, config) = (Cpu::new(1), model.config());
    let of = |targets: &[&str]| AdapterSpec {
        targets: targets.iter().map(|t| (*t).to_owned()).collect(),
        ..AdapterSpec::default()
    };
    let modules = |adapter: &Adapter<_>| {
        let entries = adapter.entries().filter(|(layer, ..)| *layer == 0);
        entries.map(|(_, t, _)| t.module()).collect::<Vec<_>>()
    };
    let all = Adapter::fresh(&k, config, &AdapterSpec::default()).unwrap();
    let attention = ["q_proj", "k_proj", "v_proj", "o_proj"];
    assert_eq!(modules(&all), attention);
    let peft = Adapter::fresh(&k, config, &of(&["q_proj", "v_proj"])).unwrap();
    assert_eq!(modules(&peft), ["q_proj", "v_proj"]);
    let said = "adapters on experts are not supported, and in this model gate_proj are maps of \
                experts; train q_proj, k_proj, v_proj, o_proj";
    let error = Adapter::fresh(&k, config, &of(&["q_proj", "gate_proj"])).unwrap_err();
    assert!(error.to_string().contains(said), "{error}");

    // PEFT keeps the seven names in the configuration, also where the model has no modules of three of them.
    let dir = home.path().join("adapter");
    std::fs::create_dir(&dir).unwrap();
    all.write(&k, "moe", &dir).unwrap();
    let path = dir.join("adapter_config.json");
    let config_of = |targets: Value| {
        let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        json["target_modules"] = targets;
        std::fs::write(&path, json.to_string()).unwrap();
    };
    config_of(json!(AdapterSpec::default().targets));
    assert_eq!(
        modules(&Adapter::read(&k, config, &dir).unwrap()),
        attention
    );
    config_of(json!("all-linear"));
    assert_eq!(
        modules(&Adapter::read(&k, config, &dir).unwrap()),
        attention
    );
    config_of(json!(["gate_proj"]));
    let error = Adapter::read(&k, config, &dir).unwrap_err().to_string();
    assert!(
        error.contains("adapter_config.json: adapters on experts"),
        "{error}"
    );

    // A trainer that has every expert's maps apart.
    let mut tensors = Vec::new();
    for (layer, target, lora) in all.entries() {
        let name = |side| {
            let module = target.module();
            format!("base_model.model.model.layers.{layer}.self_attn.{module}.lora_{side}.weight")
        };
        let bytes = |n: usize| vec![0; 4 * n];
        let rank = all.rank;
        tensors.push((name("A"), vec![rank, lora.input], bytes(rank * lora.input)));
        tensors.push((name("B"), vec![lora.out, rank], bytes(rank * lora.out)));
    }
    let odd = "base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_A.weight";
    tensors.push((odd.to_owned(), vec![1, 1], vec![0; 4]));
    let file = dir.join("adapter_model.safetensors");
    chela_engine::adapter::write_tensors(&file, &tensors).unwrap();
    config_of(json!(AdapterSpec::default().targets));
    let error = Adapter::read(&k, config, &dir).unwrap_err().to_string();
    assert!(
        error.contains(odd) && error.contains("adapters on experts are not supported"),
        "{error}"
    );
}
