//! The job as the plugins see it: processes, and the open file descriptions that they hold.

use crate::maps::Mapping;
use crate::plugins::contents::DataWriter;
use crate::plugins::error::{Context, PluginError};
use crate::plugins::procfs::{FdInfo, Seen, Stat};
use crate::plugins::recreate::again;
use crate::plugins::saved::new_file;
use crate::plugins::survey::FileContents;
use crate::plugins::{Blob, Rendezvous, sockets::Kind, streams::Stream, sys};
use crate::track::device_name;
use kedge_image::Manifest;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::net::SocketAddrAny;
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use serde::Serialize;
use serde_json::Value;
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A process of the job.
#[derive(Debug)]
pub struct Process {
    /// Its id here.
    pub pid: i32,
    /// The thread whose files in /proc tell of it: another one where its first has ended.
    pub at: i32,
    /// Its id as it knows it itself; the image has no other.
    pub inner: i32,
    pub(crate) pidfd: OwnedFd,
}

/// A descriptor of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    /// Index into [`Job::processes`].
    pub process: usize,
    pub fd: i32,
    pub close_on_exec: bool,
}

/// Where a description is that no process of the job holds: with a message that waits in a Unix
/// socket.
#[derive(Debug, Clone)]
pub(crate) struct UnderWay {
    /// This process's own descriptor for it.
    pub own: Arc<OwnedFd>,
    /// Who holds the socket, or the outermost one where sockets wait in sockets.
    pub within: Holder,
    /// What /proc calls that socket.
    pub socket: OsString,
}

/// A message that waits in a Unix socket, or a part of a stream.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub data: Vec<u8>,
    pub from: Option<SocketAddrAny>,
    /// Where the descriptions are that come with it, as [`Job::place`] has them.
    pub passed: Vec<(i32, i32)>,
}

/// An open file description, and who holds it.
#[derive(Debug, Clone)]
pub struct Found {
    /// Empty where it is under way in a socket's queue, and nowhere else.
    pub holders: Vec<Holder>,
    pub(crate) under_way: Option<UnderWay>,
    /// All that waits in it, where descriptors are among it and the processes stand still: the
    /// kernel may not show it a second time.
    pub(crate) waiting: Option<Arc<Vec<Waiting>>>,
    /// What /proc/PID/fd/FD points to: a path, or something like `pipe:[123]`.
    pub link: OsString,
    pub stat: Stat,
    pub info: FdInfo,
    /// Process (an index) and line of each lock, which /proc tells with each descriptor.
    pub locks: Vec<(usize, String)>,
    /// It is one of the streams that the job was started with.
    pub stream: Option<Stream>,
    /// It is a socket of this kind.
    pub socket: Option<Kind>,
}

impl Found {
    pub(crate) fn new(holders: Vec<Holder>, seen: Seen, locks: Vec<(usize, String)>) -> Found {
        let Seen { link, stat, info } = seen;
        let (under_way, waiting, stream, socket) = (None, None, None, None);
        Found { holders, under_way, waiting, link, stat, info, locks, stream, socket }
    }

    /// `O_RDONLY`, `O_WRONLY` or `O_RDWR`.
    pub fn access(&self) -> u32 {
        self.info.flags & libc::O_ACCMODE as u32
    }

    pub fn reads(&self) -> bool {
        self.access() != libc::O_WRONLY as u32
    }

    pub fn writes(&self) -> bool {
        self.access() != libc::O_RDONLY as u32
    }

    /// Whether no process holds it: it waits in a socket to be received.
    pub fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    pub fn is_path_only(&self) -> bool {
        self.info.is_path_only()
    }

    /// The NAME of `anon_inode:NAME`, without brackets.
    pub fn anonymous(&self) -> Option<&str> {
        let name = self.link.to_str()?.strip_prefix("anon_inode:")?;
        Some(name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name))
    }

    /// As a person would name it.
    pub fn what(&self) -> String {
        self.link.to_string_lossy().into_owned()
    }
}

/// All processes and all open file descriptions.
#[derive(Debug, Default)]
pub struct Job {
    pub processes: Vec<Process>,
    pub files: Vec<Found>,
    pub contents: FileContents,
    pub limit: u64,
    /// How long a claim may wait for something that the processes may do; zero where they stand
    /// still.
    pub patience: Duration,
    by_descriptor: HashMap<(usize, i32), usize>,
    by_inode: HashMap<(u64, u64), Vec<usize>>,
}

impl Job {
    pub(crate) fn new(processes: Vec<Process>, files: Vec<Found>) -> Job {
        let mut job = Job { processes, ..Job::default() };
        job.set_files(files);
        job
    }

    pub(crate) fn set_files(&mut self, files: Vec<Found>) {
        self.files.clear();
        self.by_descriptor.clear();
        self.by_inode.clear();
        files.into_iter().for_each(|file| self.add(file));
    }

    pub(crate) fn add(&mut self, file: Found) {
        let index = self.files.len();
        let numbers = file.holders.iter().map(|holder| ((holder.process, holder.fd), index));
        self.by_descriptor.extend(numbers);
        self.by_inode.entry((file.stat.device, file.stat.inode)).or_default().push(index);
        self.files.push(file);
    }

    /// All descriptions of the same inode, `file` among them.
    pub fn same<'a>(&'a self, file: &Found) -> impl Iterator<Item = &'a Found> + use<'a> {
        let indices = self.by_inode.get(&(file.stat.device, file.stat.inode));
        indices.into_iter().flatten().map(|index| &self.files[*index])
    }

    /// Its first holder, or that of the socket in which it waits.
    fn first(file: &Found) -> Holder {
        file.under_way.as_ref().map_or_else(|| file.holders[0], |under_way| under_way.within)
    }

    /// A descriptor for `file`: process and number; of one that is under way, for the socket in
    /// which it waits.
    pub fn holder(&self, file: &Found) -> (i32, i32) {
        let holder = Job::first(file);
        (self.processes[holder.process].pid, holder.fd)
    }

    /// A descriptor for `file`, by the thread whose files in /proc tell of it; of one that is under
    /// way, this process's own.
    pub fn place(&self, file: &Found) -> (i32, i32) {
        if let Some(under_way) = &file.under_way {
            return (std::process::id() as i32, under_way.own.as_raw_fd());
        }
        let holder = file.holders[0];
        (self.processes[holder.process].at, holder.fd)
    }

    /// The thread whose files in /proc tell of the process that holds it, or the socket in which it
    /// waits.
    pub(crate) fn at(&self, file: &Found) -> i32 {
        self.processes[Job::first(file).process].at
    }

    /// The id that the process `pid` has for itself; `None` if it is not of the job.
    pub fn inner(&self, pid: i32) -> Option<i32> {
        self.processes.iter().find(|process| process.pid == pid).map(|process| process.inner)
    }

    pub fn describe(&self, file: &Found) -> String {
        let (pid, fd) = self.holder(file);
        let what = file.what();
        match file.is_under_way() {
            true => format!("{what}, which is under way in descriptor {fd} of process {pid},"),
            false => format!("descriptor {fd} of process {pid} ({what})"),
        }
    }

    /// A descriptor of our own for the same open file description: what is done with it (offset,
    /// flags, reading) is done to the program.
    pub fn duplicate(&self, file: &Found) -> Result<OwnedFd, PluginError> {
        if let Some(under_way) = &file.under_way {
            return again(&under_way.own);
        }
        let holder = file.holders[0];
        let pidfd = &self.processes[holder.process].pidfd;
        pidfd_getfd(pidfd, holder.fd, PidfdGetfdFlags::empty())
            .to(|| format!("duplicate {}", self.describe(file)))
    }

    /// The index of the file that process `process` (an index) holds as `fd`.
    pub fn held(&self, process: usize, fd: i32) -> Option<usize> {
        self.by_descriptor.get(&(process, fd)).copied()
    }

    /// The index of the description at this place.
    pub(crate) fn placed(&self, place: (i32, i32)) -> Option<usize> {
        self.files.iter().position(|file| self.place(file) == place)
    }

    /// Those of this device and inode.
    pub(crate) fn of_inode(&self, device: u64, inode: u64) -> impl Iterator<Item = &Found> {
        let indices = self.by_inode.get(&(device, inode));
        indices.into_iter().flatten().map(|index| &self.files[*index])
    }

    /// The index of the description that this descriptor of our own stands for.
    pub fn known(&self, fd: &OwnedFd) -> Option<usize> {
        let me = std::process::id() as i32;
        let own = crate::plugins::procfs::descriptor(me, fd.as_raw_fd()).ok()??;
        let is_it = |index: &usize| {
            let place = self.place(&self.files[*index]);
            matches!(sys::compare_files((me, fd.as_raw_fd()), place), Ok(Ordering::Equal))
        };
        let id = (own.stat.device, own.stat.inode);
        self.by_inode.get(&id)?.iter().copied().find(is_it)
    }
}

/// A checkpoint while it is made: every process is stopped.
#[derive(Debug)]
pub struct Capture<'a> {
    pub job: &'a Job,
    /// The image's.
    pub folder: &'a Path,
    /// The image that this one may build on.
    pub base: Option<&'a Manifest>,
    /// What each process maps; nothing of one that has ended.
    pub(crate) mappings: &'a [Vec<Mapping>],
    pub(crate) data: DataWriter,
    /// Names of the files that plugins have put into the image's folder.
    pub(crate) files: Vec<String>,
    /// What the user should know.
    pub warnings: Vec<String>,
    /// For what is read of sockets.
    pub(crate) buffer: Vec<u8>,
    /// The job's other parts, which stand still as well.
    pub others: Option<&'a dyn Rendezvous>,
}

impl Capture<'_> {
    /// The file of index `index`.
    pub fn file(&self, index: usize) -> &Found {
        &self.job.files[index]
    }

    /// Where process `process` (an index) maps a file: first address, end, and the place in the
    /// file.
    pub fn mapped(&self, process: usize, file: &Found) -> Vec<(u64, u64, u64)> {
        let device = device_name(file.stat.device);
        let is_it =
            |mapping: &&Mapping| mapping.inode == file.stat.inode && mapping.device == device;
        let all = self.mappings.get(process).into_iter().flatten().filter(is_it);
        all.map(|mapping| (mapping.start, mapping.end, mapping.offset)).collect()
    }

    pub fn duplicate(&self, index: usize) -> Result<OwnedFd, PluginError> {
        self.job.duplicate(self.file(index))
    }

    /// `mine`, together where they are of the same inode.
    pub fn by_inode(&self, mine: &[usize]) -> Vec<Vec<usize>> {
        let mut inodes: BTreeMap<(u64, u64), Vec<usize>> = BTreeMap::new();
        for &index in mine {
            let stat = self.file(index).stat;
            inodes.entry((stat.device, stat.inode)).or_default().push(index);
        }
        inodes.into_values().collect()
    }

    /// The index of the description that this descriptor of our own stands for.
    pub fn known(&self, fd: &OwnedFd) -> Option<usize> {
        self.job.known(fd)
    }

    /// Keeps some bytes, such as what is in flight in a pipe.
    pub fn blob(&mut self, bytes: &[u8]) -> Result<Blob, PluginError> {
        self.data.append(bytes)
    }

    /// The name of a new file in the image's folder, to be made by the caller.
    pub fn new_file(&mut self) -> String {
        new_file(&mut self.files)
    }
}

/// A plugin's state from what it has saved of each thing; `None` if that is nothing.
pub fn state<T: Serialize>(
    all: impl IntoIterator<Item = Result<T, PluginError>>,
) -> Result<Option<Value>, PluginError> {
    let all = all.into_iter().collect::<Result<Vec<T>, _>>()?;
    match all.is_empty() {
        true => Ok(None),
        false => serde_json::to_value(all).map(Some).to(|| "write a plugin's state"),
    }
}
