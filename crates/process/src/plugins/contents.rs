//! Bytes that go with the image: small ones together in one file, whole files as they are.

use crate::plugins::error::{Context, PluginError, damaged};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, ftruncate, ioctl_ficlone, seek};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// The file in the image's folder that holds all blobs.
pub const DATA_FILE: &str = "descriptors.data";
/// Longest blob: the largest pipe that an administrator can allow an ordinary user, and sockets'
/// buffers.
const MAX_BLOB: u64 = 256 << 20;
const CHUNK: usize = 1 << 20;

/// A place in [`DATA_FILE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Blob {
    pub offset: u64,
    pub length: u64,
}

#[derive(Debug)]
pub(crate) struct DataWriter {
    file: File,
    length: u64,
}

/// A new file in the image's folder, private to the user.
pub(crate) fn create(folder: &Path, name: &str) -> Result<File, PluginError> {
    let path = folder.join(name);
    let mut options = File::options();
    options.read(true).write(true).create_new(true).mode(0o600);
    options.open(&path).to(|| format!("create {}", path.display()))
}

impl DataWriter {
    pub(crate) fn create(folder: &Path) -> Result<DataWriter, PluginError> {
        Ok(DataWriter { file: create(folder, DATA_FILE)?, length: 0 })
    }

    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<Blob, PluginError> {
        let blob = Blob { offset: self.length, length: bytes.len() as u64 };
        if blob.length > MAX_BLOB {
            let most = MAX_BLOB >> 20;
            return Err(PluginError::Refused(format!("more than {most} MiB are in flight")));
        }
        self.file.write_all_at(bytes, self.length).to(|| format!("write {DATA_FILE}"))?;
        self.length += blob.length;
        Ok(blob)
    }
}

/// Reads a blob back: its length is checked against the file's before anything is allocated.
pub(crate) fn read_blob(data: &File, blob: &Blob) -> Result<Vec<u8>, PluginError> {
    let end = blob.offset.checked_add(blob.length);
    let length = data.metadata().to(|| format!("read {DATA_FILE}"))?.len();
    if blob.length > MAX_BLOB || end.is_none_or(|end| end > length) {
        return Err(damaged(format!("{DATA_FILE} does not have {blob:?}")));
    }
    let mut bytes = vec![0; blob.length as usize];
    data.read_exact_at(&mut bytes, blob.offset).to(|| format!("read {DATA_FILE}"))?;
    Ok(bytes)
}

/// Makes `to`, an empty file, the same as `from`: by reflink where the file system can, else by
/// copying what is not a hole. Both offsets are changed.
pub(crate) fn copy(from: &File, to: &File) -> io::Result<()> {
    if ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    let end = from.metadata()?.len();
    ftruncate(to, end)?;
    let mut buffer = vec![0; CHUNK.min(end as usize)];
    let mut at = 0;
    while let Some((start, stop)) = data_after(from, at, end)? {
        copy_range(from, to, start, stop, &mut buffer)?;
        at = stop;
    }
    Ok(())
}

/// Hands the first `length` bytes of `from` to `write`, all but its holes, with their offsets.
pub(crate) fn read_out(
    from: &File,
    length: u64,
    mut write: impl FnMut(&[u8], u64) -> io::Result<()>,
) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK.min(length as usize)];
    let mut at = 0;
    while let Some((start, stop)) = data_after(from, at, length)? {
        for offset in (start..stop).step_by(CHUNK) {
            let piece = &mut buffer[..CHUNK.min((stop - offset) as usize)];
            from.read_exact_at(piece, offset)?;
            write(piece, offset)?;
        }
        at = stop;
    }
    Ok(())
}

/// Makes `to`, which may hold anything, the same as `from`, without ever cutting it shorter than it
/// is to be: who has mapped it loses nothing. Both offsets are changed.
pub(crate) fn overwrite(from: &File, to: &File) -> io::Result<()> {
    let end = from.metadata()?.len();
    if ioctl_ficlone(to, from).is_err() {
        let mut buffer = vec![0; CHUNK.min(end as usize)];
        let mut at = 0;
        while at < end {
            let (start, stop) = data_after(from, at, end)?.unwrap_or((end, end));
            clear(to, at, start)?;
            copy_range(from, to, start, stop, &mut buffer)?;
            at = stop;
        }
    }
    Ok(ftruncate(to, end)?)
}

/// Makes a range zeros, as far as there is any of the file.
fn clear(file: &File, start: u64, stop: u64) -> io::Result<()> {
    let stop = stop.min(file.metadata()?.len());
    if start >= stop {
        return Ok(());
    }
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if fallocate(file, hole, start, stop - start).is_ok() {
        return Ok(());
    }
    let zeros = vec![0; CHUNK];
    let mut at = start;
    while at < stop {
        let count = CHUNK.min((stop - at) as usize);
        file.write_all_at(&zeros[..count], at)?;
        at += count as u64;
    }
    Ok(())
}

/// The next range that is not a hole.
pub(crate) fn data_after(file: &File, at: u64, end: u64) -> io::Result<Option<(u64, u64)>> {
    if at >= end {
        return Ok(None);
    }
    let start = match seek(file, SeekFrom::Data(at)) {
        Ok(start) => start,
        // Nothing but a hole.
        Err(Errno::NXIO) => return Ok(None),
        // Holes are unknown there.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some((at, end))),
        Err(e) => return Err(e.into()),
    };
    let stop = seek(file, SeekFrom::Hole(start))?.min(end);
    Ok((start < stop).then_some((start, stop)))
}

fn copy_range(from: &File, to: &File, start: u64, stop: u64, buffer: &mut [u8]) -> io::Result<()> {
    let mut at = start;
    while at < stop {
        let want = buffer.len().min((stop - at) as usize);
        let got = match from.read_at(&mut buffer[..want], at) {
            // Cut shorter meanwhile by somebody outside of the job: zeros, as a reader would see.
            Ok(0) => return Ok(()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            other => other?,
        };
        to.write_all_at(&buffer[..got], at)?;
        at += got as u64;
    }
    Ok(())
}

/// Whether both hold the same bytes.
pub(crate) fn same(a: &File, b: &File) -> io::Result<bool> {
    let length = a.metadata()?.len();
    if length != b.metadata()?.len() {
        return Ok(false);
    }
    let (mut x, mut y) = (vec![0; CHUNK], vec![0; CHUNK]);
    let mut at = 0;
    while at < length {
        let want = CHUNK.min((length - at) as usize);
        match (a.read_exact_at(&mut x[..want], at), b.read_exact_at(&mut y[..want], at)) {
            (Ok(()), Ok(())) if x[..want] == y[..want] => at += want as u64,
            (Ok(()), Ok(())) => return Ok(false),
            (Err(e), _) | (_, Err(e)) if e.kind() == io::ErrorKind::UnexpectedEof => {
                return Ok(false);
            }
            (Err(e), _) | (_, Err(e)) => return Err(e),
        }
    }
    Ok(true)
}
