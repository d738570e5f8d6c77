//! What the machine does without kedge: direct writing, reading from the page cache; and what it
//! has room for.

use rustix::fs::{Mode, OFlags};
use std::fs::{self, File};
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{io, thread};

/// Bytes of one direct write, as dd and fio are usually told.
const BLOCK: usize = 4 << 20;
const PAGE: usize = 4096;

/// The largest job that this machine should be asked for: its memory is needed twice, and so is its
/// image.
pub(super) fn room(dir: &Path) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    let memory = kib.unwrap_or(0).saturating_mul(1024) / 3;
    let disk =
        rustix::fs::statvfs(dir).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
    memory.min(disk / 4)
}

/// Seconds that it takes to write `size` bytes past the page cache, until they are on the disk.
pub(super) fn write(dir: &Path, size: u64) -> Result<f64, String> {
    let path = dir.join("direct");
    let written = write_to(&path, size).map_err(|error| format!("{}: {error}", path.display()));
    let _ = fs::remove_file(&path);
    written
}

fn write_to(path: &Path, size: u64) -> io::Result<f64> {
    let flags = OFlags::CREATE | OFlags::TRUNC | OFlags::WRONLY | OFlags::CLOEXEC;
    let open = |more| rustix::fs::open(path, flags | more, Mode::RUSR | Mode::WUSR);
    // File systems without direct writing are written to as they can be.
    let file = File::from(open(OFlags::DIRECT).or_else(|_| open(OFlags::empty()))?);
    let mut memory = vec![0u8; BLOCK + PAGE];
    let mut state = 1u64;
    for byte in &mut memory {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *byte = (state >> 56) as u8;
    }
    let skip = memory.as_ptr().align_offset(PAGE).min(PAGE);
    let block = &memory[skip..skip + BLOCK];
    let begin = Instant::now();
    for at in (0..size).step_by(BLOCK) {
        file.write_all_at(&block[..(size - at).min(BLOCK as u64) as usize], at)?;
    }
    file.sync_all()?;
    Ok(begin.elapsed().as_secs_f64())
}

/// Seconds that two threads need to read the image's largest file into fresh memory; it is in the
/// page cache then, as it is for the restart that follows.
pub(super) fn read(image: &Path) -> Result<f64, String> {
    let entries = fs::read_dir(image).map_err(|error| error.to_string())?;
    let sizes = entries.flatten().filter_map(|e| Some((e.metadata().ok()?.len(), e.path())));
    let (bytes, path) = sizes.max().ok_or("an empty image")?;
    let read = || -> io::Result<f64> {
        let file = File::open(&path)?;
        // Once to have it there.
        read_by_two(&file, bytes)?;
        let begin = Instant::now();
        read_by_two(&file, bytes)?;
        Ok(begin.elapsed().as_secs_f64())
    };
    read().map_err(|error| format!("{}: {error}", path.display()))
}

fn read_by_two(file: &File, bytes: u64) -> io::Result<()> {
    let half = bytes / 2;
    let part = |from: u64, to: u64| -> io::Result<()> {
        let mut memory = vec![0u8; (to - from) as usize];
        for (at, piece) in (from..).step_by(BLOCK).zip(memory.chunks_mut(BLOCK)) {
            file.read_exact_at(piece, at)?;
        }
        black_box(&memory);
        Ok(())
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| part(half, bytes));
        part(0, half)?;
        other.join().unwrap_or_else(|_| Err(io::Error::other("a thread ended early")))
    })
}

/// Waits until the image that was only captured is durable, and removes it.
pub(super) fn settle(image: &Path) {
    let begin = Instant::now();
    while !image.join("manifest.json").exists() && begin.elapsed() < Duration::from_secs(300) {
        thread::sleep(Duration::from_millis(20));
    }
    // The job may still be saying that it is done.
    thread::sleep(Duration::from_millis(50));
    let _ = fs::remove_dir_all(image);
}
