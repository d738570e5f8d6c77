//! `kedge top`: the user's jobs on one screen, as they are from second to second.

mod act;
mod asking;
mod board;
pub(crate) mod columns;
pub(crate) mod draw;
mod gather;
mod keys;
mod pane;
pub(crate) mod screen;
mod tail;
#[cfg(test)]
mod tests;
mod view;
pub(crate) mod words;

use crate::Failure;
use crate::output::{self, Table};
use crate::time::Time;
use board::Board;
use clap::Args;
use columns::COLUMNS;
use gather::Gatherer;
use kedge_supervisor::jobs::Jobs;
use std::io::{IsTerminal, stdin, stdout};
use std::thread;
use std::time::Duration;
use view::{Order, View};

const AFTER_HELP: &str = "\
A table of your jobs, and below it the chosen one: its processes, its devices, the end of its log. \
c checkpoints the job, s swaps its device memory out or in, x ends it (and asks first), ? lists \
all keys. Where there is no terminal the table is printed once.

KERN/S and COPY/S are launches and copies a second; a launch of a graph is one. MEMORY is what the \
job has of its devices' memory, PAUSE how long it stood still for its last image. A state `silent` \
says that the job's supervisor does not answer. docs/top.md has the rest.

With --json, a list of objects: name, state (as `kedge ps` has it), supervisor, silent_seconds \
(null where the supervisor answers), started, age_seconds, gpu, command, log, processes (pid, \
name, kedge: whether it is kedge's own, resident, processor_percent), devices (name, place, used, \
size), device_memory_bytes and device_memory_size, launches_per_second, copies_per_second, \
swapped_out, clients and clients_silent (processes that use devices, and those whose proxy does \
not answer), image, image_age_seconds, checkpoints, interval_seconds, next_checkpoint (seconds \
since 1970). What is not told is null.

Examples:
  kedge top
  kedge top --interval 5s --sort memory
  kedge top --json | jq '.[] | select(.silent_seconds)'";

/// Watch jobs: their devices, kernels, memory and checkpoints, with keys to act on them
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct TopArgs {
    /// Between two looks
    #[arg(long, short, value_name = "TIME", default_value_t = Time(Duration::from_secs(1)))]
    interval: Time,
    /// Ended jobs too: the latest 50 are kept
    #[arg(long, short)]
    all: bool,
    /// What comes first
    #[arg(long, value_enum, default_value_t)]
    sort: Order,
    /// Print the table once
    #[arg(long)]
    once: bool,
    /// Print JSON once
    #[arg(long)]
    json: bool,
}

/// Shortest time between two looks.
const MIN_INTERVAL: Duration = Duration::from_millis(200);
/// Between the two looks that tell how often something is done, where there are no more than two.
pub(crate) const MEASURED: Duration = Duration::from_millis(500);

pub(crate) fn run(args: &TopArgs) -> Result<(), Failure> {
    let Time(interval) = args.interval;
    if interval < MIN_INTERVAL {
        return Err(Failure::of_usage("--interval: give 200ms or more"));
    }
    let jobs = Jobs::open()?;
    if has_screen() && !args.once && !args.json {
        let colour = has_colour();
        let view = View { order: args.sort, all: args.all, colour, ..View::default() };
        return screen::show(&jobs, view, interval);
    }
    let board = once(jobs, args)?;
    match args.json {
        true => Ok(output::json(&board.rows())?),
        false => Ok(output::print(&printed(&board))?),
    }
}

/// Returns whether there is a terminal for a whole screen.
pub(crate) fn has_screen() -> bool {
    let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    !dumb && stdin().is_terminal() && stdout().is_terminal()
}

/// Returns whether the screen may have colours.
pub(crate) fn has_colour() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// The jobs at one moment, with how often things were done just before.
fn once(jobs: Jobs, args: &TopArgs) -> Result<Board, Failure> {
    let mut gatherer = Gatherer::new(jobs, args.all);
    let mut board = gatherer.gather(None)?;
    if board.jobs.iter().any(board::Job::goes_on) {
        thread::sleep(MEASURED);
        board = gatherer.gather(None)?;
    }
    args.sort.sort(&mut board.jobs, false);
    Ok(board)
}

/// The table on paper: all columns, as wide as they are.
fn printed(board: &Board) -> String {
    let headings = COLUMNS.each_ref().map(|column| column.heading);
    let right: Vec<usize> = (0..COLUMNS.len()).filter(|at| COLUMNS[*at].right).collect();
    let mut table = Table::new(&headings, &right);
    for job in &board.jobs {
        table.row(COLUMNS.iter().map(|column| {
            let (look, text) = (column.cell)(job, board.now);
            (look.style(), text)
        }));
    }
    table.render()
}
