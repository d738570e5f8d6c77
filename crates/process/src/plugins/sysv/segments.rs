//! Shared memory segments.

use super::sys::{self, Access, Attached};
use super::table::Row;
use super::{Common, Users, common, is_same, next_id};
use crate::plugins::contents;
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::Capture;
use crate::plugins::world::{Late, World};
use kedge_image::PAGE;
use rustix::fs::{MemfdFlags, fstat, memfd_create};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bits of shmctl(2)'s mode.
const DOOMED: u32 = 0o1000;
const CHUNK: usize = 1 << 20;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Segment {
    pub(super) common: Common,
    pub(super) bytes: u64,
    /// It is removed when nobody has it attached any more.
    doomed: bool,
    /// The name of the file in the image that has its contents.
    contents: String,
}

/// Whether it is the job's: one of its processes has it attached, has made or used it; or a user of the job has, and
/// nobody else has it attached.
pub(super) fn belongs(row: &Row, users: &Users, capture: &Capture) -> bool {
    let attached = mappings(row.id, capture).next().is_some();
    let member = |name| capture.job.inner(row.get(name) as i32).is_some();
    let alone = row.get("nattch") == 0 && users.used(row);
    attached || member("cpid") || member("lpid") || alone || users.own
}

/// The devices of the mappings of a segment.
fn mappings<'a>(id: i32, capture: &'a Capture) -> impl Iterator<Item = &'a str> {
    let all = capture.mappings.iter().flatten();
    let its = all.filter(move |mapping| {
        mapping.inode == id as u64 && mapping.shared && mapping.name.starts_with("/SYSV")
    });
    its.map(|mapping| mapping.device.as_str())
}

pub(super) fn save(row: &Row, capture: &mut Capture) -> Result<Segment, PluginError> {
    let id = row.id;
    let (bytes, limit) = (row.get("size") as u64, capture.job.limit);
    let (used, swapped) = (row.get("rss") as u64, row.get("swap") as u64);
    let refused =
        |why: String| Err(PluginError::Refused(format!("the System V segment {id} {why}")));
    if used.saturating_add(swapped) > limit {
        return refused(format!("takes {used} bytes, and {limit} is the limit: raise it"));
    }
    let plain = plain_device().to(|| "make a memfd")?;
    if mappings(id, capture).any(|device| device != plain) {
        return refused("has huge pages, which kedge cannot save yet".into());
    }
    let name = capture.new_file();
    let to = contents::create(capture.folder, &name)?;
    to.set_len(bytes).to(|| format!("size {name}"))?;
    if used + swapped > 0 {
        let what = || format!("read the System V segment {id}");
        let from = Attached::to(id, false).to(what)?;
        copy_out(&from, bytes as usize, swapped == 0, &to).to(what)?;
    }
    let doomed = row.permissions & DOOMED != 0;
    Ok(Segment { common: common(row), bytes, doomed, contents: name })
}

/// The device of all shared memory but huge pages', as maps names it.
fn plain_device() -> io::Result<String> {
    let device = fstat(memfd_create("kedge", MemfdFlags::CLOEXEC)?)?.st_dev;
    Ok(format!("{:02x}:{:02x}", libc::major(device), libc::minor(device)))
}

/// Copies what is not zero; only pages that have memory, if that can be told by `all_resident`.
fn copy_out(from: &Attached, bytes: usize, all_resident: bool, to: &File) -> io::Result<()> {
    let page = PAGE as usize;
    let resident = if all_resident { from.resident(page)? } else { Vec::new() };
    let mut buffer = vec![0; page];
    for (index, at) in (0..bytes).step_by(page).enumerate() {
        if resident.get(index).is_some_and(|state| state & 1 == 0) {
            continue;
        }
        let piece = &mut buffer[..page.min(bytes - at)];
        from.read(at, piece)?;
        if piece.iter().any(|byte| *byte != 0) {
            to.write_all_at(piece, at as u64)?;
        }
    }
    Ok(())
}

pub(super) fn make(segment: &Segment, world: &mut World) -> Result<(), PluginError> {
    let Common { id, key, mode, uid, gid } = segment.common;
    let saved = world.content(&segment.contents)?;
    if saved.metadata().to(|| "look at a segment's contents")?.len() != segment.bytes {
        return Err(damaged(format!("{} has not {} bytes", segment.contents, segment.bytes)));
    }
    let what = || format!("make the System V segment {id}");
    next_id("shm", id)?;
    // For the moment this process may do anything with it.
    let made = sys::make_segment(key, segment.bytes, 0o600).to(what)?;
    is_same(made, &segment.common, "segments")?;
    let to = Attached::to(id, true).to(what)?;
    copy_in(&saved, segment.bytes, &to).to(what)?;
    sys::own_segment(id, &Access { mode, uid, gid }).to(what)?;
    if segment.doomed {
        world.late.push(Late::Doom(id));
    }
    Ok(())
}

/// Holes stay holes.
fn copy_in(from: &File, bytes: u64, to: &Attached) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK.min(bytes as usize)];
    let mut at = 0;
    while let Some((start, stop)) = contents::data_after(from, at, bytes)? {
        for offset in (start..stop).step_by(CHUNK) {
            let piece = &mut buffer[..CHUNK.min((stop - offset) as usize)];
            from.read_exact_at(piece, offset)?;
            to.write(offset as usize, piece)?;
        }
        at = stop;
    }
    Ok(())
}

/// All who had it attached have it again: it goes with the last of them.
pub(crate) fn doom(id: i32) -> Result<(), PluginError> {
    sys::remove_segment(id).to(|| format!("mark the System V segment {id} for removal"))
}
