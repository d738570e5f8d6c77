//! The job's log. The program's terminal is its own: nothing is ever written there.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Bytes of the log after which nothing is added here, so that a program that fails in a loop
/// cannot fill the disk. Long before, others begin another file (`kedge_control::logfile`).
const MAX_LOG_LEN: u64 = 32 << 20;

static LOG: OnceLock<Option<PathBuf>> = OnceLock::new();

/// How much a line matters: the name of one of `kedge_control::joblog`'s levels.
type Level = &'static str;
const ERROR: Level = "ERROR";
const WARN: Level = "WARN";
const TRACE: Level = "TRACE";

/// Appends one line to the file that KEDGE_LOG names, in one write; without one it is dropped.
pub(crate) fn line(text: &str) {
    write(WARN, text);
}

/// As [`line`], for a defect of kedge.
pub(crate) fn defect(text: &str) {
    write(ERROR, text);
}

/// As [`line`], for each call of a program whose calls are logged.
pub(crate) fn trace(text: &str) {
    write(TRACE, &format!("trace: {text}"));
}

/// As [`line`], for what the program was refused. When it fails, its user is told, too: the
/// supervisor looks for lines that begin so (`kedge_control::joblog`).
pub(crate) fn refused(text: &str) {
    write(WARN, &format!("refused: {text}"));
}

fn write(level: Level, text: &str) {
    if let Some(log) = LOG.get_or_init(|| std::env::var_os("KEDGE_LOG").map(PathBuf::from)) {
        append(log, level, text);
    }
}

/// Opens the file for each line: a descriptor that stays would be the program's to close and to
/// number anew, and a checkpoint would take the log for a file of the program's.
fn append(log: &Path, level: Level, text: &str) {
    let mut line = format!("[{} {level}] ", std::process::id());
    line.extend(text.chars().map(|c| if c == '\n' { ' ' } else { c }));
    line.push('\n');
    let file = OpenOptions::new().append(true).create(true).mode(0o600).open(log);
    // A full disk must not disturb the program.
    let _ = file.and_then(|mut file| match file.metadata()?.len() < MAX_LOG_LEN {
        true => file.write_all(line.as_bytes()),
        false => Ok(()),
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};

    #[test]
    fn lines_are_appended_and_leave_no_descriptor_behind() {
        let log = std::env::temp_dir().join(format!("kedge-shim-log-{}", std::process::id()));
        let ours = || {
            let links = fs::read_dir("/proc/self/fd").unwrap();
            let targets = links.filter_map(|link| fs::read_link(link.ok()?.path()).ok());
            targets.filter(|target| *target == log).count()
        };
        append(&log, WARN, "one\nline");
        append(&log, TRACE, "another");
        let pid = std::process::id();
        let expected = format!("[{pid} WARN] one line\n[{pid} TRACE] another\n");
        assert_eq!((fs::read_to_string(&log).unwrap(), ours()), (expected, 0));
        File::options().write(true).open(&log).unwrap().set_len(MAX_LOG_LEN).unwrap();
        append(&log, WARN, "no more");
        assert_eq!(fs::metadata(&log).unwrap().len(), MAX_LOG_LEN);
        fs::remove_file(&log).unwrap();
        append(Path::new("/nowhere/log"), WARN, "is dropped");
    }
}
