//! What /proc tells of System V objects, and of who uses them.

use crate::plugins::error::{Context, PluginError};
use crate::proc::{Field, Stat};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;

/// Longest table that is read: more rows than a namespace can have.
const MAX_TABLE: u64 = 64 << 20;
/// Ticks a second in /proc/PID/stat: the kernel's USER_HZ.
const TICKS: i64 = 100;

/// A line of /proc/sysvipc/KIND.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) id: i32,
    pub(super) key: i32,
    /// And, of segments, flags.
    pub(super) permissions: u32,
    /// The other columns, by name.
    rest: BTreeMap<String, i64>,
}

impl Row {
    /// A column; 0 if this kind does not have it.
    pub(super) fn get(&self, name: &str) -> i64 {
        self.rest.get(name).copied().unwrap_or(0)
    }
}

/// The table of `shm`, `sem` or `msg`; empty where the kernel has no System V IPC.
pub(super) fn read(kind: &str) -> Result<Vec<Row>, PluginError> {
    let path = format!("/proc/sysvipc/{kind}");
    let mut text = String::new();
    match File::open(&path).and_then(|file| file.take(MAX_TABLE).read_to_string(&mut text)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.to(|| format!("read {path}"))?,
    };
    let rows = parse(&text).ok_or_else(|| io::Error::other("it is not as this kedge knows it"));
    rows.to(|| format!("read {path}"))
}

fn parse(text: &str) -> Option<Vec<Row>> {
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next()?.split_whitespace().collect();
    let row = |line: &str| {
        let mut words = line.split_whitespace();
        let (key, id) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        let permissions = u32::from_str_radix(words.next()?, 8).ok()?;
        let rest = names.iter().skip(3).zip(words);
        let rest: Option<BTreeMap<String, i64>> =
            rest.map(|(name, word)| Some(((*name).to_owned(), word.parse().ok()?))).collect();
        Some(Row { id, key, permissions, rest: rest? })
    };
    lines.map(row).collect()
}

/// Whose a process is, and when it began in seconds since 1970, rounded down.
pub(super) fn process(pid: i32) -> io::Result<(u32, i64)> {
    use rustix::time::{ClockId, clock_gettime};
    let uid = fs::metadata(format!("/proc/{pid}"))?.uid();
    let stat = Stat::of(pid).map_err(io::Error::other)?;
    let age = clock_gettime(ClockId::Boottime).tv_sec - stat.get(Field::StartTime) / TICKS;
    Ok((uid, clock_gettime(ClockId::Realtime).tv_sec - age - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_read_by_their_columns() {
        let text = "       key      semid perms      nsems   uid\n-1176538056         77   644          3 65534\n";
        let rows = parse(text).unwrap();
        assert_eq!((rows[0].id, rows[0].key, rows[0].permissions), (77, -1_176_538_056, 0o644));
        assert_eq!((rows[0].get("nsems"), rows[0].get("otime")), (3, 0));
        assert!(parse("").is_none() && parse("key id perms\nx 1 2\n").is_none());
    }

    #[test]
    fn this_process_has_begun() {
        let (_, begin) = process(std::process::id() as i32).unwrap();
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
        assert!(begin <= now && begin > now - 24 * 3600, "{begin} {now}");
    }
}
