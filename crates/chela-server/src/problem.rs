//! Why a request is not answered, in OpenAI's JSON shape. The one place where refusals become statuses.

use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use chela_core::Refusal;
use serde_json::{Value, json};

/// An error answer.
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    pub(crate) code: Option<&'static str>,
    pub(crate) param: Option<String>,
    pub(crate) retry_after: Option<u32>,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            code: None,
            param: None,
            retry_after: None,
        }
    }

    pub(crate) fn code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    pub(crate) fn unavailable(message: impl Into<String>, retry_after: u32) -> Self {
        Refusal::Unavailable {
            message: message.into(),
            retry_after,
        }
        .into()
    }

    /// For routes on which the only thing that can be missing is the model.
    pub(crate) fn of_model(refusal: Refusal) -> Self {
        let missing = matches!(refusal, Refusal::NotFound(_));
        let mut problem = Self::from(refusal);
        if missing {
            problem.code = Some("model_not_found");
            problem.param = Some("model".to_owned());
        }
        problem
    }

    fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            409 => "conflict_error",
            410 => "gone_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            500 => "server_error",
            503 => "service_unavailable",
            _ => "invalid_request_error",
        }
    }

    /// The object clients read.
    pub(crate) fn json(&self) -> Value {
        json!({ "error": {
            "message": self.message, "type": self.kind(), "param": self.param, "code": self.code,
        }})
    }
}

impl Problem {
    /// As Anthropic's clients read it.
    pub(crate) fn anthropic(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        };
        // The words by which these clients know that they must shorten the conversation.
        let message = match self.code {
            Some("context_length_exceeded") => format!("prompt is too long: {}", self.message),
            _ => self.message.clone(),
        };
        json!({"type": "error", "error": {"type": kind, "message": message}})
    }

    /// The whole answer in that shape.
    pub(crate) fn anthropic_response(self) -> Response {
        let body = self.anthropic();
        self.respond(&body)
    }

    fn respond(self, body: &Value) -> Response {
        let mut response = json_response(self.status, body);
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        let new = |status| Self::new(status, message.clone());
        match refusal {
            Refusal::Invalid { field, .. } => Self {
                param: Some(field),
                ..new(StatusCode::BAD_REQUEST)
            },
            Refusal::Unauthenticated(_) => new(StatusCode::UNAUTHORIZED).code("invalid_api_key"),
            Refusal::Forbidden(_) => new(StatusCode::FORBIDDEN),
            Refusal::NotFound(_) => new(StatusCode::NOT_FOUND),
            Refusal::Gone(_) => new(StatusCode::GONE),
            Refusal::Conflict(_) => new(StatusCode::CONFLICT),
            Refusal::ContextLength { .. } => Self {
                param: Some("messages".to_owned()),
                ..new(StatusCode::BAD_REQUEST).code("context_length_exceeded")
            },
            // ZeroClaw reads the hint in the text, all others in the header.
            Refusal::Unavailable {
                message,
                retry_after,
            } => Self {
                message: format!("{message} (retry-after: {retry_after})"),
                retry_after: Some(retry_after),
                ..new(StatusCode::SERVICE_UNAVAILABLE)
            },
            Refusal::Internal(_) => {
                tracing::error!(error = %message, "a request failed");
                new(StatusCode::INTERNAL_SERVER_ERROR)
            }
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let body = self.json();
        self.respond(&body)
    }
}

/// A JSON answer.
pub(crate) fn json_response(status: StatusCode, body: &impl serde::Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => {
            let mut response = Response::new(Body::from(bytes));
            *response.status_mut() = status;
            response.headers_mut().insert(
                header::CONTENT_TYPE,
                HeaderValue::from_static("application/json"),
            );
            response
        }
        Err(error) => {
            tracing::error!(%error, "an answer could not be written as JSON");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
