//! `--events FILE`: what happens, as lines of JSON, for programs that follow a command.

use crate::Failure;
use clap::Args;
use kedge_control::joblog::timestamp;
use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Serialize, Serializer};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Write events to FILE, a line of JSON each, as they come: time, event, and what belongs to
    /// it. FILE may be a pipe that somebody reads
    #[arg(long, value_name = "FILE")]
    events: Option<PathBuf>,
}

impl EventsArgs {
    /// Opens the file, which grows. A pipe is never waited for, neither for its reader nor for
    /// room: what is told of goes on.
    ///
    /// # Errors
    /// It cannot be written to, or is a pipe that nobody reads.
    pub(crate) fn open(&self) -> Result<Events, Failure> {
        let Some(path) = &self.events else { return Ok(Events::default()) };
        let mut options = OpenOptions::new();
        options.append(true).create(true).custom_flags(OFlags::NONBLOCK.bits() as i32);
        let bad = |error: io::Error| {
            let is_unread = error.raw_os_error() == Some(Errno::NXIO.raw_os_error());
            let why = if is_unread { "nobody reads that pipe".into() } else { error.to_string() };
            Failure::new(format!("--events {}: {why}", path.display()))
        };
        let sink = Sink { file: options.open(path).map_err(bad)?, cut: Mutex::new(false) };
        Ok(Events { file: Some(Arc::new(sink)), path: self.events.clone() })
    }

    /// As [`Self::open`]; where the file cannot be opened now, that is tried again by whoever goes
    /// on with the job.
    pub(crate) fn open_or_later(&self) -> Events {
        self.open().unwrap_or_else(|_| Events { file: None, path: self.events.clone() })
    }
}

/// Where events go, if anywhere.
#[derive(Debug, Clone, Default)]
pub(crate) struct Events {
    file: Option<Arc<Sink>>,
    path: Option<PathBuf>,
}

#[derive(Debug)]
struct Sink {
    file: File,
    /// The last line was cut: there was no room for all of it.
    cut: Mutex<bool>,
}

impl Events {
    pub(crate) fn are_wanted(&self) -> bool {
        self.file.is_some()
    }

    /// Returns the file's name, for whoever goes on with it.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Writes a line, or loses it where nobody reads.
    pub(crate) fn tell(&self, event: &Event<'_>) {
        if let Some(sink) = &self.file {
            sink.write(&line(SystemTime::now(), event));
        }
    }
}

impl Sink {
    /// Writes a line as a whole; the one behind a line that was cut begins anew.
    fn write(&self, line: &str) {
        let mut cut = self.cut.lock().unwrap_or_else(PoisonError::into_inner);
        let text = if *cut { format!("\n{line}") } else { line.to_owned() };
        if let Ok(written) = (&self.file).write(text.as_bytes()) {
            *cut = written < text.len() && (written > 0 || *cut);
        }
    }
}

fn line(at: SystemTime, event: &Event<'_>) -> String {
    #[derive(Serialize)]
    struct Line<'a> {
        time: String,
        #[serde(flatten)]
        event: &'a Event<'a>,
    }
    let line = serde_json::to_string(&Line { time: timestamp(at), event });
    line.map(|line| line + "\n").unwrap_or_default()
}

/// What happens. docs/events.md has each name and field: they are for scripts, and stay.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event<'a> {
    /// Of a checkpoint: so much is written.
    Writing {
        job: &'a str,
        #[serde(serialize_with = "readable_if_any")]
        image: Option<&'a Path>,
        done: u64,
        bytes: Option<u64>,
    },
    /// The job runs again.
    Captured {
        job: &'a str,
        #[serde(serialize_with = "readable")]
        image: &'a Path,
        processes: usize,
        stall_seconds: f64,
        warnings: &'a [String],
    },
    /// So much of an image has been read, and compared.
    Verifying {
        #[serde(serialize_with = "readable")]
        image: &'a Path,
        done: u64,
        bytes: u64,
    },
    /// The image counts.
    Durable {
        job: &'a str,
        #[serde(serialize_with = "readable")]
        image: &'a Path,
        bytes: u64,
        seconds: f64,
        verified: Option<&'a str>,
    },
    /// All of an image has been read.
    Verified {
        #[serde(serialize_with = "readable")]
        image: &'a Path,
        good: bool,
        bytes: u64,
        seconds: f64,
    },
    /// A restart begins.
    Restarting {
        job: &'a str,
        #[serde(serialize_with = "readable")]
        image: &'a Path,
        bytes: u64,
    },
    /// The job runs.
    Restarted {
        job: &'a str,
        #[serde(serialize_with = "readable")]
        image: &'a Path,
        bytes: u64,
        seconds: f64,
    },
    /// The job has lost what it needs, and goes back to its newest image: a restart follows.
    GoesBack {
        #[serde(serialize_with = "readable")]
        image: &'a Path,
    },
    /// What a job has on its devices has left them, or is back.
    Swapped { job: &'a str, way: &'a str, bytes: Option<u64>, seconds: f64 },
    /// The program has ended: one of the two.
    Ended { status: Option<u8>, signal: Option<i32> },
    /// The command has failed.
    Failed { error: &'a str },
}

/// A path as people read it: JSON has no others.
fn readable<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

fn readable_if_any<S: Serializer>(path: &Option<&Path>, into: S) -> Result<S::Ok, S::Error> {
    match path {
        Some(path) => readable(path, into),
        None => into.serialize_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::io::Read;
    use std::os::fd::OwnedFd;
    use std::os::unix::ffi::OsStrExt;
    use std::time::UNIX_EPOCH;

    #[test]
    fn an_event_is_a_flat_line() {
        let event = Event::Writing { job: "sim", image: None, done: 7, bytes: Some(9) };
        let known = r#"{"time":"1970-01-01T00:00:00.000Z","event":"writing","job":"sim","image":null,"done":7,"bytes":9}"#;
        assert_eq!(line(UNIX_EPOCH, &event), format!("{known}\n"));
        let event = Event::GoesBack { image: Path::new("/i/sim-0001") };
        assert!(line(UNIX_EPOCH, &event).contains(r#""event":"goes_back","image":"/i/sim-0001"}"#));
        let event = Event::GoesBack { image: Path::new(OsStr::from_bytes(b"/i/\xff")) };
        assert!(line(UNIX_EPOCH, &event).contains("\"image\":\"/i/\u{fffd}\""));
    }

    /// A pipe takes a part of what is longer than its room.
    #[test]
    fn what_does_not_fit_leaves_the_next_line_whole() {
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        rustix::io::ioctl_fionbio(&writer, true).expect("no waiting");
        let sink = Sink { file: File::from(OwnedFd::from(writer)), cut: Mutex::new(false) };
        let long = "x".repeat(1 << 20) + "\n";
        sink.write(&long);
        let mut some = vec![0; 1 << 20];
        let read = reader.read(&mut some).expect("bytes");
        assert!(read > 0 && !some[..read].contains(&b'\n'));
        sink.write("next\n");
        drop(sink);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).expect("text");
        assert!(rest.ends_with("\nnext\n"), "{rest}");
    }
}
