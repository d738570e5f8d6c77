//! A snapshot of so many GiB, and its restore in another process.

use crate::driver::Cuda;
use crate::rig::*;
use kedge_device::{Object, Restore, Snapshot, Snapshots};
use std::error::Error;
use std::time::Instant;

pub(crate) fn take(gib: &str) -> Outcome {
    let bytes = gib.parse::<u64>()? * GIB;
    let pattern = Pattern::new();
    let backend = backend()?;
    grant(&backend, bytes)?;
    let cuda = Cuda::open()?;
    cuda.pin(pattern.all())?;
    spread(bytes, |at, len, _| cuda.to_device(BASE + at, pattern.at(at, len)))?;
    rest(&backend)?;
    let begin = Instant::now();
    backend.prepare_snapshot(None)?;
    let prepared = begin.elapsed().as_secs_f64();
    let begin = Instant::now();
    let snapshot = backend.snapshot(None)?;
    let pause = begin.elapsed().as_secs_f64() * 1e3;
    // What the program does from now on must not show.
    cuda.to_device(BASE, &vec![0; CHUNK])?;
    let drained = drain(&*snapshot, bytes, None)?;
    let compared = drain(&*snapshot, bytes, Some(&pattern))?;
    let begin = Instant::now();
    drop(snapshot);
    let dropped = begin.elapsed().as_secs_f64() * 1e3;
    // Once more, with everything warm.
    rest(&backend)?;
    backend.prepare_snapshot(None)?;
    let begin = Instant::now();
    let again = backend.snapshot(None)?;
    let again_pause = begin.elapsed().as_secs_f64() * 1e3;
    drop(again);
    say(&format!(
        "{{\"what\": \"snapshot\", \"gib\": {gib}, \"prepare_s\": {prepared:.3}, \"pause_ms\": {pause:.2}, \
         \"second_pause_ms\": {again_pause:.2}, \"drain_gib_s\": {:.1}, \"drain_and_compare_gib_s\": {:.1}, \
         \"drop_ms\": {dropped:.1}, \"same\": true}}",
        bytes as f64 / GIB as f64 / drained,
        bytes as f64 / GIB as f64 / compared,
    ));
    Ok(())
}

/// Reads everything, and compares it where there is what it should be; seconds.
pub(crate) fn drain(
    snapshot: &dyn Snapshot,
    bytes: u64,
    pattern: Option<&Pattern>,
) -> Result<f64, Box<dyn Error>> {
    let pieces: Vec<_> = snapshot.pieces().iter().filter(|p| p.object == Object::Memory).collect();
    spread_over(drainers(), bytes, |at, len, buffer| {
        let mut done = 0;
        while done < len {
            let start = BASE + at + done as u64;
            let after = pieces.partition_point(|piece| piece.start <= start);
            let piece = pieces[after.saturating_sub(1)];
            let part = (len - done).min((piece.start + piece.bytes - start) as usize);
            snapshot.read(piece, start, &mut buffer[done..done + part])?;
            done += part;
        }
        match pattern {
            Some(pattern) if pattern.at(at, len) != &buffer[..len] => {
                Err(format!("bytes at {at:#x} are not what they were").into())
            }
            _ => Ok(()),
        }
    })
}

pub(crate) fn put(gib: &str) -> Outcome {
    let bytes = gib.parse::<u64>()? * GIB;
    let pattern = Pattern::new();
    let begin = Instant::now();
    let backend = backend()?;
    let started = begin.elapsed().as_secs_f64();
    let begin = Instant::now();
    grant(&backend, bytes)?;
    let granted = begin.elapsed().as_secs_f64();
    spread(bytes, |at, len, _| {
        Ok(backend.restore(&Object::Memory, BASE + at, pattern.at(at, len))?)
    })?;
    backend.restore_end()?;
    let restored = begin.elapsed().as_secs_f64();
    let cuda = Cuda::open()?;
    spread(bytes, |at, len, buffer| {
        cuda.to_host(&mut buffer[..len], BASE + at)?;
        match pattern.at(at, len) == &buffer[..len] {
            true => Ok(()),
            false => Err(format!("bytes at {at:#x} are not what they were").into()),
        }
    })?;
    say(&format!(
        "{{\"what\": \"restore\", \"gib\": {gib}, \"start_s\": {started:.3}, \"grant_s\": {granted:.3}, \
         \"restore_s\": {restored:.3}, \"same\": true}}"
    ));
    Ok(())
}
