//! Scoring: log-probs of given tokens, read in chunks and asked of the head at the end.

use crate::{
    error::kernel,
    forward::{Item, Workspace, forward, hidden_norm},
    pages::KvCache,
    prefix::CacheKey,
    scheduler::chunk_end,
    version::{self, Held},
    weights::BaseWeights,
};
use chela_core::{EngineError, Priority, Scored, TokenId, Want};
use chela_kernels::{Kernels, Mat, Pairs};
use futures_channel::oneshot;

/// A text being scored.
pub struct Scoring<K: Kernels> {
    /// Whose weights.
    pub key: CacheKey,
    /// The weights; set when the request reaches the engine's thread.
    pub version: Held<K>,
    /// The text.
    pub tokens: Vec<TokenId>,
    /// First scored token.
    pub from: usize,
    /// What to compute.
    pub want: Want,
    /// To the caller.
    pub answer: oneshot::Sender<Result<Scored, EngineError>>,
    /// Keys and values; `None` until begun.
    pub cache: Option<KvCache<K>>,
    /// Hidden rows of scored positions `[N, H]`.
    pub hidden: Option<K::Buf>,
}

impl<K: Kernels> Scoring<K> {
    /// Who is served first.
    pub fn priority(&self) -> Priority {
        self.want.priority
    }
}

/// Reads one more chunk; the scores when the text is through.
pub fn advance<K: Kernels>(
    k: &K,
    base: &BaseWeights<K>,
    scoring: &mut Scoring<K>,
    work: &mut Workspace<K>,
) -> Result<Option<Scored>, EngineError> {
    let width = base.config.hidden;
    let rows = scoring.tokens.len() - scoring.from;
    let version = scoring.version.clone();
    let model = version::model(&version, base);
    let Some(cache) = scoring.cache.as_mut() else {
        return Err(EngineError::Shape("scoring without a cache".to_owned()));
    };
    if scoring.hidden.is_none() {
        scoring.hidden = Some(k.zeros(rows * width).map_err(kernel)?);
    }
    let total = scoring.tokens.len() - 1;
    let done = cache.len();
    let end = chunk_end(done, total);
    let mut items = [Item {
        cache,
        tokens: &scoring.tokens[done..end],
        version: version.clone(),
    }];
    let x = forward(k, model, &mut items, work)?;
    let first = scoring.from - 1; // row p predicts token p + 1
    if let (Some(hidden), true) = (scoring.hidden.as_mut(), end > first) {
        let from = done.max(first);
        let (src, dst) = ((from - done) * width, (from - first) * width);
        k.copy(x, src, hidden, dst, (end - from) * width)
            .map_err(kernel)?;
    }
    if end < total {
        return Ok(None);
    }
    let Some(hidden) = scoring.hidden.take() else {
        return Ok(None);
    };
    head(k, model, scoring, &hidden, rows).map(Some)
}

fn head<K: Kernels>(
    k: &K,
    base: &BaseWeights<K>,
    scoring: &Scoring<K>,
    hidden: &K::Buf,
    rows: usize,
) -> Result<Scored, EngineError> {
    let width = base.config.hidden;
    let mut normed = k.zeros(rows * width).map_err(kernel)?;
    k.rms_norm(
        hidden,
        &base.final_norm,
        hidden_norm(base, rows),
        &mut normed,
    )
    .map_err(kernel)?;
    let want = &scoring.want;
    let (ids, n) = match &want.candidates {
        Some(named) => (named.ids(), named.k()),
        None => (&scoring.tokens[scoring.from..], 1),
    };
    let pair_rows: Vec<u32> = (0..rows as u32).collect();
    let temperatures = vec![1.0 / want.temperature; rows];
    let pairs = Pairs {
        rows: &pair_rows,
        inv_temperature: &temperatures,
        candidates: ids,
        k: n,
    };
    let ask = chela_kernels::Want {
        entropy: want.entropy,
        top_k: want.top_k,
    };
    let scores = k
        .head_scores(&base.head, Mat::new(&normed, rows, width), pairs, ask)
        .map_err(kernel)?;
    finite(&scores.logprobs, &scoring.key.version)?;
    Ok(Scored {
        logprobs: scores.logprobs,
        entropy: scores.entropy.filter(|_| want.entropy),
        top: scores.top.map(|t| (t.ids, t.logprobs)),
        values: None,
    })
}

/// Log-probs that are not finite are an error, never a score.
fn finite(logprobs: &[f32], version: &chela_core::PolicyVersion) -> Result<(), EngineError> {
    match logprobs.iter().position(|l| !l.is_finite()) {
        None => Ok(()),
        Some(at) => Err(EngineError::NotFinite(format!(
            "log-prob {at} under {version}"
        ))),
    }
}
