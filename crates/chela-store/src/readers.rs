//! Connections for reading: each read sees one moment and waits for no write.

use crate::{error::Fail, schema};
use chela_core::StoreError;
use rusqlite::Connection;
use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

/// Connections kept open; more are made when more read at once.
const KEPT: usize = 4;

pub(crate) struct Readers {
    path: PathBuf,
    idle: Mutex<Vec<Connection>>,
}

impl Readers {
    pub fn new(path: PathBuf) -> Result<Self, StoreError> {
        let first = schema::open_reader(&path)?;
        Ok(Self {
            path,
            idle: Mutex::new(vec![first]),
        })
    }

    /// Runs queries that all see the same moment.
    pub fn read<T>(
        &self,
        query: impl FnOnce(&Connection) -> Result<T, Fail>,
    ) -> Result<T, StoreError> {
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = idle().pop();
        let conn = match kept {
            Some(conn) => conn,
            None => schema::open_reader(&self.path)?,
        };
        let result = Self::at_one_moment(&conn, query).map_err(Fail::of_read);
        let mut idle = idle();
        if idle.len() < KEPT {
            idle.push(conn);
        }
        result
    }

    fn at_one_moment<T>(
        conn: &Connection,
        query: impl FnOnce(&Connection) -> Result<T, Fail>,
    ) -> Result<T, Fail> {
        let moment = conn.unchecked_transaction()?;
        let result = query(&moment);
        // Ends the moment; there is nothing to roll back.
        moment.finish()?;
        result
    }
}
