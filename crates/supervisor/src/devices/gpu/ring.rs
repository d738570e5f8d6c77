//! What is in the memory by which a client and its proxy talk: saved with the client, filled in
//! again at a restart.

use super::{Saved, failed};
use kedge_process::plugins::{Blob, Capture, PluginError, World};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// A file's holes are looked for in it.
const CHUNK: u64 = 1 << 20;

/// The ring's memory, but for what is zero.
pub(super) fn save_ring(
    capture: &mut Capture,
    index: usize,
) -> Result<Vec<(u64, Blob)>, PluginError> {
    let file = File::from(capture.duplicate(index)?);
    let mut saved = Vec::new();
    let mut buffer = vec![0; CHUNK as usize];
    for (start, end) in data(&file, 0).map_err(failed("look at a ring"))? {
        for at in (start..end).step_by(CHUNK as usize) {
            let part = &mut buffer[..CHUNK.min(end - at) as usize];
            file.read_exact_at(part, at).map_err(failed("read a ring"))?;
            if part.iter().any(|byte| *byte != 0) {
                saved.push((at, capture.blob(part)?));
            }
        }
    }
    Ok(saved)
}

/// The ranges of a sparse file that are there, from a place on.
pub(super) fn data(file: &File, from: u64) -> io::Result<Vec<(u64, u64)>> {
    let (mut found, mut at) = (Vec::new(), from);
    while let Some(start) = seek(file, at, libc::SEEK_DATA)? {
        let end = seek(file, start, libc::SEEK_HOLE)?.unwrap_or(start);
        found.push((start, end));
        if end <= start {
            break;
        }
        at = end;
    }
    Ok(found)
}

/// Looks for data or a hole from `at` on; `None` where there is nothing behind.
pub(super) fn seek(file: &File, at: u64, whence: libc::c_int) -> io::Result<Option<u64>> {
    // SAFETY: a plain call on an open file, whose offset nobody uses.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at as libc::off_t, whence) };
    match u64::try_from(found) {
        Ok(found) => Ok(Some(found)),
        Err(_) => match io::Error::last_os_error() {
            e if e.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            e => Err(e),
        },
    }
}

pub(super) fn fill_ring(ring: &OwnedFd, saved: &Saved, world: &World) -> Result<(), PluginError> {
    let file = File::from(ring.try_clone().map_err(failed("duplicate a ring"))?);
    for (at, blob) in &saved.ring {
        let bytes = world.blob(blob)?;
        file.write_all_at(&bytes, *at).map_err(failed("fill a ring"))?;
    }
    Ok(())
}
