//! The way home of a thread whose tracer is killed while it makes calls for it.
//!
//! A thread that is away makes its calls in a piece of code that goes on, if nobody stops it after
//! the call, by bringing back its signal mask and registers and jumping to where it was: untraced it
//! finishes its call and is home. The extended registers need nothing, because calls leave them
//! alone. The code is written for one thread at a time, into the zeros at the vDSO's end: nothing
//! has to be mapped first, and only one thread of a process is away at a time. Clones that nobody
//! stops end there.

use crate::inject::entry_among;
use crate::sys::{self, Registers};
use crate::thread::begun_anew;
use crate::{EngineError, Thread, maps};
use libc::pid_t;

/// Offsets in the code: a call, one that makes a clone with the same memory, one of such a clone.
const HOME: u64 = 0;
const SPLIT: u64 = 152;
const OUT: u64 = 200;
/// Bytes of the code.
const LENGTH: usize = 216;
/// So many more zeros must lie before it: they are no section's then.
const MARGIN: usize = 64;
const PAGE: u64 = 4096;

/// Where a stopped process makes its calls.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ways {
    pid: pid_t,
    /// The program's own system call instruction.
    outside: u64,
    /// Where the code lies; `None` if the vDSO has no room for it. Then threads go home only as long
    /// as they are traced.
    base: Option<u64>,
}

impl Ways {
    /// Finds room in the process `pid`.
    pub(crate) fn of(pid: pid_t) -> Result<Ways, EngineError> {
        let mappings = maps::of(pid)?;
        let outside = entry_among(pid, &mappings)?;
        let vdso = mappings.iter().find(|mapping| mapping.name == "[vdso]");
        let end = vdso.ok_or(EngineError::NoEntry { pid })?.end;
        let mut page = [0; PAGE as usize];
        let count = sys::read(pid, end - PAGE, &mut page)?;
        let room = count == page.len() && is_room(&page);
        Ok(Ways { pid, outside, base: room.then_some(end - LENGTH as u64) })
    }

    /// Makes it the way of `thread`. Whoever had it before must be home.
    pub(crate) fn lead(&self, thread: &Thread) -> Result<(), EngineError> {
        let Some(base) = self.base else { return Ok(()) };
        sys::poke(thread.pid(), base, &code(&begun_anew(thread), thread.mask()))
    }

    /// Brings those home who are away, and clears the room.
    pub(crate) fn close<'a>(
        &self,
        threads: impl Iterator<Item = &'a mut Thread>,
    ) -> Result<(), EngineError> {
        for thread in threads {
            thread.go_home()?;
        }
        let Some(base) = self.base else { return Ok(()) };
        // The first word last: by it the rest is known as left over.
        sys::poke(self.pid, base + 8, &[0; LENGTH - 8])?;
        sys::poke(self.pid, base, &[0; 8])
    }

    /// The program's own instruction for a call.
    pub(crate) fn outside(&self) -> u64 {
        self.outside
    }

    /// The instruction for a call.
    pub(crate) fn home(&self) -> u64 {
        self.at(HOME)
    }

    /// The one for a call that makes a clone: that ends, if nobody stops it, and its maker goes home.
    pub(crate) fn split(&self) -> u64 {
        self.at(SPLIT)
    }

    /// The one for a clone's calls.
    pub(crate) fn out(&self) -> u64 {
        self.at(OUT)
    }

    fn at(&self, offset: u64) -> u64 {
        self.base.map_or(self.outside, |base| base + offset)
    }
}

/// Makes the vDSO's code what it was before anybody wrote a way home into its end.
pub(crate) fn clear_leftovers(vdso: &mut [u8]) {
    let Some(page) = vdso.len().checked_sub(PAGE as usize) else { return };
    if is_room(&vdso[page..]) {
        let room = vdso.len() - LENGTH;
        vdso[room..].fill(0);
    }
}

/// Whether nobody needs the end of `page`: it has zeros, or what a tracer that was killed has left.
fn is_room(page: &[u8]) -> bool {
    let (before, room) = page.split_at(page.len() - LENGTH);
    let ours = code(&sys::from_words([0; sys::REGISTERS]), 0);
    let known = |from: usize, to: usize| {
        let pairs = room[from..to].chunks(8).zip(ours[from..to].chunks(8));
        pairs.into_iter().all(|(there, ours)| there == ours || there == [0; 8])
    };
    let zeros = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
    zeros(&before[before.len() - MARGIN..])
        && known(SPLIT as usize, LENGTH)
        && (zeros(room) || room[..8] == ours[..8])
}

/// The code for a thread with these registers and this mask at home.
fn code(home: &Registers, mask: u64) -> [u8; LENGTH] {
    const CARRY_TO_SIGN: u64 = 0xd5;
    const DIRECTION: u64 = 1 << 10;
    const OVERFLOW: u64 = 1 << 11;
    let mut code = Vec::with_capacity(LENGTH);
    code.extend([0x0f, 0x05]); // syscall
    // rt_sigprocmask(SIG_SETMASK, &mask, NULL, 8). From then on handlers run, as at home: the stack
    // pointer is that of home.
    code.extend([0xb8, 14, 0, 0, 0, 0xbf, 2, 0, 0, 0]); // mov eax, 14; mov edi, 2
    code.extend([0x48, 0x8d, 0x35, 122, 0, 0, 0]); // lea rsi, [mask]
    code.extend([0x31, 0xd2, 0x41, 0xba, 8, 0, 0, 0]); // xor edx, edx; mov r10d, 8
    code.extend([0x0f, 0x05]); // syscall
    code.push(if home.eflags & DIRECTION == 0 { 0xfc } else { 0xfd }); // cld or std
    let overflow = u8::from(home.eflags & OVERFLOW != 0);
    code.extend([0x66, 0xb8, overflow, (home.eflags & CARRY_TO_SIGN) as u8]); // mov ax, flags
    code.extend([0x04, 0x7f, 0x9e]); // add al, 127, which overflows if al is 1; sahf
    let low = [(0xb8, home.rax), (0xb9, home.rcx), (0xba, home.rdx), (0xbe, home.rsi)];
    let low = low.into_iter().chain([(0xbf, home.rdi)]).map(|(load, value)| (0x48, load, value));
    let high = [(0xb8, home.r8), (0xb9, home.r9), (0xba, home.r10), (0xbb, home.r11)];
    let high = high.into_iter().map(|(load, value)| (0x49, load, value));
    for (prefix, load, value) in low.chain(high) {
        code.extend([prefix, load]); // mov register, value
        code.extend(value.to_le_bytes());
    }
    code.extend([0xff, 0x25, 0, 0, 0, 0]); // jmp [what follows]
    code.extend(home.rip.to_le_bytes());
    code.extend(mask.to_le_bytes());
    code.resize(SPLIT as usize, 0x90);
    code.extend(SPLITTING);
    code.extend((2 - (SPLIT + SPLITTING.len() as u64 + 4) as i32).to_le_bytes());
    code.extend(END);
    code.resize(OUT as usize, 0x90);
    code.extend([0x0f, 0x05]); // syscall
    code.extend(END);
    code.resize(LENGTH, 0x90);
    let mut whole = [0; LENGTH];
    whole.copy_from_slice(&code);
    whole
}

/// A call whose clone ends, by what lies 4 bytes behind, and whose maker collects it by
/// wait4(clone, NULL, __WALL, NULL) and goes home.
#[rustfmt::skip]
const SPLITTING: [u8; 32] = [
    0x0f, 0x05, 0x85, 0xc0, // syscall; test eax, eax
    0x78, 0x19, // js to the last jump
    0x74, 0x1c, // jz behind it
    0x89, 0xc7, 0x31, 0xf6, // mov edi, eax; xor esi, esi
    0xba, 0, 0, 0, 0x40, 0x45, 0x31, 0xd2, // mov edx, __WALL; xor r10d, r10d
    0xb8, 61, 0, 0, 0, 0x0f, 0x05, // mov eax, 61; syscall
    0x90, 0x90, 0x90, 0x90, // nop
    0xe9, // jmp to what follows the first call
];

/// mov eax, 231; xor edi, edi; syscall: exit_group(0).
const END: [u8; 9] = [0xb8, 231, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_finds_its_data() {
        let words = std::array::from_fn(|index| 0x1111_1111_1111_1111 * (index as u64 % 15));
        let home = sys::from_words(words);
        let mask = 0x0123_4567_89ab_cdef;
        let code = code(&home, mask);
        // The displacement counts from the instruction's end.
        let at = 19 + code[15] as usize;
        assert_eq!(code[at..at + 8], mask.to_le_bytes());
        assert_eq!(code[at - 8..at], home.rip.to_le_bytes());
        for call in [HOME, SPLIT, OUT] {
            assert_eq!(code[call as usize..][..2], [0x0f, 0x05]);
        }
    }

    #[test]
    fn what_a_killed_tracer_has_left_is_no_other_vdso() {
        let clean = [vec![7; PAGE as usize], vec![0; PAGE as usize]].concat();
        let mut left = clean.clone();
        let at = left.len() - LENGTH;
        left[at..].copy_from_slice(&code(&sys::from_words([9; sys::REGISTERS]), 5));
        clear_leftovers(&mut left);
        assert_eq!(left, clean);
        // Another kernel's code stays what it is.
        let mut other = clean.clone();
        other[at + 3] = 1;
        let same = other.clone();
        clear_leftovers(&mut other);
        assert_eq!(other, same);
    }
}
