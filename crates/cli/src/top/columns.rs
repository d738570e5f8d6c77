//! The columns of the table, on the screen and on paper: what each says of a job, and what it is
//! worth where there is no room for all.

use super::board::Job;
use super::words;
use crate::output::{BAD, DIM, FAIR, GOOD, PLAIN};
use anstyle::Style;
use kedge_supervisor::jobs::State;

/// How a cell looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Look {
    Plain,
    Good,
    Fair,
    Bad,
    Dim,
}

impl Look {
    /// Returns how it is on paper.
    pub(crate) fn style(self) -> Style {
        match self {
            Look::Plain => PLAIN,
            Look::Good => GOOD,
            Look::Fair => FAIR,
            Look::Bad => BAD,
            Look::Dim => DIM,
        }
    }
}

/// A column.
pub(crate) struct Column {
    pub(crate) heading: &'static str,
    /// Whether it holds numbers, which align to the right.
    pub(crate) right: bool,
    /// Characters that it has at least, and at most where there is room.
    pub(crate) width: (usize, usize),
    /// The screen's width from which on it is there.
    pub(crate) from: usize,
    /// What it says, at a moment in seconds since 1970.
    pub(crate) cell: fn(&Job, u64) -> (Look, String),
}

const fn text(
    heading: &'static str,
    width: (usize, usize),
    from: usize,
    cell: fn(&Job, u64) -> (Look, String),
) -> Column {
    Column { heading, right: false, width, from, cell }
}

const fn number(
    heading: &'static str,
    width: usize,
    from: usize,
    cell: fn(&Job, u64) -> (Look, String),
) -> Column {
    Column { heading, right: true, width: (width, width), from, cell }
}

/// All of them, in their order. Those that are there from 80 characters on fit into these.
pub(crate) const COLUMNS: [Column; 12] = [
    text("JOB", (10, 32), 0, |job, _| (Look::Plain, words::escaped(&job.name))),
    text("STATE", (9, 12), 0, |job, _| state(job)),
    number("AGE", 4, 0, |job, now| (Look::Plain, words::time(job.age(now)))),
    number("PROC", 4, 56, |job, _| (Look::Plain, processes(job))),
    text("DEVICES", (8, 24), 40, |job, _| (Look::Plain, words::escaped(&job.gpu))),
    number("MEMORY", 9, 50, |job, _| memory(job)),
    number("KERN/S", 6, 64, |job, _| rate(job.devices.rates.map(|rates| rates.launches))),
    number("COPY/S", 6, 80, |job, _| rate(job.devices.rates.map(|rates| rates.copies))),
    number("IMAGE", 5, 32, image_age),
    number("PAUSE", 5, 72, |job, _| {
        let pause = job.image.as_ref().map(|image| words::pause(image.stall_seconds));
        or_nothing(pause)
    }),
    number("NEXT", 4, 76, |job, now| {
        or_nothing(job.next.map(|next| words::time(next.saturating_sub(now))))
    }),
    text("LAST IMAGE", (16, 40), 100, |job, _| {
        let name = job.image.as_ref().and_then(|image| image.image.file_name());
        or_nothing(name.map(|name| words::escaped(&name.to_string_lossy())))
    }),
];

fn or_nothing(text: Option<String>) -> (Look, String) {
    text.map_or_else(|| (Look::Dim, "-".to_owned()), |text| (Look::Plain, text))
}

/// One word, which the number of an end follows.
fn state(job: &Job) -> (Look, String) {
    match &job.state {
        State::Running => match job.silent {
            Some(time) => (Look::Bad, format!("silent {}", words::time(time.as_secs()))),
            None if job.devices.swapped_out => (Look::Fair, "swapped".into()),
            None => (Look::Good, "running".into()),
        },
        State::Unsupervised => (Look::Bad, "unsupervised".into()),
        State::Exited(0) => (Look::Dim, "exited 0".into()),
        State::Exited(status) => (Look::Bad, format!("exited {status}")),
        State::Killed(signal) => (Look::Bad, format!("killed {signal}")),
        State::Moved(to) => (Look::Dim, format!("moved to {to}")),
    }
}

fn processes(job: &Job) -> String {
    match job.goes_on() {
        true => job.program().count().to_string(),
        false => "-".into(),
    }
}

fn memory(job: &Job) -> (Look, String) {
    or_nothing(
        job.memory().map(|(used, size)| format!("{}/{}", words::size(used), words::size(size))),
    )
}

fn rate(times: Option<f64>) -> (Look, String) {
    or_nothing(times.map(words::rate))
}

/// How old the last image is; a job with an interval whose image is older than three is told.
fn image_age(job: &Job, now: u64) -> (Look, String) {
    let Some(image) = &job.image else { return or_nothing(None) };
    let age = now.saturating_sub(image.captured);
    let late = job.interval.is_some_and(|interval| age > 3 * interval.as_secs().max(1));
    (if late && job.goes_on() { Look::Bad } else { Look::Plain }, words::time(age))
}

/// Characters between two columns on the screen.
pub(crate) const GAP: usize = 1;

/// Returns the columns that a screen of this width shows, and the width of each.
pub(crate) fn shown(width: usize) -> Vec<(&'static Column, usize)> {
    let mut shown: Vec<(&Column, usize)> = COLUMNS
        .iter()
        .filter(|column| column.from <= width)
        .map(|column| (column, column.width.0))
        .collect();
    let used: usize = shown.iter().map(|(_, width)| width).sum::<usize>();
    let mut left = width.saturating_sub(used + GAP * shown.len().saturating_sub(1));
    // In turns, so that no column has all of it.
    while left > 0 {
        let before = left;
        for (column, width) in &mut shown {
            if *width < column.width.1 && left > 0 {
                *width += 1;
                left -= 1;
            }
        }
        if left == before {
            break;
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing that is shown is cut off, from the width on where it is shown.
    #[test]
    fn what_is_shown_fits() {
        for width in 25..=200 {
            let shown = shown(width);
            let all: usize = shown.iter().map(|(_, width)| width).sum();
            assert!(all + GAP * (shown.len() - 1) <= width, "{width}");
        }
        assert_eq!(shown(80).len(), COLUMNS.len() - 1, "all but the image's name");
    }
}
