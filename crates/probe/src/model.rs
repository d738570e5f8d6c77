//! What `kedge model fit` times: what using devices costs, one kind of use at a time, so that near
//! and far devices can be compared.

use crate::ProbeError;
use crate::device::{Buffer, Device};
use crate::kernels;
use crate::series::{Series, Sink};
use crate::timing::nothing;
use std::io::{BufRead, Write};
use std::time::Instant;

/// Bytes of a copy from devices: up to what outlasts a shaper's burst.
pub const READS: [usize; 4] = [4 << 10, 256 << 10, 2 << 20, 8 << 20];
/// To devices: of more than what travels in the ring.
pub const WRITES: [usize; 4] = [80 << 10, 256 << 10, 2 << 20, 8 << 20];
/// Rounds of each figure, and calls and posts of one.
const ROUNDS: usize = 5;
const CALLS: usize = 200;
const POSTS: usize = 4000;
/// Copies of one size take together no more bytes than one of the largest.
const ROUND_BYTES: usize = 8 << 20;

/// Times how long a program takes to have a device. Nothing of the driver may have run before.
pub fn time_session(sink: &mut Sink<'_>) -> Result<(), ProbeError> {
    let begin = Instant::now();
    let device = Device::open()?;
    device.synchronize()?;
    sink(Series::lower("session", "s", vec![begin.elapsed().as_secs_f64()]));
    Ok(())
}

/// Times calls, posts and copies; seconds for one.
pub fn time_uses(sink: &mut Sink<'_>) -> Result<(), ProbeError> {
    let device = Device::open()?;
    let null = device.kernel(kernels::NULL, "null")?;
    let launch = || device.launch(null, [1, 1], [32, 1], &[]);
    let wait = || device.synchronize();
    let all = |posts: &dyn Fn() -> Result<(), ProbeError>| {
        (0..POSTS).try_for_each(|_| posts()).and_then(|()| wait())
    };
    sink(Series::lower("post", "s", rounds(POSTS, || all(&launch), wait)?));
    let event = device.event()?;
    sink(Series::lower("event", "s", rounds(POSTS, || all(&|| device.record(event)), wait)?));
    let made = || all(&|| device.event().map(drop));
    sink(Series::lower("record", "s", rounds(POSTS, made, wait)?));
    let call = || (0..CALLS).try_for_each(|_| launch().and_then(|()| wait()));
    sink(Series::lower("call", "s", rounds(CALLS, call, nothing)?));
    WRITES.into_iter().try_for_each(|size| writes(&device, size, sink))?;
    READS.into_iter().try_for_each(|size| reads(&device, size, sink))
}

/// How many copies of a size make a round.
fn copies_of(size: usize) -> usize {
    (ROUND_BYTES / size).min(CALLS)
}

fn writes(device: &Device, size: usize, sink: &mut Sink<'_>) -> Result<(), ProbeError> {
    let count = copies_of(size);
    let (mut own, mut pinned) = (vec![1u8; size], device.pinned(size)?);
    noise(&mut own, size as u64);
    let buffer = device.alloc(size)?;
    let write = || (0..count).try_for_each(|_| buffer.write(&own));
    let seconds = rounds(count, || write().and_then(|()| device.synchronize()), nothing)?;
    sink(Series::lower(format!("write {size}"), "s", seconds));
    let mut turn = 0;
    let write = || {
        (0..count).try_for_each(|_| {
            // What has not changed need not cross a line.
            turn += 1;
            noise(pinned.as_mut_slice(), turn);
            buffer.write(pinned.as_slice())
        })?;
        device.synchronize()
    };
    sink(Series::lower(format!("pinned write {size}"), "s", rounds(count, write, nothing)?));
    Ok(())
}

fn reads(device: &Device, size: usize, sink: &mut Sink<'_>) -> Result<(), ProbeError> {
    let count = copies_of(size);
    let (mut own, mut pinned) = (vec![1u8; size], device.pinned(size)?);
    noise(&mut own, size as u64);
    let (buffer, other) = (device.alloc(size)?, device.alloc(size)?);
    buffer.write(&own)?;
    let read = || (0..count).try_for_each(|_| buffer.read(&mut own));
    sink(Series::lower(format!("read {size}"), "s", rounds(count, read, nothing)?));
    other.fill(7)?;
    let read = || {
        (0..count).try_for_each(|at| {
            let from: &Buffer<'_> = if at % 2 == 0 { &other } else { &buffer };
            from.read(pinned.as_mut_slice())
        })
    };
    sink(Series::lower(format!("pinned read {size}"), "s", rounds(count, read, nothing)?));
    Ok(())
}

/// Returns seconds for one of `count` of each round; the first round only warms up.
fn rounds(
    count: usize,
    mut body: impl FnMut() -> Result<(), ProbeError>,
    mut settle: impl FnMut() -> Result<(), ProbeError>,
) -> Result<Vec<f64>, ProbeError> {
    body()?;
    settle()?;
    let mut seconds = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        body()?;
        seconds.push(begin.elapsed().as_secs_f64() / count as f64);
        settle()?;
    }
    Ok(seconds)
}

/// Fills memory with what no codec makes less of.
fn noise(bytes: &mut [u8], seed: u64) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for word in bytes.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
}

/// Makes events and regions of device memory, says `ready`, and answers each line until there are
/// no more: what `kedge model fit` moves.
pub fn hold_objects(
    events: usize,
    regions: usize,
    size: usize,
    input: impl BufRead,
    mut output: impl Write,
) -> Result<(), ProbeError> {
    let device = Device::open()?;
    (0..events).try_for_each(|_| device.event().map(drop))?;
    let mut bytes = vec![0; size];
    let mut held = Vec::with_capacity(regions);
    for number in 0..regions {
        noise(&mut bytes, number as u64 + 1);
        let buffer = device.alloc(size)?;
        buffer.write(&bytes)?;
        held.push(buffer);
    }
    device.synchronize()?;
    // The reader has gone, so nobody wants the rest.
    let mut said = writeln!(output, "ready").and_then(|()| output.flush());
    for _ in input.lines().map_while(Result::ok) {
        device.synchronize()?;
        said = said.and_then(|()| writeln!(output, "0")).and_then(|()| output.flush());
        if said.is_err() {
            break;
        }
    }
    Ok(())
}
