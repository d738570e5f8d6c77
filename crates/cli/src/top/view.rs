//! What the user looks at, and what keys make of it. Nothing here touches a job or a terminal.

use super::board::{Board, Job};
use super::keys::{self, Action};
use crossterm::event::{KeyCode, KeyEvent};
use kedge_supervisor::jobs::JobName;
use std::cmp::Ordering;

/// What is to be done to a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Deed {
    Checkpoint,
    SwapOut,
    SwapIn,
    End,
}

/// A job as it was when a key was pressed: another one of its name is not meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) name: JobName,
    pub(crate) supervisor: u32,
    pub(crate) started: u64,
}

/// What follows from a key, beside what it makes of the view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Command {
    Quit,
    /// Other figures are wanted than before.
    Gather,
    /// Draw all of the screen.
    Redraw,
    Do(Target, Deed),
}

/// What the jobs are sorted by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Order {
    /// The newest first
    #[default]
    Age,
    Name,
    /// Who has most device memory first
    Memory,
    /// Who launches most first
    Kernels,
    /// The oldest image first
    Image,
}

impl Order {
    const ALL: [Order; 5] = [Order::Age, Order::Name, Order::Memory, Order::Kernels, Order::Image];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Order::Age => "age",
            Order::Name => "name",
            Order::Memory => "memory",
            Order::Kernels => "kernels",
            Order::Image => "image",
        }
    }

    fn next(self) -> Order {
        let at = Order::ALL.iter().position(|one| *one == self).unwrap_or(0);
        Order::ALL[(at + 1) % Order::ALL.len()]
    }

    /// Sorts jobs; those that are alike in that, the newest first.
    pub(crate) fn sort(self, jobs: &mut [Job], reverse: bool) {
        let launches = |job: &Job| job.devices.rates.map_or(-1.0, |rates| rates.launches);
        jobs.sort_by(|a, b| {
            let by = match self {
                Order::Age => Ordering::Equal,
                Order::Name => a.name.cmp(&b.name),
                Order::Memory => b.memory().cmp(&a.memory()),
                Order::Kernels => launches(b).total_cmp(&launches(a)),
                // No image at all is the oldest.
                Order::Image => {
                    let captured = |job: &Job| job.image.as_ref().map(|image| image.captured);
                    captured(a).cmp(&captured(b))
                }
            };
            let newest = (b.started, &a.name).cmp(&(a.started, &b.name));
            let by = by.then(newest);
            if reverse { by.reverse() } else { by }
        });
    }
}

/// What is asked before a key does what it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Confirm(pub(crate) Target);

/// What was said last of what keys have done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Note {
    pub(crate) text: String,
    pub(crate) bad: bool,
}

/// What the user looks at.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct View {
    /// The chosen job, by name: it stays chosen wherever it is in the table.
    pub(crate) chosen: Option<String>,
    pub(crate) order: Order,
    pub(crate) reverse: bool,
    /// Ended jobs too.
    pub(crate) all: bool,
    pub(crate) help: bool,
    pub(crate) confirm: Option<Confirm>,
    pub(crate) note: Note,
    /// Without it, nothing is told by colours alone.
    pub(crate) colour: bool,
    /// For how many seconds there have been no new figures.
    pub(crate) stale: Option<u64>,
}

impl View {
    /// Sorts a board, and has a job of it chosen if there is one.
    pub(crate) fn take(&mut self, board: &mut Board) {
        self.order.sort(&mut board.jobs, self.reverse);
        if self.at(board).is_none() {
            self.chosen = board.jobs.first().map(|job| job.name.clone());
        }
        // A question about a job that is gone has no answer.
        let there = |target: &Target| {
            let same = |job: &Job| is(job, target) && job.goes_on();
            board.jobs.iter().any(same)
        };
        if self.confirm.as_ref().is_some_and(|Confirm(target)| !there(target)) {
            self.confirm = None;
        }
    }

    /// The place of the chosen job.
    pub(crate) fn at(&self, board: &Board) -> Option<usize> {
        let chosen = self.chosen.as_ref()?;
        board.jobs.iter().position(|job| job.name == *chosen)
    }

    /// The chosen job.
    pub(crate) fn job<'a>(&self, board: &'a Board) -> Option<&'a Job> {
        self.at(board).and_then(|at| board.jobs.get(at))
    }

    /// Has a key do what the table of keys says.
    pub(crate) fn press(&mut self, board: &mut Board, key: KeyEvent) -> Option<Command> {
        let action = keys::action(key);
        if action == Some(Action::Interrupt) {
            return Some(Command::Quit);
        }
        if self.help {
            self.help = false;
            return None;
        }
        if let Some(Confirm(target)) = self.confirm.take() {
            let yes = matches!(key.code, KeyCode::Char('y' | 'Y'));
            self.note = Note::default();
            return yes.then_some(Command::Do(target, Deed::End));
        }
        // What was said was about another key.
        self.note = Note::default();
        self.act(board, action?)
    }

    fn act(&mut self, board: &mut Board, action: Action) -> Option<Command> {
        match action {
            Action::Quit | Action::Interrupt => return Some(Command::Quit),
            Action::Up => return self.go(board, -1),
            Action::Down => return self.go(board, 1),
            Action::First => return self.go(board, isize::MIN),
            Action::Last => return self.go(board, isize::MAX),
            Action::Help => self.help = true,
            Action::Redraw => return Some(Command::Redraw),
            Action::Order => {
                self.order = self.order.next();
                self.take(board);
            }
            Action::Reverse => {
                self.reverse = !self.reverse;
                self.take(board);
            }
            Action::All => {
                self.all = !self.all;
                return Some(Command::Gather);
            }
            Action::Checkpoint => {
                return Some(Command::Do(self.target(board)?.0, Deed::Checkpoint));
            }
            Action::Swap => {
                let (target, away) = self.target(board)?;
                let deed = if away { Deed::SwapIn } else { Deed::SwapOut };
                return Some(Command::Do(target, deed));
            }
            Action::End => self.confirm = self.target(board).map(|(target, _)| Confirm(target)),
        }
        None
    }

    fn go(&mut self, board: &Board, by: isize) -> Option<Command> {
        let last = board.jobs.len().checked_sub(1)?;
        let at = self.at(board).unwrap_or(0).saturating_add_signed(by).min(last);
        self.chosen = board.jobs.get(at).map(|job| job.name.clone());
        Some(Command::Gather)
    }

    /// The chosen job, if something can be done to it, and whether its memory is swapped out. Why
    /// nothing can be is noted.
    fn target(&mut self, board: &Board) -> Option<(Target, bool)> {
        let refuse = |view: &mut View, text: String| {
            view.note = Note { text, bad: true };
            None
        };
        let Some(job) = self.job(board) else {
            return refuse(self, "there is no job".into());
        };
        if !job.goes_on() {
            return refuse(self, format!("{} has ended", job.name));
        }
        let Some(name) = job.known() else {
            return refuse(self, format!("{} is no name of a job", job.name));
        };
        let target = Target { name, supervisor: job.supervisor, started: job.started };
        Some((target, job.devices.swapped_out))
    }
}

fn is(job: &Job, target: &Target) -> bool {
    job.name == target.name.to_string()
        && (job.supervisor, job.started) == (target.supervisor, target.started)
}
