//! The one place that prints: answers to stdout, notes and progress to stderr.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use anyhow::Result;
use std::io::Write;

/// How to print.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    /// JSON for scripts.
    pub json: bool,
}

impl Output {
    /// A line of the answer, on stdout.
    pub fn plain(&self, line: &str) -> Result<()> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{line}")?;
        Ok(out.flush()?)
    }

    /// A line for the person, on stderr.
    pub fn note(&self, line: &str) {
        eprintln!("{line}");
    }

    /// Where tables go: stdout for people, stderr when stdout is for a script.
    pub fn table(&self) -> Box<dyn Write + Send> {
        if self.json {
            Box::new(std::io::stderr())
        } else {
            Box::new(std::io::stdout())
        }
    }
}

/// One JSON object on one line.
pub fn json_line(value: &serde_json::Value) -> String {
    value.to_string()
}
