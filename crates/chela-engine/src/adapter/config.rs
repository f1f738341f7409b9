//! `adapter_config.json`: what of it matters here, what of it is refused, and how it is written.

use super::Target;
use crate::error::{io, weights};
use chela_core::EngineError;
use chela_model::ModelConfig;
use serde::Serialize;
use serde_json::Value;
use std::{io::Read, path::Path};

/// No real configuration is longer; PEFT's own have about 1 KB, with patterns some more.
const LONGEST: u64 = 1 << 20;

/// Options of PEFT's `LoraConfig` (0.21) that change what the adapter computes or which tensors belong to it. Each is refused when
/// it is set to anything but nothing, since its numbers would otherwise come out wrong without a word.
const REFUSED: [&str; 17] = [
    "use_dora",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "modules_to_save",
    "exclude_modules",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
];

/// Starting values that also change the base weights, so that the adapter fits only those.
const OTHER_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

/// What a configuration says, checked.
#[derive(Debug)]
pub(super) struct PeftConfig {
    pub rank: usize,
    /// For the plain rule alpha / r, also where the file follows rsLoRA.
    pub alpha: f32,
    pub targets: Vec<Target>,
    pub base_model: Option<String>,
}

/// Reads and checks the file at `path`.
pub(super) fn read(path: &Path, model: &ModelConfig) -> Result<PeftConfig, EngineError> {
    let refuse = |why: String| weights(format!("{}: {why}", path.display()));
    let text = read_short(path, LONGEST)?;
    let json: Value = serde_json::from_slice(&text)
        .map_err(|e| refuse(format!("not valid JSON: {e}; copy the adapter again")))?;
    if !json.is_object() {
        return Err(refuse("not a JSON object".to_owned()));
    }
    check(&json, model).map_err(refuse)
}

/// A file's bytes, unless there are more than such a file has.
pub(super) fn read_short(path: &Path, longest: u64) -> Result<Vec<u8>, EngineError> {
    let file = std::fs::File::open(path).map_err(|e| io(path, e))?;
    let mut bytes = Vec::new();
    let mut short = file.take(longest + 1);
    short.read_to_end(&mut bytes).map_err(|e| io(path, e))?;
    if bytes.len() as u64 > longest {
        let path = path.display();
        return Err(weights(format!("{path}: longer than {longest} bytes")));
    }
    Ok(bytes)
}

fn check(json: &Value, model: &ModelConfig) -> Result<PeftConfig, String> {
    match json.get("peft_type") {
        None | Some(Value::Null) => {}
        Some(Value::String(kind)) if kind.is_empty() || kind.eq_ignore_ascii_case("lora") => {}
        Some(other) => return Err(format!("peft_type {other}: only plain LoRA is supported")),
    }
    if let Some(name) = REFUSED.iter().find(|name| is_set(&json[**name])) {
        let value = shown(&json[*name]);
        return Err(format!("{name} is {value}: that is not supported"));
    }
    match &json["bias"] {
        Value::Null => {}
        Value::String(bias) if bias == "none" => {}
        other => return Err(format!("bias is {other}: that is not supported, none is")),
    }
    if let Some(init) = json["init_lora_weights"].as_str()
        && OTHER_BASE
            .iter()
            .any(|other| init.to_lowercase().starts_with(other))
    {
        return Err(format!(
            "init_lora_weights is {init:?}, which changes the base weights too; save the adapter with \
             path_initial_model_for_weight_conversion, which makes a plain one"
        ));
    }
    let rank = match json["r"].as_u64().and_then(|r| usize::try_from(r).ok()) {
        Some(rank) if rank > 0 => rank,
        _ => {
            return Err(format!(
                "r is {}, expected a whole number from 1",
                shown(&json["r"])
            ));
        }
    };
    let alpha = json["lora_alpha"].as_f64().map(|alpha| alpha as f32);
    let Some(alpha) = alpha.filter(|alpha| alpha.is_finite() && *alpha > 0.0) else {
        let alpha = shown(&json["lora_alpha"]);
        return Err(format!("lora_alpha is {alpha}, expected a number above 0"));
    };
    // rsLoRA (arXiv 2312.03732) scales by alpha / √r; kept as an equal alpha of the plain rule.
    let root = match &json["use_rslora"] {
        Value::Bool(true) => (rank as f32).sqrt(),
        Value::Null | Value::Bool(false) => 1.0,
        other => return Err(format!("use_rslora is {other}, expected true or false")),
    };
    Ok(PeftConfig {
        rank,
        alpha: alpha * root,
        targets: target_modules(&json["target_modules"], model)?,
        base_model: json["base_model_name_or_path"].as_str().map(str::to_owned),
    })
}

/// Whether an option is switched on: PEFT writes those that are not as null, false, or an empty list or map.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(on) => *on,
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        Value::String(text) => !text.is_empty(),
        Value::Number(_) => true,
    }
}

/// A value for a message, cut where it is long.
fn shown(value: &Value) -> String {
    let text = match value {
        Value::Null => return "missing".to_owned(),
        value => value.to_string(),
    };
    match text.char_indices().nth(80) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

/// A list of names, or PEFT's word for all linear maps but the head.
fn target_modules(value: &Value, model: &ModelConfig) -> Result<Vec<Target>, String> {
    match value {
        Value::String(word) if word == "all-linear" => Ok(Target::of(model).to_vec()),
        Value::String(_) => Err(format!(
            "target_modules is the pattern {}: a list of names, or \"all-linear\", is supported; write the names that it \
             matches",
            shown(value)
        )),
        Value::Array(list) => {
            let name = |item: &Value| item.as_str().map(str::to_owned);
            let names: Option<Vec<String>> = list.iter().map(name).collect();
            let names = names.ok_or_else(|| format!("target_modules is {}", shown(value)))?;
            // As in PEFT, names that nothing in the model has (it keeps experts in one tensor) are no error beside others; the
            // file's tensors are compared with the rest.
            let mut found = find_targets(&names)?;
            let asked = found.clone();
            found.retain(|target| Target::of(model).contains(target));
            if found.is_empty() {
                return Err(without_experts(&asked));
            }
            Ok(found)
        }
        other => {
            let other = shown(other);
            Err(format!(
                "target_modules is {other}, expected a list of names"
            ))
        }
    }
}

/// The maps of these names, in the order in which they are kept. All seven names mean every map that takes an adapter: those of
/// attention in a mixture of experts.
pub(super) fn targets(modules: &[String], model: &ModelConfig) -> Result<Vec<Target>, EngineError> {
    let found = find_targets(modules).map_err(weights)?;
    if found == Target::ALL {
        return Ok(Target::of(model).to_vec());
    }
    let odd = |target: &&Target| !Target::of(model).contains(target);
    let odd: Vec<Target> = found.iter().filter(odd).copied().collect();
    match odd.is_empty() {
        true => Ok(found),
        false => Err(weights(without_experts(&odd))),
    }
}

/// Why these have no adapter in a mixture of experts.
pub(super) fn without_experts(asked: &[Target]) -> String {
    let names = |targets: &[Target]| {
        let names: Vec<&str> = targets.iter().map(|t| t.module()).collect();
        names.join(", ")
    };
    format!(
        "adapters on experts are not supported, and in this model {} are maps of experts; train {}",
        names(asked),
        names(&Target::ALL[..4])
    )
}

fn find_targets(modules: &[String]) -> Result<Vec<Target>, String> {
    // PEFT takes a name for every module whose path ends in it.
    let find = |name: &String| {
        let ends =
            |t: &Target| t.module() == name || format!("{}.{}", t.parent(), t.module()) == *name;
        let known = Target::ALL.map(Target::module).join(", ");
        Target::ALL
            .into_iter()
            .find(ends)
            .ok_or_else(|| format!("unknown target module {name:?}; {known} are known"))
    };
    let mut all: Vec<Target> = modules.iter().map(find).collect::<Result<_, _>>()?;
    all.sort_by_key(|t| *t as usize);
    all.dedup();
    if all.is_empty() {
        return Err("an adapter without target modules".to_owned());
    }
    Ok(all)
}

/// What is written, in PEFT's words; what is left out is PEFT's default.
#[derive(Serialize)]
struct Written<'a> {
    peft_type: &'a str,
    r: usize,
    lora_alpha: f32,
    use_rslora: bool,
    use_dora: bool,
    target_modules: Vec<String>,
    task_type: &'a str,
    base_model_name_or_path: &'a str,
    bias: &'a str,
    fan_in_fan_out: bool,
    inference_mode: bool,
    lora_dropout: f32,
}

/// The text of a configuration.
pub(super) fn written_config(
    rank: usize,
    alpha: f32,
    target_modules: Vec<String>,
    base_model: &str,
) -> Result<Vec<u8>, EngineError> {
    let written = Written {
        peft_type: "LORA",
        r: rank,
        lora_alpha: alpha,
        use_rslora: false,
        use_dora: false,
        target_modules,
        task_type: "CAUSAL_LM",
        base_model_name_or_path: base_model,
        bias: "none",
        fan_in_fan_out: false,
        inference_mode: true,
        lora_dropout: 0.0,
    };
    serde_json::to_vec_pretty(&written).map_err(weights)
}
