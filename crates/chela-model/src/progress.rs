//! How a long download tells a person how far it is.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Receives the state of one download after the other.
pub trait Progress {
    /// A transfer begins; `total` bytes when known.
    fn start(&mut self, what: &str, total: Option<u64>);
    /// So many bytes of it are there.
    fn set(&mut self, done: u64);
    /// It is over, well or not.
    fn finish(&mut self);
    /// One line about a wait that is not a transfer.
    fn note(&mut self, line: &str);
}

/// Says nothing.
#[derive(Debug, Default, Clone, Copy)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn start(&mut self, _what: &str, _total: Option<u64>) {}
    fn set(&mut self, _done: u64) {}
    fn finish(&mut self) {}
    fn note(&mut self, _line: &str) {}
}

/// A bar on stderr; silent when stderr is not a terminal.
#[derive(Debug, Default)]
pub struct TerminalProgress {
    bar: Option<ProgressBar>,
}

impl TerminalProgress {
    /// A new bar, not yet drawn.
    pub fn new() -> Self {
        Self::default()
    }
}

const BAR: &str = "{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec}";
const SPINNER: &str = "{msg} {spinner} {bytes} {bytes_per_sec}";

impl Progress for TerminalProgress {
    fn start(&mut self, what: &str, total: Option<u64>) {
        self.finish();
        if !std::io::stderr().is_terminal() {
            return;
        }
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr());
        let template = if total.is_some() { BAR } else { SPINNER };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(what.to_owned());
        self.bar = Some(bar);
    }

    fn set(&mut self, done: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        }
    }

    fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn note(&mut self, line: &str) {
        tracing::info!("{line}");
    }
}
