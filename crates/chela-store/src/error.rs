//! What goes wrong inside, sorted into what the seam knows.

use chela_core::StoreError;
use rusqlite::{Error as Sql, ErrorCode};

/// A refusal or damage that concerns one transaction, or an error of SQLite.
#[derive(Debug)]
pub(crate) enum Fail {
    Store(StoreError),
    Sql(Sql),
}

impl From<StoreError> for Fail {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<Sql> for Fail {
    fn from(error: Sql) -> Self {
        Self::Sql(error)
    }
}

/// What an error means for the transactions behind one sync.
pub(crate) enum Blame {
    /// This transaction alone fails.
    One(StoreError),
    /// All of them fail, later ones may succeed: the disk is full, or another process is in the file.
    Later(String),
    /// Nothing is certain any more.
    Fatal(String),
}

impl Fail {
    pub fn blame(self) -> Blame {
        match self {
            Self::Store(error) => Blame::One(error),
            Self::Sql(error) => match error.sqlite_error_code() {
                Some(ErrorCode::DiskFull) => {
                    Blame::Later(format!("{error}; nothing was written, free some space"))
                }
                Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
                    Blame::Later(format!("{error}; only one process may write it"))
                }
                Some(ErrorCode::ConstraintViolation | ErrorCode::TooBig) => {
                    Blame::One(StoreError::Conflict(error.to_string()))
                }
                Some(_) => Blame::Fatal(error.to_string()),
                // Rust's side of the binding: a value of the wrong type came back.
                None => Blame::One(StoreError::Damaged(error.to_string())),
            },
        }
    }

    /// For reads, where nothing can be left half done.
    pub fn of_read(self) -> StoreError {
        match self {
            Self::Store(error) => error,
            Self::Sql(error) => match error.sqlite_error_code() {
                Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) | None => {
                    StoreError::Damaged(format!("{}: {error}", crate::DATABASE))
                }
                Some(_) => StoreError::Unusable(format!("{}: {error}", crate::DATABASE)),
            },
        }
    }
}

/// Refuses a write.
pub(crate) fn refuse<T>(why: impl Into<String>) -> Result<T, Fail> {
    Err(Fail::Store(StoreError::Conflict(why.into())))
}

/// What was read is not what was written.
pub(crate) fn damaged(what: impl std::fmt::Display, why: impl std::fmt::Display) -> Fail {
    Fail::Store(StoreError::Damaged(format!("{what}: {why}")))
}

/// Names what was being read when a value had the wrong type.
pub(crate) fn reading(what: impl std::fmt::Display) -> impl FnOnce(Sql) -> Fail {
    move |error| match error.sqlite_error_code() {
        None => damaged(what, error),
        Some(_) => Fail::Sql(error),
    }
}
