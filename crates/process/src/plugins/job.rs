//! The job as the plugins see it: processes, and the open file descriptions that they hold.

use crate::maps::Mapping;
use crate::plugins::contents::DataWriter;
use crate::plugins::error::{Context, PluginError};
use crate::plugins::procfs::{FdInfo, Stat};
use crate::plugins::saved::new_file;
use crate::plugins::survey::FileContents;
use crate::plugins::{Blob, Others, sockets::Kind, streams::Stream, sys};
use crate::track::device_name;
use kedge_image::Manifest;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use serde::Serialize;
use serde_json::Value;
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::path::Path;
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

/// An open file description, and who holds it.
#[derive(Debug, Clone)]
pub struct Found {
    /// Never empty.
    pub holders: Vec<Holder>,
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

    pub fn is_path_only(&self) -> bool {
        self.info.flags & libc::O_PATH as u32 != 0
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
        self.files = files;
        self.by_descriptor.clear();
        self.by_inode.clear();
        for (index, file) in self.files.iter().enumerate() {
            let numbers = file.holders.iter().map(|holder| ((holder.process, holder.fd), index));
            self.by_descriptor.extend(numbers);
            self.by_inode.entry((file.stat.device, file.stat.inode)).or_default().push(index);
        }
    }

    /// All descriptions of the same inode, `file` among them.
    pub fn same<'a>(&'a self, file: &Found) -> impl Iterator<Item = &'a Found> + use<'a> {
        let indices = self.by_inode.get(&(file.stat.device, file.stat.inode));
        indices.into_iter().flatten().map(|index| &self.files[*index])
    }

    /// A descriptor for `file`: process and number.
    pub fn holder(&self, file: &Found) -> (i32, i32) {
        let holder = file.holders[0];
        (self.processes[holder.process].pid, holder.fd)
    }

    /// A descriptor for `file`, by the thread whose files in /proc tell of it.
    pub fn place(&self, file: &Found) -> (i32, i32) {
        let holder = file.holders[0];
        (self.processes[holder.process].at, holder.fd)
    }

    /// The id that the process `pid` has for itself; `None` if it is not of the job.
    pub fn inner(&self, pid: i32) -> Option<i32> {
        self.processes.iter().find(|process| process.pid == pid).map(|process| process.inner)
    }

    pub fn describe(&self, file: &Found) -> String {
        let (pid, fd) = self.holder(file);
        format!("descriptor {fd} of process {pid} ({})", file.what())
    }

    /// A descriptor of our own for the same open file description: what is done with it (offset,
    /// flags, reading) is done to the program.
    pub fn duplicate(&self, file: &Found) -> Result<OwnedFd, PluginError> {
        let holder = file.holders[0];
        let pidfd = &self.processes[holder.process].pidfd;
        pidfd_getfd(pidfd, holder.fd, PidfdGetfdFlags::empty())
            .to(|| format!("duplicate {}", self.describe(file)))
    }

    /// The index of the file that process `process` (an index) holds as `fd`.
    pub fn held(&self, process: usize, fd: i32) -> Option<usize> {
        self.by_descriptor.get(&(process, fd)).copied()
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
    pub others: Option<&'a dyn Others>,
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
        let me = std::process::id() as i32;
        let own = crate::plugins::procfs::descriptor(me, fd.as_raw_fd()).ok()??;
        let is_it = |index: &usize| {
            let place = self.job.place(self.file(*index));
            matches!(sys::compare_files((me, fd.as_raw_fd()), place), Ok(Ordering::Equal))
        };
        let id = (own.stat.device, own.stat.inode);
        self.job.by_inode.get(&id)?.iter().copied().find(is_it)
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
