//! [`Chat`]: one model's template and tokenizer.

use crate::{
    answer::{AnswerOptions, AnswerParser, Tags},
    call::CallFormat,
    decode::{Bytes, TextDecoder},
    encode::{Encoder, unguard},
    error::ChatError,
    grammar::{Grammar, Vocabulary},
    stop::StopGuide,
    template::{Clock, Prepared, Template},
};
use chela_core::{Constraint, Conversation, Guide, ReusablePrefix, Role, Segment, TokenId};
use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
};
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
    /// Control tokens with their texts; those that the tokenizer itself calls special need not be named.
    pub specials: Vec<(TokenId, String)>,
}

/// Template and tokenizer of one model.
pub struct Chat {
    template: Template,
    /// For requests with tools, where the model has another one for these.
    tool_template: Option<Template>,
    encoder: Encoder,
    bytes: Arc<Bytes>,
    tags: Tags,
    format: CallFormat,
    end_ids: Vec<TokenId>,
    specials: BTreeMap<TokenId, String>,
    vocabulary: usize,
    vocabulary_of_grammars: OnceLock<Result<Arc<Vocabulary>, ChatError>>,
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
        let mut chat = Self::from_parts(ChatParts {
            tokenizer,
            template,
            bos: model.bos_token().map(str::to_owned),
            eos: model.eos_token().map(str::to_owned),
            end_ids: model.config().end_ids.clone(),
            specials: model.special_tokens(),
        })?;
        chat.tool_template = model
            .tool_template()
            .map(|source| Template::new(&source, model.bos_token(), model.eos_token()))
            .transpose()?;
        if let Some(source) = model.tool_template() {
            chat.read_calls_as(CallFormat::of_template(&source));
        }
        Ok(chat)
    }

    /// From parts, for tests.
    pub fn from_parts(parts: ChatParts) -> Result<Self, ChatError> {
        let template = Template::new(&parts.template, parts.bos.as_deref(), parts.eos.as_deref())?;
        let specials = control_tokens(&parts);
        let list: Vec<_> = specials.clone().into_iter().collect();
        let format = CallFormat::of_template(&parts.template);
        Ok(Self {
            template,
            tool_template: None,
            bytes: Arc::new(Bytes::new(&parts.tokenizer, &specials)),
            tags: Tags::new(&list, format),
            format,
            end_ids: parts.end_ids,
            vocabulary: parts.tokenizer.get_vocab_size(true),
            hash: chela_model::tokenizer_hash(&parts.tokenizer),
            encoder: Encoder::new(parts.tokenizer, &list)?,
            specials,
            vocabulary_of_grammars: OnceLock::new(),
        })
    }

    fn read_calls_as(&mut self, format: CallFormat) {
        let specials: Vec<_> = self.specials.clone().into_iter().collect();
        self.tags = Tags::new(&specials, format);
        self.format = format;
    }

    /// Replaces the time that templates are told (the system's, in UTC).
    pub fn with_clock(mut self, clock: Clock) -> Self {
        if let Some(template) = &mut self.tool_template {
            template.set_clock(clock.clone());
        }
        self.template.set_clock(clock);
        self
    }

    /// SHA-256 of the tokenizer; must equal the engine's.
    pub fn tokenizer_hash(&self) -> &str {
        &self.hash
    }

    /// Ids that end a reply.
    pub fn end_ids(&self) -> &[TokenId] {
        &self.end_ids
    }

    /// Forgets the words it remembers for speed: they are people's.
    pub fn forget_words(&self) {
        self.encoder.forget_words();
    }

    /// Token ids of the tokenizer.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The template has a place for tools.
    pub fn supports_tools(&self) -> bool {
        self.tool_template.is_some() || self.template.tools
    }

    fn template(&self, conversation: &Conversation) -> Result<&Template, ChatError> {
        match &self.tool_template {
            _ if conversation.tools.is_empty() => Ok(&self.template),
            Some(template) => Ok(template),
            None if self.template.tools => Ok(&self.template),
            None => Err(ChatError::NoTools),
        }
    }

    /// Renders for generation. With `reuse`, the tokens begin with the recorded ones when the template writes the same history;
    /// else a new segment with the reason.
    ///
    /// System messages stay where they are as long as the template takes them there; when it refuses, all of them (an API's
    /// `developer` messages included) are joined by two newlines into one message at the start.
    pub fn render(
        &self,
        conversation: &Conversation,
        reuse: Result<&ReusablePrefix, &str>,
    ) -> Result<Rendered, ChatError> {
        let template = self.template(conversation)?;
        let prepared = Prepared::new(conversation, &self.encoder)?;
        let whole = template.render(&prepared, prepared.len(), true)?;
        let why = match reuse {
            Err(why) => why,
            Ok(reuse) => match self.after(template, &prepared, &whole, reuse) {
                Err(why) => why,
                Ok(rest) => {
                    let mut tokens = reuse.tokens.clone();
                    // Encoded with the end token, which decides what becomes of white space after it.
                    let rest = self.encoder.rendered(rest, false)?;
                    tokens.extend(rest.into_iter().skip(usize::from(reuse.ended)));
                    let segment = Segment::Extends;
                    return Ok(Rendered { tokens, segment });
                }
            },
        };
        Ok(Rendered {
            tokens: self.encoder.rendered(&whole, true)?,
            segment: Segment::Opened(why.to_owned()),
        })
    }

    /// What the template writes from the end token on that closes the recorded answer, or why the tokens are not what it writes.
    fn after<'a>(
        &self,
        template: &Template,
        prepared: &Prepared,
        whole: &'a str,
        reuse: &ReusablePrefix,
    ) -> Result<&'a str, &'static str> {
        if let Some(rest) = self.verbatim(reuse, whole) {
            return Ok(rest);
        }
        let answers = |at: usize| prepared.role(at) == Some(Role::Assistant);
        let before = reuse.messages.checked_sub(1).filter(|at| answers(*at));
        let before = before.ok_or("history edited")?;
        let part = |count, generate| {
            let text = template.render(prepared, count, generate);
            text.map_err(|_| "the template refuses the history alone")
        };
        let asked = part(before, true)?;
        let answered = part(reuse.messages, false)?;
        let close_in = |text: &str| {
            let ends = self.end_ids.iter().filter_map(|id| self.specials.get(id));
            ends.filter_map(|end| text.find(end.as_str())).min()
        };
        if !whole.starts_with(&answered) || !answered.starts_with(&asked) {
            // Some templates write a last answer in another way than the same answer further up (Qwen3: an empty thought). What
            // counts is whether it is written as it was said.
            let close = whole.strip_prefix(asked.as_str()).and_then(close_in);
            let at = asked.len() + close.ok_or("the template rewrites earlier turns")?;
            let written = unguard(&whole[..at]);
            return if self.spells(&reuse.tokens, reuse.ended, &written) {
                Ok(&whole[at..])
            } else {
                Err("the template rewrites earlier turns")
            };
        }
        let head = (0..before).take_while(|at| !answers(*at)).count();
        if !self.begins(&reuse.tokens, &part(head, false)?) {
            return Err("tools, template options or date changed");
        }
        let close = close_in(&answered[asked.len()..]);
        let at = close.ok_or("the template closes an answer without an end token")?;
        Ok(&whole[asked.len() + at..])
    }

    /// How a template writes a token: control tokens by their texts.
    fn written(&self, id: TokenId) -> &[u8] {
        match self.specials.get(&id) {
            Some(text) => text.as_bytes(),
            None => self.bytes.of(id),
        }
    }

    /// What follows the tokens where the text begins with the very text that they spell, and then ends the answer: most often, and
    /// then nothing else need be rendered.
    fn verbatim<'a>(&self, reuse: &ReusablePrefix, whole: &'a str) -> Option<&'a str> {
        let said = reuse.tokens.len().checked_sub(usize::from(reuse.ended))?;
        let mut rest = whole.as_bytes();
        for id in &reuse.tokens[..said] {
            rest = rest.strip_prefix(self.written(*id))?;
        }
        let rest = whole.get(whole.len() - rest.len()..)?;
        let mut ends = self.end_ids.iter().filter_map(|id| self.specials.get(id));
        ends.any(|end| rest.starts_with(end.as_str()))
            .then_some(rest)
    }

    /// The tokens, less the end token when the last is one, are this text but for white space.
    fn spells(&self, tokens: &[TokenId], ended: bool, text: &str) -> bool {
        let tokens = &tokens[..tokens.len() - usize::from(ended).min(tokens.len())];
        let said = tokens.iter().flat_map(|id| self.written(*id));
        let solid = |byte: &&u8| !byte.is_ascii_whitespace();
        said.filter(solid).eq(text.as_bytes().iter().filter(solid))
    }

    /// The recorded tokens begin with this rendered text: the messages before any answer, with the tools.
    fn begins(&self, tokens: &[TokenId], head: &str) -> bool {
        let text = unguard(head);
        let mut rest = text.as_bytes();
        for id in tokens {
            let bytes = self.written(*id);
            let n = bytes.len().min(rest.len());
            if bytes[..n] != rest[..n] {
                break;
            }
            rest = &rest[n..];
            if rest.is_empty() {
                break;
            }
        }
        if rest.is_empty() {
            return true;
        }
        // A tokenizer that normalizes does not give the same text back. Up to the last control token no id depends on what
        // follows.
        let mut ids = self.encoder.rendered(head, true).unwrap_or_default();
        while ids.last().is_some_and(|id| !self.specials.contains_key(id)) {
            ids.pop();
        }
        !ids.is_empty() && tokens.starts_with(&ids)
    }

    /// The prompt with a hint appended to the message it answers: the last user message, or the last message when there is
    /// none. An empty hint gives the plain prompt.
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
        let prepared = Prepared::new(&hinted, &self.encoder)?;
        let template = self.template(&hinted)?;
        let whole = template.render(&prepared, prepared.len(), true)?;
        self.encoder.rendered(&whole, true)
    }

    /// Ordinary text: never a control id.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, ChatError> {
        self.encoder.ordinary(text)
    }

    /// Text as a model writes it: what spells a control token becomes one. Never for text that a person or client sent.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<TokenId>, ChatError> {
        self.encoder.rendered(text, false)
    }

    /// Text of ids, control tokens left out.
    pub fn decode(&self, ids: &[TokenId]) -> String {
        self.bytes.text(ids)
    }

    /// Raw bytes of one token; none of a control token.
    pub fn token_bytes(&self, id: TokenId) -> Vec<u8> {
        self.bytes.of(id).to_vec()
    }

    /// Text as ids come.
    pub fn decoder(&self) -> TextDecoder {
        TextDecoder::new(self.bytes.clone())
    }

    /// Compiles the form that a reply to this conversation is to have. The first one takes a moment: the vocabulary is prepared.
    pub fn grammar(
        &self,
        constraint: &Constraint,
        conversation: &Conversation,
    ) -> Result<Grammar, ChatError> {
        let prepare = || {
            let made = Vocabulary::new(self.bytes.clone(), &self.specials, &self.end_ids);
            made.map(Arc::new)
        };
        let vocabulary = self.vocabulary_of_grammars.get_or_init(prepare);
        vocabulary
            .clone()?
            .grammar(constraint, &conversation.tools, self.format)
    }

    /// Follows a reply for the engine: keeps it to a form, and ends it when one of the stop strings is complete. `None` when
    /// there is neither.
    pub fn guide(&self, stops: &[String], grammar: Option<&Grammar>) -> Option<Box<dyn Guide>> {
        let stop = stops.iter().any(|stop| !stop.is_empty());
        let stop = stop.then(|| StopGuide::new(self.decoder(), stops));
        match (grammar, stop) {
            (Some(grammar), stop) => Some(grammar.guide(stop)),
            (None, Some(stop)) => Some(Box::new(stop)),
            (None, None) => None,
        }
    }

    /// Follows a reply.
    pub fn answer_parser(&self, options: AnswerOptions) -> AnswerParser {
        AnswerParser::new(self.decoder(), (self.tags.clone(), self.format), options)
    }
}

/// Every token that is no text: those named, those the tokenizer calls special, and what opens or ends a text.
fn control_tokens(parts: &ChatParts) -> BTreeMap<TokenId, String> {
    let tokenizer = &parts.tokenizer;
    let added = tokenizer.get_added_tokens_decoder();
    let special = added.iter().filter(|(_, token)| token.special);
    let mut all: BTreeMap<TokenId, String> = special
        .map(|(id, token)| (*id, token.content.clone()))
        .collect();
    for text in [&parts.bos, &parts.eos].into_iter().flatten() {
        if let Some(id) = tokenizer.token_to_id(text) {
            all.insert(id, text.clone());
        }
    }
    for id in &parts.end_ids {
        if let Some(text) = tokenizer.id_to_token(*id) {
            all.insert(*id, text);
        }
    }
    all.extend(parts.specials.iter().cloned());
    all
}
