//! The configured judges, in order.

use crate::config::{Config, JudgeKind, RuleEntry};
use anyhow::{Context, Result, bail};
use chela_chat::Chat;
use chela_core::{Judge, PolicyEngine};
use chela_remote::OpenAiTextModel;
use chela_rollout::{
    CommandJudge, EngineTextModel, ModelJudge, ModelJudgeConfig, Rule, RuleRole, RulesJudge,
};
use std::{sync::Arc, time::Duration};

/// Builds them. A rule that cannot be used is an error here, before anything slow.
pub fn build(
    config: &Config,
    engine: &Arc<dyn PolicyEngine>,
    chat: &Arc<Chat>,
) -> Result<Vec<Arc<dyn Judge>>> {
    config
        .judge
        .kinds
        .iter()
        .map(|kind| one(*kind, config, engine, chat))
        .collect()
}

/// The rules, checked.
pub fn rules(entries: &[RuleEntry]) -> Result<RulesJudge> {
    let rules = entries
        .iter()
        .map(|entry| {
            let role = match entry.role.as_str() {
                "user" => RuleRole::User,
                "tool" => RuleRole::Tool,
                other => bail!(
                    "judge.rules: rule {:?}: role {other:?}: use user or tool",
                    entry.name
                ),
            };
            Ok(Rule {
                name: entry.name.clone(),
                pattern: entry.pattern.clone(),
                role,
                reward: entry.reward,
                hint: entry.hint.clone(),
            })
        })
        .collect::<Result<_>>()?;
    RulesJudge::new(rules).context("judge.rules")
}

fn one(
    kind: JudgeKind,
    config: &Config,
    engine: &Arc<dyn PolicyEngine>,
    chat: &Arc<Chat>,
) -> Result<Arc<dyn Judge>> {
    let judge = &config.judge;
    let timeout = Duration::from_secs(judge.timeout);
    let votes = |defaults: ModelJudgeConfig| ModelJudgeConfig {
        votes: if judge.votes == 0 {
            defaults.votes
        } else {
            judge.votes
        },
        max_tokens: if judge.max_tokens == 0 {
            defaults.max_tokens
        } else {
            judge.max_tokens
        },
        temperature: judge.temperature as f32,
        vote_timeout: timeout,
        ..defaults
    };
    Ok(match kind {
        JudgeKind::Rules => Arc::new(rules(&judge.rules)?),
        JudgeKind::Own => {
            let model = Arc::new(EngineTextModel::new(engine.clone(), chat.clone()));
            Arc::new(ModelJudge::new(
                "self",
                model,
                votes(ModelJudgeConfig::own()),
            ))
        }
        JudgeKind::Openai => {
            let key = std::env::var(&judge.openai_key_variable)
                .ok()
                .filter(|k| !k.is_empty());
            let model =
                OpenAiTextModel::new(&judge.openai_url, key, judge.openai_model.clone(), timeout)
                    .map_err(|e| anyhow::anyhow!("judge.openai_url: {e}"))?;
            Arc::new(ModelJudge::new(
                "openai",
                Arc::new(model),
                votes(ModelJudgeConfig::default()),
            ))
        }
        JudgeKind::Command => Arc::new(CommandJudge::new(judge.command.clone(), timeout)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use chela_core::Score;
    use chela_rollout::{
        canaries::FEWEST,
        labelled::{self, Agreement},
    };

    /// Learning would stop for everybody by default if the default rules were wrong too often about canary turns.
    #[test]
    fn the_default_rules_do_not_stop_learning() {
        let config = Config::default().judge;
        let judge = rules(&config.rules).unwrap();
        let mut agreement = Agreement::default();
        for turn in labelled::read(labelled::BUILT_IN).unwrap() {
            let reward = judge.verdict(&turn.case).and_then(|v| v.reward);
            let score = match reward {
                Some(r) if r > 0.0 => Some(Score::Good),
                Some(r) if r < 0.0 => Some(Score::Bad),
                _ => None,
            };
            agreement.add(turn.label, score);
        }
        let (right, _) = agreement.share().unwrap();
        assert!(1.0 - right < config.max_judge_error, "{agreement:?}");
        // Close to the limit chance decides; nothing is said of a judge that speaks of so few.
        let certain = 1.0 - right < 0.5 * config.max_judge_error;
        assert!(certain || agreement.spoken() < FEWEST, "{agreement:?}");
    }
}
