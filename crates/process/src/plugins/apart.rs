//! Work that is finished even if this process is killed meanwhile.
//!
//! docs/design/0018-bytes-in-flight.md says what it is for.

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use std::ffi::c_void;
use std::io;
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

/// Bytes of the child's stack, and of the guard below it.
const STACK: usize = 512 << 10;
const GUARD: usize = 64 << 10;

/// Does `work` in a child that shares this process's memory and descriptors and outlives it;
/// returns when it is done.
///
/// `work` must not allocate, free or take a lock: if this process is killed, a dead thread may hold
/// what it would wait for. Nor may it panic.
///
/// # Errors
///
/// The child cannot be made, or `work` did not come to its end.
pub(crate) fn survive<R: Send, F: FnOnce() -> R + Send>(work: F) -> io::Result<R> {
    let stack = Stack::new()?;
    let mut task = Task { work: Some(work), result: MaybeUninit::uninit(), done: false };
    let signals = Signals::block();
    // No signal is sent at its end, so that nobody but this thread takes it for a child of the
    // program's.
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FILES;
    // SAFETY: `task` and the stack live until the child has ended: CLONE_VFORK holds this thread
    // until then. The child has this thread's TLS, which this thread does not use meanwhile.
    let child = unsafe {
        libc::clone(perform::<R, F>, stack.top(), flags, ptr::from_mut(&mut task).cast::<c_void>())
    };
    let made = if child == -1 { Err(io::Error::last_os_error()) } else { Ok(()) };
    drop(signals);
    made?;
    collect(child);
    if !task.done {
        return Err(io::Error::other("the child that was to do it has ended early"));
    }
    // SAFETY: `done` is set when the result has been stored.
    Ok(unsafe { task.result.assume_init() })
}

struct Task<R, F> {
    work: Option<F>,
    result: MaybeUninit<R>,
    done: bool,
}

extern "C" fn perform<R, F: FnOnce() -> R>(task: *mut c_void) -> libc::c_int {
    // SAFETY: survive() passes a pointer to its own task, which nobody else touches while the child
    // lives.
    let task = unsafe { &mut *task.cast::<Task<R, F>>() };
    // What is sent to the supervisor's group, SIGKILL among it, does not reach the child.
    // SAFETY: the call has no arguments.
    unsafe { libc::setsid() };
    if let Some(work) = task.work.take()
        && let Ok(result) = catch_unwind(AssertUnwindSafe(work))
    {
        task.result.write(result);
        task.done = true;
    }
    0
}

/// Waits for the child, unless somebody who collects all children has it already.
fn collect(child: i32) {
    let mut status = 0;
    // SAFETY: waitpid stores the status.
    while unsafe { libc::waitpid(child, &mut status, libc::__WALL) } == -1
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
}

struct Stack(*mut c_void);

impl Stack {
    fn new() -> io::Result<Stack> {
        let (all, access) = (GUARD + STACK, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: the kernel chooses an address where nothing is; what grows past the stack's end
        // hits the guard.
        unsafe {
            let stack = Stack(mmap_anonymous(ptr::null_mut(), all, access, MapFlags::PRIVATE)?);
            mprotect(stack.0, GUARD, rustix::mm::MprotectFlags::empty())?;
            Ok(stack)
        }
    }

    fn top(&self) -> *mut c_void {
        // SAFETY: the mapping is that long.
        unsafe { self.0.byte_add(GUARD + STACK) }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: the child has ended, so that nobody uses it.
        let _ = unsafe { munmap(self.0, GUARD + STACK) };
    }
}

/// All signals of this thread are blocked until this is dropped: no handler runs in the child.
struct Signals(libc::sigset_t);

impl Signals {
    fn block() -> Signals {
        let mut all = MaybeUninit::uninit();
        let mut before = MaybeUninit::uninit();
        // SAFETY: both calls store whole sets.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            Signals(before.assume_init())
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: the set is this thread's own from before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::pipe::pipe;
    use std::time::Duration;

    #[test]
    fn what_it_returns_and_changes_is_there() {
        let mut bytes = [0; 4];
        assert_eq!(survive(|| bytes.fill(7)).map(|()| 5).unwrap(), 5);
        assert_eq!(bytes, [7; 4]);
    }

    #[test]
    fn it_goes_on_when_its_maker_is_killed() {
        let (reader, writer) = pipe().unwrap();
        // SAFETY: the child uses nothing that another thread of the test may hold, and does not
        // return.
        let maker = unsafe { libc::fork() };
        if maker == 0 {
            let _ = survive(|| {
                let _ = rustix::io::write(&writer, b"1");
                std::thread::sleep(Duration::from_millis(300));
                let _ = rustix::io::write(&writer, b"2");
            });
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(1) };
        }
        drop(writer);
        let mut byte = [0];
        assert_eq!(rustix::io::read(&reader, &mut byte).unwrap(), 1);
        let mut status = 0;
        // SAFETY: the process is this one's own child.
        unsafe {
            libc::kill(maker, libc::SIGKILL);
            assert_eq!(libc::waitpid(maker, &mut status, 0), maker);
        }
        assert_eq!(libc::WTERMSIG(status), libc::SIGKILL);
        assert_eq!(rustix::io::read(&reader, &mut byte).unwrap(), 1);
        assert_eq!(&byte, b"2");
        // It has ended, and holds the pipe no more.
        assert_eq!(rustix::io::read(&reader, &mut byte).unwrap(), 0);
    }
}
