//! What `kedge check` looks for, and what the job's proxies have found: written by those, and read
//! by the job's supervisor.

use crate::told;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;

/// The version of [`Report`] that this one writes.
pub const FORMAT: u32 = 1;
/// Longest file of findings that is read, in bytes.
const MAX_FILE_LEN: u64 = 8 << 20;
/// Most findings of all files together that are kept.
const MAX_FINDINGS: usize = 10_000;

/// What is looked for beyond memory errors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Check {
    /// Races in shared memory.
    pub races: bool,
    /// Reads of memory that nobody has written.
    pub init: bool,
    /// Allocations that nobody uses.
    pub unused: bool,
}

impl Check {
    /// Returns it as a proxy's option has it: words between commas.
    pub fn words(self) -> String {
        let parts = [("races", self.races), ("init", self.init), ("unused", self.unused)];
        let on = parts.iter().filter(|(_, on)| *on).map(|(word, _)| *word);
        std::iter::once("memory").chain(on).collect::<Vec<_>>().join(",")
    }

    /// Reads what [`Check::words`] wrote; `None` for other words.
    pub fn of_words(words: &str) -> Option<Check> {
        let mut check = Check::default();
        for word in words.split(',') {
            match word {
                "memory" => {}
                "races" => check.races = true,
                "init" => check.init = true,
                "unused" => check.unused = true,
                _ => return None,
            }
        }
        Some(check)
    }
}

/// Where something was done, and by which thread of its block.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Place {
    /// What was done, such as `read of 4 bytes`.
    pub action: String,
    /// The source file; absent where the compiler has told no lines (`nvcc -lineinfo`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    /// Into which line the compiler has inlined it: a file and a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inlined_at: Option<(String, u32)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ptx_line: Option<u32>,
    pub thread: [u32; 3],
}

/// A mistake that was found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Finding {
    /// `memory`, `race`, `uninitialised`, `unused`, `barrier` or `fault`.
    pub kind: String,
    /// All of it in one line.
    pub message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    pub block: [u32; 3],
    #[serde(flatten)]
    pub place: Place,
    /// The other access, of two.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub other: Option<Place>,
    /// The generic address, or the offset in shared memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<u64>,
    /// How often it was found at that place.
    pub count: u64,
    /// The process that had the device: its proxy's id.
    pub proxy: u32,
}

/// What was found in a job.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    pub format: u32,
    pub findings: Vec<Finding>,
    /// Places beyond those that are listed.
    pub more: u64,
}

impl Report {
    /// Returns whether nothing was found.
    pub fn is_empty(&self) -> bool {
        self.findings.is_empty() && self.more == 0
    }

    /// Writes it in place of what this process has written there before, as a whole.
    ///
    /// # Errors
    /// As of files.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        let path = folder.join(format!("{}.json", std::process::id()));
        told::replace(&path, &serde_json::to_vec(self)?)
    }

    /// Adds what another one tells.
    fn add(&mut self, one: Report) {
        let room = MAX_FINDINGS.saturating_sub(self.findings.len());
        let beyond = one.findings.len().saturating_sub(room) as u64;
        self.more = self.more.saturating_add(one.more).saturating_add(beyond);
        self.findings.extend(one.findings.into_iter().take(room));
    }
}

/// What all proxies of a job have told.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    pub report: Report,
    /// Files that nobody can read, which may have told more, and why.
    pub unread: Vec<String>,
}

impl Found {
    /// Returns what all files of a folder tell.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn of_folder(folder: &Path) -> io::Result<Found> {
        let report = Report { format: FORMAT, ..Report::default() };
        let mut all = Found { report, unread: Vec::new() };
        for path in told::files(folder, "json")? {
            let text = told::read(&path, MAX_FILE_LEN);
            match text.and_then(|text| Ok(serde_json::from_slice(&text)?)) {
                Ok(one) => all.report.add(one),
                Err(error) => all.unread.push(format!("{}: {error}", path.display())),
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn words_are_read_as_they_were_written() {
        for bits in 0..8 {
            let check = Check { races: bits & 1 != 0, init: bits & 2 != 0, unused: bits & 4 != 0 };
            assert_eq!(Check::of_words(&check.words()), Some(check));
        }
        assert_eq!(Check::of_words("memory,rases"), None);
        assert_eq!(Check::of_words(""), None);
    }

    #[test]
    fn reports_of_several_proxies_become_one() {
        let folder = std::env::temp_dir().join(format!("kedge-check-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let finding = |line| Finding {
            kind: "race".into(),
            place: Place { line: Some(line), ..Place::default() },
            ..Finding::default()
        };
        let one = |lines: &[u32], more| Report {
            format: FORMAT,
            findings: lines.iter().map(|line| finding(*line)).collect(),
            more,
        };
        one(&[1], 0).write(&folder).unwrap();
        one(&[1, 2], 3).write(&folder).unwrap();
        let write = |name: &str, text: Vec<u8>| fs::write(folder.join(name), text).unwrap();
        write("x.json", serde_json::to_vec(&one(&[7], u64::MAX - 3)).unwrap());
        write("z.new", serde_json::to_vec(&one(&[9], 1)).unwrap());
        let all = Found::of_folder(&folder).unwrap();
        let lines: Vec<_> = all.report.findings.iter().filter_map(|one| one.place.line).collect();
        assert_eq!((lines, all.report.more), (vec![1, 2, 7], u64::MAX));
        assert!(!all.report.is_empty() && all.unread.is_empty() && Report::default().is_empty());

        write("a.json", serde_json::to_vec(&one(&[5], 1)).unwrap());
        let mut long = serde_json::to_vec(&one(&[11], 0)).unwrap();
        long.resize(MAX_FILE_LEN as usize + 1, b' ');
        write("long.json", long);
        write("y.json", b"{\"findings\": 1}".to_vec());
        std::os::unix::fs::symlink("a.json", folder.join("link.json")).unwrap();
        let made = std::process::Command::new("mkfifo").arg(folder.join("b.json")).status();
        assert!(made.unwrap().success());
        let all = Found::of_folder(&folder).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        let lines: Vec<_> = all.report.findings.iter().filter_map(|one| one.place.line).collect();
        assert_eq!((lines, all.unread.len()), (vec![1, 2, 5, 7], 4), "{:?}", all.unread);
    }
}
