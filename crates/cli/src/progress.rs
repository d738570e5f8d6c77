//! What a command that takes long is about: one line on the terminal, which is gone when it is done. Elsewhere,
//! nothing.

use crate::output::{DIM, styled};
use std::io::{IsTerminal, Write};

pub(crate) struct Progress {
    shown: bool,
}

impl Progress {
    pub(crate) fn new(text: &str) -> Progress {
        let progress = Progress { shown: std::io::stderr().is_terminal() };
        progress.show(text);
        progress
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

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}
