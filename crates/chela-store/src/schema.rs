//! Opens the file, refuses what a later program wrote, and brings what an earlier one wrote up to date.

use chela_core::StoreError;
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, config::DbConfig};
use std::{
    fs::File,
    path::{Path, PathBuf},
    time::Duration,
};

/// The schema this program writes.
pub const SCHEMA: usize = MIGRATIONS.len();

/// `MIGRATIONS[n]` leads from schema n to n + 1. Released ones are never edited.
const MIGRATIONS: &[&str] = &[
    include_str!("schema.sql"),
    include_str!("schema_2.sql"),
    include_str!("schema_3.sql"),
];

/// "chel": another program's database is not taken for ours.
const APPLICATION: i64 = 0x6368_656c;

/// How long to wait for another process that is in the file.
pub(crate) const BUSY: Duration = Duration::from_secs(5);

const PROGRAM: &str = concat!("chela ", env!("CARGO_PKG_VERSION"));

fn unusable(path: &Path, why: impl std::fmt::Display) -> StoreError {
    StoreError::Unusable(format!("{}: {why}", path.display()))
}

/// An error of SQLite, in words that say what to do where a person can.
fn failed(path: &Path, error: rusqlite::Error) -> StoreError {
    match error.sqlite_error_code() {
        Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => unusable(
            path,
            format!(
                "it is damaged or no database ({error}); put a backup in its place (`chela backup` makes them) or name \
                 another folder with --data-dir"
            ),
        ),
        _ => unusable(path, error),
    }
}

/// The writer's connection; creates the file or migrates it first.
pub(crate) fn open_writer(path: &Path) -> Result<Connection, StoreError> {
    open_with(path, MIGRATIONS)
}

fn open_with(path: &Path, migrations: &[&str]) -> Result<Connection, StoreError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_CREATE
        | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let failed = |e: rusqlite::Error| failed(path, e);
    let conn = Connection::open_with_flags(path, flags).map_err(failed)?;
    owner_only(path)?;
    conn.busy_timeout(BUSY).map_err(failed)?;
    let found = check(&conn, path, migrations.len())?;
    settings(&conn).map_err(failed)?;
    if found < migrations.len() {
        migrate(&conn, path, found, migrations)?;
    }
    let sql = "UPDATE meta SET value = ?1 WHERE key = 'written_by' AND value <> ?1";
    conn.execute(sql, [PROGRAM]).map_err(failed)?;
    sync_folder(path)?;
    Ok(conn)
}

/// A connection that cannot write.
pub(crate) fn open_reader(path: &Path) -> Result<Connection, StoreError> {
    let failed = |e: rusqlite::Error| failed(path, e);
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let conn = Connection::open_with_flags(path, flags).map_err(failed)?;
    conn.busy_timeout(BUSY).map_err(failed)?;
    conn.set_prepared_statement_cache_capacity(64);
    stable_plans(&conn).map_err(failed)?;
    no_temporary_files(&conn).map_err(failed)?;
    let found = check(&conn, path, SCHEMA)?;
    if found < SCHEMA {
        let why = format!(
            "it has schema {found}: start `chela serve` of {PROGRAM} on it once, which brings it up to date"
        );
        return Err(unusable(path, why));
    }
    Ok(conn)
}

/// The file's schema, when it is one this program can use.
fn check(conn: &Connection, path: &Path, newest: usize) -> Result<usize, StoreError> {
    let failed = |e: rusqlite::Error| failed(path, e);
    let pragma = |name: &str| conn.pragma_query_value(None, name, |r| r.get::<_, i64>(0));
    let version = pragma("user_version").map_err(failed)?;
    let application = pragma("application_id").map_err(failed)?;
    let tables: i64 = conn
        .query_row("SELECT count(*) FROM sqlite_schema", [], |r| r.get(0))
        .map_err(failed)?;
    if tables == 0 && version == 0 {
        return Ok(0);
    }
    if application != APPLICATION {
        let why = "this is the database of another program; name another folder with --data-dir";
        return Err(unusable(path, why));
    }
    let found = usize::try_from(version).map_err(|e| unusable(path, e))?;
    if found > newest {
        let sql = "SELECT value FROM meta WHERE key = 'written_by'";
        let by: Option<String> = conn
            .query_row(sql, [], |r| r.get(0))
            .optional()
            .ok()
            .flatten();
        let by = by.unwrap_or_else(|| "a later chela".to_owned());
        return Err(unusable(
            path,
            format!(
                "it has schema {found} and {PROGRAM} knows schemas up to {newest}; \
                 it was written by {by}: use that program or a later one"
            ),
        ));
    }
    Ok(found)
}

/// Plans do not depend on bound values: else each new value has its statement prepared again, which took a fifth of the server's time.
fn stable_plans(conn: &Connection) -> rusqlite::Result<()> {
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)
        .map(|_| ())
}

/// What people said must not get into temporary files.
fn no_temporary_files(conn: &Connection) -> rusqlite::Result<()> {
    conn.execute_batch("PRAGMA temp_store = MEMORY")
}

fn settings(conn: &Connection) -> rusqlite::Result<()> {
    stable_plans(conn)?;
    no_temporary_files(conn)?;
    conn.set_prepared_statement_cache_capacity(64);
    // Answers with the mode it really set, hence a query.
    conn.query_row("PRAGMA journal_mode = WAL", [], |r| r.get::<_, String>(0))?;
    conn.execute_batch(
        "PRAGMA synchronous = FULL;
         PRAGMA fullfsync = ON;
         PRAGMA checkpoint_fullfsync = ON;
         PRAGMA foreign_keys = ON;
         PRAGMA journal_size_limit = 67108864;",
    )?;
    conn.query_row("PRAGMA secure_delete = ON", [], |_| Ok(()))
}

fn migrate(
    conn: &Connection,
    path: &Path,
    found: usize,
    migrations: &[&str],
) -> Result<(), StoreError> {
    let failed = |e: rusqlite::Error| unusable(path, format!("migration from {found}: {e}"));
    if found > 0 {
        let copy = copy_path(path, found);
        keep_copy(conn, &copy).map_err(|e| unusable(&copy, e))?;
    }
    let transaction = conn.unchecked_transaction().map_err(failed)?;
    for sql in &migrations[found..] {
        transaction.execute_batch(sql).map_err(failed)?;
    }
    transaction
        .pragma_update(None, "user_version", migrations.len() as i64)
        .map_err(failed)?;
    transaction
        .pragma_update(None, "application_id", APPLICATION)
        .map_err(failed)?;
    transaction.commit().map_err(failed)
}

/// Where the copy made before leaving schema `from` lies.
fn copy_path(path: &Path, from: usize) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".schema-{from}"));
    PathBuf::from(name)
}

fn keep_copy(conn: &Connection, copy: &Path) -> Result<(), Box<dyn std::error::Error>> {
    // One from a migration that was interrupted; its original is still there.
    if copy.exists() {
        std::fs::remove_file(copy)?;
    }
    let name = copy.to_str().ok_or("the path is not Unicode")?;
    conn.execute("VACUUM INTO ?1", [name])?;
    File::open(copy)?.sync_all()?;
    owner_only(copy)?;
    Ok(())
}

/// Removes the copies kept before migrations: what is forgotten must not live on in them.
pub(crate) fn remove_copies(path: &Path) {
    for from in (0..SCHEMA).skip(1) {
        let copy = copy_path(path, from);
        if copy.exists()
            && let Err(error) = std::fs::remove_file(&copy)
        {
            tracing::warn!(path = %copy.display(), %error, "cannot remove the copy from before a migration");
        }
    }
}

/// Brings everything from the log into the database and cuts it off; `false` when a reader is in it.
pub(crate) fn empty_log(conn: &Connection) -> rusqlite::Result<bool> {
    let sql = "PRAGMA wal_checkpoint(TRUNCATE)";
    conn.query_row(sql, [], |row| Ok(!row.get::<_, bool>(0)?))
}

/// Something was forgotten, and the program ended before the log was empty and the files were searched.
pub(crate) fn is_owed(conn: &Connection) -> rusqlite::Result<bool> {
    let sql = "SELECT value FROM meta WHERE key = 'truncate_owed'";
    conn.query_row(sql, [], |row| row.get(0))
}

/// It need not be looked after any more.
pub(crate) fn settle(conn: &Connection) -> rusqlite::Result<()> {
    let sql = "UPDATE meta SET value = 0 WHERE key = 'truncate_owed'";
    conn.execute(sql, []).map(drop)
}

#[cfg(unix)]
fn owner_only(path: &Path) -> Result<(), StoreError> {
    use std::os::unix::fs::PermissionsExt;
    // SQLite gives its other files the mode of this one.
    let mode = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(path, mode).map_err(|e| unusable(path, e))
}

#[cfg(not(unix))]
fn owner_only(_: &Path) -> Result<(), StoreError> {
    Ok(())
}

/// A new file is only there for good when its folder is synced too.
fn sync_folder(path: &Path) -> Result<(), StoreError> {
    match path.parent() {
        #[cfg(unix)]
        Some(folder) => File::open(folder)
            .and_then(|f| f.sync_all())
            .map_err(|e| unusable(folder, e)),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "schema_2_tests.rs"]
mod schema_2_tests;

#[cfg(test)]
mod tests {
    use super::*;

    fn version(conn: &Connection) -> i64 {
        conn.pragma_query_value(None, "user_version", |r| r.get(0))
            .unwrap()
    }

    #[test]
    fn a_copy_is_kept_before_a_migration() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chela.db");
        let conn = open_with(&path, MIGRATIONS).unwrap();
        assert_eq!(version(&conn), SCHEMA as i64);
        drop(conn);
        let mut more = MIGRATIONS.to_vec();
        more.push("CREATE TABLE later (x); DROP TABLE pauses;");
        let conn = open_with(&path, &more).unwrap();
        assert_eq!(version(&conn), SCHEMA as i64 + 1);
        conn.execute("INSERT INTO later VALUES (1)", []).unwrap();
        let copy = Connection::open(copy_path(&path, SCHEMA)).unwrap();
        assert_eq!(version(&copy), SCHEMA as i64);
        copy.execute("DELETE FROM pauses", []).unwrap();
    }

    #[test]
    fn a_failed_migration_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chela.db");
        drop(open_with(&path, MIGRATIONS).unwrap());
        let mut more = MIGRATIONS.to_vec();
        more.extend(["DROP TABLE pauses", "nonsense"]);
        assert!(open_with(&path, &more).is_err());
        let conn = open_with(&path, MIGRATIONS).unwrap();
        conn.execute("DELETE FROM pauses", []).unwrap();
    }

    #[test]
    fn a_later_schema_is_refused_with_the_program_it_needs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chela.db");
        let conn = open_with(&path, MIGRATIONS).unwrap();
        conn.pragma_update(None, "user_version", 99).unwrap();
        conn.execute(
            "UPDATE meta SET value = 'chela 9.9' WHERE key = 'written_by'",
            [],
        )
        .unwrap();
        drop(conn);
        for error in [open_writer(&path).err(), open_reader(&path).err()] {
            let text = error.unwrap().to_string();
            assert!(
                text.contains("schema 99") && text.contains("chela 9.9"),
                "{text}"
            );
        }
    }

    #[test]
    fn another_programs_database_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chela.db");
        Connection::open(&path)
            .unwrap()
            .execute_batch("CREATE TABLE x (y)")
            .unwrap();
        let error = open_writer(&path).err().unwrap().to_string();
        assert!(error.contains("another program"), "{error}");
        std::fs::write(
            &path,
            "not a database, but long enough to be taken for one".repeat(99),
        )
        .unwrap();
        assert!(open_writer(&path).is_err());
    }
}
