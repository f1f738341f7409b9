//! [`Chat`]: one model's template and tokenizer.

use crate::{
    answer::{AnswerOptions, AnswerParser},
    decode::{Bytes, TextDecoder},
    encode::Encoder,
    error::ChatError,
    stop::StopGuide,
    template::Template,
};
use chela_core::{Conversation, Guide, ReusablePrefix, Role, Segment, TokenId};
use std::sync::Arc;
use tokenizers::Tokenizer;

/// What a [`Chat`] is made of.
pub struct ChatParts {
    /// Tokenizer.
    pub tokenizer: Tokenizer,
    /// Jinja source.
    pub template: String,
    /// Text of the opening token.
    pub bos: Option<String>,
    /// Text of the end token.
    pub eos: Option<String>,
    /// Ids that end a reply.
    pub end_ids: Vec<TokenId>,
    /// Control tokens with their texts.
    pub specials: Vec<(TokenId, String)>,
}

/// Template and tokenizer of one model.
pub struct Chat {
    template: Template,
    encoder: Encoder,
    bytes: Arc<Bytes>,
    end_ids: Vec<TokenId>,
    specials: Vec<(TokenId, String)>,
    vocabulary: usize,
    hash: String,
}

/// A prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Rendered {
    /// Its ids.
    pub tokens: Vec<TokenId>,
    /// How they relate to the parent's.
    pub segment: Segment,
}

impl Chat {
    /// From a model's own files.
    pub fn load(model: &chela_model::Model) -> Result<Self, ChatError> {
        let template = model.chat_template().ok_or_else(|| {
            ChatError::Template(format!(
                "{} has none; an instruction-tuned model does",
                model.name()
            ))
        })?;
        let tokenizer = model
            .tokenizer()
            .map_err(|e| ChatError::Tokenizer(e.to_string()))?;
        Self::from_parts(ChatParts {
            tokenizer,
            template: template.to_string(),
            bos: model.bos_token().map(str::to_owned),
            eos: model.eos_token().map(str::to_owned),
            end_ids: model.config().end_ids.clone(),
            specials: model.special_tokens(),
        })
    }

    /// From parts, for tests.
    pub fn from_parts(parts: ChatParts) -> Result<Self, ChatError> {
        let template = Template::new(&parts.template, parts.bos.as_deref(), parts.eos.as_deref())?;
        let bytes = Arc::new(Bytes::new(&parts.tokenizer, &parts.specials));
        Ok(Self {
            template,
            bytes,
            end_ids: parts.end_ids,
            vocabulary: parts.tokenizer.get_vocab_size(true),
            hash: chela_model::tokenizer_hash(&parts.tokenizer),
            encoder: Encoder::new(parts.tokenizer, parts.specials.clone()),
            specials: parts.specials,
        })
    }

    /// SHA-256 of the tokenizer; must equal the engine's.
    pub fn tokenizer_hash(&self) -> &str {
        &self.hash
    }

    /// Ids that end a reply.
    pub fn end_ids(&self) -> &[TokenId] {
        &self.end_ids
    }

    /// Token ids of the tokenizer.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The template has a place for tools.
    pub fn supports_tools(&self) -> bool {
        self.template.tools
    }

    /// Renders for generation. With `reuse`, the tokens begin with the recorded ones when the template writes the same history;
    /// else a new segment with the reason.
    pub fn render(
        &self,
        conversation: &Conversation,
        reuse: Result<&ReusablePrefix, &str>,
    ) -> Result<Rendered, ChatError> {
        if !conversation.tools.is_empty() && !self.supports_tools() {
            return Err(ChatError::NoTools);
        }
        let guarded = self.encoder.guard(conversation);
        let whole = self.template.render(&guarded, true)?;
        let why = match reuse {
            Err(why) => why.to_owned(),
            Ok(reuse) => match self.continued(&guarded, &whole, reuse)? {
                Ok(tokens) => {
                    return Ok(Rendered {
                        tokens,
                        segment: Segment::Extends,
                    });
                }
                Err(why) => why.to_owned(),
            },
        };
        Ok(Rendered {
            tokens: self.encoder.rendered(&whole)?,
            segment: Segment::Opened(why),
        })
    }

    /// The recorded tokens and what the template writes after the answer they end with.
    fn continued(
        &self,
        guarded: &Conversation,
        whole: &str,
        reuse: &ReusablePrefix,
    ) -> Result<Result<Vec<TokenId>, &'static str>, ChatError> {
        if reuse.messages == 0 || reuse.messages > guarded.messages.len() {
            return Ok(Err("history edited"));
        }
        let covered = |n: usize| Conversation {
            messages: guarded.messages[..n].to_vec(),
            ..guarded.clone()
        };
        let (Ok(asked), Ok(answered)) = (
            self.template.render(&covered(reuse.messages - 1), true),
            self.template.render(&covered(reuse.messages), false),
        ) else {
            return Ok(Err("the template refuses the history alone"));
        };
        let (Some(answer), Some(after)) =
            (answered.strip_prefix(&asked), whole.strip_prefix(&answered))
        else {
            return Ok(Err("the template rewrites earlier turns"));
        };
        // What follows the answer begins at the end token that closes it.
        let ends = self
            .specials
            .iter()
            .filter(|(id, _)| self.end_ids.contains(id));
        let close = ends
            .filter_map(|(_, text)| answer.rfind(text.as_str()).map(|at| (at, text)))
            .max();
        let Some((at, text)) = close else {
            return Ok(Err("the template closes an answer without an end token"));
        };
        let from = if reuse.ended { at + text.len() } else { at };
        let mut tokens = reuse.tokens.clone();
        tokens.extend(
            self.encoder
                .rendered(&format!("{}{after}", &answer[from..]))?,
        );
        Ok(Ok(tokens))
    }

    /// The prompt with a hint appended to the message it answers; an empty hint renders nothing.
    pub fn render_hinted(
        &self,
        conversation: &Conversation,
        hint: &str,
    ) -> Result<Vec<TokenId>, ChatError> {
        let mut hinted = conversation.clone();
        let user = hinted.messages.iter().rposition(|m| m.role == Role::User);
        let at = user.or_else(|| hinted.messages.len().checked_sub(1));
        if let (Some(at), false) = (at, hint.is_empty()) {
            let message = &mut hinted.messages[at];
            message.content = format!("{}\n\n[user hint]\n{hint}", message.content);
        }
        let whole = self.template.render(&self.encoder.guard(&hinted), true)?;
        self.encoder.rendered(&whole)
    }

    /// Ordinary text: never a control id.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, ChatError> {
        self.encoder.ordinary(text)
    }

    /// Text of ids, control tokens left out.
    pub fn decode(&self, ids: &[TokenId]) -> String {
        let mut decoder = self.decoder();
        let mut text: String = ids.iter().map(|id| decoder.push(*id)).collect();
        text += &decoder.finish();
        text
    }

    /// Raw bytes of one token.
    pub fn token_bytes(&self, id: TokenId) -> Vec<u8> {
        self.bytes.of(id).to_vec()
    }

    /// Text as ids come.
    pub fn decoder(&self) -> TextDecoder {
        TextDecoder::new(self.bytes.clone())
    }

    /// Tells the engine when one of the stop strings is complete; `None` when there are none.
    pub fn stop_guide(&self, stops: &[String]) -> Option<Box<dyn Guide>> {
        if stops.iter().all(String::is_empty) {
            return None;
        }
        Some(Box::new(StopGuide::new(self.decoder(), stops)))
    }

    /// Follows a reply.
    pub fn answer_parser(&self, options: AnswerOptions) -> AnswerParser {
        AnswerParser::new(self.decoder(), options)
    }
}
