//! Pipes and FIFOs, with what is in flight.

use crate::plugins::changes::random_name;
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::path::ResolvedPath;
use crate::plugins::world::World;
use crate::plugins::{Blob, Claim, Plugin, reach};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags, open};
use rustix::io::{Errno, read, retry_on_intr, write};
use rustix::pipe::{
    PipeFlags, SpliceFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with, tee,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// Largest pipe that is made: what `fs.pipe-max-size` can be set to at most.
const MAX_SIZE: usize = 1 << 31;

#[derive(Debug)]
pub(crate) struct Pipes;

#[derive(Serialize, Deserialize)]
struct Pipe {
    /// Of a FIFO.
    path: Option<ResolvedPath>,
    /// The FIFO has no name any more.
    unlinked: bool,
    size: usize,
    data: Blob,
    /// Lengths of the packets of `data`, of a pipe in packet mode; else empty.
    packets: Vec<u32>,
    ends: Vec<u32>,
}

impl Plugin for Pipes {
    fn name(&self) -> &'static str {
        "pipes"
    }

    fn claim(&self, file: &Found, _job: &Job) -> Claim {
        Claim::when(file.stat.kind() == libc::S_IFIFO && !file.is_path_only())
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
        state(inodes.iter().map(|ends| save(capture, ends)))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        world.parse::<Vec<Pipe>>(state)?.iter().try_for_each(|pipe| make(pipe, world))
    }
}

/// Whether somebody outside of the job holds the other end of this pipe. Asked for pipes whose
/// other end nobody in the job holds, else it is false.
pub(crate) fn leads_outside(file: &Found, job: &Job) -> bool {
    if file.stat.kind() != libc::S_IFIFO || file.is_path_only() {
        return false;
    }
    if job.same(file).any(Found::reads) && job.same(file).any(Found::writes) {
        return false;
    }
    // The kernel tells an end whose other one is gone.
    job.duplicate(file).is_ok_and(|fd| !gone(&fd))
}

fn gone(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let polled = retry_on_intr(|| poll(&mut fds, Some(&now)));
    polled.is_ok() && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

fn save(capture: &mut Capture, ends: &[usize]) -> Result<Pipe, PluginError> {
    let job = capture.job;
    let first = &job.files[ends[0]];
    if leads_outside(first, job) {
        let (what, end) =
            (job.describe(first), if first.reads() { "end" } else { "a broken pipe" });
        capture
            .warnings
            .push(format!("{what} leads out of the job: after a restart it sees {end}"));
    }
    let what = || format!("read what is in flight in {}", job.describe(first));
    let size = fcntl_getpipe_size(&job.duplicate(first)?).to(what)?;
    let mut packets = Vec::new();
    let mut data = Vec::new();
    if let Some(reader) = ends.iter().find(|index| job.files[**index].reads()) {
        data = peek(&capture.duplicate(*reader)?, size, &mut packets).to(what)?;
    }
    // Only packet mode cares where one write ended.
    let packet_mode = |index: &usize| job.files[*index].info.flags & libc::O_DIRECT as u32 != 0;
    if !ends.iter().any(packet_mode) {
        packets.clear();
    }
    let named = !first.link.as_encoded_bytes().starts_with(b"pipe:[");
    let unlinked = named && first.stat.links == 0;
    let path = named.then(|| ResolvedPath(first.link.clone().into()));
    let ends = ends.iter().map(|index| *index as u32).collect();
    Ok(Pipe { path, unlinked, size, data: capture.blob(&data)?, packets, ends })
}

/// What is in the pipe, without taking it out.
fn peek(reader: &OwnedFd, size: usize, packets: &mut Vec<u32>) -> std::io::Result<Vec<u8>> {
    let (out, into) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    // As many places as the pipe itself has.
    fcntl_setpipe_size(&into, size)?;
    match retry_on_intr(|| tee(reader, &into, size, SpliceFlags::NONBLOCK)) {
        Ok(_) => {}
        Err(Errno::AGAIN) => return Ok(Vec::new()),
        Err(e) => return Err(e.into()),
    }
    drop(into);
    let (mut data, mut buffer) = (Vec::new(), vec![0; size]);
    loop {
        // In packet mode one read returns one packet.
        match retry_on_intr(|| read(&out, &mut buffer[..]))? {
            0 => return Ok(data),
            count => {
                packets.push(count as u32);
                data.extend(&buffer[..count]);
            }
        }
    }
}

fn make(pipe: &Pipe, world: &mut World) -> Result<(), PluginError> {
    if pipe.size > MAX_SIZE || pipe.ends.is_empty() {
        return Err(damaged(format!("a pipe of {} bytes", pipe.size)));
    }
    let data = world.blob(&pipe.data)?;
    if data.len() > pipe.size {
        return Err(damaged("more is in flight than the pipe holds"));
    }
    match &pipe.path {
        None => make_anonymous(pipe, &data, world),
        Some(path) => make_fifo(pipe, &path.0, &data, world),
    }
}

fn make_anonymous(pipe: &Pipe, data: &[u8], world: &mut World) -> Result<(), PluginError> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).to(|| "make a pipe")?;
    fill(pipe, &writer, data)?;
    let (mut reader, mut writer) = (Some(reader), Some(writer));
    let through =
        |fd: &Option<OwnedFd>| fd.as_ref().map(|fd| format!("/proc/self/fd/{}", fd.as_raw_fd()));
    let (by_reader, by_writer) = (through(&reader), through(&writer));
    let mut made = Vec::new();
    for &end in &pipe.ends {
        let access = world.flags(end)? & libc::O_ACCMODE as u32;
        let (whole, path) = match access as i32 {
            libc::O_RDONLY => (reader.take(), &by_reader),
            libc::O_WRONLY => (writer.take(), &by_writer),
            _ => (None, &by_reader),
        };
        // The first of each kind is an end as pipe() made it; others were opened through /proc.
        // Both ends stay open until all are there, so that none of these opens waits.
        let fd = match (whole, path) {
            (Some(fd), _) => fd,
            (None, Some(path)) => reopen(Path::new(path), access)?,
            (None, None) => return Err(damaged("a pipe without ends")),
        };
        made.push((end, fd));
    }
    made.into_iter().try_for_each(|(end, fd)| world.made(end, fd))
}

fn make_fifo(pipe: &Pipe, path: &Path, data: &[u8], world: &mut World) -> Result<(), PluginError> {
    let path = world.path(path);
    let unlinked = pipe.unlinked;
    let path = match unlinked {
        true => random_name(&std::env::temp_dir().join("fifo"), "").to(|| "name a FIFO")?,
        false => path,
    };
    world.make_folders(&path)?;
    if path.symlink_metadata().is_err() {
        world.changes.make(&path, FileType::Fifo)?;
    }
    let fifo = |access: u32| {
        reach::open_at(&path, access_flags(access)).to(|| format!("open {}", path.display()))
    };
    let both = fifo(libc::O_RDWR as u32);
    let made = both.and_then(|both| {
        expect_fifo(&both, &path)?;
        if peek(&both, MIN_SIZE, &mut Vec::new()).to(|| "look into a FIFO")?.is_empty() {
            fill(pipe, &both, data)?;
        }
        for &end in &pipe.ends {
            let access = world.flags(end)? & libc::O_ACCMODE as u32;
            world.made(end, fifo(access)?)?;
        }
        Ok(())
    });
    if unlinked {
        std::fs::remove_file(&path).to(|| format!("remove {}", path.display()))?;
    }
    made
}

/// One page: the smallest pipe.
const MIN_SIZE: usize = 4096;

fn expect_fifo(fd: &OwnedFd, path: &Path) -> Result<(), PluginError> {
    let stat = rustix::fs::fstat(fd).to(|| format!("look at {}", path.display()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Fifo {
        let what = format!("{} is not a FIFO any more: put it elsewhere", path.display());
        return Err(PluginError::Refused(what));
    }
    Ok(())
}

/// Does not wait for the other end; the flag is set right with all others.
fn reopen(path: &Path, access: u32) -> Result<OwnedFd, PluginError> {
    open(path, access_flags(access), Mode::empty()).to(|| format!("open {}", path.display()))
}

fn access_flags(access: u32) -> OFlags {
    OFlags::from_bits_retain(access) | OFlags::NONBLOCK | OFlags::CLOEXEC
}

/// Sets the size and puts the data in.
fn fill(pipe: &Pipe, writer: &OwnedFd, data: &[u8]) -> Result<(), PluginError> {
    let now = fcntl_getpipe_size(writer).to(|| "read a pipe's size")?;
    if now != pipe.size {
        fcntl_setpipe_size(writer, pipe.size)
            .to(|| format!("make a pipe of {} bytes (see fs.pipe-max-size)", pipe.size))?;
    }
    let modes =
        if pipe.packets.is_empty() { OFlags::NONBLOCK } else { OFlags::NONBLOCK | OFlags::DIRECT };
    let before = rustix::fs::fcntl_getfl(writer).to(|| "read a pipe's flags")?;
    rustix::fs::fcntl_setfl(writer, before | modes).to(|| "set a pipe's flags")?;
    let mut rest = data;
    let whole = [data.len() as u32];
    for &packet in if pipe.packets.is_empty() { &whole[..] } else { &pipe.packets[..] } {
        let now = rest.split_at_checked(packet as usize);
        let (now, later) = now.ok_or_else(|| damaged("packets of more than is in flight"))?;
        put(writer, now)?;
        rest = later;
    }
    rustix::fs::fcntl_setfl(writer, before).to(|| "set a pipe's flags")
}

fn put(writer: &OwnedFd, mut data: &[u8]) -> Result<(), PluginError> {
    while !data.is_empty() {
        let count = retry_on_intr(|| write(writer.as_fd(), data)).to(|| "fill a pipe")?;
        data = &data[count.min(data.len())..];
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::recreate::again;

    #[test]
    fn peeking_takes_nothing_and_tells_packets_apart() {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::DIRECT).unwrap();
        put(&writer, b"one").unwrap();
        put(&writer, b"second").unwrap();
        for _ in 0..2 {
            let mut packets = Vec::new();
            assert_eq!(peek(&reader, 65536, &mut packets).unwrap(), b"onesecond");
            assert_eq!(packets, [3, 6]);
        }
        let copy = again(&reader).unwrap();
        let mut buffer = [0; 16];
        assert_eq!(read(&copy, &mut buffer).unwrap(), 3);
    }
}
