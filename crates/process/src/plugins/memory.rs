//! memfd: memory that is a file, with its contents and seals.

use crate::huge;
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
use std::os::unix::fs::FileExt;
use std::path::Path;

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
    /// Bytes of its huge pages; 0 for ordinary ones, and in older images.
    #[serde(default)]
    huge: u64,
    contents: String,
    /// Description and offset.
    opened: Vec<(u32, u64)>,
}

impl Plugin for Memory {
    fn name(&self) -> &'static str {
        "memfd"
    }

    fn claim(&self, file: &Found, job: &Job) -> Claim {
        if !files::is_memory(file) || file.stat.kind() != libc::S_IFREG {
            return Claim::No;
        }
        let (pid, fd) = job.place(file);
        match statfs(format!("/proc/{pid}/fd/{fd}")) {
            Ok(_) if file.stat.allocated > job.limit => Claim::Refused(format!(
                "it takes {} bytes, and {} is the limit: raise it",
                file.stat.allocated, job.limit
            )),
            Ok(_) => Claim::Yes,
            Err(e) => Claim::Refused(format!("it cannot be looked at: {e}")),
        }
    }

    fn saves_under_way(&self, _file: &Found) -> bool {
        true
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
    let (pid, fd) = job.place(file);
    let pages = huge::pages_of_file(Path::new(&format!("/proc/{pid}/fd/{fd}")));
    let pages = pages.to(|| format!("look at {}", job.describe(file)))?;
    let (contents, size) = match pages {
        Some(_) => save_huge(capture, file)?,
        None => files::save_contents(capture, file)?,
    };
    Ok(Memfd {
        name: SavedPath(std::ffi::OsStr::from_bytes(name).into()),
        mode: file.stat.mode & 0o7777,
        seals: seals.bits(),
        size,
        huge: pages.unwrap_or(0),
        contents,
        opened: opened
            .iter()
            .map(|index| (*index as u32, job.files[*index].info.position))
            .collect(),
    })
}

/// Saves the contents of one of huge pages, which tells no holes: what reads them as zeros makes no
/// pages.
fn save_huge(capture: &mut Capture, file: &Found) -> Result<(String, u64), PluginError> {
    let what = || format!("read {}", file.what());
    let (pid, fd) = capture.job.place(file);
    let from = File::open(format!("/proc/{pid}/fd/{fd}")).to(what)?;
    let length = from.metadata().to(what)?.len();
    let name = capture.new_file();
    let to = contents::create(capture.folder, &name)?;
    huge::copy_out(length, &to, |bytes, at| from.read_exact_at(bytes, at)).to(what)?;
    Ok((name, length))
}

/// Makes it of huge pages, as it was, with its contents.
fn make_huge(memfd: &Memfd, flags: MemfdFlags, saved: &File) -> std::io::Result<File> {
    let file = huge::file(&memfd.name.0, memfd.huge, flags.bits())?;
    file.set_len(memfd.size)?;
    if memfd.size > 0 {
        let window = huge::Window::of(&file)?;
        contents::read_out(saved, memfd.size, |bytes, at| window.write_all_at(bytes, at))?;
    }
    Ok(file)
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
    if memfd.huge != 0 && !huge::is_possible(memfd.huge, 0, memfd.size) {
        return Err(damaged(format!("huge pages of {} bytes", memfd.huge)));
    }
    let mut made = None;
    if memfd.huge != 0 {
        match make_huge(memfd, flags, &saved) {
            Ok(file) => made = Some(file),
            Err(error) => world.note(huge::lacking("a memfd", memfd.huge, &error)),
        }
    }
    let file = match made {
        Some(file) => file,
        None => {
            let file = memfd_create(&memfd.name.0, flags).to(|| "make a memfd")?;
            let file = File::from(file);
            contents::copy(&saved, &file).to(|| "fill a memfd")?;
            file
        }
    };
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
