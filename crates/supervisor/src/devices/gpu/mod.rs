//! The plugin for devices: the three descriptors that tie a client to its proxy. What the devices
//! hold is taken by the proxies while the job stands still, and written by them; at a restart new
//! proxies bring it back and are tied to the clients in the old ones' place.

mod begun;
mod captures;
mod checkpoint;
mod pages;
mod restart;
mod ring;

use crate::devices::quiesce::Resting;
pub(crate) use begun::Restart;
pub(crate) use captures::Captures;
pub(crate) use checkpoint::{GpuCheckpoint, was_connecting};
use kedge_control::proxy::ControlError;
use kedge_process::plugins::{Blob, Found, Job, PluginError, Process};
use pages::SavedPages;
pub(crate) use restart::GpuRestart;
use serde::{Deserialize, Serialize};
use std::io;
use std::time::Duration;

/// Longer than any device takes.
const LIMIT: Duration = Duration::from_secs(3600);

/// What images call the plugins' state.
const NAME: &str = "gpu";

#[derive(Serialize, Deserialize)]
struct State {
    clients: Vec<Saved>,
    /// Descriptions of what NVIDIA's management library has open, and what each is.
    management: Vec<(u32, String)>,
    /// Descriptions of device memory that travels from process to process, and where it is found.
    #[serde(default)]
    memory: Vec<(u32, String)>,
    /// Whether there is any such memory.
    #[serde(default)]
    travels: bool,
}

#[derive(Serialize, Deserialize)]
struct Saved {
    /// As it knows itself.
    pid: i32,
    /// The file of what its devices hold.
    file: String,
    /// Descriptions.
    sockets: Vec<u32>,
    rings: Vec<u32>,
    arenas: Vec<u32>,
    /// What is not zero in the ring's memory: offsets and bytes.
    ring: Vec<(u64, Blob)>,
    /// Where it has managed memory that lies on its devices page by page.
    #[serde(default)]
    pages: Option<SavedPages>,
}

#[derive(Debug)]
struct Client {
    resting: Resting,
    /// The inode of its own end.
    end: u64,
}

/// What a description is to a client.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Socket,
    Ring,
    Arena,
    /// The host's pages of managed memory, and what watches them.
    Pages,
    Watcher,
}

impl Client {
    fn part(&self, file: &Found, job: &Job) -> Option<Part> {
        let inode = file.stat.inode;
        let memfd = |name: &str| file.link.to_string_lossy().starts_with(&format!("/memfd:{name}"));
        match () {
            () if file.socket.is_some() && inode == self.end => Some(Part::Socket),
            () if memfd("kedge-ring") && inode == self.resting.ring => Some(Part::Ring),
            () if memfd("kedge-shared") && inode == self.resting.arena => Some(Part::Arena),
            () if pages::is_file(file)
                && pages::has_length(file)
                && self.holds(file, job, None) =>
            {
                Some(Part::Pages)
            }
            () if pages::is_watcher(file, job, self) => Some(Part::Watcher),
            () => None,
        }
    }

    fn is(&self, process: &Process) -> bool {
        process.pid == self.resting.pid as i32
    }

    /// Whether the client's process itself holds it, under that number if one is given.
    fn holds(&self, file: &Found, job: &Job, number: Option<i32>) -> bool {
        let mut own = file.holders.iter().filter(|it| self.is(&job.processes[it.process]));
        own.any(|holder| number.is_none_or(|number| holder.fd == number))
    }

    fn file(&self) -> String {
        format!("gpu-{}.kimg", self.resting.pid)
    }
}

/// Whether a file of an image is what devices held: a client's, or those of one of its places.
pub fn is_of_devices(name: &str) -> bool {
    name.starts_with("gpu-") && name.ends_with(".kimg")
}

/// Whether a file of an image is the one of a client's devices.
pub(crate) fn is_of_client(name: &str) -> bool {
    is_of_devices(name) && !kedge_gpu_image::is_of_place(name)
}

fn failed(what: impl Into<String>) -> impl FnOnce(io::Error) -> PluginError {
    move |source| PluginError::System { what: what.into(), source }
}

fn refused(pid: u32, error: &ControlError) -> PluginError {
    PluginError::Refused(format!("the devices of process {pid}: {error}"))
}
