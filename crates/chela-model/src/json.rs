//! Reads the JSON files of a model folder and takes typed values out of them.

use std::path::Path;

use serde_json::Value;

use crate::error::{ModelError, Result};

/// A JSON file must be an object.
pub(crate) fn read(path: &Path) -> Result<Value> {
    let bytes = std::fs::read(path).map_err(|e| ModelError::io(path, e))?;
    let value: Value = serde_json::from_slice(&bytes)
        .map_err(|e| ModelError::format(path, format!("not valid JSON: {e}")))?;
    if value.is_object() {
        Ok(value)
    } else {
        Err(ModelError::format(path, "not a JSON object"))
    }
}

/// The same, or `None` when the folder has no such file.
pub(crate) fn read_optional(path: &Path) -> Result<Option<Value>> {
    if path.exists() {
        read(path).map(Some)
    } else {
        Ok(None)
    }
}

/// One JSON object and the file it came from, for messages.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    pub value: &'a Value,
    pub path: &'a Path,
}

impl<'a> Fields<'a> {
    fn bad(&self, key: &str, expected: &str) -> ModelError {
        let reason = match self.value.get(key) {
            Some(found) => format!("{key} is {found}, expected {expected}"),
            None => format!("{key} is missing, expected {expected}"),
        };
        ModelError::format(self.path, reason)
    }

    /// Present and not null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|value| !value.is_null())
    }

    /// An object below this one.
    pub fn object(&self, key: &str) -> Option<Self> {
        let value = self.get(key).filter(|value| value.is_object())?;
        Some(Self {
            value,
            path: self.path,
        })
    }

    /// A size that must be there.
    pub fn size(&self, key: &str) -> Result<usize> {
        self.optional_size(key)?
            .ok_or_else(|| self.bad(key, "a whole number"))
    }

    /// A size that may be absent.
    pub fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let size = value.as_u64().and_then(|n| usize::try_from(n).ok());
        size.map(Some)
            .ok_or_else(|| self.bad(key, "a whole number"))
    }

    /// A number that must be there.
    pub fn number(&self, key: &str) -> Result<f32> {
        self.optional_number(key)?
            .ok_or_else(|| self.bad(key, "a number"))
    }

    /// A number that may be absent.
    pub fn optional_number(&self, key: &str) -> Result<Option<f32>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let number = value.as_f64().map(|x| x as f32);
        number.map(Some).ok_or_else(|| self.bad(key, "a number"))
    }

    /// A switch that may be absent.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        value
            .as_bool()
            .map(Some)
            .ok_or_else(|| self.bad(key, "true or false"))
    }

    /// A text that may be absent.
    pub fn text(&self, key: &str) -> Option<&'a str> {
        self.get(key).and_then(Value::as_str)
    }

    /// Token ids: absent, one, or a list.
    pub fn ids(&self, key: &str) -> Result<Vec<u32>> {
        let id = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids = match self.get(key) {
            None => Some(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(id).collect(),
            Some(value) => id(value).map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.bad(key, "token ids"))
    }
}
