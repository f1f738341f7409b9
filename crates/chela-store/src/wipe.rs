//! Overwrites what SQLite leaves behind in its pages.
//!
//! `secure_delete` zeroes a row where it is deleted. But when SQLite moves rows between pages (it does so when one is inserted
//! or deleted between others), the bytes they leave stay in the unused middle of the old page, and zeroing the row later does
//! not reach them. That middle has no meaning to SQLite, so it can be zeroed in the file. The writer does it, with the log
//! empty and its own cache dropped, so that no older copy of the page is written over it.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, SeekFrom, Write},
    ops::Range,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

/// Pages wiped between two groups of writes, at most.
pub(crate) const AT_ONCE: usize = 512;

/// Page numbers below this have a first byte of 0 or 1. A page that begins with one (an overflow page, a free one) can then not
/// be taken for one of a tree, which begins with 2, 5, 10 or 13. With pages of 4 KiB the file is below 128 GiB.
const MOST_PAGES: u64 = 0x0200_0000;

/// A file that stays open until the process ends. Closing any handle of a file takes away all POSIX locks that the process has
/// on it, those of SQLite's own handles too; so the database and its `-shm` are opened once and never closed.
pub(crate) struct Lasting(Mutex<File>);

impl Lasting {
    /// Reads from an offset until the buffer is full or the file ends.
    pub fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(at))?;
        let mut filled = 0;
        while filled < buffer.len() {
            match file.read(&mut buffer[filled..]) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(filled)
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(at))?;
        file.write_all(bytes)
    }
}

/// Which file it is, whatever its name.
type Identity = (u64, u64);

#[cfg(unix)]
fn identity(path: &Path) -> io::Result<Identity> {
    use std::os::unix::fs::MetadataExt;
    let found = std::fs::metadata(path)?;
    Ok((found.dev(), found.ino()))
}

/// Elsewhere closing takes no locks away; a handle of its own for each use will do.
#[cfg(not(unix))]
fn identity(path: &Path) -> io::Result<Identity> {
    use std::sync::atomic::{AtomicU64, Ordering};
    static COUNT: AtomicU64 = AtomicU64::new(0);
    std::fs::metadata(path)?;
    Ok((0, COUNT.fetch_add(1, Ordering::Relaxed)))
}

static OPEN: Mutex<Vec<(Identity, Arc<Lasting>)>> = Mutex::new(Vec::new());

/// The handle of a file that SQLite has locks on.
pub(crate) fn lasting(path: &Path) -> io::Result<Arc<Lasting>> {
    let which = identity(path)?;
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, file)) = open.iter().find(|(other, _)| *other == which) {
        return Ok(file.clone());
    }
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let file = Arc::new(Lasting(Mutex::new(file)));
    open.push((which, file.clone()));
    Ok(file)
}

/// The unused middle of a page of a tree: after the list of cells, before the cells. `number` counts from 1.
fn gap(number: u64, page: &[u8]) -> Option<Range<usize>> {
    // The file's own header comes first.
    let head = if number == 1 { 100 } else { 0 };
    let two = |at: usize| {
        let bytes = page.get(at..at + 2)?;
        Some(usize::from(u16::from_be_bytes([bytes[0], bytes[1]])))
    };
    let list = match page.get(head)? {
        2 | 5 => head + 12,
        10 | 13 => head + 8,
        _ => return None,
    };
    let from = list + 2 * two(head + 3)?;
    let to = match two(head + 5)? {
        0 => 65_536,
        to => to,
    };
    (from <= to && to <= page.len() && number < MOST_PAGES).then_some(from..to)
}

/// Something lies in the page where nothing should.
pub(crate) fn is_dirty(number: u64, page: &[u8]) -> bool {
    gap(number, page).is_some_and(|gap| page[gap].iter().any(|b| *b != 0))
}

/// Zeroes the middles of these pages and syncs. Only for the one thread that writes the file.
pub(crate) fn wipe(path: &Path, page_size: usize, numbers: &[u64]) -> io::Result<()> {
    let file = lasting(path)?;
    let mut page = vec![0; page_size];
    for number in numbers {
        let at = (number - 1) * page_size as u64;
        if file.read_at(at, &mut page)? < page_size {
            continue;
        }
        if is_dirty(*number, &page)
            && let Some(gap) = gap(*number, &page)
        {
            let zeros = vec![0; gap.len()];
            file.write_at(at + gap.start as u64, &zeros)?;
        }
    }
    let file = file.0.lock().unwrap_or_else(PoisonError::into_inner);
    file.sync_data()
}

/// The same for every page of the file.
pub(crate) fn wipe_all(path: &Path, page_size: usize) -> io::Result<()> {
    let pages = std::fs::metadata(path)?.len() / page_size as u64;
    let all: Vec<u64> = (1..=pages).collect();
    wipe(path, page_size, &all)
}
