//! The files of a job's proxies become one trace.

use super::{Kind, Line, MAX_LINE_LEN, Span, Table, Wanted};
use crate::told;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

/// Most lanes of one process that have a name; what comes beyond has its number alone.
const MAX_LANES: usize = 10_000;
/// In a trace, streams are threads: with numbers that no thread of Linux has.
const STREAMS: u64 = 1 << 24;
/// Most streams of one device. The numbers stay below 2^31.
const MAX_STREAMS: u64 = 1 << 24;
/// As the thread of pauses.
const PAUSES: u64 = STREAMS - 1;

/// What became of the files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Merged {
    pub table: Table,
    /// Processes whose files there were.
    pub processes: u64,
    pub spans: u64,
    /// What processes have left out, because they had come to their limit.
    pub left: u64,
    /// Calls that came faster than they were taken.
    pub lost: u64,
    /// Lines that nobody can read, such as the last one of a proxy that was killed.
    pub damaged: u64,
    /// Files that nobody can read, and why.
    pub unread: Vec<String>,
}

/// Makes one trace of all files in a folder.
///
/// # Errors
/// The folder cannot be read, or the trace not written; in words.
pub fn merge(folder: &Path, wanted: &Wanted) -> Result<Merged, String> {
    let files = told::files(folder, "jsonl");
    let files = files.map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut merged = Merged::default();
    let Some(path) = &wanted.file else {
        let nobody = Output { out: io::sink(), first: true };
        return match all(&files, wanted.limit, nobody, &mut merged) {
            Ok(()) => Ok(merged),
            Err(error) => Err(error.to_string()),
        };
    };
    let written = File::create(path).and_then(|file| {
        let output = Output { out: BufWriter::new(file), first: true };
        all(&files, wanted.limit, output, &mut merged)
    });
    written.map_err(|error| format!("{}: {error}: the trace is not whole", path.display()))?;
    Ok(merged)
}

fn all<W: Write>(
    files: &[PathBuf],
    limit: u64,
    mut output: Output<W>,
    merged: &mut Merged,
) -> io::Result<()> {
    output.out.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n")?;
    for path in files {
        match told::open(path) {
            Ok(file) => one(file, limit, &mut output, merged)?,
            Err(error) => merged.unread.push(format!("{}: {error}", path.display())),
        }
    }
    let (left, lost, processes) = (merged.left, merged.lost, merged.processes);
    let other = json!({ "left_out": left, "lost": lost, "processes": processes });
    output.out.write_all(b"\n],\"otherData\":")?;
    serde_json::to_writer(&mut output.out, &other)?;
    output.out.write_all(b"}\n")?;
    output.out.flush()
}

/// Adds the file of one proxy.
fn one<W: Write>(
    file: File,
    limit: u64,
    output: &mut Output<W>,
    merged: &mut Merged,
) -> io::Result<()> {
    // No honest file is longer.
    let mut lines = BufReader::new(file.take(limit.saturating_add(MAX_LINE_LEN as u64)));
    let (mut process, mut lanes, mut text) = (0, BTreeSet::new(), Vec::new());
    loop {
        match line_of(&mut lines, &mut text) {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) => {
                merged.unread.push(error.to_string());
                return Ok(());
            }
        }
        if text.trim_ascii().is_empty() {
            continue;
        }
        let line =
            if text.len() > MAX_LINE_LEN { None } else { serde_json::from_slice(&text).ok() };
        match line {
            Some(Line::Client { client, program }) => {
                process = client;
                merged.processes = merged.processes.saturating_add(1);
                let name = json!({ "name": format!("{program} ({client})") });
                output.name("process_name", client, 0, &name)?;
            }
            Some(Line::Span(span)) => {
                let lane = lane(&span);
                if lanes.len() < MAX_LANES && lanes.insert(lane) {
                    let name = json!({ "name": lane_name(&span) });
                    output.name("thread_name", process, lane, &name)?;
                }
                merged.table.add(&span);
                merged.spans = merged.spans.saturating_add(1);
                output.span(process, lane, &span)?;
            }
            Some(Line::Left { left, lost }) => {
                merged.left = merged.left.saturating_add(left);
                merged.lost = merged.lost.saturating_add(lost);
            }
            None => merged.damaged = merged.damaged.saturating_add(1),
        }
    }
}

/// Reads the next line: of one that is longer than any honest one, what shows that, and passes the
/// rest. Returns how many bytes of it are there; 0 at the end.
fn line_of(lines: &mut impl BufRead, text: &mut Vec<u8>) -> io::Result<usize> {
    text.clear();
    let read = lines.by_ref().take(MAX_LINE_LEN as u64 + 1).read_until(b'\n', text)?;
    if read > MAX_LINE_LEN && text.last() != Some(&b'\n') {
        lines.skip_until(b'\n')?;
    }
    Ok(read)
}

/// Returns what counts as a span's thread in the trace.
fn lane(span: &Span) -> u64 {
    match (span.kind, span.device) {
        (Kind::Pause, _) => PAUSES,
        (Kind::Call, _) | (_, None) => span.lane % PAUSES,
        (_, Some(device)) => {
            let device = u64::from(device % kedge_cuda_types::arena::MAX_DEVICES);
            STREAMS + device * MAX_STREAMS + span.lane % MAX_STREAMS
        }
    }
}

fn lane_name(span: &Span) -> String {
    match (span.kind, span.device) {
        (Kind::Pause, _) => "kedge".to_owned(),
        (Kind::Call, _) | (_, None) => format!("thread {}", span.lane),
        (_, Some(device)) => format!("device {device}, stream {}", span.lane),
    }
}

/// The list of a trace's events.
struct Output<W> {
    out: W,
    first: bool,
}

/// An event that has a length (`ph` is X); times in microseconds.
#[derive(Serialize)]
struct Event<'a> {
    ph: &'static str,
    cat: &'static str,
    name: &'a str,
    pid: u32,
    tid: u64,
    ts: f64,
    dur: f64,
    args: Value,
}

/// Nanoseconds as microseconds: exact to the nanosecond for 50 days after a machine has started.
fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1000.0
}

impl<W: Write> Output<W> {
    fn span(&mut self, pid: u32, tid: u64, span: &Span) -> io::Result<()> {
        let args = match span.kind {
            Kind::Call => json!({ "result": span.outcome }),
            Kind::Copy => json!({ "bytes": span.bytes }),
            _ => json!({}),
        };
        let (ts, dur) = (micros(span.begin), micros(span.end.saturating_sub(span.begin)));
        let (cat, name) = (span.kind.word(), &*span.name);
        self.event(&Event { ph: "X", cat, name, pid, tid, ts, dur, args })
    }

    /// Says how a process or thread is called.
    fn name(&mut self, what: &str, pid: u32, tid: u64, args: &Value) -> io::Result<()> {
        self.event(&json!({ "ph": "M", "name": what, "pid": pid, "tid": tid, "args": args }))
    }

    fn event(&mut self, event: &impl Serialize) -> io::Result<()> {
        if !std::mem::take(&mut self.first) {
            self.out.write_all(b",\n")?;
        }
        Ok(serde_json::to_writer(&mut self.out, event)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_an_end_takes_no_memory() {
        let long = [vec![b'x'; 64 * MAX_LINE_LEN], b"\nnext\n".to_vec()].concat();
        let (mut lines, mut text) = (&long[..], Vec::new());
        assert!(line_of(&mut lines, &mut text).unwrap() > MAX_LINE_LEN);
        assert!(text.capacity() < 4 * MAX_LINE_LEN, "{}", text.capacity());
        assert_eq!((line_of(&mut lines, &mut text).unwrap(), &*text), (5, &b"next\n"[..]));
        assert_eq!(line_of(&mut lines, &mut text).unwrap(), 0);
    }
}
