//! Snapshots of what has changed: how fast the devices compute digests, and what a second snapshot
//! takes.

use crate::driver::Cuda;
use crate::rig::*;
use kedge_device::digest::{BLOCK, Keys};
use kedge_device::{Backend, Known, Object, Piece, Snapshot, Snapshots};
use kedge_protocol::StreamOp;
use std::error::Error;
use std::time::Instant;

/// One block in so many changes.
const EVERY: u64 = 20;
/// Digests that are compared with the processor's.
const COMPARED: u64 = 64;

pub(crate) fn measure(gib: &str) -> Outcome {
    let bytes = gib.parse::<u64>()? * GIB;
    let pattern = Pattern::new();
    let backend = backend()?;
    grant(&backend, bytes)?;
    let cuda = Cuda::open()?;
    cuda.pin(pattern.all())?;
    spread(bytes, |at, len, _| cuda.to_device(BASE + at, pattern.at(at, len)))?;
    let mut known = Known::nothing(Keys::draw()?);
    let mut pauses = Vec::new();
    let mut same = true;
    let mut prepares = Vec::new();
    let mut changed = Vec::new();
    for round in 0..4 {
        if round == 3 {
            change(&*backend, bytes)?;
        }
        rest(&backend)?;
        let begin = Instant::now();
        backend.prepare_snapshot(Some(&known))?;
        prepares.push(begin.elapsed().as_secs_f64() * 1e3);
        let begin = Instant::now();
        let snapshot = backend.snapshot(Some(&known))?;
        pauses.push(begin.elapsed().as_secs_f64() * 1e3);
        let (parts, read) = drain_changes(&*snapshot, &known)?;
        changed.push(parts);
        if round == 0 {
            same &= agree(&*snapshot, &known)?;
        }
        if round == 3 {
            same &= read.iter().all(|bytes| *bytes == CHANGED);
        }
        for piece in snapshot.pieces() {
            if let Some(digests) = snapshot.digests(piece) {
                known.pieces.insert(piece.clone(), digests);
            }
        }
    }
    say(&format!(
        "{{\"what\": \"changes\", \"gib\": {gib}, \"pause_full_with_digests_ms\": {:.2}, \
         \"pause_nothing_changed_ms\": {:.2}, \"digests_gb_s\": {:.0}, \"pause_5_percent_ms\": {:.2}, \
         \"drained_of_1\": {:.4}, \"nothing_changed_drained\": {}, \"prepare_ms\": {prepares:.1?}, \"same\": {same}}}",
        pauses[0],
        pauses[2],
        bytes as f64 / pauses[2] / 1e6,
        pauses[3],
        changed[3] as f64 / bytes as f64,
        changed[2],
    ));
    Ok(())
}

/// What a changed block begins with.
const CHANGED: u8 = 0x5a;

/// Writes a little into one block of many.
fn change(backend: &dyn Backend, bytes: u64) -> Outcome {
    for block in (0..bytes / BLOCK).step_by(EVERY as usize) {
        let dst = BASE + block * BLOCK;
        let value = CHANGED.into();
        let fill = StreamOp::Memset { dst, pitch: 0, value, element: 1, width: 64, height: 1 };
        backend.submit(STREAM, fill)?;
    }
    backend.submit(STREAM, StreamOp::Empty {})?;
    let end = Instant::now() + std::time::Duration::from_secs(20);
    while !backend.at_rest() && Instant::now() < end {
        std::thread::yield_now();
    }
    Ok(())
}

/// Reads all that is not known: how many bytes, and the first of each run.
fn drain_changes(snapshot: &dyn Snapshot, known: &Known) -> Result<(u64, Vec<u8>), Box<dyn Error>> {
    let (mut total, mut first) = (0, Vec::new());
    let mut buffer = vec![0; CHUNK];
    for piece in snapshot.pieces() {
        let digests = snapshot.digests(piece).ok_or("a piece without digests")?;
        for (from, to, _) in known.compare(piece, &digests).into_iter().filter(|run| !run.2) {
            let bytes = (to - from).min(CHUNK as u64) as usize;
            snapshot.read(piece, piece.start + from, &mut buffer[..bytes])?;
            first.push(buffer[0]);
            total += to - from;
        }
    }
    Ok((total, first))
}

/// Whether the devices' digests are the processor's.
fn agree(snapshot: &dyn Snapshot, known: &Known) -> Result<bool, Box<dyn Error>> {
    let memory = |piece: &&Piece| piece.object == Object::Memory;
    let piece = snapshot.pieces().iter().find(memory).ok_or("no memory")?;
    let digests = snapshot.digests(piece).ok_or("no digests")?;
    let mut block = vec![0; BLOCK as usize];
    let mut same = true;
    for index in 0..COMPARED.min(piece.bytes / BLOCK) {
        snapshot.read(piece, piece.start + index * BLOCK, &mut block)?;
        same &= digests[index as usize] == Some(known.keys.digest(&block));
    }
    Ok(same)
}
