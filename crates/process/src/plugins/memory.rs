//! memfd: memory that is a file, with its contents and seals.

use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::files::{self, open};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::path::SavedPath;
use crate::plugins::world::{Late, World};
use crate::plugins::{Claim, Plugin, contents};
use rustix::fs::{
    MemfdFlags, Mode, SealFlags, SeekFrom, fchmod, fcntl_get_seals, memfd_create, seek, statfs,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;

const PREFIX: &[u8] = b"/memfd:";
const SUFFIX: &[u8] = b" (deleted)";

#[derive(Debug)]
pub(crate) struct Memory;

#[derive(Serialize, Deserialize)]
struct Memfd {
    name: SavedPath,
    mode: u32,
    seals: u32,
    size: u64,
    contents: String,
    /// Description and offset.
    opened: Vec<(u32, u64)>,
}

impl Plugin for Memory {
    fn name(&self) -> &'static str {
        "memfd"
    }

    fn claim(&self, file: &Found, job: &Job) -> Claim {
        /// linux/magic.h
        const HUGETLBFS: u64 = 0x9584_58f6;
        if !files::is_memory(file) || file.stat.kind() != libc::S_IFREG {
            return Claim::No;
        }
        let (pid, fd) = job.place(file);
        match statfs(format!("/proc/{pid}/fd/{fd}")) {
            Ok(kind) if kind.f_type as u64 == HUGETLBFS => {
                Claim::Refused("a plugin for memfd of huge pages would be needed".to_owned())
            }
            Ok(_) if file.stat.allocated > job.limit => Claim::Refused(format!(
                "it takes {} bytes, and {} is the limit: raise it",
                file.stat.allocated, job.limit
            )),
            Ok(_) => Claim::Yes,
            Err(e) => Claim::Refused(format!("it cannot be looked at: {e}")),
        }
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        let inodes = capture.by_inode(mine);
        state(inodes.iter().map(|opened| save(capture, opened)))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        world.parse::<Vec<Memfd>>(state)?.iter().try_for_each(|memfd| make(memfd, world))
    }
}

fn save(capture: &mut Capture, opened: &[usize]) -> Result<Memfd, PluginError> {
    let job = capture.job;
    let file = &job.files[opened[0]];
    let link = file.link.as_bytes();
    let name = link.strip_prefix(PREFIX).unwrap_or(link);
    let name = name.strip_suffix(SUFFIX).unwrap_or(name);
    let seals = fcntl_get_seals(capture.duplicate(opened[0])?)
        .to(|| format!("read the seals of {}", job.describe(file)))?;
    let (contents, size) = files::save_contents(capture, file)?;
    Ok(Memfd {
        name: SavedPath(std::ffi::OsStr::from_bytes(name).into()),
        mode: file.stat.mode & 0o7777,
        seals: seals.bits(),
        size,
        contents,
        opened: opened
            .iter()
            .map(|index| (*index as u32, job.files[*index].info.position))
            .collect(),
    })
}

fn make(memfd: &Memfd, world: &mut World) -> Result<(), PluginError> {
    let saved = world.content(&memfd.contents)?;
    if saved.metadata().to(|| "look at a memfd's contents")?.len() != memfd.size {
        return Err(damaged(format!("{} has not {} bytes", memfd.contents, memfd.size)));
    }
    // What was made without leave for seals has this one.
    let flags = match SealFlags::from_bits_retain(memfd.seals).contains(SealFlags::SEAL) {
        true if memfd.seals == SealFlags::SEAL.bits() => MemfdFlags::CLOEXEC,
        _ => MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    };
    let file = memfd_create(&memfd.name.0, flags).to(|| "make a memfd")?;
    let file = File::from(file);
    contents::copy(&saved, &file).to(|| "fill a memfd")?;
    fchmod(&file, Mode::from_raw_mode(memfd.mode & 0o7777)).to(|| "set a memfd's mode")?;
    // Whoever opens it once more for writing keeps others from running it.
    let mut original = Some(file.try_clone().to(|| "make a memfd")?);
    for &(description, offset) in &memfd.opened {
        let flags = world.flags(description)?;
        let same = flags & (libc::O_ACCMODE | libc::O_PATH) as u32 == libc::O_RDWR as u32;
        let fd = match original.take_if(|_| same) {
            Some(original) => original.into(),
            None => open::through(&file, flags)?,
        };
        if world.flags(description)? & libc::O_PATH as u32 == 0 {
            seek(&fd, SeekFrom::Start(offset))
                .map_err(|e| damaged(format!("offset {offset}: {e}")))?;
        }
        world.made(description, fd)?;
    }
    if flags.contains(MemfdFlags::ALLOW_SEALING) && memfd.seals != 0 {
        // The memory that maps it may need what they forbid.
        world.late.push(Late::Seal(file.into(), memfd.seals));
    }
    Ok(())
}
