//! System calls inside a traced process: one at a time, or in batches by the parasite's code.

use crate::sys::{self, Stop};
use crate::vdso::Vdso;
use crate::{EngineError, Thread, maps};
use kedge_parasite::{self as parasite, CALL_SIZE, Call};
use libc::pid_t;
use std::ffi::CStr;
use std::io;

const PAGE: u64 = 4096;
/// Bytes for the calls of a batch.
const CALLS: u64 = 64 << 10;
/// Bytes for what they point to.
const DATA: u64 = 64 << 10;
const MAX_CALLS: usize = CALLS as usize / CALL_SIZE - 1;

/// The mapping in a process that holds the parasite's code, a list of calls and what they point to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parasite {
    base: u64,
}

impl Parasite {
    pub(crate) const LENGTH: u64 = PAGE + CALLS + DATA;

    /// Maps it at `base`, which must be free, into the process of `thread`.
    pub(crate) fn install(thread: &mut Thread, base: u64) -> Result<Parasite, EngineError> {
        let entry = entry(thread.pid())?;
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let writable = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let arguments = [base, Parasite::LENGTH, writable, anonymous as u64, u64::MAX, 0];
        let at = thread.call(entry, libc::SYS_mmap, &arguments)?;
        checked(thread.pid(), "map the parasite", at)?;
        sys::write(thread.pid(), base, parasite::code())?;
        let executable = (libc::PROT_READ | libc::PROT_EXEC) as u64;
        let result = thread.call(entry, libc::SYS_mprotect, &[base, PAGE, executable])?;
        checked(thread.pid(), "make the parasite executable", result)?;
        Ok(Parasite { base })
    }

    /// One call.
    pub(crate) fn call(
        self,
        thread: &mut Thread,
        what: &'static str,
        number: i64,
        arguments: &[u64],
    ) -> Result<i64, EngineError> {
        let result = thread.call(self.entry(), number, arguments)?;
        checked(thread.pid(), what, result)
    }

    /// One call whose arguments point to `data`, which is put where [`Parasite::data`] says; what
    /// it is for is told if it fails.
    pub(crate) fn call_with(
        self,
        thread: &mut Thread,
        what: &str,
        number: i64,
        arguments: &[u64],
        data: &[u8],
    ) -> Result<i64, EngineError> {
        if data.len() as u64 > DATA || arguments.len() > 6 {
            return Err(EngineError::Nonsense("an argument of a call is too long"));
        }
        let pid = thread.pid();
        sys::write(pid, self.data(), data)?;
        let result = thread.call(self.entry(), number, arguments)?;
        if (-4095..0).contains(&result) {
            let source = io::Error::from_raw_os_error(-result as i32);
            return Err(EngineError::unsupported(pid, format!("cannot {what}: {source}")));
        }
        Ok(result)
    }

    /// Has the process write `bytes` into the file at `path`, unless it may not.
    pub(crate) fn attempt_to_write(
        self,
        thread: &mut Thread,
        path: &CStr,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        let data = [path.to_bytes_with_nul(), bytes].concat();
        sys::write(thread.pid(), self.data(), &data)?;
        let flags = (libc::O_WRONLY | libc::O_CLOEXEC) as u64;
        let arguments = [libc::AT_FDCWD as u64, self.data(), flags];
        let fd = thread.call(self.entry(), libc::SYS_openat, &arguments)?;
        if fd >= 0 {
            let at = self.data() + path.count_bytes() as u64 + 1;
            let arguments = [fd as u64, at, bytes.len() as u64];
            thread.call(self.entry(), libc::SYS_write, &arguments)?;
            thread.call(self.entry(), libc::SYS_close, &[fd as u64])?;
        }
        Ok(())
    }

    pub(crate) fn batch(self, thread: &mut Thread) -> Batch<'_> {
        Batch { parasite: self, thread, calls: Vec::new(), whats: Vec::new(), data: Vec::new() }
    }

    /// Unmaps it. Nothing can be called by it afterwards.
    pub(crate) fn remove(self, thread: &mut Thread) -> Result<(), EngineError> {
        let arguments = [self.base, Parasite::LENGTH];
        self.call(thread, "unmap the parasite", libc::SYS_munmap, &arguments).map(drop)
    }

    /// Where the single system call's instruction is.
    pub(crate) fn entry(self) -> u64 {
        self.base + parasite::ONCE
    }

    /// Where bytes can be put that a single call points to.
    pub(crate) fn data(self) -> u64 {
        self.base + PAGE + CALLS
    }
}

/// What a call has returned, as a result.
pub(crate) fn checked(pid: pid_t, what: &'static str, result: i64) -> Result<i64, EngineError> {
    if !(-4095..0).contains(&result) {
        return Ok(result);
    }
    let source = io::Error::from_raw_os_error(-result as i32);
    Err(EngineError::System { pid, what, source })
}

/// Calls that are made one after the other; the first failure ends them, unless it may fail.
/// A full batch is run at once, so results of calls are asked for by [`Batch::run`] only where
/// the batch is known to be short.
#[derive(Debug)]
pub(crate) struct Batch<'a> {
    parasite: Parasite,
    thread: &'a mut Thread,
    calls: Vec<Call>,
    whats: Vec<&'static str>,
    data: Vec<u8>,
}

impl Batch<'_> {
    /// Adds a call.
    pub(crate) fn call(
        &mut self,
        what: &'static str,
        number: i64,
        arguments: &[u64],
    ) -> Result<(), EngineError> {
        self.add(what, number, arguments, 0)
    }

    /// Adds a call whose failure does not matter.
    pub(crate) fn attempt(
        &mut self,
        what: &'static str,
        number: i64,
        arguments: &[u64],
    ) -> Result<(), EngineError> {
        self.add(what, number, arguments, 1)
    }

    fn add(
        &mut self,
        what: &'static str,
        number: i64,
        arguments: &[u64],
        may_fail: u64,
    ) -> Result<(), EngineError> {
        let mut call = Call { number: number as u64, may_fail, ..Call::default() };
        call.arguments[..arguments.len()].copy_from_slice(arguments);
        self.calls.push(call);
        self.whats.push(what);
        // Room is kept for what the next call may point to.
        if self.calls.len() == MAX_CALLS || self.data.len() as u64 > DATA / 2 {
            self.run()?;
        }
        Ok(())
    }

    /// Puts bytes where the next call can point to; their address. At most half of the room.
    pub(crate) fn put(&mut self, bytes: &[u8]) -> Result<u64, EngineError> {
        if bytes.len() as u64 > DATA / 2 - 8 {
            return Err(EngineError::Nonsense("an argument of a call is too long"));
        }
        let at = self.data.len();
        self.data.extend(bytes);
        self.data.resize(self.data.len().next_multiple_of(8), 0);
        Ok(self.parasite.data() + at as u64)
    }

    /// Makes the calls that were added since the last time; what each returned.
    pub(crate) fn run(&mut self) -> Result<Vec<i64>, EngineError> {
        let under_way = self.set_out()?;
        under_way.end(self.thread)
    }

    /// Has the process begin the calls that were added since the last time, without waiting for
    /// them: nothing else is asked of it before [`UnderWay::end`].
    pub(crate) fn begin(mut self) -> Result<UnderWay, EngineError> {
        self.set_out()
    }

    fn set_out(&mut self) -> Result<UnderWay, EngineError> {
        let (mut calls, whats) = (std::mem::take(&mut self.calls), std::mem::take(&mut self.whats));
        let data = std::mem::take(&mut self.data);
        let list = self.parasite.base + PAGE;
        if !calls.is_empty() {
            let pid = self.thread.pid();
            calls.push(Call { number: parasite::END, ..Call::default() });
            sys::write(pid, list, &encoded(&calls))?;
            sys::write(pid, self.parasite.data(), &data)?;
            self.thread.begin_batch(self.parasite.base + parasite::BATCH, list)?;
        }
        Ok(UnderWay { list, whats })
    }
}

/// Calls that a process makes.
#[derive(Debug)]
#[must_use = "the process is to be waited for"]
pub(crate) struct UnderWay {
    list: u64,
    whats: Vec<&'static str>,
}

impl UnderWay {
    /// Waits until they are made; what each returned.
    pub(crate) fn end(self, thread: &mut Thread) -> Result<Vec<i64>, EngineError> {
        let UnderWay { list, whats } = self;
        if whats.is_empty() {
            return Ok(Vec::new());
        }
        let pid = thread.pid();
        let ended = thread.end_batch()?;
        let done = (ended.saturating_sub(list) / CALL_SIZE as u64) as usize;
        let mut bytes = vec![0; whats.len() * CALL_SIZE];
        read_exact(pid, list, &mut bytes)?;
        let result = |index: usize| {
            let at = index * CALL_SIZE + std::mem::offset_of!(Call, result);
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            i64::from_le_bytes(word)
        };
        if let Some(what) = whats.get(done) {
            checked(pid, what, result(done))?;
            return Err(EngineError::Ended { pid });
        }
        Ok((0..whats.len()).map(result).collect())
    }
}

fn encoded(calls: &[Call]) -> Vec<u8> {
    let words = calls.iter().flat_map(|call| {
        let [a, b, c, d, e, f] = call.arguments;
        [call.number, a, b, c, d, e, f, call.result as u64, call.may_fail]
    });
    words.flat_map(u64::to_le_bytes).collect()
}

/// Reads the memory of `pid` at `address`, all of it.
pub(crate) fn read_exact(pid: pid_t, address: u64, into: &mut [u8]) -> Result<(), EngineError> {
    let mut done = 0;
    while done < into.len() {
        let count = sys::read(pid, address.wrapping_add(done as u64), &mut into[done..])?;
        if count == 0 {
            return Err(EngineError::Ended { pid });
        }
        done += count;
    }
    Ok(())
}

impl Thread {
    /// Lets it run a batch.
    fn begin_batch(&mut self, code: u64, list: u64) -> Result<(), EngineError> {
        self.leave_home()?;
        // The trap that ends a batch would lose its action if it were blocked.
        sys::set_signal_mask(self.pid(), !(1 << (libc::SIGTRAP - 1)))?;
        let mut registers = self.home();
        (registers.rip, registers.r15, registers.orig_rax) = (code, list, u64::MAX);
        sys::set_registers(self.pid(), &registers)?;
        self.go_on()
    }

    /// Waits until it is at the end of its batch: where the list stands then.
    fn end_batch(&mut self) -> Result<u64, EngineError> {
        loop {
            match sys::wait(self.pid())? {
                Stop::Signal(libc::SIGTRAP) => break,
                Stop::Event(libc::PTRACE_EVENT_CLONE | libc::PTRACE_EVENT_FORK) => {
                    self.note_made()?;
                }
                Stop::Signal(signal @ (libc::SIGSEGV | libc::SIGILL | libc::SIGBUS)) => {
                    let source = io::Error::other(format!("signal {signal}"));
                    let what = "run calls in it";
                    return Err(EngineError::System { pid: self.pid(), what, source });
                }
                Stop::Syscall | Stop::Event(_) | Stop::Signal(_) => {}
            }
            self.go_on()?;
        }
        Ok(sys::registers(self.pid())?.r15)
    }
}

/// A system call instruction that the process has already: one in its vDSO.
pub(crate) fn entry(pid: pid_t) -> Result<u64, EngineError> {
    Vdso::among(pid, &maps::of(pid)?)?.entry()
}
