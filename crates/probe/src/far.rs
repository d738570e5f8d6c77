//! What `kedge bench far` has measured: a program that does one thing at a time, by order.

use crate::ProbeError;
use crate::cpu;
use crate::device::{Buffer, Device, Kernel, Pinned};
use crate::kernels;
use std::io::{BufRead, Write};
use std::time::Instant;

/// Launches of a step, which then reads one value back.
const STEP: usize = 200;
/// Bytes of the longest copy.
const ROOM: usize = 256 << 20;
const PROXY: &str = "kedge-proxy";

/// Obeys one order a line, and answers each with a number, seconds unless said otherwise:
/// `connect`, first of all, from cuInit to the end of a first launch; `post N`, for each of so many
/// launches, not their end; `records N`, so many events recorded, and a wait; `makes N`, so many
/// events made, and a wait; `calls N`, for each of so many calls that wait, the median; `kernels
/// N`, so many launches and a wait; `step`, launches and one value read back; `in-pinned BYTES` and
/// the like, one copy; `proxies`, processor time of the job's proxies.
///
/// # Errors
/// A call of the driver fails.
pub fn obey(input: impl BufRead, mut output: impl Write) -> Result<(), ProbeError> {
    let mut lines = input.lines().map_while(Result::ok);
    let mut said = writeln!(output, "ready").and_then(|()| output.flush());
    let Some(_) = lines.next() else { return Ok(()) };
    let begin = Instant::now();
    let device = Device::open()?;
    let null = device.kernel(kernels::NULL, "null")?;
    device.launch(null, [1, 1], [32, 1], &[])?;
    device.synchronize()?;
    let mut answer = begin.elapsed().as_secs_f64();
    let mut bench = Bench { device: &device, null, copies: None };
    // A reader that has gone wants no more.
    while said.is_ok() {
        said = writeln!(output, "{answer}").and_then(|()| output.flush());
        let Some(line) = lines.next() else { break };
        let (order, number) = line.split_once(' ').unwrap_or((&line, "0"));
        answer = bench.order(order, number.parse().unwrap_or(0))?;
    }
    Ok(())
}

struct Bench<'d> {
    device: &'d Device,
    null: Kernel,
    copies: Option<Copies<'d>>,
}

struct Copies<'d> {
    buffer: Buffer<'d>,
    pinned: Pinned<'d>,
    pageable: Vec<u8>,
    /// How often what is copied has been made anew.
    turn: u32,
}

impl<'d> Bench<'d> {
    fn order(&mut self, order: &str, count: usize) -> Result<f64, ProbeError> {
        let device = self.device;
        let launch = || device.launch(self.null, [1, 1], [32, 1], &[]);
        let begin = Instant::now();
        let mut each = 1;
        match order {
            "post" => {
                (0..count).try_for_each(|_| launch())?;
                let posted = begin.elapsed().as_secs_f64() / count.max(1) as f64;
                device.synchronize()?;
                return Ok(posted);
            }
            "records" => {
                let event = device.event()?;
                (0..count).try_for_each(|_| device.record(event))?;
                device.synchronize()?;
            }
            "makes" => {
                (0..count).try_for_each(|_| device.event().map(drop))?;
                device.synchronize()?;
            }
            "calls" => return self.calls(count),
            "kernels" => {
                (0..count).try_for_each(|_| launch())?;
                device.synchronize()?;
            }
            "step" => {
                each = count.max(1);
                let word = device.alloc(4)?;
                for _ in 0..each {
                    (0..STEP).try_for_each(|_| launch())?;
                    word.read(&mut [0; 4])?;
                }
            }
            "proxies" => return Ok(cpu::seconds_of_children(PROXY).unwrap_or(f64::NAN)),
            _ => return self.copy(order, count.min(ROOM)),
        }
        Ok(begin.elapsed().as_secs_f64() / each as f64)
    }

    fn calls(&self, count: usize) -> Result<f64, ProbeError> {
        let mut seconds = Vec::new();
        for _ in 0..count.max(1) {
            let begin = Instant::now();
            self.device.free_memory()?;
            seconds.push(begin.elapsed().as_secs_f64());
        }
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[seconds.len() / 2])
    }

    /// The seconds of one copy.
    fn copy(&mut self, order: &str, bytes: usize) -> Result<f64, ProbeError> {
        let copies = match &mut self.copies {
            Some(copies) => copies,
            none => none.insert(Copies::new(self.device)?),
        };
        copies.renew(order, bytes)?;
        self.device.synchronize()?;
        let Copies { buffer, pinned, pageable, .. } = copies;
        let begin = Instant::now();
        match order {
            "in-pinned" => buffer.write(&pinned.as_slice()[..bytes])?,
            "in-pageable" => buffer.write(&pageable[..bytes])?,
            "out-pinned" => buffer.read(&mut pinned.as_mut_slice()[..bytes])?,
            "out-pageable" => buffer.read(&mut pageable[..bytes])?,
            _ => return Ok(f64::NAN),
        }
        Ok(begin.elapsed().as_secs_f64())
    }
}

impl<'d> Copies<'d> {
    fn new(device: &'d Device) -> Result<Copies<'d>, ProbeError> {
        let buffer = device.alloc(ROOM)?;
        let mut pinned = device.pinned(ROOM)?;
        pinned.as_mut_slice().fill(1);
        Ok(Copies { buffer, pinned, pageable: vec![1; ROOM], turn: 1 })
    }

    /// Gives what is to be copied a content that the other side has not got.
    fn renew(&mut self, order: &str, bytes: usize) -> Result<(), ProbeError> {
        self.turn += 1;
        let source = match order {
            "in-pinned" => self.pinned.as_mut_slice(),
            "in-pageable" => &mut self.pageable,
            _ => return self.buffer.fill(self.turn.wrapping_mul(0x9e37_79b9)),
        };
        // Bytes that nothing makes smaller.
        let mut noise = u64::from(self.turn).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for word in source[..bytes].as_chunks_mut::<8>().0 {
            noise = noise.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            *word = noise.to_le_bytes();
        }
        Ok(())
    }
}
