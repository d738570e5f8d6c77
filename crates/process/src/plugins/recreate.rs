//! Makes the descriptors again, in the init of a restart.

use crate::plugins::changes::{Changes, Moment};
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::path::PathMap;
use crate::plugins::saved::{Common, Saved, Slot};
use crate::plugins::world::{Argument, InjectedCall, Late, World};
use crate::plugins::{Plugins, Rendezvous, Stage, inet, inotify, layers, sys, sysv};
use crate::translate::Table;
use kedge_image::Folder;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{OFlags, SealFlags, fcntl_add_seals, fcntl_setfl};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Debug, Default)]
pub struct RecreateOptions<'a> {
    /// The image's folder.
    pub folder: PathBuf,
    /// The same, where it is open: then its files are read through that, whatever has its name by
    /// now.
    pub opened: Option<Folder>,
    pub paths: PathMap,
    /// What the job's standard streams are bound to; /dev/null where there is none.
    pub streams: [Option<BorrowedFd<'a>>; 3],
    /// All processes of the job, also those without descriptors.
    pub processes: Vec<i32>,
    /// As in [`SurveyOptions`](crate::plugins::SurveyOptions).
    pub more: Plugins,
    /// Told at once what takes long.
    pub tell: Option<fn(&str)>,
    /// Where the journal of what is changed of the user's files is to lie: whoever has the path
    /// undoes ([`settle`](crate::plugins::settle)). Without, dropping what was made undoes.
    pub journal: Option<PathBuf>,
    /// The files that the job maps: none of them is cut shorter.
    pub mapped: BTreeSet<PathBuf>,
    /// Told of each moment of the changes.
    pub at: Option<fn(Moment)>,
    /// The other parts of the job, which are restarted at the same time.
    pub others: Option<Arc<dyn Rendezvous>>,
}

impl RecreateOptions<'_> {
    /// Opens a file of the image.
    pub(crate) fn file(&self, name: &str) -> Result<File, PluginError> {
        let folder = self.opened.clone().map_or_else(|| Folder::open(&self.folder), Ok)?;
        Ok(folder.file(name)?)
    }
}

/// The descriptors of a job, in the process that restarts it. What there was in the file system is
/// changed by [`Recreated::change_files`]; until [`Recreated::commit`], all is undone at the end.
#[derive(Debug)]
pub struct Recreated {
    /// One for each open file description, close-on-exec, with numbers of [`Recreated::above`] and
    /// more.
    pub descriptors: Vec<OwnedFd>,
    /// Above every number that a process of the job uses.
    pub above: i32,
    /// In this order, once all processes have their descriptors, memory and ids.
    pub calls: Vec<InjectedCall>,
    /// What the user should know.
    pub notes: Vec<String>,
    slots: Vec<Slot>,
    late: Vec<Late>,
    changes: Changes,
    /// Those that have made the descriptors, in the layers' order.
    pub(crate) plugins: Plugins,
    /// Where the files of the image are, once they have been put back.
    pub(crate) restored: BTreeSet<PathBuf>,
    /// Where the hosts of the job are that programs remember elsewhere.
    pub(crate) addresses: Table,
}

impl Recreated {
    /// The descriptors of a job that has none so far.
    pub(crate) fn nothing() -> Recreated {
        Recreated {
            descriptors: Vec::new(),
            above: 3,
            calls: Vec::new(),
            notes: Vec::new(),
            slots: Vec::new(),
            late: Vec::new(),
            changes: Changes::default(),
            plugins: Plugins::new(),
            restored: BTreeSet::new(),
            addresses: Table::default(),
        }
    }

    /// The calls by which process `pid`, which has inherited the descriptors, puts them under its
    /// own numbers and lets go of the rest.
    pub fn place(&self, pid: i32) -> Vec<InjectedCall> {
        let call = |number, arguments: [u64; 3], what| InjectedCall {
            pid,
            number,
            arguments: arguments.map(Argument::Number).to_vec(),
            what,
        };
        let mine = self.slots.iter().filter(|slot| slot.pid == pid);
        let mut calls: Vec<_> = mine
            .map(|slot| {
                let from = self.descriptors[slot.description as usize].as_raw_fd();
                let flags = if slot.close_on_exec { libc::O_CLOEXEC } else { 0 };
                let arguments = [from as u64, slot.fd as u64, flags as u64];
                call(libc::SYS_dup3, arguments, format!("put descriptor {} in place", slot.fd))
            })
            .collect();
        let rest = [self.above as u64, u64::from(u32::MAX), 0];
        calls.push(call(libc::SYS_close_range, rest, "let go of descriptors".to_owned()));
        calls
    }

    /// What must wait until the processes' memory is there. Call it before they run.
    pub fn settle(&mut self) -> Result<(), PluginError> {
        let mut watches = Vec::new();
        for late in self.late.drain(..) {
            match late {
                Late::Seal(fd, seals) => {
                    fcntl_add_seals(&fd, SealFlags::from_bits_retain(seals))
                        .to(|| "seal a memfd")?;
                }
                Late::Doom(id) => sysv::doom(id)?,
                late @ Late::Watch(..) => watches.push(late),
            }
        }
        self.late = watches;
        Ok(())
    }

    /// Puts the user's files back: the last that can fail, when all else of the job is there.
    pub fn change_files(&mut self) -> Result<(), PluginError> {
        self.changes.apply(&mut self.notes)?;
        for late in self.late.drain(..) {
            if let Late::Watch(fd, watches) = late {
                inotify::add(&fd, &watches)?;
            }
        }
        Ok(())
    }

    /// What will be at `path`, where that is not what is there now, or has other contents.
    pub fn home(&self, path: &Path) -> Option<&File> {
        self.changes.home(path)
    }

    /// The restart has succeeded: what was done to the file system stays.
    ///
    /// # Errors
    ///
    /// If that cannot be written down: then the restart has failed.
    pub fn commit(&mut self) -> Result<(), PluginError> {
        self.changes.commit()
    }
}

impl Saved {
    /// Makes every open file description of the job. Needs room for as many descriptors at once,
    /// so it raises this process's soft limit to its hard one.
    pub fn recreate(&self, options: &RecreateOptions) -> Result<Recreated, PluginError> {
        let made = self.make(options);
        if let (Err(error), Some(others)) = (&made, &options.others) {
            others.fail(&error.to_string());
        }
        made
    }

    fn make(&self, options: &RecreateOptions) -> Result<Recreated, PluginError> {
        raise_limit();
        let mut world = World::new(self, options)?;
        let plugins = layers(&options.more);
        let unknown = |state: &&crate::plugins::saved::State| {
            !plugins.iter().any(|plugin| plugin.name() == state.plugin)
        };
        if let Some(state) = self.states.iter().find(unknown) {
            return Err(PluginError::NoPlugin(state.plugin.clone()));
        }
        for plugin in &plugins {
            for state in self.states.iter().filter(|state| state.plugin == plugin.name()) {
                if state.version != plugin.version() {
                    let (plugin, known) = (state.plugin.clone(), plugin.version());
                    return Err(PluginError::Newer { plugin, found: state.version, known });
                }
                plugin.restart(state.state.clone(), &mut world)?;
            }
        }
        world.finish_steps()?;
        if let Some(others) = &options.others {
            // Those without sockets are waited for as well.
            for stage in [Stage::Offered, Stage::Bound] {
                inet::meet(&**others, stage)?;
            }
        }
        self.finish(world, plugins)
    }

    fn finish(&self, mut world: World, plugins: Plugins) -> Result<Recreated, PluginError> {
        let above = self.slots.iter().map(|slot| slot.fd + 1).max().unwrap_or(0).max(3);
        let mut descriptors = Vec::with_capacity(self.descriptions.len());
        for (index, common) in self.descriptions.iter().enumerate() {
            let fd = world.descriptions[index].take();
            let fd = fd.ok_or_else(|| damaged(format!("nobody made description {index}")))?;
            set_flags(&fd, common)?;
            descriptors.push(
                fcntl_dupfd_cloexec(&fd, above).to(|| {
                    format!("have descriptors above {above}: raise the limit (`ulimit -n`)")
                })?,
            );
            own(index as u32, common, &mut world);
        }
        let World { calls, late, notes, changes, restored, addresses, .. } = world;
        let slots = self.slots.clone();
        Ok(Recreated {
            descriptors,
            above,
            calls,
            notes,
            slots,
            late,
            changes,
            plugins,
            restored,
            addresses,
        })
    }
}

/// Flags that F_SETFL changes; O_ASYNC needs its owner first.
const SETTABLE: u32 = (libc::O_APPEND | libc::O_NONBLOCK | libc::O_DIRECT | libc::O_NOATIME) as u32;

fn set_flags(fd: &OwnedFd, common: &Common) -> Result<(), PluginError> {
    if common.flags & libc::O_PATH as u32 != 0 {
        return Ok(());
    }
    // A stream's flags are its other holders', too; but a program that does not wait relies on it.
    let mask = if common.stream { libc::O_NONBLOCK as u32 } else { SETTABLE };
    let now = rustix::fs::fcntl_getfl(fd).to(|| "read a descriptor's flags")?.bits();
    let wanted = now & !mask | common.flags & mask;
    if wanted == now {
        return Ok(());
    }
    fcntl_setfl(fd, OFlags::from_bits_retain(wanted)).to(|| "set a descriptor's flags")
}

/// The owner, its signal and O_ASYNC, by the first process that holds it.
fn own(description: u32, common: &Common, world: &mut World) {
    let plain = common.owner.1 == 0 && common.signal == 0;
    if plain && common.flags & libc::O_ASYNC as u32 == 0 {
        return;
    }
    let Some(slot) = world.holders(description).next() else { return };
    let (pid, fd) = (slot.pid, slot.fd);
    let mut fcntl = |command: i32, argument, what: &str| {
        let arguments =
            vec![Argument::Number(fd as u64), Argument::Number(command as u64), argument];
        let what = format!("{what} of descriptor {fd}");
        world.inject(InjectedCall { pid, number: libc::SYS_fcntl, arguments, what });
    };
    if common.owner.1 != 0 {
        let (kind, id) = common.owner;
        let bytes = [kind.to_ne_bytes(), id.to_ne_bytes()].concat();
        fcntl(sys::F_SETOWN_EX, Argument::Bytes(bytes), "set the owner");
    }
    if common.signal != 0 {
        fcntl(sys::F_SETSIG, Argument::Number(common.signal as u64), "set the signal");
    }
    if common.flags & libc::O_ASYNC as u32 != 0 && !common.stream {
        let flags = u64::from(common.flags);
        fcntl(libc::F_SETFL, Argument::Number(flags), "set the flags");
    }
}

/// Has this process have as many descriptors as it may.
pub(super) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    // If that is refused, what needs more will say so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// A second descriptor for the same open file description.
pub(crate) fn again(fd: impl AsFd) -> Result<OwnedFd, PluginError> {
    fcntl_dupfd_cloexec(fd, 3).to(|| "duplicate a descriptor")
}
