//! The base model as a judge's model: it never learns, so it cannot drift with the policy it judges.

use chela_chat::{AnswerOptions, Chat};
use chela_core::{
    BoxFuture, Conversation, EngineError, FinishReason, JudgeError, PolicyEngine, PolicyRef,
    Priority, Prompt, SamplingEvent, SamplingParams, TextModel, TextRequest,
};
use futures_util::StreamExt;
use std::sync::Arc;

/// A [`TextModel`] over the engine's base model, at the lowest priority but training's.
pub struct EngineTextModel {
    engine: Arc<dyn PolicyEngine>,
    chat: Arc<Chat>,
}

impl EngineTextModel {
    /// `chat` must be the engine's model's.
    pub fn new(engine: Arc<dyn PolicyEngine>, chat: Arc<Chat>) -> Self {
        Self { engine, chat }
    }
}

fn failed(error: impl std::fmt::Display) -> JudgeError {
    JudgeError::Failed(error.to_string())
}

impl TextModel for EngineTextModel {
    fn complete(&self, request: TextRequest) -> BoxFuture<'_, Result<String, JudgeError>> {
        Box::pin(async move {
            let conversation = Conversation {
                messages: request.messages,
                ..Conversation::default()
            };
            let rendered = self
                .chat
                .render(&conversation, Err("judge"))
                .map_err(failed)?;
            let params = SamplingParams {
                temperature: request.temperature,
                seed: request.seed,
                max_tokens: request.max_tokens.max(1),
                end_ids: self.chat.end_ids().to_vec(),
                priority: Priority::Judge,
                ..SamplingParams::default()
            };
            let prompt = Prompt {
                tokens: rendered.tokens,
            };
            let mut events = match self.engine.sample(PolicyRef::Base, prompt, params) {
                Ok(events) => events,
                // It will never fit: a void vote with its reason, not a judge that is down.
                Err(error @ EngineError::ContextLength { .. }) => {
                    return Ok(format!("(no answer: {error})"));
                }
                Err(error) => return Err(failed(error)),
            };
            let options = AnswerOptions {
                call_id_seed: request.seed,
                ..AnswerOptions::default()
            };
            let mut parser = self.chat.answer_parser(options);
            while let Some(event) = events.next().await {
                match event.map_err(failed)? {
                    SamplingEvent::Started { .. } => {}
                    SamplingEvent::Token(token) => {
                        parser.push(token.id);
                    }
                    SamplingEvent::Finished(FinishReason::Aborted | FinishReason::Failed) => {
                        return Err(failed("the engine did not finish the vote"));
                    }
                    // A vote cut by its length has no box at its end and is void by itself.
                    SamplingEvent::Finished(_) => break,
                }
            }
            let (_, answer) = parser.finish();
            Ok(answer.content)
        })
    }
}
