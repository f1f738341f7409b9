//! Names of things: profiles, sessions, turns, versions.

use crate::error::NameError;
use std::fmt;

/// A token of the model's vocabulary.
pub type TokenId = u32;

/// Milliseconds since the Unix epoch. Whoever has a clock passes the value in; nothing here reads one.
pub type Millis = i64;

/// A user or agent that learns on its own. A key names it; an adapter belongs to it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Profile(String);

impl Profile {
    /// The name of the profile used when no key names another.
    pub const DEFAULT: &'static str = "default";

    /// Accepts 1 to 64 characters of `a-z A-Z 0-9 . _ -` that do not begin with a dot, so that a profile can name a folder.
    pub fn new(name: impl Into<String>) -> Result<Self, NameError> {
        let name = name.into();
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.chars().all(legal) {
            return Err(NameError::Profile(name));
        }
        Ok(Self(name))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for Profile {
    fn default() -> Self {
        Self(Self::DEFAULT.to_owned())
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A client's name for one conversation: opaque text, never a path. Identity is (profile, session).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(String);

impl SessionId {
    /// Accepts 1 to 256 characters without control characters; not `.` and `..`, which no address can hold.
    pub fn new(id: impl Into<String>) -> Result<Self, NameError> {
        let id = id.into();
        if matches!(id.as_str(), "" | "." | "..")
            || id.chars().count() > 256
            || id.chars().any(char::is_control)
        {
            return Err(NameError::Session(id.chars().take(80).collect()));
        }
        Ok(Self(id))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One request and its answer. Never used twice; later turns have larger ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TurnId(pub u64);

impl TurnId {
    /// Reads what [`fmt::Display`] writes: `turn_` and 16 hexadecimal digits. Prefixes an API puts before it (as in
    /// `chatcmpl-turn_…`) are the API's to strip.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix("turn_")?;
        if digits.len() != 16 {
            return None;
        }
        u64::from_str_radix(digits, 16).ok().map(Self)
    }
}

impl fmt::Display for TurnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "turn_{:016x}", self.0)
    }
}

/// What may be trained once: one judged turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SampleId(pub u64);

/// One state of a profile's weights. Numbers are never used twice within a profile; 0 is the base model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PolicyVersion {
    /// Whose weights.
    pub profile: Profile,
    /// 0 = base model without an adapter.
    pub number: u64,
}

impl PolicyVersion {
    /// The base model, as that profile sees it.
    pub fn base(profile: Profile) -> Self {
        Self { profile, number: 0 }
    }
}

impl fmt::Display for PolicyVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.profile, self.number)
    }
}

/// Which weights a call wants.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PolicyRef {
    /// The base model: judges and references.
    Base,
    /// Whatever the profile serves when the call arrives.
    Served(Profile),
    /// Exactly this version, which must be resident or registered.
    Version(PolicyVersion),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_are_folder_names() {
        for bad in ["", "..", ".x", "a/b", "a b", "ü", &"x".repeat(65)] {
            assert!(Profile::new(bad).is_err(), "{bad:?}");
        }
        assert_eq!(
            Profile::new("open-claw_1.2").unwrap().as_str(),
            "open-claw_1.2"
        );
    }

    #[test]
    fn sessions_are_opaque_text() {
        for bad in ["", "a\nb", "a\0b", &"界".repeat(257)] {
            assert!(SessionId::new(bad).is_err());
        }
        assert!(SessionId::new("../../etc/passwd").is_ok());
        assert!(SessionId::new("界".repeat(256)).is_ok());
    }

    #[test]
    fn turn_ids_round_trip() {
        let id = TurnId(0x1234_5678_9abc_def0);
        assert_eq!(TurnId::parse(&id.to_string()), Some(id));
        assert_eq!(TurnId::parse("turn_12"), None);
        assert_eq!(TurnId::parse("1234567890123456"), None);
    }
}
