//! Snapshots that outlive this process: the memory of each device, as a file in memory whose
//! descriptor goes to somebody else. On a GPU it would be the device's own.

use super::restore::{Stage, put, wrong_stage};
use crate::device::SoftBackend;
use crate::device::tasks::lock;
use kedge_cuda_types::{CuError, arena};
use kedge_device::{Held, HeldPart, HeldPlace, Object, Piece, Snapshot, SnapshotError};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Bytes that are copied together.
const CHUNK: u64 = 1 << 20;

/// Files in memory of one device, one after the other, with their lengths.
pub(in crate::device) type Parts = BTreeMap<u32, Arc<Vec<(File, u64)>>>;

/// Copies what lies in the devices' memory.
pub(super) fn export(snapshot: &dyn Snapshot) -> Result<Held, CuError> {
    let mut files: BTreeMap<u32, (File, u64)> = BTreeMap::new();
    let mut places = Vec::new();
    for piece in snapshot.pieces() {
        let device = (piece.object == Object::Memory).then(|| arena::device_of(piece.start));
        let Some(device) = device.flatten() else {
            places.push(None);
            continue;
        };
        if let std::collections::btree_map::Entry::Vacant(entry) = files.entry(device) {
            entry.insert((File::from(memory_file().map_err(|_| CuError::OUT_OF_MEMORY)?), 0));
        }
        let (file, end) = files.get_mut(&device).ok_or(CuError::UNKNOWN)?;
        places.push(Some(HeldPlace { device, offset: *end }));
        copy_out(snapshot, piece, file, *end)?;
        *end += piece.bytes;
    }
    let part = |(device, (file, bytes))| HeldPart { device, bytes, fd: OwnedFd::from(file) };
    Ok(Held { parts: files.into_iter().map(part).collect(), places })
}

fn copy_out(
    snapshot: &dyn Snapshot,
    piece: &Piece,
    file: &File,
    offset: u64,
) -> Result<(), CuError> {
    let mut buffer = vec![0; CHUNK.min(piece.bytes) as usize];
    for at in (0..piece.bytes).step_by(CHUNK as usize) {
        let part = &mut buffer[..CHUNK.min(piece.bytes - at) as usize];
        snapshot.read(piece, piece.start + at, part)?;
        file.write_all_at(part, offset + at).map_err(|_| CuError::OUT_OF_MEMORY)?;
    }
    Ok(())
}

fn memory_file() -> io::Result<OwnedFd> {
    // SAFETY: the name is a string that ends with a zero.
    let fd = unsafe { libc::memfd_create(c"kedge-held".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: memfd_create has just made this descriptor, and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Takes what another process has exported, while bytes are put back.
pub(in crate::device) fn import(
    backend: &SoftBackend,
    parts: Vec<HeldPart>,
) -> Result<(), SnapshotError> {
    let mut by_device: BTreeMap<u32, Vec<(File, u64)>> = BTreeMap::new();
    for HeldPart { device, bytes, fd } in parts {
        by_device.entry(device).or_default().push((File::from(fd), bytes));
    }
    let shared = by_device.into_iter().map(|(device, parts)| (device, Arc::new(parts)));
    match &mut *lock(&backend.stage) {
        Stage::Filling { held, .. } => *held = shared.collect(),
        _ => return Err(wrong_stage("take what is held")),
    }
    Ok(())
}

/// Puts a piece back from there.
pub(in crate::device) fn copy(
    backend: &SoftBackend,
    piece: &Piece,
    from: HeldPlace,
) -> Result<(), SnapshotError> {
    let parts = match &*lock(&backend.stage) {
        Stage::Filling { held, .. } => held.get(&from.device).cloned(),
        _ => return Err(wrong_stage("take bytes")),
    };
    let parts = parts.ok_or(CuError::INVALID_VALUE)?;
    from.offset.checked_add(piece.bytes).ok_or(CuError::INVALID_VALUE)?;
    let mut buffer = vec![0; CHUNK.min(piece.bytes) as usize];
    let mut at = 0;
    while at < piece.bytes {
        let (file, offset, left) = part_at(&parts, from.offset + at)?;
        let bytes = &mut buffer[..CHUNK.min(piece.bytes - at).min(left) as usize];
        file.read_exact_at(bytes, offset).map_err(|error| {
            let what = format!("what was held of the devices' memory cannot be read: {error}");
            SnapshotError::new(CuError::OPERATING_SYSTEM, what)
        })?;
        put(backend, &piece.object, piece.start + at, bytes)?;
        at += bytes.len() as u64;
    }
    Ok(())
}

/// Where an offset lies: the file, the offset there, and how much of the file follows.
fn part_at(parts: &[(File, u64)], offset: u64) -> Result<(&File, u64, u64), CuError> {
    let mut before = 0u64;
    for (file, bytes) in parts {
        let inside = offset.checked_sub(before).filter(|inside| inside < bytes);
        if let Some(inside) = inside {
            return Ok((file, inside, bytes - inside));
        }
        before = before.saturating_add(*bytes);
    }
    Err(CuError::INVALID_VALUE)
}
