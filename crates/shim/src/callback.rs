//! Host functions: what the device asks this process to run, on one thread of kedge's own.
//!
//! A function is known to the proxy by a token. That of a stream's function is used once; that of a
//! graph's node lives as long as the node, and as launches that still run.

use crate::stream::{self, Stream};
use crate::{log, memory, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUhostFn, CUstream, CUstreamCallback};
use kedge_protocol::{CtxId, StreamOp};
use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A program's function and its argument. The argument is handed back, never looked at.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostFn {
    pub(crate) function: CUhostFn,
    pub(crate) user_data: *mut c_void,
}

// SAFETY: the program gave the pointer to be used from another thread.
unsafe impl Send for HostFn {}
// SAFETY: the value is only copied; what it points to is the program's function's alone.
unsafe impl Sync for HostFn {}

impl HostFn {
    pub(crate) fn run(self) {
        // SAFETY: the program promised a function that may be called with this argument.
        unsafe { (self.function)(self.user_data) }
    }
}

/// `cuStreamAddCallback`'s function: it is told the stream and its status.
#[derive(Debug, Clone, Copy)]
struct StreamFn {
    function: CUstreamCallback,
    user_data: *mut c_void,
    stream: CUstream,
    ctx: CtxId,
}

// SAFETY: the program gave the pointer to be used from another thread.
unsafe impl Send for StreamFn {}

#[derive(Debug, Clone, Copy)]
enum Entry {
    Once(HostFn),
    OnceStream(StreamFn),
    /// A graph node's.
    Kept(HostFn),
}

#[derive(Default)]
struct Callbacks {
    last: u64,
    entries: HashMap<u64, Entry>,
    thread_runs: bool,
}

static CALLBACKS: Mutex<Option<Callbacks>> = Mutex::new(None);

fn with<T>(f: impl FnOnce(&mut Callbacks) -> T) -> T {
    let mut guard = CALLBACKS.lock().unwrap_or_else(PoisonError::into_inner);
    f(guard.get_or_insert_with(Callbacks::default))
}

/// Keeps `entry` and makes sure that the thread runs which will serve it.
fn register(entry: Entry) -> Result<u64, CuError> {
    with(|callbacks| {
        if !callbacks.thread_runs {
            start_thread()?;
            callbacks.thread_runs = true;
        }
        callbacks.last += 1;
        callbacks.entries.insert(callbacks.last, entry);
        Ok(callbacks.last)
    })
}

/// A graph node's host function: its token ends with the last owner, once nothing uses it.
#[derive(Debug)]
pub(crate) struct HostNode {
    pub(crate) host_fn: HostFn,
    pub(crate) token: u64,
}

impl HostNode {
    pub(crate) fn new(host_fn: HostFn) -> Result<Arc<Self>, CuError> {
        Ok(Arc::new(Self { host_fn, token: register(Entry::Kept(host_fn))? }))
    }
}

impl Drop for HostNode {
    fn drop(&mut self) {
        let token = self.token;
        after_device(move || {
            with(|callbacks| callbacks.entries.remove(&token));
        });
    }
}

type Action = Box<dyn FnOnce() + Send>;
static RETIRED: Mutex<VecDeque<(u64, Action)>> = Mutex::new(VecDeque::new());

fn retired() -> MutexGuard<'static, VecDeque<(u64, Action)>> {
    RETIRED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has `action` run by the first [`sweep`] after all work that has been posted by now is done.
pub(crate) fn after_device(action: impl FnOnce() + Send + 'static) {
    let posted = session::get().map_or(0, |session| session.client.posted());
    retired().push_back((posted, Box::new(action)));
}

/// Runs the actions whose time has come. Called wherever the program has waited.
pub(crate) fn sweep() {
    let completed = session::get().map_or(u64::MAX, |session| session.client.completed());
    loop {
        let next = {
            let mut retired = retired();
            match retired.front() {
                Some((posted, _)) if *posted <= completed => retired.pop_front(),
                _ => None,
            }
        };
        // Outside of the lock: an action may retire others.
        match next {
            Some((_, action)) => action(),
            None => return,
        }
    }
}

thread_local! {
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// NOT_PERMITTED for what may not be called inside a host function, whether it would wait or not:
/// all but calls on a stream or an event that there is (driver 580 on an H200). Callers tell by it
/// where they are: libgomp keeps memory to free it later. Of those on streams and events, kedge
/// refuses what would ask the proxy, for its device may wait for the host function.
#[inline]
pub(crate) fn check_called(name: &str) -> Result<(), CuError> {
    if IN_CALLBACK.get() && !is_on_stream_or_event(name) {
        return Err(CuError::NOT_PERMITTED);
    }
    Ok(())
}

fn is_on_stream_or_event(name: &str) -> bool {
    let one = ["cuStream", "cuEvent", "cuLaunchHostFunc"].iter().any(|it| name.starts_with(it));
    one && !name.starts_with("cuStreamCreate") && !name.starts_with("cuEventCreate")
}

/// NOT_PERMITTED inside a host function, where CUDA allows no call that could wait for the device.
pub(crate) fn check_not_inside() -> Result<(), CuError> {
    if IN_CALLBACK.get() { Err(CuError::NOT_PERMITTED) } else { Ok(()) }
}

/// Starts the thread that runs host functions. It blocks every signal, so that the program's
/// handlers run on the program's own threads.
fn start_thread() -> Result<(), CuError> {
    let session = session::get()?;
    // SAFETY: a zeroed sigset_t is a valid argument of sigfillset, which initialises it.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: a zeroed sigset_t is a valid place for pthread_sigmask to store the old mask in.
    let mut before: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: both sets live across the calls; the mask is put back below.
    unsafe {
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
    }
    let spawned = std::thread::Builder::new()
        .name("cuda-host-fn".to_owned())
        .stack_size(8 << 20)
        .spawn(move || serve(session));
    // SAFETY: `before` was filled in by the call above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    spawned.map(drop).map_err(|error| {
        log::line(&format!("cannot start the thread for host functions: {error}"));
        CuError::OPERATING_SYSTEM
    })
}

fn serve(session: &'static session::Session) {
    IN_CALLBACK.set(true);
    while let Ok(token) = session.client.next_host_fn() {
        memory::paged::host_function_begins(token);
        run(token);
        memory::paged::host_function_ends();
        if session.client.host_fn_done(token).is_err() {
            return;
        }
    }
}

fn run(token: u64) {
    let entry = with(|callbacks| match callbacks.entries.get(&token).copied() {
        Some(Entry::Kept(host_fn)) => Some(Entry::Kept(host_fn)),
        Some(once) => {
            callbacks.entries.remove(&token);
            Some(once)
        }
        None => None,
    });
    match entry {
        Some(Entry::Once(host_fn) | Entry::Kept(host_fn)) => host_fn.run(),
        Some(Entry::OnceStream(f)) => {
            let sticky = session::get().ok().and_then(|s| s.client.sticky(f.ctx));
            let status = sticky.map_or(0, |error| error.0);
            // SAFETY: the program promised a function that may be called with these arguments.
            unsafe { (f.function)(f.stream, status, f.user_data) }
        }
        None => log::line(&format!("the proxy asked for host function {token}, which is unknown")),
    }
}

/// `cuLaunchHostFunc`.
pub(crate) unsafe fn cuLaunchHostFunc(
    stream: CUstream,
    function: Option<CUhostFn>,
    user_data: *mut c_void,
) -> Result<(), CuError> {
    let function = function.ok_or(CuError::INVALID_VALUE)?;
    let host_fn = HostFn { function, user_data };
    stream::submit(
        stream,
        |stream| once(stream, Entry::Once(host_fn)),
        || Ok(crate::graph::Payload::Host(HostNode::new(host_fn)?)),
    )
}

/// `cuStreamAddCallback`. Cannot be captured.
pub(crate) unsafe fn cuStreamAddCallback(
    handle: CUstream,
    function: Option<CUstreamCallback>,
    user_data: *mut c_void,
    flags: u32,
) -> Result<(), CuError> {
    let function = function.filter(|_| flags == 0).ok_or(CuError::INVALID_VALUE)?;
    stream::submit(
        handle,
        |stream| {
            let ctx = stream.ctx();
            once(stream, Entry::OnceStream(StreamFn { function, user_data, stream: handle, ctx }))
        },
        || Err(CuError::STREAM_CAPTURE_UNSUPPORTED),
    )
}

fn once(stream: &Stream, entry: Entry) -> Result<(), CuError> {
    let token = register(entry)?;
    stream.post(StreamOp::HostFn { token }).inspect_err(|_| {
        with(|callbacks| callbacks.entries.remove(&token));
    })
}
