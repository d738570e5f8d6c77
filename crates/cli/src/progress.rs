//! What a command that takes long is about: one line on the terminal, which is gone when it is
//! done. Elsewhere, nothing.

use crate::output::{self, DIM, styled};
use crate::time::Time;
use kedge_control::size::Size;
use kedge_supervisor::control::{Sending, Stage};
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

pub(crate) struct Progress {
    shown: bool,
}

impl Progress {
    pub(crate) fn new(text: &str) -> Progress {
        let progress = Progress { shown: std::io::stderr().is_terminal() };
        progress.show(text);
        progress
    }

    /// Whether anybody sees it.
    pub(crate) fn is_shown(&self) -> bool {
        self.shown
    }

    pub(crate) fn show(&self, text: &str) {
        if self.shown {
            let mut err = anstream::stderr().lock();
            let _ = write!(err, "\r\x1b[K");
            if !text.is_empty() {
                let _ = write!(err, "{}", styled(DIM, text));
            }
            let _ = err.flush();
        }
    }

    pub(crate) fn clear(&self) {
        self.show("");
    }

    /// Leaves the terminal as it is, to whoever clears it.
    pub(crate) fn leave(self) {
        std::mem::forget(self);
    }
}

/// Has Ctrl-C say what becomes of `what`, which `command` shows, before it ends the command.
pub(crate) fn on_interrupt(sending: &Sending, what: String, command: &'static str) {
    kedge_supervisor::on_interrupt(sending, move |stage| {
        // Instead of the line that tells how far it is.
        Progress::new("").clear();
        match stage {
            Stage::NotSent => output::complain(&format!("{what} was not asked for")),
            Stage::Sent => output::complain(&format!("{what} goes on: see `{command}`")),
            // The command was about to say the rest itself.
            Stage::Over => {}
        }
    });
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

/// How fast something goes that is measured in bytes.
#[derive(Debug)]
pub(crate) struct Speed {
    begin: Instant,
}

impl Speed {
    pub(crate) fn new() -> Speed {
        Speed { begin: Instant::now() }
    }

    /// Returns how far it is, how fast, and how much time is left where it is known how much there
    /// is to do.
    pub(crate) fn of(&self, done: u64, all: Option<u64>) -> String {
        said(done, all, self.begin.elapsed())
    }
}

fn said(done: u64, all: Option<u64>, since: Duration) -> String {
    let mut text = Size(done).to_string();
    if let Some(all) = all {
        text.push_str(&format!(" of {}", Size(all)));
    }
    let seconds = since.as_secs_f64();
    // Of the first moments nothing can be said.
    if seconds < 0.2 || done == 0 {
        return text;
    }
    let speed = done as f64 / seconds;
    text.push_str(&format!(", {}/s", Size(speed as u64)));
    if let Some(left) = all.and_then(|all| all.checked_sub(done)).filter(|left| *left > 0) {
        let left = Duration::from_secs_f64((left as f64 / speed).ceil());
        text.push_str(&format!(", {} left", Time(left)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_and_time_left_are_told_where_they_are_known() {
        let (gib, second) = (1 << 30, Duration::from_secs(1));
        assert_eq!(said(gib, Some(3 * gib), second), "1 GiB of 3 GiB, 1 GiB/s, 2s left");
        assert_eq!(said(gib, None, 2 * second), "1 GiB, 512 MiB/s");
        assert_eq!(said(gib, Some(gib), second), "1 GiB of 1 GiB, 1 GiB/s");
        assert_eq!(said(5 << 20, Some(4 << 20), second), "5 MiB of 4 MiB, 5 MiB/s");
        assert_eq!(said(0, Some(gib), second), "0 B of 1 GiB");
        assert_eq!(said(gib, Some(2 * gib), second / 100), "1 GiB of 2 GiB");
    }
}
