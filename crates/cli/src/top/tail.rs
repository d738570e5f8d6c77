//! The last lines of a job's log.

use kedge_control::joblog::Line;
use kedge_control::told;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// So much of the end is read.
const END: u64 = 16 << 10;

/// Returns the last `most` lines of a log; none where it cannot be read.
pub(crate) fn of(log: &Path, most: usize) -> Vec<String> {
    read(log, most).unwrap_or_default()
}

fn read(log: &Path, most: usize) -> io::Result<Vec<String>> {
    let mut file = told::open(log)?;
    let length = file.metadata()?.len();
    let from = length.saturating_sub(END);
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(END).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    // The first line of the middle has no beginning.
    let skip = usize::from(from > 0);
    let lines: Vec<&str> = text.lines().skip(skip).collect();
    let last = lines.len().saturating_sub(most);
    Ok(lines[last..].iter().map(|line| Line::parse(line).to_string()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn only_the_end_is_read() {
        let path = std::env::temp_dir().join(format!("kedge-top-tail-{}", std::process::id()));
        assert!(of(&path, 5).is_empty(), "there is none");
        fs::write(&path, "2026-11-20T19:35:01.000Z INFO a b@c d[1]: one\ntwo\nthree").unwrap();
        assert_eq!(of(&path, 2), ["two", "three"]);
        assert_eq!(of(&path, 9), ["2026-11-20T19:35:01.000Z d[1]: one", "two", "three"]);
        let long = format!("{}\nlast\n", "x".repeat(END as usize));
        fs::write(&path, long).unwrap();
        let told = of(&path, 9);
        fs::remove_file(&path).unwrap();
        assert_eq!(told, ["last"]);
    }
}
