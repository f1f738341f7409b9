//! Reads held-out questions greedily, in sessions that nothing follows in, and measures distance to the base model.

use crate::{
    LabError,
    client::{Ask, Client},
    taste::HeldOut,
    texts,
};
use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

/// How a held-out set is read.
#[derive(Clone, Copy, Debug)]
pub struct Reading<'a> {
    /// Tells this reading's sessions from others'.
    pub tag: &'a str,
    /// The version that answers; `None` = the served one.
    pub version: Option<u64>,
    /// The conversations' system message.
    pub system: &'a str,
    /// Most tokens of a reply.
    pub max_tokens: usize,
    /// Requests at once.
    pub lanes: usize,
}

/// Replies to the questions, in their order.
pub fn read(
    client: &Client,
    reading: Reading<'_>,
    questions: &[&str],
) -> Result<Vec<HeldOut>, LabError> {
    let Reading {
        tag,
        version,
        system,
        max_tokens,
        lanes,
    } = reading;
    in_parallel(questions.len(), lanes, |i| {
        let reply = client.chat(&Ask {
            version,
            session: &session(tag, i),
            // Nothing follows in these sessions, so no verdict and no sample can come of them.
            kind: None,
            done: true,
            messages: &texts::opening(system, questions[i]),
            temperature: 0.0,
            max_tokens,
            seed: 0,
        })?;
        Ok(HeldOut {
            question: questions[i].to_owned(),
            reply: reply.text,
            ended: reply.ended,
            tokens: reply.tokens,
        })
    })
}

fn session(tag: &str, index: usize) -> String {
    format!("heldout-{tag}-{index}")
}

/// Distance of the replies read under `tag` from the base model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Distance {
    /// Mean k1 = logprob − reference_logprob per reply token at temperature 1.
    pub kl_to_base: f64,
    /// Mean −reference_logprob per reply token.
    pub base_nll: f64,
}

/// Measures it over the recorded replies, which were read greedily: their own log-probs are the policy's at temperature 1, and the
/// base model's come from the API, which scores any text.
pub fn distance(
    client: &Client,
    tag: &str,
    count: usize,
    version: u64,
    lanes: usize,
) -> Result<Distance, LabError> {
    let base = client.endpoint().base_model.clone();
    let sums = in_parallel(count, lanes, |i| {
        let recorded = client.recorded(&session(tag, i))?;
        let policy = recorded.logprobs.clone();
        let reference = if version == 0 {
            policy.clone()
        } else {
            client.logprobs(&format!("{base}:side"), &recorded)?
        };
        if policy.len() != reference.len() {
            let (has, needs) = (policy.len(), reference.len());
            return Err(LabError::Http(format!(
                "{has} recorded log-probs for {needs} reply tokens"
            )));
        }
        let k1: f64 = policy.iter().zip(&reference).map(|(p, r)| p - r).sum();
        Ok((k1, -reference.iter().sum::<f64>(), reference.len()))
    })?;
    let tokens = sums.iter().map(|s| s.2).sum::<usize>().max(1) as f64;
    Ok(Distance {
        kl_to_base: sums.iter().map(|s| s.0).sum::<f64>() / tokens,
        base_nll: sums.iter().map(|s| s.1).sum::<f64>() / tokens,
    })
}

/// Runs `work(0..n)` on a few threads; results in order, or the first error.
pub fn in_parallel<T: Send>(
    n: usize,
    lanes: usize,
    work: impl Fn(usize) -> Result<T, LabError> + Sync,
) -> Result<Vec<T>, LabError> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(n));
    std::thread::scope(|scope| {
        for _ in 0..lanes.clamp(1, n.max(1)) {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= n {
                        return;
                    }
                    let result = work(i);
                    let failed = result.is_err();
                    done.lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push((i, result));
                    if failed {
                        next.store(n, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, r)| r).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_their_order_and_an_error_ends_it() {
        assert_eq!(
            in_parallel(20, 4, |i| Ok(i * 2)).unwrap(),
            (0..20).map(|i| i * 2).collect::<Vec<_>>()
        );
        let failed = in_parallel(1000, 2, |i| {
            if i == 3 {
                Err(LabError::Stuck("three".to_owned()))
            } else {
                Ok(i)
            }
        });
        assert!(failed.is_err());
        assert_eq!(in_parallel(0, 4, Ok).unwrap(), Vec::<usize>::new());
    }
}
