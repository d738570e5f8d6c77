//! The plugin of a restart: new proxies bring back what the devices held, and are tied to the
//! clients.

use super::begun::{Begun, Restart, Sources, Started, go_on, in_full, why_not};
use super::{LIMIT, NAME, Saved, State, failed};
use crate::base::sockets::listen;
use crate::devices::sharing;
use crate::services::keeper::Held;
use crate::services::management;
use crate::services::warm::WarmProxy;
use kedge_control::aliases;
use kedge_control::joblog::JobLog;
use kedge_image::FileEntry;
use kedge_process::plugins::{Claim, Found, Job, Plugin, PluginError, World};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The plugin of a restart.
#[derive(Debug)]
pub(crate) struct GpuRestart {
    restart: Restart,
    kept: Mutex<Kept>,
}

/// Returns what the image's manifest, with these `files`, tells of each client's: each has one of
/// its own.
///
/// # Errors
/// The image is not whole, or not what kedge has written.
fn entries<'a>(
    files: &'a [FileEntry],
    clients: &[Saved],
) -> Result<Vec<&'a FileEntry>, PluginError> {
    let mut seen = BTreeSet::new();
    let entry = |client: &Saved| {
        let name = &client.file;
        let entry = files.iter().find(|file| file.name == *name);
        let entry = entry.ok_or_else(|| PluginError::Damaged(format!("it lacks {name}")))?;
        match seen.insert(&entry.name) {
            true => Ok(entry),
            false => Err(PluginError::Damaged(format!("two processes have {name}"))),
        }
    };
    clients.iter().map(entry).collect()
}

/// What a restart has until it is used.
#[derive(Debug)]
struct Kept {
    /// What of the image is held in memory.
    held: Option<Held>,
    /// Proxies that are ready, as many as there were.
    warm: Vec<WarmProxy>,
    begun: Vec<Begun>,
    /// Where processes ask for devices as soon as they run.
    listener: Option<UnixListener>,
}

impl GpuRestart {
    pub(crate) fn new(restart: Restart, held: Option<Held>, warm: Vec<WarmProxy>) -> GpuRestart {
        let kept = Kept { held, warm, begun: Vec::new(), listener: None };
        GpuRestart { restart, kept: Mutex::new(kept) }
    }

    /// What the job's init needs of this process's descriptors.
    pub(crate) fn numbers(&self) -> Vec<RawFd> {
        let kept = self.kept();
        let held = kept.held.iter().flat_map(Held::numbers);
        held.chain(kept.warm.iter().flat_map(WarmProxy::numbers)).collect()
    }

    /// What the process that restarts the job still holds: its copy of what the init was given.
    pub(crate) fn held(&self) -> Option<Held> {
        self.kept().held.take()
    }

    /// Has processes of the job that has been restarted get devices, as they ask for them.
    ///
    /// # Errors
    /// There are no threads left.
    pub(crate) fn serve(&self, log: Arc<JobLog>) -> io::Result<()> {
        let Some(listener) = self.kept().listener.take() else { return Ok(()) };
        self.restart.proxies.serve(listener, self.restart.launch.clone(), log, None)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Plugin for GpuRestart {
    fn name(&self) -> &'static str {
        NAME
    }

    fn claim(&self, _file: &Found, _job: &Job) -> Claim {
        Claim::No
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        let restart = &self.restart;
        let mut kept = self.kept();
        let Kept { held, warm, begun, .. } = &mut *kept;
        let State { clients, management, memory, travels } = world.parse(state)?;
        if travels && !warm.is_empty() {
            // Their descriptors are compared with others' by kcmp, which takes proxies of this
            // namespace.
            warm.clear();
            restart.launch.note(
                "no warm proxy serves processes whose device memory travelled as descriptors: new ones start",
            );
        }
        let folder = restart.socket.parent().unwrap_or(Path::new("/")).to_owned();
        aliases::clear(&folder);
        let entries = entries(&restart.files, &clients)?;
        // All start, and come up side by side, before the first table of an image is read.
        let started: Result<Vec<Started>, PluginError> =
            clients.iter().map(|_| Started::new(restart, warm.pop())).collect();
        let mut sources = Sources::of(restart, held.as_ref());
        for ((saved, entry), started) in clients.iter().zip(entries).zip(started?) {
            begun.push(sources.restore((saved, entry), started, world)?);
        }
        for (description, name) in memory {
            let name = aliases::parse(&name);
            let name = name.ok_or_else(|| PluginError::Damaged("a name is none".to_owned()))?;
            let fails = || begun.iter().any(Begun::has_ended);
            let found = aliases::descriptor(&folder, &name, fails).map_err(|source| {
                let what =
                    "find device memory that is shared: the proxy that has it ended or is silent";
                why_not(begun, PluginError::System { what: what.into(), source })
            });
            world.made(description, found?)?;
        }
        management.into_iter().try_for_each(|(at, path)| management::reopen(at, &path, world))
    }

    fn rebuilt(&self) -> Result<(), PluginError> {
        let (restart, mut kept) = (&self.restart, self.kept());
        let begun = std::mem::take(&mut kept.begun);
        let all = begun.iter().map(|begun| (begun.client, &begun.proxy));
        sharing::wait_for_all(all, LIMIT).map_err(|error| {
            PluginError::Refused(in_full(&begun, format!("the devices of {error}")))
        })?;
        for Begun { client, proxy, .. } in begun {
            go_on(&proxy, client)?;
            restart.proxies.add(proxy).map_err(failed("start a thread"))?;
        }
        let listener = listen(&restart.socket);
        kept.listener = Some(listener.map_err(failed("listen on the job's socket"))?);
        // They end with the process that restarts the job, and not with its init.
        (kept.held, kept.warm) = (None, Vec::new());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(file: &str) -> Saved {
        let saved = serde_json::json!({
            "pid": 1, "file": file, "sockets": [], "rings": [], "arenas": [], "ring": [],
        });
        serde_json::from_value(saved).unwrap()
    }

    /// Before any proxy is started for one.
    #[test]
    fn clients_that_the_image_has_no_file_for_are_damage() {
        let of = |name: &str| FileEntry { name: name.into(), bytes: 1, checksum: 2 };
        let files = [of("gpu-1.kimg"), of("gpu-2.kimg")];
        let told = |names: &[&str]| {
            let clients: Vec<Saved> = names.iter().map(|name| client(name)).collect();
            entries(&files, &clients).map(|entries| entries.len()).map_err(|e| e.to_string())
        };
        assert_eq!(told(&["gpu-2.kimg", "gpu-1.kimg"]), Ok(2));
        assert!(told(&["gpu-1.kimg", ""]).is_err());
        assert!(told(&["gpu-1.kimg", "gpu-3.kimg"]).unwrap_err().contains("gpu-3.kimg"));
        assert!(told(&["gpu-1.kimg"; 3]).unwrap_err().contains("two processes"));
    }
}
