//! How many instructions the device executes: thread-instructions a second for each of its cores.

use crate::ProbeError;
use crate::device::{Buffer, Device, Kernel};
use crate::kernels::{self, Source, TILE};
use crate::series::{Series, Sink};
use crate::timing::{nothing, rate, repetitions, sample};
use std::time::{Duration, Instant};

const UNIT: &str = "1e9 thread-instructions/s per core";
/// Threads of a block of the one-dimensional kernels.
const BLOCK: u32 = 256;
/// Blocks for each core: enough that none runs out of work before the others.
const BLOCKS_PER_CORE: u32 = 4;
const SAMPLE: Duration = Duration::from_millis(50);

pub(crate) fn measure(device: &Device, sink: &mut Sink<'_>) -> Result<(), ProbeError> {
    let bench = Soft { device, cores: device.multiprocessors()? };
    bench.float_alu(sink)?;
    bench.tiled_matmul(sink)?;
    bench.integer_alu(sink)?;
    bench.copy(sink)
}

/// Runs one kernel of one block.
pub(crate) fn check(device: &Device) -> Result<(), ProbeError> {
    const TURNS: u32 = 3;
    let source = kernels::integer_alu();
    let kernel = device.kernel(&source.ptx, source.name)?;
    let out = device.alloc((BLOCK * 4) as usize)?;
    device.launch(kernel, [1, 1], [BLOCK, 1], &[out.address, u64::from(TURNS)])?;
    device.synchronize()?;
    check_integers(&out, TURNS)
}

fn check_integers(out: &Buffer<'_>, turns: u32) -> Result<(), ProbeError> {
    for (index, found) in out.floats()?.into_iter().enumerate().step_by(101) {
        let expected = kernels::integer_alu_result(index as u32, turns);
        if found.to_bits() != expected {
            let detail = format!("{:#x}, not {expected:#x}", found.to_bits());
            return Err(ProbeError::Wrong { what: "integer loop", detail });
        }
    }
    Ok(())
}

struct Soft<'d> {
    device: &'d Device,
    cores: u32,
}

impl Soft<'_> {
    fn kernel(&self, source: &Source) -> Result<Kernel, ProbeError> {
        self.device.kernel(&source.ptx, source.name)
    }

    /// Seconds for one `launch`, which is repeated to fill a sample.
    fn time(&self, launch: impl Fn() -> Result<(), ProbeError>) -> Result<Vec<f64>, ProbeError> {
        let run = |times: usize| {
            (0..times).try_for_each(|_| launch())?;
            self.device.synchronize()
        };
        run(1)?;
        let start = Instant::now();
        run(1)?;
        let times = repetitions(start.elapsed(), SAMPLE);
        sample(times, || run(times), nothing)
    }

    /// Returns the series `name` of launches that take `seconds`, each of so many `instructions`.
    fn per_core(&self, name: &str, instructions: u64, seconds: Vec<f64>) -> Series {
        rate(name, UNIT, instructions as f64 / f64::from(self.cores) / 1e9, seconds)
    }

    fn float_alu(&self, sink: &mut Sink<'_>) -> Result<(), ProbeError> {
        const TURNS: u32 = 200;
        let source = kernels::float_alu();
        let kernel = self.kernel(&source)?;
        let blocks = self.cores * BLOCKS_PER_CORE;
        let out = self.device.alloc((blocks * BLOCK * 4) as usize)?;
        let parameters = [out.address, u64::from(TURNS)];
        let launch = || self.device.launch(kernel, [blocks, 1], [BLOCK, 1], &parameters);
        let seconds = self.time(launch)?;
        // x/2 + 1/2, often: 1, whatever it began with.
        if let Some(wrong) = out.floats()?.into_iter().find(|x| *x != 1.0) {
            return Err(ProbeError::Wrong { what: "fp32 ALU loop", detail: wrong.to_string() });
        }
        let executed = u64::from(blocks * BLOCK) * u64::from(TURNS) * source.per_turn;
        sink(self.per_core("fp32 ALU loop", executed, seconds).target(1.0));
        Ok(())
    }

    fn integer_alu(&self, sink: &mut Sink<'_>) -> Result<(), ProbeError> {
        const TURNS: u32 = 200;
        let source = kernels::integer_alu();
        let kernel = self.kernel(&source)?;
        let blocks = self.cores * BLOCKS_PER_CORE;
        let out = self.device.alloc((blocks * BLOCK * 4) as usize)?;
        let parameters = [out.address, u64::from(TURNS)];
        let launch = || self.device.launch(kernel, [blocks, 1], [BLOCK, 1], &parameters);
        let seconds = self.time(launch)?;
        check_integers(&out, TURNS)?;
        let executed = u64::from(blocks * BLOCK) * u64::from(TURNS) * source.per_turn;
        sink(self.per_core("integer ALU loop", executed, seconds));
        Ok(())
    }

    fn tiled_matmul(&self, sink: &mut Sink<'_>) -> Result<(), ProbeError> {
        const N: u32 = 256;
        const BYTES: usize = (N * N * 4) as usize;
        let source = kernels::tiled_matmul();
        let kernel = self.kernel(&source)?;
        let [a, b, c] = [(); 3].map(|()| self.device.alloc(BYTES));
        let (a, b, c) = (a?, b?, c?);
        a.fill(2f32.to_bits())?;
        b.fill(3f32.to_bits())?;
        let parameters = [a.address, b.address, c.address, u64::from(N)];
        let grid = [N / TILE, N / TILE];
        let launch = || self.device.launch(kernel, grid, [TILE, TILE], &parameters);
        let seconds = self.time(launch)?;
        let expected = 6.0 * N as f32;
        if let Some(wrong) = c.floats()?.into_iter().find(|x| *x != expected) {
            let detail = format!("{wrong}, not {expected}");
            return Err(ProbeError::Wrong { what: "tiled matrix product", detail });
        }
        let executed = u64::from(N * N) * u64::from(N / TILE) * source.per_turn;
        sink(self.per_core("tiled matrix product", executed, seconds).target(1.0));
        Ok(())
    }

    /// More than any cache holds, so that memory is the limit.
    fn copy(&self, sink: &mut Sink<'_>) -> Result<(), ProbeError> {
        const WORDS: u32 = 16 << 20;
        const BYTES: usize = (WORDS * 4) as usize;
        let source = kernels::copy_words();
        let kernel = self.kernel(&source)?;
        let (from, to) = (self.device.alloc(BYTES)?, self.device.alloc(BYTES)?);
        from.fill(0x5eed)?;
        to.fill(0)?;
        let parameters = [from.address, to.address, u64::from(WORDS)];
        let blocks = self.cores * BLOCKS_PER_CORE;
        let launch = || self.device.launch(kernel, [blocks, 1], [BLOCK, 1], &parameters);
        let seconds = self.time(launch)?;
        if let Some(wrong) = to.floats()?.into_iter().find(|x| x.to_bits() != 0x5eed) {
            let detail = format!("{:#x}", wrong.to_bits());
            return Err(ProbeError::Wrong { what: "copy kernel", detail });
        }
        let moved = 2.0 * BYTES as f64 / 1e9;
        sink(rate("copy kernel, bytes read and written", "GB/s", moved, seconds.clone()));
        sink(self.per_core("copy kernel", u64::from(WORDS) * source.per_turn, seconds));
        Ok(())
    }
}
