//! One kernel's vDSO in the place of another's. A program keeps the addresses of its functions, so
//! the old code stays where it was, and each function's entry jumps to the one of the same name in
//! the code of the kernel that runs.
//!
//! A thread that was inside of a function goes on in the old code, as it was. Its data pages are
//! zeros then, which the code of all kernels takes for "no clock that can be read here": the
//! function makes the system call instead.

use crate::EngineError;
use crate::home;
use crate::inject::read_exact;
use crate::maps::Mapping;
use libc::pid_t;
use std::collections::BTreeMap;

/// Longest vDSO that is kept, in bytes; the longest there is has four pages.
pub(crate) const MAX_LEN: usize = 64 << 10;
/// The name of its mapping.
pub(crate) const NAME: &str = "[vdso]";
/// The instruction of a system call.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Bytes of `jmp rel32`, at an entry.
const JUMP: usize = 5;
/// Bytes of `jmp [what follows]` and an address, among the zeros at the code's end.
const FAR_JUMP: usize = 14;
/// So many more zeros must lie before these: they are no section's then.
const MARGIN: usize = 16;

/// The vDSO of a stopped process, read once.
#[derive(Debug)]
pub(crate) struct Vdso {
    pid: pid_t,
    start: u64,
    code: Vec<u8>,
}

impl Vdso {
    /// Reads the one among the mappings of `pid`.
    pub(crate) fn among(pid: pid_t, mappings: &[Mapping]) -> Result<Vdso, EngineError> {
        let vdso = mappings.iter().find(|mapping| mapping.name == NAME);
        Vdso::of(pid, vdso.ok_or(EngineError::NoEntry { pid })?)
    }

    /// Reads the one that `mapping` of `pid` is.
    pub(crate) fn of(pid: pid_t, mapping: &Mapping) -> Result<Vdso, EngineError> {
        let mut code = vec![0; (mapping.len() as usize).min(MAX_LEN)];
        read_exact(pid, mapping.start, &mut code)?;
        Ok(Vdso { pid, start: mapping.start, code })
    }

    /// Returns the address of a system call instruction in it.
    pub(crate) fn entry(&self) -> Result<u64, EngineError> {
        let at = self.code.windows(SYSCALL.len()).position(|pair| pair == SYSCALL);
        at.map(|at| self.start + at as u64).ok_or(EngineError::NoEntry { pid: self.pid })
    }

    /// Returns its end and the bytes before that.
    pub(crate) fn end(&self) -> (u64, &[u8]) {
        (self.start + self.code.len() as u64, &self.code)
    }

    /// Returns its code without what a killed tracer may have left there: that is no difference
    /// between kernels.
    pub(crate) fn clean(&self) -> Vec<u8> {
        let mut code = self.code.clone();
        home::clear_leftovers(&mut code);
        code
    }
}

/// The old code with its entries redirected.
#[derive(Debug)]
pub(crate) struct Redirected(pub(crate) Vec<u8>);

impl Redirected {
    /// `old` lay at `at`; the running kernel's `new` lies at `to`. An error says what is wrong with
    /// one.
    pub(crate) fn new(old: &[u8], at: u64, new: &[u8], to: u64) -> Result<Self, &'static str> {
        let here = functions(new).ok_or("this kernel's has no table of functions")?;
        let there = functions(old).ok_or("the old one has no table of functions")?;
        // What this kernel does not have goes on in the old code, which makes the system call.
        let both = there.iter().filter_map(|(name, entry)| Some((*entry, *here.get(name)?)));
        let targets: BTreeMap<usize, usize> = both.collect();
        if targets.is_empty() {
            return Err("it has no function of the old one's");
        }
        let entries: Vec<usize> = targets.keys().copied().collect();
        let mut code = old.to_vec();
        let zeros = code.iter().rev().take_while(|byte| **byte == 0).count();
        let end = code.len() - zeros;
        let apart = entries.windows(2).all(|pair| pair[0] + JUMP <= pair[1]);
        if !apart || entries.last().is_some_and(|last| last + JUMP > end) {
            return Err("functions of the old one are too short");
        }
        if zeros < MARGIN + FAR_JUMP * entries.len() || at.checked_add(code.len() as u64).is_none()
        {
            return Err("the old one has no room at its end");
        }
        for (index, (entry, target)) in targets.into_iter().enumerate() {
            let far = code.len() - FAR_JUMP * (index + 1);
            let address = to.wrapping_add(target as u64);
            code[far..far + 6].copy_from_slice(&[0xff, 0x25, 0, 0, 0, 0]);
            code[far + 6..far + FAR_JUMP].copy_from_slice(&address.to_le_bytes());
            let distance = far as i32 - (entry + JUMP) as i32;
            code[entry] = 0xe9;
            code[entry + 1..entry + JUMP].copy_from_slice(&distance.to_le_bytes());
        }
        Ok(Redirected(code))
    }
}

/// The functions that an image of a vDSO exports, by name, as offsets; `None` if it is none or has
/// no table of them.
fn functions(code: &[u8]) -> Option<BTreeMap<&[u8], usize>> {
    const MAX_SECTIONS: usize = 64;
    const SYMBOLS: u32 = 11;
    const SYMBOL: usize = 24;
    const FUNCTION: u8 = 2;
    // An ELF file of 64 bits, whose sections' headers have the usual length.
    if code.len() > MAX_LEN || !code.starts_with(b"\x7fELF\x02\x01") || half(code, 0x3a)? != 64 {
        return None;
    }
    let (headers, count) = (word(code, 0x28)?, usize::from(half(code, 0x3c)?));
    let section = |index: usize| code.get(headers.checked_add(index * 64)?..)?.get(..64);
    let bytes = |header: &[u8]| {
        let from = word(header, 0x18)?;
        code.get(from..from.checked_add(word(header, 0x20)?)?)
    };
    let mut sections = (0..count.min(MAX_SECTIONS)).filter_map(section);
    let table = sections.find(|header| number(header, 4) == Some(SYMBOLS))?;
    let names = bytes(section(number(table, 0x28)? as usize)?)?;
    let symbols = bytes(table)?.chunks_exact(SYMBOL);
    let function = |symbol: &[u8]| {
        let name = names.get(number(symbol, 0)? as usize..)?;
        let name = &name[..name.iter().position(|byte| *byte == 0)?];
        let entry = word(symbol, 8)?;
        let there = symbol[4] & 15 == FUNCTION && half(symbol, 6)? != 0 && entry < code.len();
        there.then_some((name, entry))
    };
    Some(symbols.filter_map(function).collect())
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn word(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{inject, maps};

    fn own() -> Vec<u8> {
        let pid = std::process::id() as i32;
        let mappings = maps::of(pid).unwrap();
        let vdso = mappings.iter().find(|mapping| mapping.name == "[vdso]").unwrap();
        let mut code = vec![0; vdso.len() as usize];
        inject::read_exact(pid, vdso.start, &mut code).unwrap();
        code
    }

    #[test]
    fn entries_lead_to_the_functions_of_the_same_name() {
        let old = own();
        let functions = functions(&old).unwrap();
        let time = functions[&b"__vdso_clock_gettime"[..]];
        let Redirected(code) = &Redirected::new(&old, 0x7000, &old, 0x1234_5678_9000).unwrap();
        assert_eq!(code[time], 0xe9);
        let far =
            (time + JUMP).wrapping_add_signed(number(code, time + 1).unwrap() as i32 as isize);
        assert_eq!(code[far..far + 6], [0xff, 0x25, 0, 0, 0, 0]);
        assert_eq!(word(code, far + 6), Some(0x1234_5678_9000 + time));
        let changed = old.iter().zip(code).filter(|(old, new)| old != new).count();
        assert!(changed <= functions.len() * (JUMP + FAR_JUMP), "{changed}");
    }

    #[test]
    fn what_is_no_vdso_is_refused() {
        let good = own();
        let new = |old: &[u8]| Redirected::new(old, 0x7000, &good, 0x9000);
        assert!(new(&[]).is_err() && new(&[0; 8192]).is_err() && new(&good[..4096]).is_err());
        let mut full = good.clone();
        let end = full.len() - 100;
        full[end..].fill(0x90);
        assert!(new(&full).unwrap_err().contains("no room"));
        // Whatever byte of the headers is wrong, nothing is read outside of it.
        for at in (0..64).chain(good.len() - 4096..good.len()) {
            let mut bad = good.clone();
            bad[at] ^= 0xff;
            let _ = new(&bad);
        }
    }
}
