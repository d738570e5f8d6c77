//! A terminal's settings (termios(3)), as the kernel's own structure.

use crate::plugins::sys;
use rustix::fd::AsFd;
use serde::{Deserialize, Serialize};
use std::io;

/// struct termios2: input, output, control and local flags; line discipline and 19 characters;
/// input and output speed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    flags: [u32; 4],
    line: u8,
    characters: Vec<u8>,
    speeds: [u32; 2],
}

const CHARACTERS: usize = 19;

impl Settings {
    pub(crate) fn read(fd: impl AsFd) -> io::Result<Settings> {
        let bytes = sys::terminal(fd)?;
        let word = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&bytes[at..at + 4]);
            u32::from_ne_bytes(word)
        };
        Ok(Settings {
            flags: [word(0), word(4), word(8), word(12)],
            line: bytes[16],
            characters: bytes[17..17 + CHARACTERS].to_vec(),
            speeds: [word(36), word(40)],
        })
    }

    /// The line discipline is the usual one and stays.
    pub(crate) fn set(&self, fd: impl AsFd) -> io::Result<()> {
        let mut bytes = [0; sys::TERMINAL];
        for (at, word) in self.flags.iter().enumerate() {
            bytes[4 * at..4 * at + 4].copy_from_slice(&word.to_ne_bytes());
        }
        bytes[16] = self.line;
        for (to, from) in bytes[17..17 + CHARACTERS].iter_mut().zip(&self.characters) {
            *to = *from;
        }
        bytes[36..40].copy_from_slice(&self.speeds[0].to_ne_bytes());
        bytes[40..44].copy_from_slice(&self.speeds[1].to_ne_bytes());
        sys::set_terminal(fd, &bytes)
    }

    pub(super) fn canonical(&self) -> bool {
        self.flags[3] & libc::ICANON != 0
    }

    /// Everything passes as it is, in both directions.
    pub(super) fn raw(&self) -> Settings {
        let mut raw = self.quiet();
        raw.flags[3] &= !libc::ICANON;
        raw
    }

    /// As [`Settings::raw`], but lines are lines.
    pub(super) fn quiet(&self) -> Settings {
        let mut quiet = self.clone();
        quiet.flags[0] = 0;
        quiet.flags[1] &= !libc::OPOST;
        quiet.flags[3] &= libc::ICANON;
        quiet
    }
}
