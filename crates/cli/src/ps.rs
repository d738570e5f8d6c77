//! `kedge ps`: the user's jobs.

use crate::Failure;
use crate::output::{self, BAD, DIM, GOOD, PLAIN, Table};
use clap::Args;
use kedge_supervisor::jobs::{self, Jobs, LastImage, Meta, State};
use kedge_supervisor::{Checkpoints, HeldImage};
use serde::Serialize;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// Ended jobs too: the latest 50 are kept
    #[arg(long, short)]
    all: bool,
    /// Print a JSON list of objects: name, state ("running", "exited", "killed", or "unsupervised":
    /// its processes run, and its supervisor was killed), status, signal, pid, supervisor, gpu,
    /// command, started and ended (seconds since 1970), log, image (null, or the latest that is
    /// durable: image, captured, bytes, stall_seconds), checkpoints (durable and failed, how many
    /// since the job began or came back; last_failure, null or at, why), held (null, or what of an
    /// image is in memory too: image, on_devices and in_memory in bytes, until)
    #[arg(long)]
    json: bool,
}

/// A job, flat, as scripts like it.
#[derive(Debug, Serialize)]
struct Row {
    name: String,
    state: &'static str,
    /// What the program exited with.
    status: Option<i32>,
    /// What killed it.
    signal: Option<i32>,
    pid: Option<u32>,
    supervisor: u32,
    gpu: String,
    command: Vec<String>,
    started: u64,
    ended: Option<u64>,
    log: Option<PathBuf>,
    image: Option<LastImage>,
    checkpoints: Option<Checkpoints>,
    held: Option<HeldImage>,
}

pub(crate) fn run(args: &PsArgs) -> Result<(), Failure> {
    let jobs = Jobs::open()?;
    let goes_on = [State::Running, State::Unsupervised];
    let metas = jobs.list()?.into_iter().filter(|meta| args.all || goes_on.contains(&meta.state));
    if args.json {
        let rows: Vec<Row> = metas.map(|meta| row(&jobs, meta)).collect();
        return Ok(output::json(&rows)?);
    }
    let mut table =
        Table::new(&["JOB", "STATE", "PID", "GPU", "TIME", "IMAGE", "AGE", "COMMAND"], &[2, 4, 6]);
    let now = jobs::now();
    for meta in metas {
        let name = meta.state.name();
        let (style, state) = match &meta.state {
            State::Running => (GOOD, name.to_owned()),
            State::Unsupervised => (BAD, name.to_owned()),
            State::Exited(0) => (DIM, format!("{name} 0")),
            State::Exited(number) | State::Killed(number) => (BAD, format!("{name} {number}")),
            State::Moved(to) => (DIM, format!("{name} to {}", output::harmless(to))),
        };
        let image = meta.name.parse().ok().and_then(|name| jobs.last_image(&name));
        let time = meta.ended.unwrap_or(now).saturating_sub(meta.started);
        table.row([
            (PLAIN, meta.name),
            (style, state),
            (PLAIN, meta.pid.map(|pid| pid.to_string()).unwrap_or_default()),
            (PLAIN, meta.gpu),
            (PLAIN, clock(time)),
            (PLAIN, image.as_ref().map_or_else(|| "-".to_owned(), short)),
            (
                PLAIN,
                image.map_or_else(String::new, |image| clock(now.saturating_sub(image.captured))),
            ),
            (PLAIN, output::harmless(&shown(&meta.command))),
        ]);
    }
    Ok(output::print(&table.render())?)
}

fn row(jobs: &Jobs, meta: Meta) -> Row {
    let (status, signal) = match meta.state {
        State::Running | State::Unsupervised | State::Moved(_) => (None, None),
        State::Exited(status) => (Some(status), None),
        State::Killed(signal) => (None, Some(signal)),
    };
    let name = meta.name.parse().ok();
    Row {
        state: meta.state.name(),
        status,
        signal,
        log: name.as_ref().map(|name| jobs.log_path(name)),
        image: name.as_ref().and_then(|name| jobs.last_image(name)),
        checkpoints: name.as_ref().map(|name| jobs.checkpoints(name)),
        held: name.as_ref().and_then(|name| jobs.held(name)),
        name: meta.name,
        pid: meta.pid,
        supervisor: meta.supervisor,
        gpu: meta.gpu,
        command: meta.command,
        started: meta.started,
        ended: meta.ended,
    }
}

/// An image by its folder's name.
fn short(image: &LastImage) -> String {
    output::harmless(&image.image.file_name().unwrap_or_default().to_string_lossy())
}

/// A command's words, cut where a terminal's line ends anyway.
fn shown(command: &[String]) -> String {
    const MAX_CHARS: usize = 60;
    let text = command.join(" ");
    match text.char_indices().nth(MAX_CHARS) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

/// `1:02:03`, or `2:03`.
fn clock(seconds: u64) -> String {
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 {
        format!("{hours}:{minutes:02}:{seconds:02}")
    } else {
        format!("{minutes}:{seconds:02}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_like_a_clock() {
        assert_eq!(clock(0), "0:00");
        assert_eq!(clock(125), "2:05");
        assert_eq!(clock(3600 + 62), "1:01:02");
    }

    #[test]
    fn long_commands_are_cut_between_characters() {
        assert_eq!(shown(&["a".into(), "b".into()]), "a b");
        assert_eq!(shown(&["é".repeat(61)]), format!("{}…", "é".repeat(60)));
    }
}
