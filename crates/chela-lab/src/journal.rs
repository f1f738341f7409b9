//! What is kept of a run as it goes, a file of JSON lines: its setting, each reading, its end. From it a run goes on where it stopped, and
//! from the journals of several runs the curves are drawn.

use crate::LabError;
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

/// What makes two runs the same run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Setting {
    /// Base model.
    pub model: String,
    /// What the users like.
    pub taste: String,
    /// What becomes of their words: `binary`, `opd`, `combined`, `coin`, `none`.
    pub teaching: String,
    /// Seed of users and adapter.
    pub seed: u64,
    /// Optimizer steps.
    pub updates: u64,
    /// Samples of a step.
    pub batch: usize,
    /// Learning rate.
    pub lr: f64,
    /// Who finds the users' words.
    pub speaker: String,
    /// Held-out prompts read before the first step and after the last.
    pub held_out: usize,
    /// Of these, read at each version.
    pub live: usize,
    /// Problems whose answer is checked.
    pub checked: usize,
    /// Where the problems are from.
    pub problems: String,
}

/// Held-out prompts read greedily with one version.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// Optimizer steps made.
    pub update: u64,
    /// The version.
    pub version: u64,
    /// All prompts, not only those of the curve.
    pub whole: bool,
    /// Which replies pass, in the order of the prompts.
    pub passing: Vec<bool>,
    /// Which answers are right; empty where none was checked.
    pub right: Vec<bool>,
    /// Share of replies no other one equals.
    pub distinct: f64,
    /// Share on topic.
    pub on_topic: f64,
    /// Mean tokens of a reply, cut at the limit.
    pub mean_tokens: f64,
    /// Mean k1 to the base model, nats a token, on these replies.
    pub kl_to_base: f64,
    /// Mean negative log-prob of these replies under the base model.
    pub base_nll: f64,
    /// Sessions begun so far.
    pub sessions: u64,
    /// Sessions until three in a row were as the user likes them.
    pub three: Option<u64>,
    /// Seconds since this run began or went on.
    pub seconds: f64,
}

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Setting(Setting),
    Reading(Reading),
    /// It went on after a stop.
    Resumed,
    /// All is read; why it ended.
    End(String),
}

/// A run as far as it is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// What it is.
    pub setting: Setting,
    /// Readings in their order.
    pub readings: Vec<Reading>,
    /// How often it went on after a stop.
    pub resumed: u64,
    /// How it ended; `None` = it did not.
    pub ended: Option<String>,
}

impl Run {
    /// The whole reading before the first step.
    pub fn start(&self) -> Option<&Reading> {
        self.readings.iter().find(|r| r.whole && r.update == 0)
    }

    /// The whole reading after the last one.
    pub fn end(&self) -> Option<&Reading> {
        self.ended.as_ref()?;
        self.readings.iter().rfind(|r| r.whole)
    }
}

/// The journal of one run, open for more.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    run: Run,
}

impl Journal {
    /// Opens a run's journal, or begins one. One of another setting is refused: what it holds is no part of this run.
    pub fn open(path: &Path, setting: Setting) -> Result<Self, LabError> {
        let wrong = |what: String| LabError::Journal(format!("{}: {what}", path.display()));
        // Killed before the first line was whole: nothing is lost by beginning anew.
        let begun = fs::read(path).is_ok_and(|text| text.contains(&b'\n'));
        if !begun {
            let _ = fs::remove_file(path);
            let journal = Self {
                path: path.to_owned(),
                run: Run {
                    setting: setting.clone(),
                    readings: Vec::new(),
                    resumed: 0,
                    ended: None,
                },
            };
            journal.write(&Line::Setting(setting))?;
            return Ok(journal);
        }
        let run = read(path)?;
        if run.setting != setting {
            return Err(wrong(format!(
                "a run of another setting is kept here ({:?}, now {setting:?}); name another folder with --out, or delete it",
                run.setting
            )));
        }
        let mut journal = Self {
            path: path.to_owned(),
            run,
        };
        if journal.run.ended.is_none() {
            journal.end_line()?;
            journal.run.resumed += 1;
            journal.write(&Line::Resumed)?;
        }
        Ok(journal)
    }

    /// As far as it is.
    pub fn run(&self) -> &Run {
        &self.run
    }

    /// Keeps a reading.
    pub fn reading(&mut self, reading: Reading) -> Result<(), LabError> {
        self.write(&Line::Reading(reading.clone()))?;
        self.run.readings.push(reading);
        Ok(())
    }

    /// It is over.
    pub fn end(&mut self, why: &str) -> Result<(), LabError> {
        self.write(&Line::End(why.to_owned()))?;
        self.run.ended = Some(why.to_owned());
        Ok(())
    }

    /// A last line that was cut must not swallow the next.
    fn end_line(&self) -> Result<(), LabError> {
        let whole = fs::read(&self.path).map(|text| text.ends_with(b"\n"));
        if whole.map_err(|e| self.wrong(&e))? {
            return Ok(());
        }
        self.append("")
    }

    fn write(&self, line: &Line) -> Result<(), LabError> {
        let text = serde_json::to_string(line).map_err(|e| self.wrong(&e))?;
        self.append(&text)
    }

    fn append(&self, line: &str) -> Result<(), LabError> {
        let mut options = OpenOptions::new();
        let file = options.create(true).append(true).open(&self.path);
        let mut file = file.map_err(|e| self.wrong(&e))?;
        writeln!(file, "{line}").map_err(|e| self.wrong(&e))
    }

    fn wrong(&self, what: &dyn std::fmt::Display) -> LabError {
        LabError::Journal(format!("{}: {what}", self.path.display()))
    }
}

/// Reads a journal. A last line that was cut when the program was killed is left out.
pub fn read(path: &Path) -> Result<Run, LabError> {
    let wrong = |what: String| LabError::Journal(format!("{}: {what}", path.display()));
    let text = fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
    let mut run: Option<Run> = None;
    for line in text.lines() {
        let Ok(line) = serde_json::from_str::<Line>(line) else {
            continue;
        };
        match (line, &mut run) {
            (Line::Setting(setting), None) => {
                run = Some(Run {
                    setting,
                    readings: Vec::new(),
                    resumed: 0,
                    ended: None,
                });
            }
            (Line::Reading(reading), Some(run)) => run.readings.push(reading),
            (Line::Resumed, Some(run)) => run.resumed += 1,
            (Line::End(why), Some(run)) => run.ended = Some(why),
            _ => {}
        }
    }
    run.ok_or_else(|| wrong("this is no journal of an experiment".to_owned()))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn setting(teaching: &str, seed: u64) -> Setting {
        Setting {
            model: "m".to_owned(),
            taste: "brief".to_owned(),
            teaching: teaching.to_owned(),
            seed,
            updates: 2,
            batch: 4,
            lr: 2e-4,
            speaker: "scripted".to_owned(),
            held_out: 4,
            live: 2,
            checked: 4,
            problems: "built in".to_owned(),
        }
    }

    #[test]
    fn a_run_goes_on_where_it_stopped() {
        let path = std::env::temp_dir().join(format!("chela-journal-{}", std::process::id()));
        let _ = fs::remove_file(&path);
        let mut journal = Journal::open(&path, setting("opd", 1)).unwrap();
        let reading = Reading {
            update: 1,
            passing: vec![true, false],
            ..Reading::default()
        };
        journal.reading(reading.clone()).unwrap();
        // Killed in the middle of a line.
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        write!(file, "{{\"reading\": {{\"upd").unwrap();
        drop(file);
        let mut again = Journal::open(&path, setting("opd", 1)).unwrap();
        assert_eq!(again.run().readings, [reading]);
        assert!(again.run().ended.is_none());
        again.end("as it was to").unwrap();
        let over = Journal::open(&path, setting("opd", 1)).unwrap();
        assert_eq!(over.run().resumed, 1);
        assert_eq!(over.run().ended.as_deref(), Some("as it was to"));
        let other = Journal::open(&path, setting("opd", 2)).unwrap_err();
        assert!(other.to_string().contains("--out"), "{other}");
        fs::write(&path, "{\"setting\": {\"mo").unwrap();
        assert!(Journal::open(&path, setting("opd", 3)).is_ok());
        fs::write(&path, "no journal\n").unwrap();
        assert!(read(&path).is_err());
        fs::remove_file(&path).unwrap();
    }
}
