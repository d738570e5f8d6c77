//! The plugin of a checkpoint: which descriptors tie clients to devices that rest, and how these
//! are captured.

use super::ring::save_ring;
use super::{Client, LIMIT, NAME, Part, Saved, State, failed, pages, refused};
use crate::base::sockets::leads_to;
use crate::devices::quiesce::Resting;
use crate::devices::sharing::{self, Lent};
use crate::job::jobs::NVML_SOCKET;
use crate::services::management;
use kedge_control::proxy::{Answer, ControlError, Order};
use kedge_image::Manifest;
use kedge_process::EngineError;
use kedge_process::plugins::{Capture, Claim, Found, Job, Plugin, PluginError, Refusal, unix_peer};
use serde_json::Value;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The plugin of a checkpoint: these are at rest and may be captured.
#[derive(Debug)]
pub(crate) struct GpuCheckpoint {
    pub(super) clients: Vec<Client>,
    /// Memory of which processes may have descriptors.
    lent: Vec<Lent>,
    /// The job's, by which a process asks for devices.
    socket: PathBuf,
    /// Whether this image or a later one may build on another.
    track: bool,
    /// So many of them capture, and have not said yet that they are done.
    asked: AtomicUsize,
}

/// Why a process cannot be captured for a moment.
const CONNECTING: &str = "the process is just getting its devices: try again";

/// Whether the job could not be captured because a process was just getting its devices.
pub(crate) fn was_connecting(error: &EngineError) -> bool {
    let EngineError::Descriptors(PluginError::Survey(refusals)) = error else { return false };
    // Until it is connected, what it is to share with its proxy is nobody's; of what is under way
    // to it, the socket is named first.
    let is = |refusal: &Refusal, why: &str| refusal.remedy.ends_with(why);
    refusals.iter().all(|refusal| is(refusal, CONNECTING) || is(refusal, LOST))
        && refusals.iter().any(|refusal| is(refusal, CONNECTING))
}

/// Why a client cannot be captured whose proxy has ended.
const LOST: &str =
    "its devices are gone with their proxy: restart the job from an image (`kedge run --recover`)";

/// Whether it is memory that a client and its proxy share.
fn is_shared_with_a_proxy(file: &Found) -> bool {
    let link = file.link.to_string_lossy();
    let known = ["/memfd:kedge-ring", "/memfd:kedge-shared"];
    known.iter().any(|name| link.starts_with(name)) || pages::is_file(file)
}

/// Where the job's questions to NVIDIA's management library are answered: beside the job's socket.
fn nvml(socket: &Path) -> PathBuf {
    socket.with_file_name(NVML_SOCKET)
}

/// Whether it is a connection to the job's socket, which becomes one to a proxy. One whose proxy
/// has ended is not.
fn is_connecting(file: &Found, job: &Job, socket: &Path) -> bool {
    let stream = file.socket.is_some_and(|kind| kind.domain == libc::AF_UNIX);
    let end = || job.duplicate(file).ok().map(UnixStream::from);
    stream && end().is_some_and(|end| leads_to(&end, socket) && !is_over(&end))
}

/// Whether the other end has been closed. One that nobody has accepted yet has no inode, as if it
/// had, but is not.
fn is_over(end: &UnixStream) -> bool {
    let mut looked = libc::pollfd { fd: end.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: one structure, which lives as long as the call; it does not wait.
    let found = unsafe { libc::poll(&raw mut looked, 1, 0) };
    found > 0 && looked.revents & libc::POLLHUP != 0
}

impl GpuCheckpoint {
    /// Returns the one of these clients, which are at rest.
    ///
    /// # Errors
    /// The kernel does not tell where their connections lead.
    pub(crate) fn of(
        clients: &[Resting],
        lent: Vec<Lent>,
        socket: &Path,
        track: bool,
    ) -> io::Result<GpuCheckpoint> {
        let mut known = Vec::new();
        for resting in clients {
            match unix_peer(resting.socket) {
                Ok(Some(end)) => known.push(Client { resting: resting.clone(), end }),
                // It has just gone, or its proxy has with it.
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        let (clients, socket) = (known, socket.to_owned());
        Ok(GpuCheckpoint { clients, lent, socket, track, asked: AtomicUsize::new(0) })
    }

    /// Waits for all that have been asked to capture, whether they succeed or not: the first
    /// failure. So nobody takes what they say for another answer.
    pub(super) fn settle(&self) -> Result<(), PluginError> {
        let asked = self.asked.swap(0, Ordering::SeqCst);
        let answer = |client: &Client| match client.resting.proxy.control.answer(LIMIT) {
            Ok(Answer::Captured { .. }) => Ok(()),
            Ok(_) => Err(refused(client.resting.pid, &ControlError::Nonsense)),
            Err(error) => Err(refused(client.resting.pid, &error)),
        };
        self.clients.iter().take(asked).map(answer).fold(Ok(()), Result::and)
    }
}

impl Plugin for GpuCheckpoint {
    fn name(&self) -> &'static str {
        NAME
    }

    fn claim(&self, file: &Found, job: &Job) -> Claim {
        let GpuCheckpoint { clients, lent, socket, .. } = self;
        if clients.iter().any(|client| client.part(file, job).is_some()) {
            return Claim::Yes;
        }
        if clients.iter().any(|client| pages::is_starting(file, job, client)) {
            return Claim::Refused(CONNECTING.to_owned());
        }
        let is_memory = || sharing::memory(file, job, lent).is_some();
        if is_memory() || management::opened(file, job, &nvml(socket)).is_some() {
            return Claim::Yes;
        }
        if is_connecting(file, job, socket) {
            return Claim::Refused(CONNECTING.to_owned());
        }
        match is_shared_with_a_proxy(file) {
            true => Claim::Refused(LOST.to_owned()),
            false => Claim::No,
        }
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        for client in &self.clients {
            begin_capture(client, self.track, capture.base)?;
            self.asked.fetch_add(1, Ordering::SeqCst);
        }
        let clients = self.clients.iter().map(|client| save(client, capture, mine));
        let clients = clients.collect::<Result<Vec<Saved>, _>>()?;
        let memory = sharing::save(capture, mine, &self.lent);
        let travels = !self.lent.is_empty();
        let apart = |index: &usize| memory.iter().all(|(other, _)| *other as usize != *index);
        let rest: Vec<usize> = mine.iter().copied().filter(apart).collect();
        let management = management::save(capture, &rest, &nvml(&self.socket));
        if clients.is_empty() && management.is_empty() && memory.is_empty() {
            return Ok(None);
        }
        let all = serde_json::to_value(State { clients, management, memory, travels });
        all.map(Some).map_err(|error| failed("write the devices' state")(error.into()))
    }

    fn captured(&self) -> Result<(), PluginError> {
        self.settle()
    }
}

/// Has a client's devices captured, for a file that may build on its own in `base`. All do so at
/// once, and while the processes are held.
fn begin_capture(client: &Client, track: bool, base: Option<&Manifest>) -> Result<(), PluginError> {
    let parent = base.and_then(|base| base.file(&client.file())).map(|file| file.checksum);
    let given = client.resting.proxy.control.give(&Order::Capture { track, parent }, &[]);
    given.map_err(|error| refused(client.resting.pid, &error))
}

fn save(client: &Client, capture: &mut Capture, mine: &[usize]) -> Result<Saved, PluginError> {
    let part = |part| {
        let is_part = |index: &usize| client.part(capture.file(*index), capture.job) == Some(part);
        let found = mine.iter().filter(|index| is_part(index));
        found.copied().collect::<Vec<usize>>()
    };
    let (sockets, rings, arenas) = (part(Part::Socket), part(Part::Ring), part(Part::Arena));
    let first = rings.first().copied();
    let first = first.ok_or_else(|| PluginError::Refused("a client has closed its ring".into()))?;
    let numbers =
        |indices: Vec<usize>| indices.into_iter().map(|index| index as u32).collect::<Vec<u32>>();
    let managed = (numbers(part(Part::Pages)), numbers(part(Part::Watcher)));
    let pid = client.resting.pid as i32;
    Ok(Saved {
        pid: capture.job.inner(pid).unwrap_or(pid),
        file: client.file(),
        sockets: numbers(sockets),
        rings: numbers(rings),
        arenas: numbers(arenas),
        ring: save_ring(capture, first)?,
        pages: pages::save(client, capture, managed)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_connection_that_nobody_has_accepted_is_not_over() {
        let folder = std::env::temp_dir().join(format!("kgpu-over-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let end = UnixStream::connect(&path).unwrap();
        assert!(leads_to(&end, &path) && !leads_to(&end, &folder));
        assert!(!is_over(&end));
        let (accepted, _) = listener.accept().unwrap();
        assert!(!is_over(&end));
        drop(accepted);
        assert!(is_over(&end));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
