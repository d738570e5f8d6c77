//! The way home of a thread whose tracer is killed while it makes calls for it.
//!
//! A thread that is away makes its calls in a piece of code that goes on, if nobody stops it after
//! the call, by bringing back its signal mask and registers and jumping to where it was: untraced
//! it finishes its call and is home. The extended registers need nothing, because calls leave them
//! alone. The code is written for one thread, into the zeros at the vDSO's end: nothing has to be
//! mapped first. Clones that nobody stops end there.
//!
//! Before it lies, where there is room, code that makes several calls in a row, without a stop
//! after each: it ends with a signal to itself that does nothing, and that its tracer is told of.
//! Both together are a slot. As many threads can be away at once as there is room for slots, one
//! before the other.

use crate::sys::{self, Registers};
use crate::thread::begun_anew;
use crate::vdso::Vdso;
use crate::{EngineError, Thread, maps};
use libc::pid_t;
use std::cell::Cell;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Offsets in the code: a call, one that makes a clone with the same memory, one of such a clone.
const HOME: u64 = 0;
const SPLIT: u64 = 152;
const OUT: u64 = 200;
/// Offset of what follows a call: the way home.
const AFTER_CALL: usize = 2;
/// Bytes of the code.
const LENGTH: usize = 216;
/// So many more zeros must lie before it: they are no section's then.
const MARGIN: usize = 16;
/// Bytes of the code that makes calls in a row, which lies before the other.
const ROW: usize = 272;
/// Its beginning: xor r9d, r9d; nop. Of the registers only those are used that the way home brings
/// back; calls leave r9 alone.
const ROW_START: [u8; 8] = [0x45, 0x31, 0xc9, 0x90, 0x90, 0x90, 0x90, 0x90];
/// Bytes of a slot: the code that makes calls in a row, and the way home behind it.
const SLOT: usize = ROW + LENGTH;
/// The parts of a slot in the order in which they are written and cleared where that takes a call a
/// word: if the tracer is killed meanwhile, the first word of the way, and that of the calls before
/// it, tell that the rest was left over.
const WRITING: [Range<usize>; 2] = [ROW..SLOT, 0..ROW];
const CLEARING: [Range<usize>; 4] = [8..ROW, 0..8, ROW + 8..SLOT, ROW..ROW + 8];
/// Most slots that are used.
const MAX_SLOTS: usize = 5;
/// Most questions that fit into that code.
pub(crate) const MAX_QUESTIONS: usize = 8;
const PAGE: u64 = 4096;

/// A system call that takes a number and an address where its answer goes, and returns 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Question {
    pub(crate) call: i64,
    pub(crate) number: i32,
    pub(crate) answer: u64,
}

/// Addresses, from one up to another by steps, that a thread asks rseq(2) for until one is answered
/// with another error than EINVAL. Each is that of an area as long as the step, with that
/// signature.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seek {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) step: u64,
    pub(crate) signature: u32,
}

/// What the code leaves if all addresses were answered with EINVAL: no address of a [`Seek`] plus
/// an error, because those are multiples of the step.
pub(crate) const SEEKING_NOWHERE: i64 = 0;

/// Signals that do nothing by default: one that the program neither catches nor blocks can be sent
/// to a thread, and nobody sees it.
const QUIET: [i32; 3] = [libc::SIGURG, libc::SIGWINCH, libc::SIGCHLD];

/// Returns a signal that nobody would notice, of those of [`QUIET`]: `caught` are those that the
/// program catches, `blocked` those that some thread of it blocks, a bit each.
pub(crate) fn quiet(caught: u64, blocked: u64) -> Option<i32> {
    QUIET.into_iter().find(|signal| (caught | blocked) & (1 << (signal - 1)) == 0)
}

/// Calls in a row that lie ready in a process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Row {
    /// The code's beginning.
    pub(crate) entry: u64,
    /// What follows the signal that it sends to itself.
    pub(crate) end: u64,
    /// That signal.
    pub(crate) quiet: i32,
}

/// Where a stopped process makes its calls.
#[derive(Debug)]
pub(crate) struct Ways {
    pid: pid_t,
    memory: Option<File>,
    /// The program's own system call instruction.
    outside: u64,
    /// Where the code lies; `None` if the vDSO has no room for it. Then threads go home only as
    /// long as they are traced.
    base: Option<u64>,
    /// How many slots there is room for, of which the last one ends with that code.
    slots: usize,
    /// How many of them were written to since they were cleared.
    used: Cell<usize>,
    /// A signal that nobody would notice.
    quiet: Option<i32>,
}

impl Ways {
    /// Finds room in the process `pid`.
    pub(crate) fn of(pid: pid_t) -> Result<Ways, EngineError> {
        Ways::within(&Vdso::among(pid, &maps::of(pid)?)?, pid)
    }

    /// Finds room in the vDSO of the process `pid`.
    pub(crate) fn within(vdso: &Vdso, pid: pid_t) -> Result<Ways, EngineError> {
        let (end, code) = vdso.end();
        let page = code.len().checked_sub(PAGE as usize).map(|page| &code[page..]);
        let room = page.and_then(room_in);
        let slots = room.map_or(0, |room| room / SLOT);
        let base = room.map(|_| end - LENGTH as u64);
        let memory = base.and_then(|_| sys::memory(pid));
        let (used, quiet) = (Cell::new(0), None);
        Ok(Ways { pid, memory, outside: vdso.entry()?, base, slots, used, quiet })
    }

    /// The same where `quiet` is a signal that nobody would notice: the program neither catches nor
    /// blocks it, and it does nothing by default. Without one there are no calls in a row.
    pub(crate) fn with_quiet(self, quiet: Option<i32>) -> Ways {
        Ways { quiet, ..self }
    }

    /// Makes it the way of `thread`. Whoever had it before must be home.
    pub(crate) fn lead(&self, thread: &Thread) -> Result<(), EngineError> {
        let Some(base) = self.base else { return Ok(()) };
        self.poke(base, &code(&begun_anew(thread), thread.mask()))
    }

    /// The same for a thread that is to ask `questions`, [`MAX_QUESTIONS`] at most; `None` if it
    /// cannot make calls in a row.
    pub(crate) fn lead_asking(
        &self,
        thread: &Thread,
        questions: &[Question],
    ) -> Result<Option<Row>, EngineError> {
        let few = questions.len() <= MAX_QUESTIONS;
        self.lead_row(thread, |quiet| few.then(|| asking(questions, quiet)))
    }

    /// Returns how many threads can ask at once; 0 if none can make calls in a row.
    pub(crate) fn at_once(&self) -> usize {
        self.quiet.map_or(0, |_| self.slots)
    }

    /// The same in a slot of that number, below [`Ways::at_once`]: others may be away in the other
    /// slots. Whoever had this one before must be home.
    pub(crate) fn lead_asking_in(
        &self,
        slot: usize,
        thread: &Thread,
        questions: &[Question],
    ) -> Result<Option<Row>, EngineError> {
        let few = questions.len() <= MAX_QUESTIONS && slot < self.slots;
        self.lead_row_in(slot, thread, |quiet| few.then(|| asking(questions, quiet)))
    }

    /// The same for a thread that is to seek its registration: it leaves the address that was
    /// answered differently, plus that answer, or [`SEEKING_NOWHERE`].
    pub(crate) fn lead_seeking(
        &self,
        thread: &Thread,
        seek: &Seek,
    ) -> Result<Option<Row>, EngineError> {
        self.lead_row(thread, |quiet| Some(seeking(seek, quiet)))
    }

    /// The same for a thread that is to make a process that shares its memory, has no descriptors,
    /// makes a clone and ends; the thread's process is no subreaper meanwhile.
    pub(crate) fn lead_splitting(
        &self,
        thread: &Thread,
        subreaper: bool,
    ) -> Result<Option<Row>, EngineError> {
        self.lead_row(thread, |quiet| Some(splitting(quiet, subreaper)))
    }

    /// The same for a thread whose process is to be no subreaper until it makes the second row of
    /// calls.
    pub(crate) fn lead_resigning(
        &self,
        thread: &Thread,
    ) -> Result<Option<(Row, Row)>, EngineError> {
        let mut first = 0;
        let row = self.lead_row(thread, |quiet| {
            let (code, pause, end) = resigning(quiet);
            first = pause as u64;
            Some((code, end))
        })?;
        Ok(row.map(|row| {
            let pause = row.entry + first;
            (Row { end: pause, ..row }, Row { entry: pause, ..row })
        }))
    }

    fn lead_row(
        &self,
        thread: &Thread,
        row: impl FnOnce(i32) -> Option<([u8; ROW], usize)>,
    ) -> Result<Option<Row>, EngineError> {
        self.lead_row_in(0, thread, row)
    }

    /// In a slot: the first one is the last in the vDSO, the next one lies before it.
    fn lead_row_in(
        &self,
        slot: usize,
        thread: &Thread,
        row: impl FnOnce(i32) -> Option<([u8; ROW], usize)>,
    ) -> Result<Option<Row>, EngineError> {
        let (Some(base), Some(quiet)) = (self.base.filter(|_| self.slots > 0), self.quiet) else {
            return Ok(None);
        };
        let Some((row, end)) = row(quiet) else { return Ok(None) };
        let entry = base - (slot * SLOT + ROW) as u64;
        self.used.set(self.used.get().max(slot + 1));
        let way = code(&begun_anew(thread), thread.mask());
        self.poke_slot(entry, &[&row[..], &way].concat(), &WRITING)?;
        Ok(Some(Row { entry, end: entry + end as u64, quiet }))
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
        // From the first slot on, so that nothing is left before one that is clear.
        for slot in (1..self.used.take()).rev() {
            self.clear(base - (slot * SLOT) as u64, true)?;
        }
        self.clear(base, self.slots > 0)
    }

    /// Clears a way home, and the calls in a row before it, if there is room for some.
    fn clear(&self, way: u64, row: bool) -> Result<(), EngineError> {
        if row {
            return self.poke_slot(way - ROW as u64, &[0; SLOT], &CLEARING);
        }
        self.poke(way + 8, &[0; LENGTH - 8])?;
        self.poke(way, &[0; 8])
    }

    /// Writes all of a slot: with one call, or part after part.
    fn poke_slot(
        &self,
        entry: u64,
        slot: &[u8],
        parts: &[Range<usize>],
    ) -> Result<(), EngineError> {
        let memory = self.memory.as_ref();
        if memory.is_some_and(|memory| memory.write_all_at(slot, entry).is_ok()) {
            return Ok(());
        }
        let mut parts = parts.iter().cloned();
        parts.try_for_each(|part| self.poke(entry + part.start as u64, &slot[part]))
    }

    fn poke(&self, address: u64, bytes: &[u8]) -> Result<(), EngineError> {
        sys::poke(self.pid, self.memory.as_ref(), address, bytes)
    }

    /// The program's own instruction for a call.
    pub(crate) fn outside(&self) -> u64 {
        self.outside
    }

    /// The instruction for a call.
    pub(crate) fn home(&self) -> u64 {
        self.at(HOME)
    }

    /// The one for a call that makes a clone: that ends, if nobody stops it, and its maker goes
    /// home.
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
    if let Some(room) = room_in(&vdso[page..]) {
        let room = vdso.len() - room;
        vdso[room..].fill(0);
    }
}

/// Bytes at the end of `page` that nobody needs: there are zeros, or what a tracer that was killed
/// has left. `None` if they are too few.
fn room_in(page: &[u8]) -> Option<usize> {
    let mut slots = 0;
    while slots < MAX_SLOTS && ends_with_slot(&page[..page.len() - slots * SLOT]) {
        slots += 1;
    }
    // What lies before is code, if it is no margin.
    let margin = |room: usize| page[..page.len() - room].iter().rev().take(MARGIN).all(is_zero);
    let slots = (1..=slots).rev().map(|slots| slots * SLOT).find(|room| margin(*room));
    slots.or_else(|| (ends_with_way(page).is_some() && margin(LENGTH)).then_some(LENGTH))
}

fn is_zero(byte: &u8) -> bool {
    *byte == 0
}

/// Whether zeros lie at the end of `page`, or what was left of a slot.
fn ends_with_slot(page: &[u8]) -> bool {
    let Some(way_is_left) = ends_with_way(page) else { return false };
    let Some(before) = page.len().checked_sub(SLOT + MARGIN) else { return false };
    let row = &page[before + MARGIN..page.len() - LENGTH];
    row.iter().all(is_zero) || way_is_left && row[..8] == ROW_START
}

/// Whether a way home was left at the end of `page`; `None` if neither that nor zeros lie there.
fn ends_with_way(page: &[u8]) -> Option<bool> {
    let way = page.last_chunk::<LENGTH>()?;
    let ours = code(&sys::from_words([0; sys::REGISTERS]), 0);
    let known = |from: usize, to: usize| {
        let pairs = way[from..to].chunks(8).zip(ours[from..to].chunks(8));
        pairs.into_iter().all(|(there, ours)| there == ours || there == [0; 8])
    };
    let is_left = way[..8] == ours[..8];
    let usable = known(SPLIT as usize, LENGTH) && (is_left || way.iter().all(is_zero));
    usable.then_some(is_left)
}

/// Code that asks, with 0 in r9 if all were answered, and the offset of what follows its signal.
fn asking(questions: &[Question], quiet: i32) -> ([u8; ROW], usize) {
    let mut code = ROW_START.to_vec();
    for question in questions {
        code.extend(load(EDI, question.number));
        code.extend([0x48, 0xbe]); // mov rsi, answer
        code.extend(question.answer.to_le_bytes());
        code.extend([0x31, 0xd2]); // xor edx, edx
        code.extend(call(question.call));
        code.extend([0x49, 0x09, 0xc1]); // or r9, rax
    }
    let end = signal_itself(&mut code, quiet);
    (whole(code), end)
}

/// Code that asks rseq(2) for one address after the other, with what it has found in r9; the offset
/// is that of what follows the signal.
fn seeking(seek: &Seek, quiet: i32) -> ([u8; ROW], usize) {
    let mut code = ROW_START.to_vec();
    code.extend(load(ESI, seek.step as i32));
    code.extend([0x31, 0xd2]); // xor edx, edx
    code.extend([0x41, 0xba]); // mov r10d, signature
    code.extend(seek.signature.to_le_bytes());
    code.extend([0x48, 0xbf]); // mov rdi, from
    code.extend(seek.from.to_le_bytes());
    code.extend([0x49, 0xb8]); // mov r8, to
    code.extend(seek.to.to_le_bytes());
    let next = code.len();
    code.extend(call(libc::SYS_rseq));
    code.extend([0x83, 0xf8, -libc::EINVAL as u8]); // cmp eax, -EINVAL
    code.extend([0x75, 10]); // jne to what is found
    code.extend([0x48, 0x01, 0xf7]); // add rdi, rsi
    code.extend([0x4c, 0x39, 0xc7]); // cmp rdi, r8
    let behind = code.len() + 2;
    code.extend([0x72, (next as i32 - behind as i32) as u8]); // jb to the next
    code.extend([0xeb, 4]); // jmp to the signal
    code.extend([0x4c, 0x8d, 0x0c, 0x07]); // lea r9, [rdi + rax]
    let end = signal_itself(&mut code, quiet);
    (whole(code), end)
}

/// Code that makes a process with the same memory, which closes its descriptors, leaves its process
/// group, makes a clone and ends; the first collects it by wait4(). What the clone is to do is end,
/// too, if nobody stops it. In r9 is 0, or why there is no such process; the offset is that of what
/// follows the signal. A subreaper is none until the first has been collected: who is one gets the
/// clone for a child.
fn splitting(quiet: i32, subreaper: bool) -> ([u8; ROW], usize) {
    // xor esi, esi; xor edx, edx; xor r10d, r10d; xor r8d, r8d
    const NO_MORE_ARGUMENTS: [u8; 10] =
        [0x31, 0xf6, 0x31, 0xd2, 0x45, 0x31, 0xd2, 0x45, 0x31, 0xc0];
    let mut code = ROW_START.to_vec();
    if subreaper {
        code.extend(be_subreaper(false));
    }
    code.extend(load(EDI, libc::CLONE_VM));
    code.extend(NO_MORE_ARGUMENTS);
    code.extend(call(libc::SYS_clone));
    code.extend([0x49, 0x89, 0xc1]); // mov r9, rax
    code.extend([0x85, 0xc0, 0x0f, 0x84, 0, 0, 0, 0]); // test eax, eax; jz to what the other does
    let other = code.len();
    code.extend([0x78, 0]); // js to the signal
    let failed = code.len();
    code.extend([0x89, 0xc7]); // mov edi, eax
    code.extend(NO_MORE_ARGUMENTS);
    code.extend(load(EDX, libc::__WALL));
    code.extend(call(libc::SYS_wait4));
    code.extend([0x45, 0x31, 0xc9]); // xor r9d, r9d
    code[failed - 1] = (code.len() - failed) as u8;
    if subreaper {
        code.extend(be_subreaper(true));
    }
    let end = signal_itself(&mut code, quiet);
    let distance = (code.len() - other) as i32;
    code[other - 4..other].copy_from_slice(&distance.to_le_bytes());
    code.extend(load(EDI, 0));
    code.extend(NO_MORE_ARGUMENTS);
    code.extend([0x83, 0xce, 0xff]); // or esi, -1
    code.extend(call(libc::SYS_close_range));
    code.extend(load(EDI, 0));
    code.extend(NO_MORE_ARGUMENTS);
    code.extend(call(libc::SYS_setpgid));
    code.extend(load(EDI, 0));
    code.extend(call(libc::SYS_clone));
    code.extend(END);
    (whole(code), end)
}

/// Code that has its process be no subreaper, sends the signal, and makes it one again; the offsets
/// of what follows the signal, and of what follows the second one.
fn resigning(quiet: i32) -> ([u8; ROW], usize, usize) {
    let mut code = ROW_START.to_vec();
    code.extend(be_subreaper(false));
    signal(&mut code, quiet);
    let pause = code.len();
    code.extend(be_subreaper(true));
    let end = signal_itself(&mut code, quiet);
    (whole(code), pause, end)
}

/// prctl(PR_SET_CHILD_SUBREAPER, on)
fn be_subreaper(on: bool) -> [u8; 17] {
    let mut code = [0; 17];
    code[..5].copy_from_slice(&load(EDI, libc::PR_SET_CHILD_SUBREAPER));
    code[5..10].copy_from_slice(&load(ESI, i32::from(on)));
    code[10..].copy_from_slice(&call(libc::SYS_prctl));
    code
}

const EDI: u8 = 0xbf;
const ESI: u8 = 0xbe;
const EDX: u8 = 0xba;
const EAX: u8 = 0xb8;

/// mov register, value
fn load(register: u8, value: i32) -> [u8; 5] {
    let value = value.to_le_bytes();
    [register, value[0], value[1], value[2], value[3]]
}

/// mov eax, number; syscall
fn call(number: i64) -> [u8; 7] {
    let [load, a, b, c, d] = load(EAX, number as i32);
    [load, a, b, c, d, 0x0f, 0x05]
}

/// Adds tgkill(getpid(), gettid(), quiet), and the way home after it; the offset of that.
fn signal_itself(code: &mut Vec<u8>, quiet: i32) -> usize {
    signal(code, quiet);
    let end = code.len();
    // Untraced, it goes on to where the way home brings its mask back.
    code.extend(load(0xe9, (ROW + AFTER_CALL - (end + 5)) as i32)); // jmp
    end
}

/// Adds tgkill(getpid(), gettid(), quiet).
fn signal(code: &mut Vec<u8>, quiet: i32) {
    code.extend(call(libc::SYS_getpid));
    code.extend([0x89, 0xc7]); // mov edi, eax
    code.extend(call(libc::SYS_gettid));
    code.extend([0x89, 0xc6]); // mov esi, eax
    code.extend(load(EDX, quiet));
    code.extend(call(libc::SYS_tgkill));
}

fn whole(code: Vec<u8>) -> [u8; ROW] {
    let mut whole = [0x90; ROW];
    whole[..code.len()].copy_from_slice(&code);
    whole
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
    fn questions_lead_home() {
        let question = Question { call: libc::SYS_prctl, number: 2, answer: 1 };
        for count in 0..=MAX_QUESTIONS {
            let (code, end) = asking(&vec![question; count], libc::SIGURG);
            let distance = i32::from_le_bytes(*code[end + 1..].first_chunk().unwrap());
            assert_eq!(code[end], 0xe9);
            assert_eq!(end + 5 + distance as usize, ROW + AFTER_CALL);
        }
        let seek = Seek { from: 0, to: 64, step: 32, signature: 1 };
        let rows = [
            splitting(libc::SIGURG, false),
            splitting(libc::SIGURG, true),
            seeking(&seek, libc::SIGURG),
        ];
        for (code, end) in rows {
            assert_eq!((code[end], code[..8].to_vec()), (0xe9, ROW_START.to_vec()));
        }
        let (code, pause, end) = resigning(libc::SIGURG);
        assert_eq!((&code[pause..pause + 17], code[end]), (&be_subreaper(true)[..], 0xe9));
    }

    /// Where a slot is written, and cleared again, word by word, and the tracer killed after any of
    /// them.
    #[test]
    fn a_slot_that_is_half_written_or_cleared_is_known() {
        let clean = [vec![7; PAGE as usize], vec![0; PAGE as usize]].concat();
        let question = Question { call: libc::SYS_getitimer, number: 2, answer: u64::MAX };
        let (row, _) = asking(&[question; MAX_QUESTIONS], libc::SIGURG);
        let slot = [&row[..], &code(&sys::from_words([9; sys::REGISTERS]), 5)].concat();
        let begin = clean.len() - SLOT;
        let mut now = clean.clone();
        let mut steps = |parts: &[Range<usize>], slot: &[u8]| {
            for word in parts.iter().flat_map(|part| part.clone().step_by(8)) {
                now[begin + word..begin + word + 8].copy_from_slice(&slot[word..word + 8]);
                let mut left = now.clone();
                clear_leftovers(&mut left);
                assert!(left == clean, "word {word}");
                assert_eq!(room_in(&now[PAGE as usize..]), Some(MAX_SLOTS * SLOT), "word {word}");
            }
        };
        steps(&WRITING, &slot);
        steps(&CLEARING, &[0; SLOT]);
        assert_eq!(now, clean);
    }

    #[test]
    fn what_a_killed_tracer_has_left_is_no_other_vdso() {
        let clean = [vec![7; PAGE as usize], vec![0; PAGE as usize]].concat();
        let mut left = clean.clone();
        let at = left.len() - LENGTH;
        left[at..].copy_from_slice(&code(&sys::from_words([9; sys::REGISTERS]), 5));
        clear_leftovers(&mut left);
        assert_eq!(left, clean);
        // With questions before it.
        let answer = 0x1234_5678_9abc;
        let question = Question { call: libc::SYS_getitimer, number: 2, answer };
        let (asking, _) = asking(&[question; MAX_QUESTIONS], libc::SIGURG);
        left[at..].copy_from_slice(&code(&sys::from_words([9; sys::REGISTERS]), 5));
        left[at - ROW..at].copy_from_slice(&asking);
        clear_leftovers(&mut left);
        assert_eq!(left, clean);
        // In every slot, and where the first ones were cleared already.
        for cleared in [0, 1, MAX_SLOTS - 1] {
            let mut left = clean.clone();
            for slot in cleared..MAX_SLOTS {
                let from = left.len() - (MAX_SLOTS - slot) * SLOT;
                left[from..from + ROW].copy_from_slice(&asking);
                let way = code(&sys::from_words([9; sys::REGISTERS]), 5);
                left[from + ROW..from + SLOT].copy_from_slice(&way);
            }
            assert_eq!(room_in(&left[PAGE as usize..]), Some(MAX_SLOTS * SLOT));
            clear_leftovers(&mut left);
            assert_eq!(left, clean);
        }
        // Another kernel's code stays what it is.
        let mut other = clean.clone();
        other[at + 3] = 1;
        let same = other.clone();
        clear_leftovers(&mut other);
        assert_eq!(other, same);
        // And it is no room.
        for (code, room) in [(SLOT + MARGIN - 1, Some(LENGTH)), (LENGTH + MARGIN - 1, None)] {
            let mut full = vec![0; PAGE as usize];
            let end = full.len() - code;
            full[..=end].fill(7);
            assert_eq!(room_in(&full), room);
        }
        for slots in 1..=MAX_SLOTS {
            let mut full = vec![0; PAGE as usize];
            let end = full.len() - slots * SLOT - MARGIN;
            full[..end].fill(7);
            assert_eq!(room_in(&full), Some(slots * SLOT));
        }
    }
}
