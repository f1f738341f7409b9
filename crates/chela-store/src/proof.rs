//! Looks for what was forgotten in every file of the store, while the writer goes on.

use crate::{
    error::Fail,
    forget::Forgotten,
    schema,
    shared::Shared,
    wipe::{self, Lasting},
    writer::{Order, Task, Wipe},
};
use aho_corasick::{AhoCorasick, AhoCorasickKind, BuildError};
use chela_core::{Forget, ForgetProof, StoreError};
use futures_channel::oneshot;
use rusqlite::types::ValueRef;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

/// How long the log may be held by readers before the proof says what is still in it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });

/// Bytes read at once: a multiple of every page size.
const CHUNK: usize = 1 << 20;

/// Searches, each after what the one before found was wiped or explained.
const ROUNDS: usize = 3;

/// Before the next search while a reader is in the log.
const PAUSE: Duration = Duration::from_millis(100);

/// Forgets, then proves it.
pub(crate) struct Forgetting {
    pub forget: Forget,
    pub done: Option<Forgotten>,
    pub reply: oneshot::Sender<Result<ForgetProof, StoreError>>,
    pub path: PathBuf,
    pub shared: Arc<Shared>,
    pub orders: mpsc::Sender<Order>,
}

impl Task for Forgetting {
    fn run(&mut self, change: &mut crate::apply::Change<'_>) -> Result<(), Fail> {
        self.done = Some(change.forget(&self.forget)?);
        Ok(())
    }

    fn answer(self: Box<Self>, failure: Option<StoreError>) {
        let (failure, forgotten) = match (failure, self.done) {
            (None, Some(forgotten)) => (None, Some(forgotten)),
            (failure, _) => (failure, None),
        };
        let Some(forgotten) = forgotten else {
            let why = || StoreError::Dead("a transaction was not run".to_owned());
            let _ = self.reply.send(Err(failure.unwrap_or_else(why)));
            return;
        };
        let reply = self.reply;
        let search = Search {
            path: self.path,
            shared: self.shared,
            orders: self.orders,
            pieces: forgotten.pieces,
            proof: ForgetProof {
                plan: forgotten.plan,
                ..ForgetProof::default()
            },
        };
        let named = std::thread::Builder::new().name("chela-store-proof".to_owned());
        // Without a thread the sender is dropped, which its receiver tells as an error.
        if let Err(error) = named.spawn(move || drop(reply.send(search.run()))) {
            tracing::error!(%error, "it is forgotten, but no thread can be started to look for it");
        }
    }
}

struct Search {
    path: PathBuf,
    shared: Arc<Shared>,
    orders: mpsc::Sender<Order>,
    pieces: Vec<Vec<u8>>,
    proof: ForgetProof,
}

/// What one search found.
#[derive(Default)]
struct Findings {
    /// Files, and which pieces are in each.
    files: BTreeMap<String, BTreeSet<usize>>,
    bytes: u64,
    /// Pages of the database whose unused middle is not empty.
    dirty: Vec<u64>,
}

impl Search {
    fn run(mut self) -> Result<ForgetProof, StoreError> {
        let patience = Instant::now() + PATIENCE;
        let mut wiped = false;
        for round in 1.. {
            self.shared.wait_for_log(patience)?;
            let findings = self.search()?;
            self.leave_out_held(&findings)?;
            let found = self.still_found(&findings);
            if !wiped || !found.is_empty() {
                wiped = self.wipe(&findings.dirty)?;
            }
            self.proof.pieces = self.pieces.iter().filter(|p| !p.is_empty()).count() as u64;
            self.proof.bytes = findings.bytes;
            self.proof.files = findings.files.into_keys().collect();
            self.proof.found = found;
            if self.proof.found.is_empty() && wiped {
                // Should the writer be gone, the next opening looks again.
                let _ = self.orders.send(Order::Proven);
                break;
            }
            if Instant::now() >= patience || (wiped && round >= ROUNDS) {
                break;
            }
            if !wiped {
                std::thread::sleep(PAUSE);
            }
        }
        if !self.proof.found.is_empty() {
            tracing::error!(files = ?self.proof.found, "pieces of what was forgotten are still there");
        }
        Ok(self.proof)
    }

    fn closed<T>(&self) -> Result<T, StoreError> {
        let why = "the store was closed before its files were searched; what was to be forgotten is removed";
        Err(StoreError::Unusable(why.to_owned()))
    }

    fn unreadable(path: &Path, error: impl std::fmt::Display) -> StoreError {
        let why = "it is forgotten, but whether the file still holds it cannot be told";
        StoreError::Unusable(format!("{}: {error}; {why}", path.display()))
    }

    fn patterns(&self, which: impl Iterator<Item = usize>) -> Result<Patterns<'_>, StoreError> {
        let places = which.filter(|i| !self.pieces[*i].is_empty()).collect();
        Patterns::new(&self.pieces, places).map_err(|e| Self::unreadable(&self.path, e))
    }

    fn search(&self) -> Result<Findings, StoreError> {
        let mut findings = Findings::default();
        for path in self.files()? {
            let name = path.file_name().unwrap_or_default();
            let name = name.to_string_lossy().into_owned();
            let database = path == self.path;
            let patterns = self.patterns(0..self.pieces.len())?;
            match self.search_file(&path, database, patterns, &mut findings) {
                Ok(Some(found)) => drop(findings.files.insert(name, found)),
                Ok(None) => return self.closed(),
                // A log or a copy that is gone holds nothing.
                Err(e) if e.kind() == io::ErrorKind::NotFound && !database => {}
                Err(e) => return Err(Self::unreadable(&path, e)),
            }
        }
        Ok(findings)
    }

    /// The database, and whatever lies beside it under its name.
    fn files(&self) -> Result<Vec<PathBuf>, StoreError> {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        let own = self.path.file_name().unwrap_or_default().to_string_lossy();
        let mut files = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(|e| Self::unreadable(folder, e))? {
            let path = entry.map_err(|e| Self::unreadable(folder, e))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(&*own) && path.is_file() {
                files.push(path);
            }
        }
        files.sort();
        Ok(files)
    }

    /// The pieces in one file; `None` when the store is being closed.
    fn search_file(
        &self,
        path: &Path,
        database: bool,
        mut patterns: Patterns<'_>,
        findings: &mut Findings,
    ) -> io::Result<Option<BTreeSet<usize>>> {
        let mut source = Source::open(path, database)?;
        let page = self.shared.page_size();
        let overlap = self.pieces.iter().map(Vec::len).max().unwrap_or(1).max(1) - 1;
        let mut found = BTreeSet::new();
        let mut buffer = vec![0; overlap + CHUNK];
        let (mut kept, mut at) = (0, 0_u64);
        loop {
            if self.shared.is_closing() {
                return Ok(None);
            }
            let read = source.read(at, &mut buffer[kept..kept + CHUNK])?;
            if database {
                for (i, bytes) in buffer[kept..kept + read].chunks_exact(page).enumerate() {
                    let number = at / page as u64 + i as u64 + 1;
                    if wipe::is_dirty(number, bytes) {
                        findings.dirty.push(number);
                    }
                }
            }
            let filled = kept + read;
            patterns.find(&buffer[..filled], &mut found);
            at += read as u64;
            findings.bytes += read as u64;
            // What is written behind the end meanwhile is not what was forgotten.
            if read < CHUNK {
                return Ok(Some(found));
            }
            let next = overlap.min(filled);
            buffer.copy_within(filled - next..filled, 0);
            kept = next;
        }
    }

    fn still_found(&self, findings: &Findings) -> Vec<String> {
        let files = findings.files.iter();
        let holding = files.filter(|(_, found)| found.iter().any(|i| !self.pieces[*i].is_empty()));
        holding.map(|(name, _)| name.clone()).collect()
    }

    /// Pieces that something remaining holds too are no longer looked for.
    fn leave_out_held(&mut self, findings: &Findings) -> Result<(), StoreError> {
        let all = findings.files.values().flatten().copied();
        let all: BTreeSet<usize> = all.collect();
        if all.is_empty() {
            return Ok(());
        }
        let patterns = self.patterns(all.iter().copied())?;
        let held = self.held(patterns, all.len());
        for piece in held.map_err(Fail::of_read)? {
            self.pieces[piece] = Vec::new();
        }
        if self.shared.is_closing() {
            return self.closed();
        }
        Ok(())
    }

    /// Which of these pieces are in a row of any table.
    fn held(&self, mut patterns: Patterns<'_>, of: usize) -> Result<BTreeSet<usize>, Fail> {
        let conn = schema::open_reader(&self.path)?;
        let moment = conn.unchecked_transaction()?;
        let sql =
            "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'";
        let mut statement = moment.prepare(sql)?;
        let tables = statement.query_map([], |row| row.get::<_, String>(0))?;
        let mut held = BTreeSet::new();
        for table in tables {
            let mut rows = moment.prepare(&format!("SELECT * FROM {}", table?))?;
            let columns = rows.column_count();
            let mut rows = rows.query([])?;
            while let Some(row) = rows.next()? {
                for column in 0..columns {
                    if let ValueRef::Text(bytes) | ValueRef::Blob(bytes) = row.get_ref(column)? {
                        patterns.find(bytes, &mut held);
                    }
                }
                if held.len() == of || self.shared.is_closing() {
                    return Ok(held);
                }
            }
        }
        Ok(held)
    }

    /// Has the writer empty the log and the middles of these pages; `false` when a reader kept it from that.
    fn wipe(&self, dirty: &[u64]) -> Result<bool, StoreError> {
        let mut all = true;
        let none: &[u64] = &[];
        for pages in dirty.chunks(wipe::AT_ONCE).chain([none]) {
            let (reply, done) = mpsc::channel();
            let pages = pages.to_vec();
            let sent = self.orders.send(Order::Wipe(Wipe { pages, reply }));
            if sent.is_err() || self.shared.is_closing() {
                return self.closed();
            }
            all &= done.recv().unwrap_or(false);
        }
        Ok(all)
    }
}

/// Up to so many patterns get the quicker kind of automaton; of more it would take too much memory.
const QUICK: usize = 1_000;

/// After so many hits those that were found are no longer looked for: a system prompt may be in every second page.
const MANY: usize = 1_000;

struct Patterns<'a> {
    pieces: &'a [Vec<u8>],
    automaton: AhoCorasick,
    /// Of each pattern, which piece it is.
    places: Vec<usize>,
    hits: usize,
}

impl<'a> Patterns<'a> {
    fn new(pieces: &'a [Vec<u8>], places: Vec<usize>) -> Result<Self, BuildError> {
        let kind = (places.len() <= QUICK).then_some(AhoCorasickKind::DFA);
        Ok(Self {
            automaton: AhoCorasick::builder()
                .kind(kind)
                .build(places.iter().map(|i| &pieces[*i]))?,
            pieces,
            places,
            hits: 0,
        })
    }

    fn find(&mut self, bytes: &[u8], found: &mut BTreeSet<usize>) {
        for hit in self.automaton.find_overlapping_iter(bytes) {
            found.insert(self.places[hit.pattern().as_usize()]);
            self.hits += 1;
        }
        if self.hits > MANY {
            let left = self.places.iter().copied();
            let left = left.filter(|i| !found.contains(i)).collect();
            // Should it fail, the old one does as well, only slower.
            if let Ok(smaller) = Self::new(self.pieces, left) {
                *self = smaller;
            }
        }
    }
}

/// A file to read from its beginning to its end.
enum Source {
    /// SQLite has locks on it.
    Lasting(Arc<Lasting>),
    Own(File),
}

impl Source {
    fn open(path: &Path, database: bool) -> io::Result<Self> {
        let locked = database || path.to_string_lossy().ends_with("-shm");
        Ok(if locked {
            Self::Lasting(wipe::lasting(path)?)
        } else {
            Self::Own(File::open(path)?)
        })
    }

    /// Fills the buffer unless the file ends.
    fn read(&mut self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Lasting(file) => file.read_at(at, buffer),
            Self::Own(file) => {
                let mut filled = 0;
                while filled < buffer.len() {
                    match file.read(&mut buffer[filled..])? {
                        0 => break,
                        n => filled += n,
                    }
                }
                Ok(filled)
            }
        }
    }
}
