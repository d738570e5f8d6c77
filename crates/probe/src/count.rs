//! What `kedge doctor` checkpoints and brings back: a program that counts, in its own memory or in
//! a device's.

use crate::ProbeError;
use crate::device::{Buffer, Device, Kernel};
use std::io::{BufRead, Read, Write};

/// `count(at)`: adds one to a number.
const COUNT: &str = ".version 7.0\n.target sm_70\n.address_size 64\n\
    .visible .entry count(.param .u64 at)\n{\n.reg .b64 %rd<3>;\n\
    ld.param.u64 %rd1, [at];\nld.global.u64 %rd2, [%rd1];\nadd.u64 %rd2, %rd2, 1;\n\
    st.global.u64 [%rd1], %rd2;\nret;\n}\n";

/// Draws a number and prints it; then, for each line of `input`, adds one to it and prints it
/// again. Where `on_device`, the number is in a device's memory, and a kernel adds.
///
/// # Errors
/// What the driver said.
pub fn count(
    on_device: bool,
    input: impl BufRead,
    mut output: impl Write,
) -> Result<(), ProbeError> {
    let device = on_device.then(Device::open).transpose()?;
    let mut counter = Counter::new(device.as_ref(), random())?;
    let mut lines = input.lines();
    // Who does not read any more, or asks no more, wants no more.
    while writeln!(output, "{}", counter.get()?).and_then(|()| output.flush()).is_ok()
        && lines.next().is_some_and(|line| line.is_ok())
    {
        counter.add()?;
    }
    Ok(())
}

/// A number that two programs will not share. Without /dev/urandom, this process's id.
fn random() -> u64 {
    let mut bytes = [0; 8];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    // Half the numbers: none overflows.
    read.map_or(u64::from(std::process::id()), |()| u64::from_ne_bytes(bytes) >> 1)
}

enum Counter<'d> {
    Here(u64),
    There { device: &'d Device, kernel: Kernel, memory: Buffer<'d> },
}

impl<'d> Counter<'d> {
    fn new(device: Option<&'d Device>, first: u64) -> Result<Counter<'d>, ProbeError> {
        let Some(device) = device else { return Ok(Counter::Here(first)) };
        let memory = device.alloc(8)?;
        memory.write(&first.to_ne_bytes())?;
        Ok(Counter::There { device, kernel: device.kernel(COUNT, "count")?, memory })
    }

    fn add(&mut self) -> Result<(), ProbeError> {
        match self {
            Counter::Here(number) => *number += 1,
            Counter::There { device, kernel, memory } => {
                device.launch(*kernel, [1, 1], [1, 1], &[memory.address])?;
                device.synchronize()?;
            }
        }
        Ok(())
    }

    fn get(&self) -> Result<u64, ProbeError> {
        match self {
            Counter::Here(number) => Ok(*number),
            Counter::There { memory, .. } => {
                let mut bytes = [0; 8];
                memory.read(&mut bytes)?;
                Ok(u64::from_ne_bytes(bytes))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_counts_one() {
        let mut said = Vec::new();
        count(false, &b"\n\n"[..], &mut said).unwrap();
        let said = String::from_utf8(said).unwrap();
        let numbers: Vec<u64> = said.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(numbers, [numbers[0], numbers[0] + 1, numbers[0] + 2]);
    }
}
