//! How a request wants its reply sampled.

use crate::{
    problem::Problem,
    wire::{Fields, invalid},
};
use chela_core::SamplingRequest;
use serde_json::Value;

/// Most replies to one prompt.
const MOST_CHOICES: i64 = 8;
/// Most alternatives of one token.
pub(super) const MOST_TOP: i64 = 20;

/// `n`
pub(super) fn choices(fields: &Fields) -> Result<usize, Problem> {
    Ok(fields
        .integer("n", 1, MOST_CHOICES)?
        .map_or(1, |n| n as usize))
}

/// As chat completions spell it.
pub(super) fn chat_sampling(
    fields: &Fields,
    vocabulary: usize,
) -> Result<SamplingRequest, Problem> {
    let logprobs = fields.flag("logprobs")?;
    let top = fields.integer("top_logprobs", 0, MOST_TOP)?;
    // Clients that always send 0 ask for nothing.
    if top.is_some_and(|top| top > 0) && !logprobs {
        return Err(invalid("top_logprobs", "needs logprobs: true"));
    }
    let most = match fields.integer("max_completion_tokens", 1, i64::MAX)? {
        Some(n) => Some(n),
        None => fields.integer("max_tokens", 1, i64::MAX)?,
    };
    Ok(SamplingRequest {
        max_tokens: most.map(|m| m as usize),
        top_logprobs: logprobs.then_some(top.unwrap_or(0) as u8),
        ..sampling(fields, vocabulary)?
    })
}

/// All but the limit of tokens and log-probs, which each API spells its own way.
pub(super) fn sampling(fields: &Fields, vocabulary: usize) -> Result<SamplingRequest, Problem> {
    let mut sampling = SamplingRequest {
        temperature: fields.number("temperature", 0.0, 2.0)?,
        // 0 keeps the most likely token only; the sampler wants a positive mass.
        top_p: fields
            .number("top_p", 0.0, 1.0)?
            .map(|p| p.max(f32::MIN_POSITIVE)),
        top_k: fields
            .integer("top_k", -1, i64::from(u32::MAX))?
            .map(|k| k.max(0) as u32),
        min_p: fields.number("min_p", 0.0, 1.0)?,
        frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?,
        presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?,
        logit_bias: logit_bias(fields, vocabulary)?,
        seed: seed(fields)?,
        stop: stops(fields, "stop")?,
        ..SamplingRequest::default()
    };
    // Only the most likely token has all of its own probability.
    if sampling.min_p.is_some_and(|p| p >= 1.0) {
        (sampling.min_p, sampling.top_k) = (None, Some(1));
    }
    Ok(sampling)
}

/// Any whole number of 64 bits; a negative one is as good a seed.
fn seed(fields: &Fields) -> Result<Option<u64>, Problem> {
    let Some(value) = fields.get("seed") else {
        return Ok(None);
    };
    let seed = value.as_u64().or_else(|| value.as_i64().map(|s| s as u64));
    seed.map(Some)
        .ok_or_else(|| invalid("seed", "must be an integer of 64 bits"))
}

/// Stop strings under an API's own name.
pub(super) fn stops(fields: &Fields, name: &str) -> Result<Vec<String>, Problem> {
    let wrong = || invalid(name, "must be a string or a list of at most 16 strings");
    let all: Vec<String> = match fields.get(name) {
        None => Vec::new(),
        Some(Value::String(s)) => vec![s.clone()],
        Some(Value::Array(list)) if list.len() <= 16 => list
            .iter()
            .map(|s| s.as_str().map(str::to_owned).ok_or_else(wrong))
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(wrong()),
    };
    if all.iter().any(String::is_empty) {
        return Err(invalid(
            name,
            "an empty text would stop every reply at once",
        ));
    }
    if all.iter().any(|s| s.chars().count() > 1000) {
        return Err(invalid(name, "a stop string has at most 1000 characters"));
    }
    Ok(all)
}

fn logit_bias(fields: &Fields, vocabulary: usize) -> Result<Vec<(u32, f32)>, Problem> {
    let Some(value) = fields.get("logit_bias") else {
        return Ok(Vec::new());
    };
    let map = value
        .as_object()
        .ok_or_else(|| invalid("logit_bias", "must be an object"))?;
    map.iter()
        .map(|(id, bias)| {
            let id: u32 = id
                .parse()
                .ok()
                .filter(|id| (*id as usize) < vocabulary)
                .ok_or_else(|| {
                    invalid(
                        "logit_bias",
                        format!("{id:?} is no token id below {vocabulary}"),
                    )
                })?;
            let bias = bias.as_f64().filter(|b| (-100.0..=100.0).contains(b));
            let bias =
                bias.ok_or_else(|| invalid("logit_bias", "values must be between -100 and 100"))?;
            Ok((id, bias as f32))
        })
        .collect()
}
