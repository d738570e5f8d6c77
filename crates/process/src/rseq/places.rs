//! Where areas are looked for, and how a thread tells which one is its own.
//!
//! rseq(2) with another area than the registered one fails with EINVAL, with the registered one
//! with EBUSY (EPERM if the signature is another one), and registers nothing. So a thread tries
//! address after address, in code that lies ready in its process (`home.rs`), until one is answered
//! differently.

use super::{AREA, Registration, SIGNATURE};
use crate::home::{SEEKING_NOWHERE, Seek, Ways};
use crate::maps::Mapping;
use crate::{EngineError, Thread};
use libc::pid_t;
use std::ops::Range;

/// Offset from the thread pointer of glibc's area, from 2.35 until 2.40. From 2.41 on it lies
/// before the thread pointer, as that of programs that register one of their own (`__thread`).
const GLIBC: u64 = 0x9a0;
/// Bytes before the thread pointer where areas are looked for: static thread-local variables.
const BEFORE: u64 = 64 << 10;
/// Bytes behind it: the C library's description of the thread.
const BEHIND: u64 = 4 << 10;
/// Most bytes of the program's variables where areas are looked for.
const DATA: u64 = 1 << 20;
/// Most addresses that are tried with two stops each.
const ONE_BY_ONE: u64 = (BEFORE + BEHIND) / AREA;

/// An address that no area can have, so that none is registered there: the kernel's half.
const OUTSIDE: u64 = 0xffff_8000_0000_0000;

/// Where areas are looked for in one process.
#[derive(Debug)]
pub(crate) struct Places {
    pid: pid_t,
    /// Where one was found last, as an offset from the thread pointer.
    found: u64,
    data: Vec<Range<u64>>,
}

/// What rseq(2) has answered to a thread.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// To all addresses that it knows another one.
    Elsewhere,
    /// To this address something else, as an errno.
    At(u64, i32),
}

impl Places {
    /// Those in the process `pid`, which maps `mappings`.
    pub(crate) fn among(pid: pid_t, mappings: &[Mapping]) -> Places {
        Places { pid, found: GLIBC, data: data(mappings) }
    }

    /// Asks the stopped `thread`, which is at home afterwards.
    ///
    /// # Errors
    ///
    /// If it has registered an area that is not found, or one with another signature: by name.
    pub(crate) fn ask(
        &mut self,
        thread: &mut Thread,
        ways: &Ways,
    ) -> Result<Registration, EngineError> {
        let none = Registration::default();
        match seek(thread, ways, &one(OUTSIDE))? {
            Some(Answer::Elsewhere) => {}
            Some(Answer::At(_, libc::EFAULT | libc::ENOSYS)) => return Ok(none),
            Some(Answer::At(_, errno)) => return Err(self.strange(thread, errno)),
            None => return Err(self.nowhere(thread)),
        }
        let pointer = thread.home().fs_base;
        let near = [one(pointer.wrapping_add(self.found)), window(pointer)];
        for place in near.iter().chain(&self.data) {
            match seek(thread, ways, place)? {
                None | Some(Answer::Elsewhere) => {}
                Some(Answer::At(address, libc::EBUSY)) => {
                    self.found = address.wrapping_sub(pointer);
                    return Ok(Registration { address, length: AREA as u32, signature: SIGNATURE });
                }
                Some(Answer::At(_, errno)) => return Err(self.strange(thread, errno)),
            }
        }
        Err(self.nowhere(thread))
    }

    fn nowhere(&self, thread: &Thread) -> EngineError {
        let what = format!(
            "its thread {} has registered an area for restartable sequences (rseq) at a place that kedge does not know, \
             and Linux tells it only from 5.13 on: use such a kernel, or have the program not register one",
            thread.pid()
        );
        EngineError::unsupported(self.pid, what)
    }

    fn strange(&self, thread: &Thread, errno: i32) -> EngineError {
        let why = if errno == libc::EPERM {
            format!("with another signature than {SIGNATURE:#x}")
        } else {
            format!("and the kernel answers {}", std::io::Error::from_raw_os_error(errno))
        };
        let what = format!(
            "its thread {} has registered an area for restartable sequences (rseq) {why}; Linux tells what it is only \
             from 5.13 on: use such a kernel, or have the program not register one",
            thread.pid()
        );
        EngineError::unsupported(self.pid, what)
    }
}

fn one(address: u64) -> Range<u64> {
    address..address.wrapping_add(AREA)
}

/// The addresses of areas that belong to the thread with that thread pointer.
fn window(pointer: u64) -> Range<u64> {
    let from = pointer.saturating_sub(BEFORE).next_multiple_of(AREA);
    from..pointer.saturating_add(BEHIND)
}

/// What of the window is memory that areas can lie in: each a whole number of areas.
pub(super) fn around(mappings: &[Mapping], pointer: u64) -> Vec<Range<u64>> {
    let window = window(pointer);
    let own = mappings.iter().filter(|m| is_own(m));
    let within = own.map(|m| m.start.max(window.start)..m.end.min(window.end));
    within.filter(|part| part.start < part.end).collect()
}

/// The program's variables: those of its files, and what lies right behind them.
pub(super) fn data(mappings: &[Mapping]) -> Vec<Range<u64>> {
    let mut left = DATA;
    let mut data: Vec<Range<u64>> = Vec::new();
    let mut end = 0;
    for mapping in mappings {
        let follows = mapping.inode == 0 && mapping.start == end;
        let is_file = mapping.inode != 0;
        end = if is_file || follows { mapping.end } else { 0 };
        if is_own(mapping) && (is_file || follows || mapping.name == "[heap]") && left > 0 {
            let bytes = mapping.len().min(left);
            data.push(mapping.start..mapping.start + bytes);
            left -= bytes;
        }
    }
    data
}

fn is_own(mapping: &Mapping) -> bool {
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    !mapping.shared && mapping.protection & writable == writable
}

/// Has the thread try all addresses of `place`. `None` if they are too many for the way that it
/// has.
fn seek(
    thread: &mut Thread,
    ways: &Ways,
    place: &Range<u64>,
) -> Result<Option<Answer>, EngineError> {
    let wanted = Seek { from: place.start, to: place.end, step: AREA, signature: SIGNATURE };
    if let Some(row) = ways.lead_seeking(thread, &wanted)? {
        return Ok(Some(answer(thread.run(row, |_| Ok(()))?)));
    }
    if (place.end - place.start) / AREA > ONE_BY_ONE {
        return Ok(None);
    }
    seek_one_by_one(thread, ways, place).map(Some)
}

/// The same with two stops an address.
fn seek_one_by_one(
    thread: &mut Thread,
    ways: &Ways,
    place: &Range<u64>,
) -> Result<Answer, EngineError> {
    ways.lead(thread)?;
    let mut answer = Answer::Elsewhere;
    for address in place.clone().step_by(AREA as usize) {
        let arguments = [address, AREA, 0, u64::from(SIGNATURE)];
        let result = thread.call(ways.home(), libc::SYS_rseq, &arguments)?;
        if result != -i64::from(libc::EINVAL) {
            answer = Answer::At(address, -result as i32);
            break;
        }
    }
    thread.go_home()?;
    Ok(answer)
}

/// What the code has left: the address that was answered differently, plus that negative answer.
fn answer(left: i64) -> Answer {
    /// Answers that there are; addresses are multiples of more than the difference of any two.
    const ERRORS: [i32; 4] = [libc::EPERM, libc::EFAULT, libc::EBUSY, libc::ENOSYS];
    if left == SEEKING_NOWHERE {
        return Answer::Elsewhere;
    }
    let address = |errno: &i32| (left as u64).wrapping_add(*errno as u64);
    let errno = ERRORS.into_iter().find(|errno| address(errno) % AREA == 0);
    let errno = errno.unwrap_or(libc::EINVAL);
    Answer::At(address(&errno), errno)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_told_apart() {
        for (address, errno) in [
            (0x7f00_0000_0020u64, libc::EBUSY),
            (0x40, libc::EPERM),
            (OUTSIDE, libc::EFAULT),
            (OUTSIDE, libc::ENOSYS),
        ] {
            let left = address.wrapping_sub(errno as u64) as i64;
            assert_eq!(answer(left), Answer::At(address, errno));
        }
        assert_eq!(answer(SEEKING_NOWHERE), Answer::Elsewhere);
    }
}
