//! What a drain costs a program that goes on: a heartbeat of launches, and copies inside the
//! device, with and without a drain beside them, by turns.

use crate::rig::*;
use crate::sizes::drain;
use kedge_device::{Backend, Snapshot, Snapshots};
use kedge_device_nvidia::NvidiaBackend;
use kedge_protocol::{Copy3d, Place, StreamOp};
use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const TURN: Duration = Duration::from_millis(300);
const TURNS: usize = 5;

type Work = fn(&NvidiaBackend) -> Outcome;

pub(crate) fn measure(gib: &str) -> Outcome {
    let bytes = gib.parse::<u64>()? * GIB;
    let backend = backend()?;
    grant(&backend, bytes)?;
    rest(&backend)?;
    backend.prepare_snapshot(None)?;
    let snapshot = backend.snapshot(None)?;
    let mut beats: Vec<(&str, Work)> = vec![("launch and synchronize", beat)];
    if std::env::var_os("KEDGE_BEATS_ALONE").is_none() {
        beats.push(("copies inside the device", copies));
    }
    for (what, work) in beats {
        let mut ratios = Vec::new();
        let mut rates = (0.0, 0.0);
        for _ in 0..TURNS {
            let alone = rate(&backend, work)?;
            let (beside, drained) = beside(&backend, work, &*snapshot, bytes)?;
            ratios.push(beside / alone);
            rates = (alone, drained);
        }
        ratios.sort_by(f64::total_cmp);
        say(&format!(
            "{{\"what\": \"{what} during a drain\", \"rate\": {:.4}, \"least\": {:.4}, \"alone_per_s\": {:.1}, \
             \"drain_gib_s\": {:.1}}}",
            ratios[TURNS / 2],
            ratios[0],
            rates.0,
            rates.1,
        ));
    }
    Ok(())
}

fn beat(backend: &NvidiaBackend) -> Outcome {
    let fill =
        StreamOp::Memset { dst: BASE, pitch: 0, value: 7, element: 4, width: 1024, height: 1 };
    backend.submit(STREAM, fill)?;
    finish(backend, STREAM)
}

fn copies(backend: &NvidiaBackend) -> Outcome {
    let place = |addr| Place::Mapped { addr, pitch: 0, slice: 0 };
    let (src, dst, width) = (place(BASE), place(BASE + SLAB), SLAB);
    for _ in 0..20 {
        let copy = Copy3d { src, dst, width, height: 1, depth: 1 };
        backend.submit(STREAM, StreamOp::Copy { copy })?;
    }
    finish(backend, STREAM)
}

/// Rounds of `work` a second.
fn rate(backend: &NvidiaBackend, work: Work) -> Result<f64, Box<dyn Error>> {
    let (begin, mut rounds) = (Instant::now(), 0);
    while begin.elapsed() < TURN {
        work(backend)?;
        rounds += 1;
    }
    Ok(f64::from(rounds) / begin.elapsed().as_secs_f64())
}

/// The rate while a snapshot is drained again and again, and how fast it leaves.
fn beside(
    backend: &NvidiaBackend,
    work: Work,
    snapshot: &dyn Snapshot,
    bytes: u64,
) -> Result<(f64, f64), Box<dyn Error>> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let drains = scope.spawn(|| {
            let (begin, mut total) = (Instant::now(), 0);
            while !stop.load(Ordering::Relaxed) {
                drain(snapshot, bytes.min(GIB / 2), None).map_err(|error| error.to_string())?;
                total += bytes.min(GIB / 2);
            }
            Ok::<f64, String>(total as f64 / GIB as f64 / begin.elapsed().as_secs_f64())
        });
        std::thread::sleep(Duration::from_millis(100));
        let rate = rate(backend, work);
        stop.store(true, Ordering::Relaxed);
        let drained = drains.join().map_err(|_| "a panic")??;
        Ok((rate?, drained))
    })
}
