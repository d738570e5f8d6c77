//! What /proc tells of a process's descriptors. Nothing here is trusted to have a length.

use crate::plugins::error::{Context, PluginError};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;

/// Longest fdinfo that is read: some 400,000 members of an epoll.
const MAX_FDINFO: u64 = 64 << 20;
const MAX_STATUS: u64 = 1 << 20;

/// /proc/PID/fdinfo/FD.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FdInfo {
    pub position: u64,
    /// As `F_GETFL` has them, plus `O_CLOEXEC`, which is the descriptor's own.
    pub flags: u32,
    /// The lines after `ino:`, which the kind of file adds.
    pub more: Vec<String>,
}

impl FdInfo {
    pub(crate) fn parse(text: &str) -> Option<FdInfo> {
        let mut info = FdInfo::default();
        let mut known = 0;
        for line in text.lines() {
            let (name, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.trim();
            match name {
                "pos" if known == 0 => {
                    // Printed signed; directories of some file systems use all 64 bits.
                    info.position = value.parse::<i64>().ok()? as u64;
                    known += 1;
                }
                "flags" if known == 1 => {
                    info.flags = u32::from_str_radix(value, 8).ok()?;
                    known += 1;
                }
                "mnt_id" | "ino" if info.more.is_empty() => {}
                _ => info.more.push(line.to_owned()),
            }
        }
        (known == 2).then_some(info)
    }

    /// Whether it is open for its path alone (O_PATH).
    pub fn is_path_only(&self) -> bool {
        self.flags & libc::O_PATH as u32 != 0
    }

    /// The value of the line `NAME: VALUE`.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.more.iter().find_map(|line| {
            let (found, value) = line.split_once(':')?;
            (found.trim() == name).then(|| value.trim())
        })
    }

    /// The lines that begin with `start`, from its last word on.
    pub fn lines<'a>(&'a self, start: &'a str) -> impl Iterator<Item = &'a str> {
        let word = start.rfind(' ').map_or(0, |at| at + 1);
        self.more.iter().filter(move |line| line.starts_with(start)).map(move |line| &line[word..])
    }

    /// The values of all lines that begin with `NAME:`.
    pub fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.more.iter().filter_map(move |line| line.strip_prefix(name)?.strip_prefix(':'))
    }
}

/// What a descriptor is, without opening it.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub link: OsString,
    pub info: FdInfo,
    pub stat: Stat,
}

/// The fields of stat(2) that descriptors need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    pub device: u64,
    pub inode: u64,
    pub mode: u32,
    pub links: u64,
    /// Of a device's node: which device.
    pub special: u64,
    pub size: u64,
    /// Bytes that it takes on the disk.
    pub allocated: u64,
    /// Nanoseconds since 1970.
    pub modified: i128,
    /// User and group.
    pub owner: (u32, u32),
}

impl Stat {
    pub fn of(metadata: &fs::Metadata) -> Stat {
        Stat {
            device: metadata.dev(),
            inode: metadata.ino(),
            mode: metadata.mode(),
            links: metadata.nlink(),
            special: metadata.rdev(),
            size: metadata.size(),
            allocated: metadata.blocks().saturating_mul(512),
            modified: i128::from(metadata.mtime()) * 1_000_000_000
                + i128::from(metadata.mtime_nsec()),
            owner: (metadata.uid(), metadata.gid()),
        }
    }

    /// `S_IFREG` and so on.
    pub fn kind(&self) -> u32 {
        self.mode & libc::S_IFMT
    }

    pub fn is(&self, other: &Stat) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }
}

fn read(path: &str, limit: u64) -> io::Result<String> {
    // A file of /proc tells no size: room from the start saves calls while a job stands still.
    let mut text = String::with_capacity(4 << 10);
    File::open(path)?.take(limit).read_to_string(&mut text)?;
    if text.len() as u64 == limit {
        return Err(io::Error::other("longer than expected"));
    }
    Ok(text)
}

/// The numbers of the descriptors of `pid`.
pub(crate) fn descriptors(pid: i32) -> Result<Vec<i32>, PluginError> {
    let what = || format!("list the descriptors of process {pid}");
    let mut numbers = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).to(what)? {
        let name = entry.to(what)?.file_name();
        numbers.extend(name.to_str().and_then(|name| name.parse::<i32>().ok()));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// What descriptor `fd` of `pid` is; `None` if it has been closed meanwhile.
pub(crate) fn descriptor(pid: i32, fd: i32) -> Result<Option<Seen>, PluginError> {
    let seen = || {
        let path = format!("/proc/{pid}/fd/{fd}");
        let link = fs::read_link(&path)?.into_os_string();
        let stat = Stat::of(&fs::metadata(&path)?);
        Ok(Seen { link, info: info(pid, fd)?, stat })
    };
    unless_closed(pid, fd, seen())
}

/// The same where descriptor `fd` of `pid` is known to stand for the same description as the one
/// that was `seen`: most of what there is to tell is the description's.
pub(crate) fn same_description(
    pid: i32,
    fd: i32,
    seen: &Seen,
) -> Result<Option<Seen>, PluginError> {
    let Seen { link, stat, .. } = seen;
    let same = |info| Seen { link: link.clone(), info, stat: *stat };
    unless_closed(pid, fd, info(pid, fd).map(same))
}

fn info(pid: i32, fd: i32) -> io::Result<FdInfo> {
    let text = read(&format!("/proc/{pid}/fdinfo/{fd}"), MAX_FDINFO)?;
    FdInfo::parse(&text).ok_or_else(|| io::Error::other("unknown form"))
}

fn unless_closed(pid: i32, fd: i32, seen: io::Result<Seen>) -> Result<Option<Seen>, PluginError> {
    match seen {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some).to(|| format!("look at descriptor {fd} of process {pid}")),
    }
}

/// The id that `pid` has in its own, innermost pid namespace.
pub(crate) fn inner_pid(pid: i32) -> io::Result<i32> {
    let namespace = |of: &str| fs::read_link(format!("/proc/{of}/ns/pid"));
    // A link is read in less time than a status.
    if let (Ok(its), Ok(own)) = (namespace(&pid.to_string()), namespace("self"))
        && its.as_os_str() == own.as_os_str()
    {
        return Ok(pid);
    }
    let status = read(&format!("/proc/{pid}/status"), MAX_STATUS)?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let last = line.and_then(|line| line.split_whitespace().last()?.parse().ok());
    last.ok_or_else(|| io::Error::other("its status has no NSpid"))
}

/// The device that is the terminal of the session of `pid`.
pub(crate) fn terminal(pid: i32) -> Option<u64> {
    let stat = read(&format!("/proc/{pid}/stat"), MAX_STATUS).ok()?;
    // After the name, which may hold anything: state, parent, group, session, terminal (proc(5)).
    let number: i32 = stat.rsplit_once(')')?.1.split_whitespace().nth(4)?.parse().ok()?;
    let number = number as u32;
    (number != 0).then(|| {
        let minor = number & 0xff | (number >> 12) & 0xf_ff00;
        libc::makedev((number >> 8) & 0xfff, minor)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_prints() {
        let text = "pos:\t0\nflags:\t02004002\nmnt_id:\t16\nino:\t1057\neventfd-count:                2a\neventfd-id: 3\n";
        let info = FdInfo::parse(text).unwrap();
        assert_eq!(info.flags, 0o2004002);
        assert_eq!(info.value("eventfd-count"), Some("2a"));
        assert_eq!(info.more.len(), 2);
    }

    #[test]
    fn refuses_what_it_does_not_know() {
        for text in ["", "pos:\tx\nflags:\t0\n", "pos:\t1\n", "flags:\t9\npos:\t0\n"] {
            assert_eq!(FdInfo::parse(text), None, "{text:?}");
        }
    }
}
