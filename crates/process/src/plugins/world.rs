//! A restart in the making: what plugins put their descriptions into.

use crate::plugins::changes::Changes;
use crate::plugins::contents::{self, Blob, DATA_FILE};
use crate::plugins::error::{PluginError, damaged};
use crate::plugins::inotify::Watch;
use crate::plugins::recreate::RecreateOptions;
use crate::plugins::{Saved, Slot};
use crate::translate::Table;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::FileType;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// An argument of an [`InjectedCall`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Argument {
    Number(u64),
    /// The address of these bytes, which the engine puts into the process's memory.
    Bytes(Vec<u8>),
    /// What the call so many places before this one, of the same process, has returned.
    Earlier(usize),
}

/// A system call that only the process itself can make, once its descriptors are in place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InjectedCall {
    /// The process, by the id that it knows itself.
    pub pid: i32,
    pub number: i64,
    /// The rest is 0.
    pub arguments: Vec<Argument>,
    /// What it is for, should it fail.
    pub what: String,
}

/// What is done by the init when memory and processes are there.
#[derive(Debug)]
pub(crate) enum Late {
    /// Seals that forbid what rebuilding the memory needs.
    Seal(OwnedFd, u32),
    /// A System V segment that is removed with its last user, once all of them have it.
    Doom(i32),
    /// Watches of an inotify, which must not see how files are put back.
    Watch(OwnedFd, Vec<Watch>),
}

/// What is done when all descriptions are there.
type Step = Box<dyn FnOnce(&mut World) -> Result<(), PluginError>>;

pub struct World<'a> {
    pub options: &'a RecreateOptions<'a>,
    saved: &'a Saved,
    data: File,
    pub(crate) descriptions: Vec<Option<OwnedFd>>,
    pub(crate) calls: Vec<InjectedCall>,
    pub(crate) late: Vec<Late>,
    after: Vec<Step>,
    /// Descriptions that mean the process which makes or registers them.
    personal: BTreeSet<u32>,
    pub(crate) notes: Vec<String>,
    pub(crate) changes: Changes,
    /// Where the files of the image are.
    pub(crate) restored: BTreeSet<PathBuf>,
    /// Where the hosts of the job are that programs remember elsewhere.
    pub(crate) addresses: Table,
}

impl<'a> World<'a> {
    pub(crate) fn new(
        saved: &'a Saved,
        options: &'a RecreateOptions<'a>,
    ) -> Result<World<'a>, PluginError> {
        let data = options.file(DATA_FILE)?;
        let mut descriptions = Vec::new();
        descriptions.resize_with(saved.descriptions(), || None);
        let (calls, late, after, notes) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let personal = BTreeSet::new();
        let changes = Changes::new(options.journal.clone(), options.at);
        Ok(World {
            options,
            saved,
            data,
            descriptions,
            calls,
            late,
            after,
            personal,
            notes,
            changes,
            restored: BTreeSet::new(),
            addresses: Table::default(),
        })
    }

    /// Parses a plugin's state.
    pub fn parse<T: DeserializeOwned>(&self, state: Value) -> Result<T, PluginError> {
        serde_json::from_value(state).map_err(|e| damaged(e.to_string()))
    }

    /// Hands the descriptor for an open file description over.
    pub fn made(&mut self, description: u32, fd: impl Into<OwnedFd>) -> Result<(), PluginError> {
        match self.descriptions.get_mut(description as usize) {
            Some(place @ None) => *place = Some(fd.into()),
            Some(Some(_)) => return Err(damaged(format!("description {description} twice"))),
            None => return Err(damaged(format!("no description {description}"))),
        }
        Ok(())
    }

    /// Says that what `epoll_ctl` does with it must be done by the process itself.
    pub fn personal(&mut self, description: u32) {
        self.personal.insert(description);
    }

    pub fn is_personal(&self, description: u32) -> bool {
        self.personal.contains(&description)
    }

    /// What another plugin, which this one `requires`, has made.
    pub fn get(&self, description: u32) -> Result<BorrowedFd<'_>, PluginError> {
        let made = self.descriptions.get(description as usize).and_then(Option::as_ref);
        made.map(AsFd::as_fd).ok_or_else(|| damaged(format!("no description {description} yet")))
    }

    /// The flags that `F_GETFL` returned.
    pub fn flags(&self, description: u32) -> Result<u32, PluginError> {
        let common = self.saved.descriptions.get(description as usize);
        common
            .map(|common| common.flags)
            .ok_or_else(|| damaged(format!("no description {description}")))
    }

    /// Who holds it.
    pub fn holders(&self, description: u32) -> impl Iterator<Item = &'a Slot> + use<'a> {
        self.saved.slots.iter().filter(move |slot| slot.description == description)
    }

    /// The ids of all processes, as they know themselves.
    pub fn has_process(&self, pid: i32) -> bool {
        self.options.processes.contains(&pid) || self.saved.slots.iter().any(|slot| slot.pid == pid)
    }

    pub fn blob(&self, blob: &Blob) -> Result<Vec<u8>, PluginError> {
        contents::read_blob(&self.data, blob)
    }

    /// Opens a file that `checkpoint` has put into the image's folder.
    pub fn content(&self, name: &str) -> Result<File, PluginError> {
        if !self.saved.files.iter().any(|known| known == name) {
            return Err(damaged(format!("{name} is not among its files")));
        }
        self.options.file(name)
    }

    /// Where `path` is now.
    pub fn path(&self, path: &Path) -> PathBuf {
        self.options.paths.apply(path)
    }

    /// Leaves a step for the time when all descriptions are there.
    pub fn after(&mut self, step: impl FnOnce(&mut World) -> Result<(), PluginError> + 'static) {
        self.after.push(Box::new(step));
    }

    pub(crate) fn finish_steps(&mut self) -> Result<(), PluginError> {
        std::mem::take(&mut self.after).into_iter().try_for_each(|step| step(self))
    }

    /// Adds a call for the process itself.
    pub fn inject(&mut self, call: InjectedCall) {
        self.calls.push(call);
    }

    /// Leaves it to each holder to open its own in place of what was made, by the call `number`
    /// with `arguments`, which returns a descriptor; then moves it to `offset`.
    pub fn reopen(
        &mut self,
        description: u32,
        (number, arguments): (i64, Vec<Argument>),
        offset: u64,
        what: &str,
    ) {
        for slot in self.holders(description) {
            let close = if slot.close_on_exec { libc::O_CLOEXEC } else { 0 };
            let plain = |number: i64| Argument::Number(number as u64);
            let mut steps = vec![(number, arguments.clone())];
            if offset != 0 {
                let at = vec![Argument::Earlier(1), Argument::Number(offset), plain(0)];
                steps.push((libc::SYS_lseek, at));
            }
            let opened = |steps: &Vec<_>| Argument::Earlier(steps.len());
            let place = vec![opened(&steps), plain(slot.fd.into()), plain(close.into())];
            steps.push((libc::SYS_dup3, place));
            steps.push((libc::SYS_close, vec![opened(&steps)]));
            for (number, arguments) in steps {
                let what = format!("{what} as descriptor {}", slot.fd);
                self.inject(InjectedCall { pid: slot.pid, number, arguments, what });
            }
        }
    }

    /// Tells the user.
    pub fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// Tells the user at once: something takes long.
    pub fn tell(&self, what: &str) {
        if let Some(tell) = self.options.tell {
            tell(what);
        }
    }

    /// Makes the folders that `path` is to lie in: temporary ones go with a job that is killed.
    pub(crate) fn make_folders(&mut self, path: &Path) -> Result<(), PluginError> {
        let missing = |folder: &&Path| {
            let missing =
                folder.symlink_metadata().is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
            missing && !folder.as_os_str().is_empty()
        };
        let missing: Vec<&Path> = path.ancestors().skip(1).take_while(missing).collect();
        for folder in missing.into_iter().rev() {
            self.changes.make(folder, FileType::Directory)?;
            self.note(format!("{} was not there any more: it was made anew", folder.display()));
        }
        Ok(())
    }
}
