//! Shared memory segments.

use super::sys::{self, Access, Attached};
use super::table::Row;
use super::{Common, Users, common, is_same, next_id};
use crate::huge;
use crate::plugins::contents;
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::Capture;
use crate::plugins::world::{Late, World};
use kedge_image::PAGE;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bits of shmctl(2)'s mode.
const DOOMED: u32 = 0o1000;
/// Longest segment of huge pages, in bytes.
const MAX_HUGE_LEN: u64 = 1 << 46;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Segment {
    pub(super) common: Common,
    pub(super) bytes: u64,
    /// Bytes of its huge pages; 0 for ordinary ones, and in older images.
    #[serde(default)]
    huge: u64,
    /// It is removed when nobody has it attached any more.
    doomed: bool,
    /// The name of the file in the image that has its contents.
    contents: String,
}

/// Whether it is the job's: one of its processes has it attached, has made or used it; or a user of
/// the job has, and nobody else has it attached.
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
    let name = capture.new_file();
    let to = contents::create(capture.folder, &name)?;
    to.set_len(bytes).to(|| format!("size {name}"))?;
    let mut huge = mappings(id, capture).find_map(huge::pages_on);
    if used + swapped > 0 {
        let what = || format!("read the System V segment {id}");
        let from = Attached::to(id, false).to(what)?;
        if huge.is_none() {
            huge = from.pages().to(what)?;
        }
        match huge {
            Some(pages) => {
                copy_huge(&from, bytes.next_multiple_of(pages), used + swapped, &to).to(what)?;
            }
            None => copy_out(&from, bytes as usize, swapped == 0, &to).to(what)?,
        }
    }
    let doomed = row.permissions & DOOMED != 0;
    let huge = huge.unwrap_or(0);
    Ok(Segment { common: common(row), bytes, huge, doomed, contents: name })
}

/// Copies what is not zero of `whole` bytes of huge pages, of which there are pages for `used`.
fn copy_huge(from: &Attached, whole: u64, used: u64, to: &File) -> io::Result<()> {
    match from.file(whole)? {
        Some(file) => huge::copy_out(whole, to, |into, at| file.read_exact_at(into, at)),
        None => {
            let all = used >= whole;
            huge::copy_out(whole, to, |into, at| from.read_pages(at, into, all))
        }
    }
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
    let (bytes, pages) = (segment.bytes, segment.huge);
    if pages != 0 && (!huge::is_possible(pages, 0, pages) || bytes > MAX_HUGE_LEN) {
        return Err(damaged(format!("huge pages of {pages} bytes")));
    }
    let whole = if pages == 0 { bytes } else { bytes.next_multiple_of(pages) };
    let length = saved.metadata().to(|| "look at a segment's contents")?.len();
    if ![bytes, whole].contains(&length) {
        return Err(damaged(format!("{} has not {} bytes", segment.contents, segment.bytes)));
    }
    let what = || format!("make the System V segment {id}");
    next_id("shm", id)?;
    // For the moment this process may do anything with it.
    let made = match pages {
        0 => sys::make_segment(key, bytes, 0o600),
        _ => make_huge(segment, whole, world)?,
    };
    let made = made.to(what)?;
    is_same(made, &segment.common, "segments")?;
    let to = Attached::to(id, true).to(what)?;
    match pages {
        0 => contents::read_out(&saved, bytes, |piece, at| to.write(at as usize, piece)),
        _ => contents::read_out(&saved, length, |piece, at| to.write_pages(at, piece)),
    }
    .to(what)?;
    sys::own_segment(id, &Access { mode, uid, gid }).to(what)?;
    if segment.doomed {
        world.late.push(Late::Doom(id));
    }
    Ok(())
}

/// Makes a segment of huge pages, or of ordinary ones where there are not so many: then it is as
/// long as its pages were together, since whoever has it attached may use all of that.
fn make_huge(
    segment: &Segment,
    whole: u64,
    world: &mut World,
) -> Result<io::Result<i32>, PluginError> {
    let Common { id, key, .. } = segment.common;
    let mode = 0o600 | libc::SHM_HUGETLB | huge::flag(segment.huge);
    let error = match sys::make_segment_of(key, segment.bytes, mode) {
        Ok(made) => return Ok(Ok(made)),
        Err(error) => error,
    };
    world.note(huge::lacking(&format!("the System V segment {id}"), segment.huge, &error));
    // A failure may have used it up.
    next_id("shm", id)?;
    Ok(sys::make_segment(key, whole, 0o600))
}

/// All who had it attached have it again: it goes with the last of them.
pub(crate) fn doom(id: i32) -> Result<(), PluginError> {
    sys::remove_segment(id).to(|| format!("mark the System V segment {id} for removal"))
}
