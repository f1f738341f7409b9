//! What is watched once a version serves: the score of its replies, their length, and how often its tool calls fail. Plain functions.

use crate::config::WatchConfig;
use chela_core::{LiveTurn, Millis, registry::Chain};

/// Why a version is taken back, and to which.
#[derive(Clone, Debug, PartialEq)]
pub struct Fall {
    /// The version that sampled the turns it compares badly with.
    pub back_to: u64,
    /// In words, with both figures.
    pub why: String,
}

/// Compares the newest judged turns of the chain with those before them. `turns` is newest first; turns of versions that were left
/// say nothing about what is served, nor do turns from before `since` when somebody put it back then, against what they said. `None` =
/// all is well, or there is too little to tell.
pub fn watch(
    turns: &[LiveTurn],
    (chain, since): (&Chain, Option<Millis>),
    config: &WatchConfig,
) -> Option<Fall> {
    let served = chain.numbers().first().copied()?;
    let on_chain: Vec<&LiveTurn> = turns.iter().filter(|t| chain.holds(t.version)).collect();
    let judged: Vec<&LiveTurn> = on_chain
        .iter()
        .copied()
        .filter(|t| t.reward.is_some())
        .collect();
    let n = config.turns;
    if n == 0 || judged.len() < 2 * n {
        return None;
    }
    let (now, before) = (&judged[..n], &judged[n..judged.len().min(3 * n)]);
    if since.is_some_and(|since| now.iter().any(|t| t.at < since)) {
        return None;
    }
    let back_to = before.first()?.version;
    // The same version sampled both: whatever changed, it was not the weights.
    if back_to == served {
        return None;
    }
    score(now, before, config)
        .or_else(|| length(now, before, config))
        .or_else(|| tools(&on_chain, n, config))
        .map(|why| Fall { back_to, why })
}

fn score(now: &[&LiveTurn], before: &[&LiveTurn], config: &WatchConfig) -> Option<String> {
    let rewards = |turns: &[&LiveTurn]| -> Vec<f64> {
        turns
            .iter()
            .filter_map(|t| t.reward)
            .map(f64::from)
            .collect()
    };
    let ((now, e_now), (before, e_before)) = (moments(&rewards(now)), moments(&rewards(before)));
    let (drop, error) = (before - now, e_now.hypot(e_before));
    (drop > config.margin && drop > config.errors * error).then(|| {
        format!(
            "the live score fell from {before:.2} to {now:.2} (margin {:.2}, standard error {error:.2})",
            config.margin
        )
    })
}

fn length(now: &[&LiveTurn], before: &[&LiveTurn], config: &WatchConfig) -> Option<String> {
    let mean = |turns: &[&LiveTurn]| {
        turns.iter().map(|t| t.reply_len as f64).sum::<f64>() / turns.len().max(1) as f64
    };
    let (now, before) = (mean(now).max(1.0), mean(before).max(1.0));
    let factor = (now / before).max(before / now);
    (factor > config.length).then(|| {
        format!(
            "replies went from {before:.0} to {now:.0} tokens (limit: a factor of {:.1})",
            config.length
        )
    })
}

/// Tool results among the newest turns against those among the ones before.
fn tools(turns: &[&LiveTurn], n: usize, config: &WatchConfig) -> Option<String> {
    let called: Vec<f64> = turns
        .iter()
        .filter_map(|t| t.tool_error)
        .map(|failed| f64::from(u8::from(failed)))
        .collect();
    if called.len() < 2 * n {
        return None;
    }
    let (now, e_now) = moments(&called[..n]);
    let (before, e_before) = moments(&called[n..called.len().min(3 * n)]);
    let (rise, error) = (now - before, e_now.hypot(e_before));
    (rise > config.tool_errors && rise > config.errors * error)
        .then(|| format!("failed tool calls rose from {before:.2} to {now:.2}"))
}

/// Mean and its standard error.
fn moments(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
    (mean, (variance / n).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;
    use chela_core::{PolicyVersion, Profile, TurnId, VersionRecord};

    fn chain(head: u64) -> Chain {
        let record = |number| VersionRecord {
            version: PolicyVersion {
                profile: Profile::default(),
                number,
            },
            parent: number - 1,
            steps: number,
            ..VersionRecord::default()
        };
        Chain::of(head, &(1..=head).map(record).collect::<Vec<_>>())
    }

    /// `(version, how many, reward of the i-th, tokens)`.
    type Group = (u64, usize, fn(usize) -> f32, usize);

    /// Newest first.
    fn turns(groups: &[Group]) -> Vec<LiveTurn> {
        let mut all = Vec::new();
        for (version, many, reward, reply_len) in groups {
            let newest = 1000 - all.len() as u64;
            all.extend((0..*many).map(|i| LiveTurn {
                turn: TurnId(newest - i as u64),
                at: (newest - i as u64) as Millis,
                version: *version,
                reward: Some(reward(i)),
                reply_len: *reply_len,
                tool_error: None,
            }));
        }
        all
    }

    fn look(groups: &[Group]) -> Option<Fall> {
        watch(&turns(groups), (&chain(3), None), &WatchConfig::default())
    }

    const GOOD: fn(usize) -> f32 = |i| if i % 4 == 0 { -1.0 } else { 1.0 };
    const HALF: fn(usize) -> f32 = |i| if i % 2 == 0 { -1.0 } else { 1.0 };
    const POOR: fn(usize) -> f32 = |i| if i % 4 == 0 { 1.0 } else { -1.0 };

    #[test]
    fn a_clear_fall_goes_back_to_the_version_before_it() {
        let fall = look(&[(3, 20, POOR, 50), (2, 10, POOR, 50), (1, 60, GOOD, 50)]).unwrap();
        assert_eq!(fall.back_to, 1);
        assert!(fall.why.contains("fell from 0.50 to"), "{}", fall.why);
    }

    #[test]
    fn noise_improvement_and_too_few_turns_change_nothing() {
        assert_eq!(look(&[(3, 30, GOOD, 50), (1, 60, GOOD, 50)]), None);
        assert_eq!(look(&[(3, 30, GOOD, 50), (1, 60, POOR, 50)]), None);
        assert_eq!(look(&[(3, 29, POOR, 50), (1, 30, GOOD, 50)]), None);
        // Half instead of three quarters of thirty: within two standard errors.
        assert_eq!(look(&[(3, 30, HALF, 50), (1, 30, GOOD, 50)]), None);
    }

    #[test]
    fn the_same_version_is_not_to_blame() {
        assert_eq!(look(&[(3, 30, POOR, 50), (3, 60, GOOD, 50)]), None);
        // Nor are turns of versions that were left.
        assert_eq!(
            look(&[(7, 30, POOR, 50), (3, 30, GOOD, 50), (1, 60, GOOD, 50)]),
            None
        );
    }

    #[test]
    fn what_was_put_back_is_judged_by_its_turns_since_then() {
        let all = turns(&[(3, 30, POOR, 50), (1, 60, GOOD, 50)]);
        let look = |since| watch(&all, (&chain(3), Some(since)), &WatchConfig::default());
        assert_eq!(look(all[29].at + 1), None);
        assert_eq!(look(all[29].at).map(|f| f.back_to), Some(1));
    }

    #[test]
    fn a_jump_in_length_and_failing_tools_are_seen() {
        let fall = look(&[(3, 30, GOOD, 400), (1, 60, GOOD, 50)]).unwrap();
        assert!(fall.why.contains("50 to 400 tokens"), "{}", fall.why);
        assert!(look(&[(3, 30, GOOD, 2), (1, 60, GOOD, 50)]).is_some());
        let mut all = turns(&[(3, 30, GOOD, 50), (1, 60, GOOD, 50)]);
        for (i, turn) in all.iter_mut().enumerate() {
            turn.tool_error = Some(i < 20);
        }
        let fall = watch(&all, (&chain(3), None), &WatchConfig::default()).unwrap();
        assert!(fall.why.contains("tool calls"), "{}", fall.why);
    }
}
