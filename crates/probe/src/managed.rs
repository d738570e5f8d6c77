//! What `kedge bench managed` has measured: a program with managed memory that does one thing at a
//! time, by order, and checks what it computes.

use crate::ProbeError;
use crate::device::{Buffer, Device, Kernel, Managed};
use std::io::{BufRead, Write};
use std::time::Instant;

/// Bytes of a page, and of a word of managed memory.
const PAGE: usize = 4096;
const WORD: usize = 8;
/// Bytes between two first touches: nothing is read ahead from one to the other.
const APART: usize = 64 << 10;
/// Threads of a block, and blocks.
const THREADS: u32 = 128;
const BLOCKS: u32 = 256;

const HEADER: &str = ".version 7.0\n.target sm_70\n.address_size 64\n";

/// What each kernel begins with: `%rd5` is the thread's number, `%rd6` how many there are.
const NUMBER: &str = "mov.u32 %r1, %ctaid.x;\nmov.u32 %r2, %ntid.x;\nmov.u32 %r3, %tid.x;\n\
    mad.lo.u32 %r3, %r1, %r2, %r3;\nmov.u32 %r4, %nctaid.x;\nmul.lo.u32 %r4, %r4, %r2;\n\
    cvt.u64.u32 %rd5, %r3;\ncvt.u64.u32 %rd6, %r4;\n";

/// `fill(to, count, stride, first)`: word `i`, `stride` bytes from the one before, is `first + i`.
const FILL: &str = "mov.u64 %rd7, %rd5;\nLOOP:\nsetp.ge.u64 %p, %rd7, %rd2;\n@%p ret;\n\
    mad.lo.u64 %rd8, %rd7, %rd3, %rd1;\nadd.u64 %rd9, %rd4, %rd7;\nst.global.u64 [%rd8], %rd9;\n\
    add.u64 %rd7, %rd7, %rd6;\nbra LOOP;\n";

/// `total(from, count, stride, sum)`: adds such words to a sum.
const TOTAL: &str = "mov.u64 %rd7, %rd5;\nmov.u64 %rd10, 0;\nLOOP:\nsetp.ge.u64 %p, %rd7, %rd2;\n\
    @%p bra DONE;\nmad.lo.u64 %rd8, %rd7, %rd3, %rd1;\nld.global.u64 %rd9, [%rd8];\n\
    add.u64 %rd10, %rd10, %rd9;\nadd.u64 %rd7, %rd7, %rd6;\nbra LOOP;\nDONE:\n\
    atom.global.add.u64 %rd11, [%rd4], %rd10;\nret;\n";

/// `dot(a, count, b, sum)`: adds the products of 32-bit words.
const DOT: &str = "mov.u64 %rd7, %rd5;\nmov.u64 %rd10, 0;\nLOOP:\nsetp.ge.u64 %p, %rd7, %rd2;\n\
    @%p bra DONE;\nshl.b64 %rd8, %rd7, 2;\nadd.u64 %rd9, %rd3, %rd8;\nadd.u64 %rd8, %rd1, %rd8;\n\
    ld.global.u32 %r5, [%rd8];\nld.global.u32 %r6, [%rd9];\nmul.wide.u32 %rd11, %r5, %r6;\n\
    add.u64 %rd10, %rd10, %rd11;\nadd.u64 %rd7, %rd7, %rd6;\nbra LOOP;\nDONE:\n\
    atom.global.add.u64 %rd12, [%rd4], %rd10;\nret;\n";

fn kernel(device: &Device, name: &str, body: &str) -> Result<Kernel, ProbeError> {
    let parameters = ["a", "b", "c", "d"].map(|it| format!(".param .u64 {it}")).join(", ");
    let loads = [1, 2, 3, 4].map(|it| {
        let parameter = char::from(b'a' + it - 1);
        format!("ld.param.u64 %rd{it}, [{parameter}];\n")
    });
    let ptx = format!(
        "{HEADER}.visible .entry {name}({parameters})\n{{\n.reg .pred %p;\n.reg .b32 %r<7>;\n\
         .reg .b64 %rd<13>;\n{}{NUMBER}{body}}}\n",
        loads.concat()
    );
    device.kernel(&ptx, name)
}

/// Obeys one order a line, and answers each with a number, seconds unless said otherwise: `hold
/// BYTES` and `free`, of managed memory; `post N`, for each of so many launches, not their end;
/// `launch`, one and the wait; `touched PERCENT`, the same where the host has written to so many
/// pages, and `pages PERCENT`, their number; `touch-read N` and `touch-write N`, for each of so
/// many first touches by the host, the median; `walk-read BYTES` and `walk-write BYTES`, a part
/// that the device has, by the host; `memcpy BYTES`, of ordinary memory; `bus BYTES`, pinned memory
/// to the device; `vectors BYTES` and `dot`, of two that are so large together.
///
/// # Errors
/// A call of the driver fails, or what the device or the host finds is not what the other wrote.
pub fn obey_managed(input: impl BufRead, mut output: impl Write) -> Result<(), ProbeError> {
    let device = Device::open()?;
    let mut bench = Bench::new(&device)?;
    let mut said = writeln!(output, "ready").and_then(|()| output.flush());
    for line in input.lines().map_while(Result::ok) {
        if said.is_err() {
            break;
        }
        let (order, number) = line.split_once(' ').unwrap_or((&line, "0"));
        let answer = bench.order(order, number.parse().unwrap_or(0))?;
        said = writeln!(output, "{answer}").and_then(|()| output.flush());
    }
    Ok(())
}

struct Bench<'d> {
    device: &'d Device,
    fill: Kernel,
    total: Kernel,
    dot: Kernel,
    /// A word on the device.
    sum: Buffer<'d>,
    held: Option<Managed<'d>>,
    vectors: Option<Vectors<'d>>,
    /// Makes what is written differ from what was there.
    turn: u64,
}

struct Vectors<'d> {
    a: Managed<'d>,
    b: Managed<'d>,
    product: u64,
}

impl<'d> Bench<'d> {
    fn new(device: &'d Device) -> Result<Bench<'d>, ProbeError> {
        let fill = kernel(device, "fill", FILL)?;
        let (total, dot) = (kernel(device, "total", TOTAL)?, kernel(device, "dot", DOT)?);
        let sum = device.alloc(WORD)?;
        let mut bench = Bench { device, fill, total, dot, sum, held: None, vectors: None, turn: 1 };
        bench.launch()?;
        Ok(bench)
    }

    fn order(&mut self, order: &str, number: usize) -> Result<f64, ProbeError> {
        self.turn += 1;
        match order {
            "hold" => {
                let begin = Instant::now();
                self.held = Some(self.device.managed(number)?);
                Ok(begin.elapsed().as_secs_f64())
            }
            "free" => {
                let begin = Instant::now();
                self.held = None;
                Ok(begin.elapsed().as_secs_f64())
            }
            "post" => self.post(number),
            "launch" => self.launch(),
            "pages" => Ok(self.scattered(number).0 as f64),
            "touched" => self.touched(number),
            "touch-read" => self.touch(number, false),
            "touch-write" => self.touch(number, true),
            "walk-read" => self.walk(number, false),
            "walk-write" => self.walk(number, true),
            "memcpy" => Ok(memcpy(number)),
            "bus" => self.bus(number),
            "vectors" => self.make_vectors(number),
            "dot" => self.product(),
            _ => Ok(f64::NAN),
        }
    }

    /// Where the small kernel writes: managed memory, if some is held.
    fn address(&self) -> u64 {
        self.held.as_ref().map_or(self.sum.address, |held| held.address)
    }

    fn small(&self, value: u64) -> Result<(), ProbeError> {
        self.device.launch(self.fill, [1, 1], [1, 1], &[self.address(), 1, 8, value])
    }

    fn post(&mut self, count: usize) -> Result<f64, ProbeError> {
        let begin = Instant::now();
        (0..count).try_for_each(|at| self.small(self.turn + at as u64))?;
        let posted = begin.elapsed().as_secs_f64() / count.max(1) as f64;
        self.device.synchronize()?;
        Ok(posted)
    }

    fn launch(&mut self) -> Result<f64, ProbeError> {
        let begin = Instant::now();
        self.small(self.turn)?;
        self.device.synchronize()?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// How many pages `percent` of what is held are, and the bytes from each to the next.
    fn scattered(&self, percent: usize) -> (usize, usize) {
        let size = self.held.as_ref().map_or(0, |held| held.size);
        let stride = PAGE * 100 / percent.clamp(1, 100);
        // Whole pages, so that each word is one of its own.
        let stride = stride / PAGE * PAGE;
        (size / stride, stride)
    }

    fn touched(&mut self, percent: usize) -> Result<f64, ProbeError> {
        let ((count, stride), first) = (self.scattered(percent), self.turn << 32);
        let Some(held) = &mut self.held else { return Ok(f64::NAN) };
        (0..count).for_each(|at| held.write(at * stride, first + at as u64));
        let begin = Instant::now();
        self.device.launch(self.fill, [1, 1], [1, 1], &[self.address(), 1, 8, first])?;
        self.device.synchronize()?;
        let taken = begin.elapsed().as_secs_f64();
        self.check_total("pages that the host has written", count, stride, first)?;
        Ok(taken)
    }

    /// The device's words are `first` and so on.
    fn check_total(
        &self,
        what: &'static str,
        count: usize,
        stride: usize,
        first: u64,
    ) -> Result<(), ProbeError> {
        self.sum.write(&0u64.to_ne_bytes())?;
        let parameters = [self.address(), count as u64, stride as u64, self.sum.address];
        self.device.launch(self.total, [BLOCKS, 1], [THREADS, 1], &parameters)?;
        check(what, self.word()?, sum_of(count, first))
    }

    fn word(&self) -> Result<u64, ProbeError> {
        let mut bytes = [0; WORD];
        self.sum.read(&mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Has the device alone have words that are `first` and so on.
    fn fill(&self, count: usize, stride: usize, first: u64) -> Result<(), ProbeError> {
        let parameters = [self.address(), count as u64, stride as u64, first];
        self.device.launch(self.fill, [BLOCKS, 1], [THREADS, 1], &parameters)?;
        self.device.synchronize()
    }

    fn touch(&mut self, count: usize, write: bool) -> Result<f64, ProbeError> {
        let first = self.turn << 32;
        let count = count.min(self.held.as_ref().map_or(0, |held| held.size / APART)).max(1);
        self.fill(count, APART, first)?;
        let Some(held) = &mut self.held else { return Ok(f64::NAN) };
        let (mut seconds, mut found) = (Vec::with_capacity(count), 0u64);
        // Each once, and no two in a row that follow each other.
        let all = count.next_power_of_two();
        for at in (0..all).map(|at| at * 3 % all).filter(|at| *at < count) {
            let begin = Instant::now();
            match write {
                true => held.write(at * APART, first + 7 + at as u64),
                false => found = found.wrapping_add(held.read(at * APART)),
            }
            seconds.push(begin.elapsed().as_secs_f64());
        }
        seconds.sort_by(f64::total_cmp);
        let median = seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN);
        match write {
            false => {
                check("pages that the device has written", found, sum_of(seconds.len(), first))?
            }
            true => self.check_total("pages that the host has touched", count, APART, first + 7)?,
        }
        Ok(median)
    }

    fn walk(&mut self, bytes: usize, write: bool) -> Result<f64, ProbeError> {
        let bytes = bytes.min(self.held.as_ref().map_or(0, |held| held.size));
        let (count, first) = (bytes / WORD, self.turn << 32);
        self.fill(count, WORD, first)?;
        let Some(held) = &mut self.held else { return Ok(f64::NAN) };
        let (begin, mut found) = (Instant::now(), 0u64);
        for at in 0..count {
            match write {
                true => held.write(at * WORD, first + 7 + at as u64),
                false => found = found.wrapping_add(held.read(at * WORD)),
            }
        }
        let taken = begin.elapsed().as_secs_f64();
        match write {
            false => check("what the device has written", found, sum_of(count, first))?,
            true => self.check_total("what the host has written", count, WORD, first + 7)?,
        }
        Ok(taken)
    }

    fn bus(&self, bytes: usize) -> Result<f64, ProbeError> {
        let (buffer, pinned) = (self.device.alloc(bytes)?, self.device.pinned(bytes)?);
        buffer.write(pinned.as_slice())?;
        self.device.synchronize()?;
        let begin = Instant::now();
        buffer.write(pinned.as_slice())?;
        self.device.synchronize()?;
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Makes two vectors in the place of those before.
    fn make_vectors(&mut self, bytes: usize) -> Result<f64, ProbeError> {
        self.vectors = None;
        let half = (bytes / 2).max(WORD) / WORD * WORD;
        let begin = Instant::now();
        let (mut a, mut b) = (self.device.managed(half)?, self.device.managed(half)?);
        let mut product = 0u64;
        for at in (0..half).step_by(WORD) {
            let x = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let y = x.wrapping_mul(0x2545_f491_4f6c_dd1d);
            a.write(at, x);
            b.write(at, y);
            let (low, high) = ((x & 0xffff_ffff) * (y & 0xffff_ffff), (x >> 32) * (y >> 32));
            product = product.wrapping_add(low).wrapping_add(high);
        }
        self.vectors = Some(Vectors { a, b, product });
        Ok(begin.elapsed().as_secs_f64())
    }

    fn product(&mut self) -> Result<f64, ProbeError> {
        self.sum.write(&0u64.to_ne_bytes())?;
        let Some(Vectors { a, b, product }) = &self.vectors else { return Ok(f64::NAN) };
        let parameters = [a.address, (a.size / 4) as u64, b.address, self.sum.address];
        let begin = Instant::now();
        self.device.launch(self.dot, [BLOCKS, 1], [THREADS, 1], &parameters)?;
        self.device.synchronize()?;
        let taken = begin.elapsed().as_secs_f64();
        check("the product of two vectors", self.word()?, *product)?;
        Ok(taken)
    }
}

/// The sum of so many numbers from `first` on.
fn sum_of(count: usize, first: u64) -> u64 {
    (0..count as u64).fold(0, |sum, at| sum.wrapping_add(first.wrapping_add(at)))
}

fn check(what: &'static str, found: u64, expected: u64) -> Result<(), ProbeError> {
    if found == expected {
        return Ok(());
    }
    Err(ProbeError::Wrong { what, detail: format!("{found:#x}, not {expected:#x}") })
}

/// Seconds of copying so many bytes of ordinary memory that is there.
fn memcpy(bytes: usize) -> f64 {
    let (from, mut to) = (vec![1u8; bytes], vec![2u8; bytes]);
    let begin = Instant::now();
    to.copy_from_slice(std::hint::black_box(&from));
    std::hint::black_box(&to);
    begin.elapsed().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_told() {
        assert_eq!(sum_of(4, 10), 46);
        assert!(check("a sum", 46, sum_of(4, 10)).is_ok());
        let said = check("a sum", 47, 46).unwrap_err().to_string();
        assert!(said.contains("a sum") && said.contains("0x2f, not 0x2e"), "{said}");
    }
}
