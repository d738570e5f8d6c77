//! What `kedge bench checkpoint` checkpoints, and `kedge bench migrate` moves: a program that holds
//! device memory, launches and synchronises without end, and tells of the longest time between two
//! beats by its own clock.

use crate::ProbeError;
use crate::device::{Buffer, Device, Kernel, Pinned};
use std::io::{BufRead, Write};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::{Duration, Instant};

/// An odd number whose multiples look random.
const NOISE: u64 = 0x9e37_79b9_7f4a_7c15;
/// Bytes of one allocation at most.
const PART: usize = 1 << 30;
/// Bytes that a change writes together.
const BLOCK: usize = 256 << 10;
/// Beats of which the median is taken.
const RECENT: usize = 4096;
/// Launches between two waits of `kernels`, and of a step; bytes that each kernel of a step writes,
/// and that a step copies to and from the device.
const KERNELS: usize = 100;
const STEP_KERNELS: usize = 16;
const STEP_BYTES: usize = 64 << 20;
const STEP_COPY: usize = 1 << 20;
/// Kernels of an iteration, bytes that each writes, and bytes of the program's own memory that an
/// iteration copies to and from the device.
const ITERATION_KERNELS: usize = 16;
const ITERATION_BYTES: usize = 1 << 20;
const ITERATION_COPY: usize = 512 << 10;

/// `fill(to, words, seed)`: noise, 16 bytes a thread.
const FILL: &str = ".version 7.0\n.target sm_70\n.address_size 64\n\
    .visible .entry fill(.param .u64 to, .param .u64 words, .param .u64 seed)\n{\n\
    .reg .pred %p;\n.reg .b32 %r<8>;\n.reg .b64 %rd<6>;\n\
    ld.param.u64 %rd1, [to];\nld.param.u32 %r1, [words];\nld.param.u32 %r2, [seed];\n\
    mov.u32 %r3, %ctaid.x;\nmov.u32 %r4, %ntid.x;\nmov.u32 %r5, %tid.x;\n\
    mad.lo.u32 %r3, %r3, %r4, %r5;\nsetp.ge.u32 %p, %r3, %r1;\n@%p ret;\n\
    mul.wide.u32 %rd2, %r3, 16;\nadd.u64 %rd1, %rd1, %rd2;\n\
    xor.b32 %r4, %r3, %r2;\nmul.lo.u32 %r4, %r4, 0x9E3779B1;\nshr.u32 %r5, %r4, 15;\nxor.b32 %r4, %r4, %r5;\n\
    mul.lo.u32 %r5, %r4, 0x85EBCA77;\nshr.u32 %r6, %r5, 13;\nxor.b32 %r5, %r5, %r6;\n\
    mul.lo.u32 %r6, %r5, 0xC2B2AE3D;\nmul.lo.u32 %r7, %r6, 0x27D4EB2F;\n\
    st.global.v4.u32 [%rd1], {%r4, %r5, %r6, %r7};\nret;\n}\n";

/// What the program holds.
#[derive(Debug, Clone, Copy)]
pub struct Held {
    /// Bytes of device memory, and of this process's own.
    pub device: usize,
    pub host: usize,
    /// Whether the device's are noise; otherwise LZ4 makes little of them.
    pub noise: bool,
    /// Bytes of one allocation at most.
    pub part: usize,
}

impl Held {
    /// Returns what a program that holds so much of the device's memory, as noise, holds.
    pub const fn noise(device: usize) -> Held {
        Held { device, host: 0, noise: true, part: PART }
    }
}

/// Holds memory, says `ready`, then beats, and obeys one order a line: `ping`; `rest`, no more
/// beats until the next order; `reset`; `gap`, the longest gap between two beats since `reset`,
/// less their median; `rate SECONDS`, beats a second for so long; `kernels SECONDS` and `steps
/// SECONDS`, the same of other loads; `iterate N`, so many iterations, seconds; `change PERCENT` of
/// the device memory's blocks; `changing PERCENT`, from now on so many of them a second. It answers
/// each with a number.
pub fn beat(
    held: Held,
    input: impl BufRead + Send + 'static,
    mut output: impl Write,
) -> Result<(), ProbeError> {
    let device = Device::open()?;
    let host: Vec<u64> = (0..held.host as u64 / 8).map(|word| word.wrapping_mul(NOISE)).collect();
    let mut heart = Heart::new(&device, held)?;
    let orders = lines(input);
    let mut said = writeln!(output, "ready").and_then(|()| output.flush());
    let mut rests = false;
    // The reader has gone, so nobody wants the rest.
    while said.is_ok() {
        let order = if rests { orders.recv().ok() } else { next(&orders, &mut heart)? };
        let Some(line) = order else { break };
        rests = line == "rest";
        let answer = heart.obey(&line)?;
        said = writeln!(output, "{answer}").and_then(|()| output.flush());
    }
    drop(std::hint::black_box(host));
    Ok(())
}

/// Beats until there is an order; `None` when there will be no more.
fn next(orders: &Receiver<String>, heart: &mut Heart<'_>) -> Result<Option<String>, ProbeError> {
    loop {
        match orders.try_recv() {
            Ok(line) => return Ok(Some(line)),
            Err(TryRecvError::Disconnected) => return Ok(None),
            Err(TryRecvError::Empty) => {
                heart.change_on()?;
                heart.beat()?;
            }
        }
    }
}

/// Lines as they come: a beat does not wait for them.
fn lines(input: impl BufRead + Send + 'static) -> Receiver<String> {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        let mut lines = input.lines().map_while(Result::ok);
        lines.all(|line| send.send(line).is_ok());
    });
    receive
}

struct Heart<'d> {
    device: &'d Device,
    null: Kernel,
    fill: Kernel,
    memory: Vec<Buffer<'d>>,
    pinned: Pinned<'d>,
    /// The last beat, the longest since `reset`, and the last few, in seconds.
    last: Instant,
    longest: f64,
    recent: Vec<f64>,
    next: usize,
    seed: u64,
    changing: Changing,
}

/// What is changed between beats.
#[derive(Debug, Default)]
struct Changing {
    /// Of a hundred blocks, so many a second.
    percent: f64,
    /// Since when, and how many blocks have been.
    begin: Option<Instant>,
    changed: usize,
}

impl<'d> Heart<'d> {
    fn new(device: &'d Device, held: Held) -> Result<Heart<'d>, ProbeError> {
        let bytes = held.device;
        let null = device.kernel(crate::kernels::NULL, "null")?;
        let fill = device.kernel(FILL, "fill")?;
        let part = held.part.max(16);
        let parts = (0..bytes).step_by(part).map(|at| device.alloc(part.min(bytes - at)));
        let memory = parts.collect::<Result<Vec<_>, _>>()?;
        let (last, recent) = (Instant::now(), Vec::with_capacity(RECENT));
        let pinned = device.pinned(STEP_COPY)?;
        let (longest, next, seed, changing) = (0.0, 0, 1, Changing::default());
        let mut heart = Heart {
            device,
            null,
            fill,
            memory,
            pinned,
            last,
            longest,
            recent,
            next,
            seed,
            changing,
        };
        for part in 0..heart.memory.len() {
            match held.noise {
                true => heart.write(part, 0, heart.memory[part].size)?,
                false => heart.memory[part].fill(part as u32 + 1)?,
            }
        }
        device.synchronize()?;
        heart.last = Instant::now();
        Ok(heart)
    }

    /// Writes new noise to a part of the memory.
    fn write(&mut self, part: usize, at: usize, bytes: usize) -> Result<(), ProbeError> {
        self.seed += 1;
        let words = (bytes / 16) as u32;
        let to = self.memory[part].address + at as u64;
        let seed = self.seed.wrapping_mul(0x9e37_79b9);
        let grid = [words.div_ceil(256).max(1), 1];
        self.device.launch(self.fill, grid, [256, 1], &[to, words.into(), seed])
    }

    fn beat(&mut self) -> Result<(), ProbeError> {
        self.device.launch(self.null, [1, 1], [32, 1], &[])?;
        self.device.synchronize()?;
        let gap = self.last.elapsed().as_secs_f64();
        self.last = Instant::now();
        self.longest = self.longest.max(gap);
        if self.recent.len() < RECENT {
            self.recent.push(gap);
        } else {
            self.recent[self.next] = gap;
        }
        self.next = (self.next + 1) % RECENT;
        Ok(())
    }

    fn obey(&mut self, line: &str) -> Result<f64, ProbeError> {
        let (order, number) = line.split_once(' ').unwrap_or((line, "0"));
        let number = number.parse::<f64>().unwrap_or(0.0);
        let answer = match order {
            "reset" => {
                self.longest = 0.0;
                0.0
            }
            "gap" => (self.longest - self.median()).max(0.0),
            "rate" => self.rate(number, Heart::beat)?,
            "kernels" => self.rate(number, Heart::kernels)?,
            "steps" => self.rate(number, Heart::step)?,
            "iterate" => self.iterate(number as usize)?,
            "change" => self.change(number)?,
            "changing" => {
                self.changing =
                    Changing { percent: number, begin: Some(Instant::now()), changed: 0 };
                0.0
            }
            _ => 0.0,
        };
        // An order is no gap.
        self.last = Instant::now();
        Ok(answer)
    }

    fn median(&self) -> f64 {
        let mut sorted = self.recent.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
    }

    /// How often a second `load` can be done, tried for so many.
    fn rate(
        &mut self,
        seconds: f64,
        load: fn(&mut Self) -> Result<(), ProbeError>,
    ) -> Result<f64, ProbeError> {
        let time = Duration::from_secs_f64(seconds.clamp(0.001, 600.0));
        let (begin, mut turns) = (Instant::now(), 0.0);
        self.last = begin;
        while begin.elapsed() < time {
            load(self)?;
            turns += 1.0;
        }
        Ok(turns / begin.elapsed().as_secs_f64())
    }

    /// Many small kernels, and a wait for all of them.
    fn kernels(&mut self) -> Result<(), ProbeError> {
        (0..KERNELS).try_for_each(|_| self.device.launch(self.null, [1, 1], [32, 1], &[]))?;
        self.device.synchronize()
    }

    /// What a step of a computation does: copies its input, runs some kernels with work, copies its
    /// output.
    fn step(&mut self) -> Result<(), ProbeError> {
        let bytes = STEP_BYTES.min(self.memory.first().map_or(0, |memory| memory.size));
        let Some(memory) = self.memory.first() else { return Ok(()) };
        memory.write(self.pinned.as_slice())?;
        (0..STEP_KERNELS).try_for_each(|_| self.write(0, 0, bytes))?;
        match self.memory.first() {
            Some(memory) => memory.read(self.pinned.as_mut_slice()),
            None => Ok(()),
        }
    }

    /// So many iterations of a computation whose host has a part in each, as that of a simulation
    /// has: seconds that they take.
    fn iterate(&mut self, count: usize) -> Result<f64, ProbeError> {
        let Some(memory) = self.memory.first() else { return Ok(0.0) };
        let bytes = ITERATION_BYTES.min(memory.size);
        let mut own = vec![0; ITERATION_COPY.min(memory.size)];
        let begin = Instant::now();
        for turn in 0..count {
            own[..8].copy_from_slice(&(turn as u64).to_le_bytes());
            self.memory[0].write(&own)?;
            (0..ITERATION_KERNELS).try_for_each(|_| self.write(0, 0, bytes))?;
            self.memory[0].read(&mut own)?;
        }
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Writes to one block, if it is time for one.
    fn change_on(&mut self) -> Result<(), ProbeError> {
        let Changing { percent, begin: Some(begin), changed } = self.changing else {
            return Ok(());
        };
        let blocks: usize = self.memory.iter().map(|part| part.size / BLOCK).sum();
        let due = begin.elapsed().as_secs_f64() * blocks as f64 * percent / 100.0;
        if (changed as f64) >= due || blocks == 0 {
            return Ok(());
        }
        self.changing.changed += 1;
        // Blocks far from each other.
        let mut block = changed.wrapping_mul(NOISE as usize) % blocks;
        for part in 0..self.memory.len() {
            let here = self.memory[part].size / BLOCK;
            if block < here {
                return self.write(part, block * BLOCK, BLOCK);
            }
            block -= here;
        }
        Ok(())
    }

    /// Writes to so many of a hundred blocks; the part that it was.
    fn change(&mut self, percent: f64) -> Result<f64, ProbeError> {
        let every = (100.0 / percent.clamp(0.01, 100.0)) as usize;
        let (mut changed, mut all) = (0, 0);
        for part in 0..self.memory.len() {
            let blocks = self.memory[part].size / BLOCK;
            for block in (0..blocks).step_by(every.max(1)) {
                self.write(part, block * BLOCK, BLOCK)?;
                changed += 1;
            }
            all += blocks;
        }
        self.device.synchronize()?;
        Ok(f64::from(changed) / (all.max(1) as f64))
    }
}
