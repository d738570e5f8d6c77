//! What a traced job has done and when: written by its proxies as it happens, each to a file of its
//! own, and made one trace by the job's supervisor. The file is in the format of Chrome's traces,
//! which Perfetto shows too.
//!
//! A file has a line of JSON for each thing. What is in it when a process is killed stays, and a
//! last line that is cut off is left out.

mod merge;
mod table;
#[cfg(test)]
mod tests;

pub use merge::{Merged, merge};
pub use table::{Row, Table};

use crate::told;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Longest line that is written and read, in bytes.
const MAX_LINE_LEN: usize = 16 << 10;
/// Most characters of a name that are kept: names of kernels from templates have no end.
const MAX_NAME_LEN: usize = 1000;
/// Bytes of a file that are kept for whose it is and for what its process has left out.
const RESERVE: u64 = 4096;
/// Bytes of the line that says what was left out, of two numbers of 20 digits. It has its place
/// from the beginning on: there may be none when a disk is full.
const LAST: usize = 80;

/// What is asked of a job that is traced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The file that gets the trace; `None` where the table is all that is wanted.
    pub file: Option<PathBuf>,
    /// Bytes that each process's proxy writes at most.
    pub limit: u64,
}

/// What something was that took time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A driver function that the program called.
    Call,
    Kernel,
    /// A copy or fill.
    Copy,
    /// A graph, as a whole.
    Graph,
    /// A function of the program's, in a stream.
    Host,
    /// The devices stood still for kedge.
    Pause,
}

impl Kind {
    /// All of them, in the order in which they are told.
    pub const ALL: [Kind; 6] =
        [Kind::Call, Kind::Kernel, Kind::Copy, Kind::Graph, Kind::Host, Kind::Pause];

    /// Returns the word for it in traces.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Call => "call",
            Kind::Kernel => "kernel",
            Kind::Copy => "copy",
            Kind::Graph => "graph",
            Kind::Host => "host",
            Kind::Pause => "pause",
        }
    }
}

/// Something that took time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    pub kind: Kind,
    pub name: String,
    /// Nanoseconds of the machine's CLOCK_MONOTONIC, as is `end`.
    pub begin: u64,
    pub end: u64,
    /// Of a call: its thread. Of what a device does: its stream.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lane: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<u32>,
    /// Of a copy.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes: u64,
    /// What a call returned: CUresult.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub outcome: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A line of a proxy's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Line {
    Span(Span),
    /// The first: whose file it is.
    Client {
        client: u32,
        program: String,
    },
    /// How many spans had no room in it, and how many came too fast. Blank until that is known.
    Left {
        left: u64,
        #[serde(default)]
        lost: u64,
    },
}

/// A proxy's file, open. What finds no room in it is counted.
#[derive(Debug)]
pub struct Writer {
    file: File,
    /// Where what was left out is to be written.
    last: u64,
    /// Lines that are on their way to it.
    buffer: Vec<u8>,
    /// Bytes that may still be written.
    room: u64,
    left: u64,
    lost: u64,
}

impl Writer {
    /// Makes the file of this process in a folder, for what process `client` does.
    ///
    /// # Errors
    /// As of files.
    pub fn create(folder: &Path, limit: u64, client: u32, program: &str) -> io::Result<Writer> {
        let file = told::create(&folder.join(format!("{}.jsonl", std::process::id())))?;
        let room = limit.saturating_sub(RESERVE);
        let mut first = Vec::new();
        put(&mut first, &Line::Client { client, program: shortened(program.to_owned()) })?;
        let last = first.len() as u64;
        first.extend_from_slice(&blank(Vec::new()));
        let mut writer = Writer { file, last, buffer: Vec::new(), room, left: 0, lost: 0 };
        writer.file.write_all(&first)?;
        Ok(writer)
    }

    /// Appends something; after the first that has no room, nothing more.
    pub fn span(&mut self, span: Span) {
        let before = self.buffer.len();
        let span = Span { name: shortened(span.name), ..span };
        let put = self.left == 0 && put(&mut self.buffer, &Line::Span(span)).is_ok();
        let bytes = (self.buffer.len() - before) as u64;
        if put && bytes <= self.room {
            self.room -= bytes;
        } else {
            self.buffer.truncate(before);
            self.left = self.left.saturating_add(1);
        }
    }

    /// Counts what came too fast to be written.
    pub fn lose(&mut self, count: u64) {
        self.lost = self.lost.saturating_add(count);
    }

    /// Returns how many bytes are not in the file yet.
    pub fn waiting(&self) -> usize {
        self.buffer.len()
    }

    /// Hands over what is not in the file yet. A disk that is full loses it.
    pub fn flush(&mut self) {
        if !self.buffer.is_empty() && self.file.write_all(&self.buffer).is_err() {
            let lines = self.buffer.iter().filter(|byte| **byte == b'\n').count();
            self.left = self.left.saturating_add(lines as u64);
        }
        self.buffer.clear();
    }

    /// Hands over all, and says how much was left out. Nothing comes after this.
    pub fn close(&mut self) {
        self.flush();
        let (left, lost) = (self.left, self.lost);
        if left > 0 || lost > 0 {
            let mut last = Vec::new();
            if put(&mut last, &Line::Left { left, lost }).is_ok() {
                // Takes no more room: also on a disk that is full.
                let _ = self.file.write_all_at(&blank(last), self.last);
            }
        }
    }
}

fn put(buffer: &mut Vec<u8>, line: &Line) -> io::Result<()> {
    serde_json::to_writer(&mut *buffer, line)?;
    buffer.push(b'\n');
    Ok(())
}

/// Fills a line up to the length of the last one.
fn blank(mut line: Vec<u8>) -> Vec<u8> {
    if line.last() == Some(&b'\n') {
        line.pop();
    }
    line.resize(LAST - 1, b' ');
    line.push(b'\n');
    line
}

fn shortened(mut name: String) -> String {
    if let Some((at, _)) = name.char_indices().nth(MAX_NAME_LEN) {
        name.truncate(at);
        name.push('…');
    }
    name
}
