//! `kedge cache top`: the caches of this machine on one screen, as they are from second to second.

mod board;
mod draw;
mod screen;
#[cfg(test)]
mod tests;

use crate::Failure;
use crate::{output, top};
use board::{Board, Gatherer};
use clap::Args;
use std::io::{self, Write, stdout};
use std::thread;
use std::time::{Duration, Instant};

const AFTER_HELP: &str = "\
Your caches, root's screen those of everybody: what each has that is not below (UNSAVED), of how \
many files, for how many seconds the first of them waits (OLDEST), what programs write (IN/S) and \
what is drained a second, and its tiers. d drains the chosen one, q ends, ? lists the keys. Where \
there is no terminal it is printed once.

With --json, a line a second, an object: at (seconds since 1970) and caches, a list: user, under, \
in_bytes_per_second and drained_bytes_per_second (null at first), error (why it cannot be asked), \
status (as `kedge cache status --json` has it; null where it cannot be asked).

Examples:
  kedge cache top
  kedge cache top --once
  kedge cache top --json | jq '.caches[].drained_bytes_per_second'";

/// Between two looks.
const INTERVAL: Duration = Duration::from_secs(1);

/// Watch caches: their tiers, speeds and errors, with a key to drain
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct TopArgs {
    /// Tell it once
    #[arg(long)]
    once: bool,
    /// Print JSON, a line a second
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &TopArgs) -> Result<(), Failure> {
    if args.json && !args.once {
        return follow();
    }
    if !args.once && top::has_screen() {
        return screen::show(top::has_colour());
    }
    let mut gatherer = Gatherer::default();
    let mut board = gatherer.gather()?;
    if board.caches.iter().any(|cache| cache.status.is_some()) {
        thread::sleep(top::MEASURED);
        board = gatherer.gather()?;
    }
    match args.json {
        true => say(&board).map(|_| ()),
        false => Ok(output::print(&printed(&board))?),
    }
}

/// Writes a line a second, until nobody reads it.
fn follow() -> Result<(), Failure> {
    let mut gatherer = Gatherer::default();
    let mut next = Instant::now();
    while say(&gatherer.gather()?)? {
        next += INTERVAL;
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(())
}

/// Writes a line of JSON. `false` if nobody reads it any more.
fn say(board: &Board) -> Result<bool, Failure> {
    let mut line = serde_json::to_vec(board).map_err(io::Error::from)?;
    line.push(b'\n');
    let mut out = stdout().lock();
    match out.write_all(&line).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error.into()),
        Ok(()) => Ok(true),
    }
}

/// All lines on paper, as wide as they are.
fn printed(board: &Board) -> String {
    let longest = board.caches.iter().map(|cache| cache.name().chars().count()).max();
    let mut text = String::new();
    for line in draw::lines(board, longest.unwrap_or(0).max(draw::NAME)) {
        let mut row = String::new();
        for (look, cell) in line.cells {
            row += &output::styled(look.style(), &cell);
        }
        text += row.trim_end();
        text.push('\n');
    }
    text
}
