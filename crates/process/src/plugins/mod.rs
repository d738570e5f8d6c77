//! Descriptors: what a job's processes hold open, saved from outside and made again.
//!
//! The engine knows no resource. A [`Plugin`] knows one kind of descriptor, and [`built_in`]
//! makes kedge's own; docs/plugins.md shows how to add one. A checkpoint or a restart has plugins
//! of its own, values that end with it. The engine's side has three moments:
//!
//! 1. [`Survey::of`], before anything is stopped: every open file description of the job, and who
//!    takes it. What cannot be saved is a [`Refusal`] that names it.
//! 2. [`Survey::save`], while all processes are stopped: [`Saved`], plus files in the image's
//!    folder. [`Plugin::resume`] before they run again.
//! 3. [`Saved::recreate`], in the init of a restart: one descriptor for each open file description,
//!    the table of who holds which under what number, and the calls that only the process itself
//!    can make ([`InjectedCall`]).

mod apart;
mod carried;
mod changes;
mod contents;
mod devices;
mod epoll;
mod error;
mod eventfd;
mod files;
mod inet;
mod inotify;
mod job;
mod leases;
mod locks;
mod memory;
pub(crate) mod mqueue;
mod netlink;
mod others;
mod own;
mod path;
mod pidfd;
mod pipes;
pub(crate) mod procfs;
mod pty;
mod raw;
mod recreate;
pub(crate) mod rings;
mod saved;
mod signalfd;
mod sockets;
mod streams;
pub(crate) mod survey;
pub(crate) mod sys;
pub(crate) mod sysv;
mod timerfd;
mod unix;
mod world;

pub use changes::{Moment, Settled, home_of, settle, settle_all, settle_in};
pub(crate) use changes::{new_path, reach, remove_socket};
pub use contents::{Blob, DATA_FILE};
pub use error::{PluginError, Refusal};
pub use files::RestoredFiles;
pub(crate) use files::{Passing, Places, look as look_at_files};
pub use inet::release_ports;
pub use job::{Capture, Found, Holder, Job, Process, state};
pub use others::{Rendezvous, Stage};
pub use path::PathMap;
pub(crate) use path::is_resolved;
pub use procfs::FdInfo;
pub use recreate::{RecreateOptions, Recreated};
pub use saved::{Saved, Slot};
pub use sockets::{Kind, unix_peer};
pub use survey::{FileContents, Survey, SurveyOptions};
pub(crate) use sysv::{Ipc, segment_bytes};
pub use world::{Argument, InjectedCall, World};

use serde_json::Value;
use std::sync::Arc;

/// Whether a plugin takes an open file description.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claim {
    No,
    Yes,
    /// It is of the plugin's kind, and cannot be saved: why, and what to do about it.
    Refused(String),
}

impl Claim {
    pub(crate) fn when(mine: bool) -> Claim {
        if mine { Claim::Yes } else { Claim::No }
    }
}

/// What knows one kind of descriptor. Each plugin saves all descriptions of its kind together, so
/// that what they share (a pipe between its ends) is saved once.
///
/// A plugin is made for one checkpoint or one restart, with all that it needs, and keeps what it
/// has to know from one of these functions to the next. What a restart's knows is in the job's init
/// as well, which is a copy of the process that restarts the job.
pub trait Plugin: Send + Sync + std::fmt::Debug {
    /// What it provides: its name in the image, in refusals and in `requires`.
    fn name(&self) -> &'static str;

    /// Of the state that `checkpoint` returns. An image with a newer one is refused.
    fn version(&self) -> u32 {
        1
    }

    /// Plugins whose descriptions must be there before this one's `restart`.
    fn requires(&self) -> &'static [&'static str] {
        &[]
    }

    /// Whether it takes `file`: asked while the job runs, after those before it have not.
    fn claim(&self, file: &Found, job: &Job) -> Claim;

    /// Whether it can save a description of its own that no process holds: one that waits in a
    /// socket to be received. No process can open it again at a restart.
    fn saves_under_way(&self, _file: &Found) -> bool {
        false
    }

    /// The state of `mine` (indices into the job's files), while every process is stopped. Also
    /// called without any of its own, for what belongs to other plugins' descriptions (locks);
    /// then `None` says that there is nothing. One that takes no descriptions has nothing to save.
    fn checkpoint(
        &self,
        _capture: &mut Capture,
        _mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        Ok(None)
    }

    /// After `checkpoint`, when the memory of all processes is held as well: returns when what that
    /// has begun is over, and whether it succeeded. Not called where something else has failed.
    fn captured(&self) -> Result<(), PluginError> {
        Ok(())
    }

    /// Makes every description of `state` ([`World::made`]).
    fn restart(&self, _state: Value, _world: &mut World) -> Result<(), PluginError> {
        Err(PluginError::Damaged(format!("the plugin `{}` saves nothing", self.name())))
    }

    /// At a restart, when everything is there again, just before the processes run. The calling
    /// process is the init, which lives as long as they do.
    fn rebuilt(&self) -> Result<(), PluginError> {
        Ok(())
    }

    /// At a restart, when everything is there again and none of the user's files has been changed:
    /// returns once the job may run, if it has to wait for that.
    fn may_run(&self) -> Result<(), PluginError> {
        Ok(())
    }

    /// At a restart, when the user's files have been put back as well: the last that can fail. What
    /// others must agree to belongs here.
    fn agreed(&self) -> Result<(), PluginError> {
        Ok(())
    }

    /// After `checkpoint`, just before the processes run again, whether the checkpoint succeeded or
    /// not: puts back what it took out of them.
    fn resume(&self, _capture: &mut Capture) -> Result<(), PluginError> {
        Ok(())
    }
}

/// The plugins of one checkpoint or one restart.
pub type Plugins = Vec<Arc<dyn Plugin>>;

/// Makes kedge's own plugins. The order is that of claiming: the special before the general.
pub fn built_in() -> Plugins {
    vec![
        Arc::new(streams::Streams),
        Arc::new(locks::Locks),
        Arc::new(own::Own),
        Arc::new(pty::Ptys),
        Arc::new(devices::Devices),
        Arc::new(pipes::Pipes),
        Arc::new(memory::Memory),
        Arc::new(leases::Leases),
        Arc::new(mqueue::Queues),
        Arc::new(unix::Unix),
        Arc::new(inet::Inet),
        Arc::new(raw::Raw),
        Arc::new(netlink::Netlink),
        Arc::new(eventfd::Eventfd),
        Arc::new(timerfd::Timerfd),
        Arc::new(signalfd::Signalfd),
        Arc::new(pidfd::Pidfd),
        Arc::new(inotify::Inotify),
        Arc::new(rings::Rings),
        Arc::new(epoll::Epoll),
        Arc::new(files::Files),
        Arc::new(sysv::Sysv),
    ]
}

/// Returns `more`, which a program that uses this crate adds, and kedge's own, in the order of
/// claiming.
fn all(more: &Plugins) -> Plugins {
    more.iter().cloned().chain(built_in()).collect()
}

/// Returns all plugins in the layers' order: each after all that it requires. What is required and
/// not there, or requires itself, comes last.
pub fn layers(more: &Plugins) -> Plugins {
    let mut left = all(more);
    let mut ordered = Plugins::new();
    // Each round takes one plugin at least: kedge's own have no cycles (tested below), and with
    // those of others the first one is taken.
    while !left.is_empty() {
        let ready = |plugin: &Arc<dyn Plugin>| {
            plugin.requires().iter().all(|name| ordered.iter().any(|done| done.name() == *name))
        };
        let next = left.iter().position(ready).unwrap_or(0);
        ordered.push(left.remove(next));
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_what_is_required_comes_first() {
        let ordered = layers(&Plugins::new());
        for (at, plugin) in ordered.iter().enumerate() {
            assert!(!ordered[..at].iter().any(|other| other.name() == plugin.name()));
            for name in plugin.requires() {
                let before = ordered[..at].iter().any(|other| other.name() == *name);
                assert!(before, "{} requires {name}", plugin.name());
            }
        }
    }
}
