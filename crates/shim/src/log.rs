//! The job's log. The program's terminal is its own: nothing is ever written there.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::OnceLock;

static LOG: OnceLock<Option<File>> = OnceLock::new();

/// Appends one line to the file that KEDGE_LOG names, in one write; without one it is dropped.
pub(crate) fn line(text: &str) {
    let Some(mut file) = LOG.get_or_init(open).as_ref() else { return };
    let mut line = format!("[{}] ", std::process::id());
    line.extend(text.chars().map(|c| if c == '\n' { ' ' } else { c }));
    line.push('\n');
    // A full disk must not disturb the program.
    let _ = file.write_all(line.as_bytes());
}

fn open() -> Option<File> {
    let path = std::env::var_os("KEDGE_LOG")?;
    OpenOptions::new().append(true).create(true).mode(0o600).open(path).ok()
}
