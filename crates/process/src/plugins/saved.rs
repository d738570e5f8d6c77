//! The saved descriptors, and their form in the image.

use crate::plugins::contents::DATA_FILE;
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::Capture;
use crate::plugins::sys;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

const VERSION: u32 = 1;
/// Longest form that is read back.
const MAX_BYTES: usize = 256 << 20;
/// Most open file descriptions of a job.
const MAX_DESCRIPTIONS: usize = 1 << 20;
/// Most descriptors of a job.
const MAX_SLOTS: usize = 1 << 22;
/// The kernel's own bound on descriptor numbers (`sysctl_nr_open_max`) is above this one, which
/// is what a process can have by default (`fs.nr_open`).
const MAX_FD: i32 = 1 << 20;

/// A descriptor: process, number, and which open file description it stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    /// As the process knows itself.
    pub pid: i32,
    pub fd: i32,
    pub close_on_exec: bool,
    pub description: u32,
}

/// What all open file descriptions have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Common {
    /// `F_GETFL`.
    pub flags: u32,
    /// One of the job's streams: its flags belong to others, too.
    pub stream: bool,
    /// `F_GETOWN_EX`: kind and the id that the job knows; 0: none.
    pub owner: (i32, i32),
    /// `F_GETSIG`.
    pub signal: i32,
    /// Device and inode as they were: what a mapping of the file names.
    pub inode: (u64, u64),
}

/// What a plugin has saved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    pub plugin: String,
    pub version: u32,
    pub state: Value,
}

/// All descriptors of a job. Its own bytes go into the image ([`Saved::to_bytes`]), and so do the
/// files that it names ([`Saved::files`]), which are in the image's folder already.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    version: u32,
    pub(crate) slots: Vec<Slot>,
    pub(crate) descriptions: Vec<Common>,
    pub(crate) states: Vec<State>,
    pub(crate) files: Vec<String>,
    warnings: Vec<String>,
}

impl Saved {
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The number of open file descriptions.
    pub fn descriptions(&self) -> usize {
        self.descriptions.len()
    }

    /// A description of the file that a mapping named by device and inode; best one that writes.
    pub fn description_of(&self, device: u64, inode: u64) -> Option<u32> {
        let writes =
            |common: &Common| common.flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32;
        let usable = |common: &Common| common.flags & libc::O_PATH as u32 == 0;
        let found = self.descriptions.iter().enumerate();
        let found = found.filter(|(_, c)| c.inode == (device, inode) && usable(c));
        found.max_by_key(|(_, common)| writes(common)).map(|(index, _)| index as u32)
    }

    /// Names of the files in the image's folder that belong to it.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        std::iter::once(DATA_FILE).chain(self.files.iter().map(String::as_str))
    }

    /// Every text in what plugins have saved that could be a path.
    pub(crate) fn paths(&self) -> Vec<&Path> {
        let (mut paths, mut left) = (Vec::new(), Vec::new());
        left.extend(self.states.iter().map(|state| &state.state));
        while let Some(value) = left.pop() {
            match value {
                Value::String(text) if text.starts_with('/') => paths.push(Path::new(text)),
                Value::Array(all) => left.extend(all),
                Value::Object(all) => left.extend(all.values()),
                _ => {}
            }
        }
        paths
    }

    /// What the user should know about this checkpoint.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The name of a new file in the image's folder, to be made by the caller.
    pub(crate) fn new_file(&mut self) -> String {
        new_file(&mut self.files)
    }

    pub fn to_bytes(&self) -> Result<Vec<u8>, PluginError> {
        serde_json::to_vec(self).to(|| "write the descriptors")
    }

    /// Reads what [`Saved::to_bytes`] has made; every number in it is checked before use, here or
    /// by the plugin whose it is.
    pub fn from_bytes(bytes: &[u8]) -> Result<Saved, PluginError> {
        if bytes.len() > MAX_BYTES {
            return Err(damaged("longer than any job's"));
        }
        let saved: Saved = serde_json::from_slice(bytes).map_err(|e| damaged(e.to_string()))?;
        saved.check()?;
        Ok(saved)
    }

    fn check(&self) -> Result<(), PluginError> {
        if self.version != VERSION {
            let (plugin, found) = ("descriptors".to_owned(), self.version);
            return Err(PluginError::Newer { plugin, found, known: VERSION });
        }
        if self.descriptions.len() > MAX_DESCRIPTIONS || self.slots.len() > MAX_SLOTS {
            return Err(damaged("more descriptors than any job has"));
        }
        let mut numbers = BTreeSet::new();
        for slot in &self.slots {
            let known = (slot.description as usize) < self.descriptions.len();
            if slot.pid <= 0 || !(0..MAX_FD).contains(&slot.fd) || !known {
                return Err(damaged(format!("{slot:?}")));
            }
            if !numbers.insert((slot.pid, slot.fd)) {
                return Err(damaged(format!("{slot:?} is there twice")));
            }
        }
        let plain =
            |name: &String| !name.is_empty() && !name.contains('/') && !name.starts_with('.');
        match self.files.iter().all(plain) {
            true => Ok(()),
            false => Err(damaged("a file lies outside of the image's folder")),
        }
    }
}

/// The name of a new one of `files`.
pub(crate) fn new_file(files: &mut Vec<String>) -> String {
    let name = format!("file-{:06}.data", files.len());
    files.push(name.clone());
    name
}

/// What belongs to no plugin.
pub(crate) fn saved(capture: Capture, states: Vec<State>) -> Result<Saved, PluginError> {
    let job = capture.job;
    let mut slots = Vec::new();
    let mut descriptions = Vec::new();
    for (index, file) in job.files.iter().enumerate() {
        let mut common = Common {
            flags: file.info.flags,
            stream: file.stream.is_some(),
            owner: (0, 0),
            signal: 0,
            inode: (file.stat.device, file.stat.inode),
        };
        common.flags &= !(libc::O_CLOEXEC as u32);
        // One that is a path only knows no such calls.
        if !file.is_path_only() {
            let fd = capture.duplicate(index)?;
            let owner =
                sys::owner(&fd).to(|| format!("read the owner of {}", job.describe(file)))?;
            common.owner = (owner.kind, inner_id(&capture, owner));
            common.signal = sys::owner_signal(&fd)
                .to(|| format!("read the signal of {}", job.describe(file)))?;
        }
        descriptions.push(common);
        slots.extend(file.holders.iter().map(|holder| Slot {
            pid: job.processes[holder.process].inner,
            fd: holder.fd,
            close_on_exec: holder.close_on_exec,
            description: index as u32,
        }));
    }
    let Capture { files, warnings, .. } = capture;
    Ok(Saved { version: VERSION, slots, descriptions, states, files, warnings })
}

/// The owner's id as the job knows it; 0 if it is not of the job.
fn inner_id(capture: &Capture, owner: sys::Owner) -> i32 {
    if owner.id == 0 {
        return 0;
    }
    let process = || capture.job.inner(owner.id);
    // A thread other than its process's leader, or a process group by its leader's id.
    process().or_else(|| crate::plugins::procfs::inner_pid(owner.id).ok()).unwrap_or(0)
}
