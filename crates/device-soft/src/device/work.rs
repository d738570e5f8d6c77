//! What a task does when its turn comes.

use super::conditional::Conditional;
use super::copies::{Fill, Scatter, Transfer};
use super::events::Stamp;
use super::nested::Nested;
use super::runtime::Runtime;
use super::shared_event::{Record, SharedEvent};
use super::tasks::Task;
use crate::fault::Fault;
use crate::launch::GridSpec;
use kedge_cuda_types::CuError;
use kedge_device::Done;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Copies and fills up to this many bytes run where the task became ready; more goes to an engine.
const INLINE_BYTES: u64 = 256 << 10;

pub(super) enum Work {
    /// A marker: a graph's empty node, an event wait, a graph launch's end.
    Nothing,
    /// A graph begins whose program is traced.
    Begin(Arc<AtomicU64>),
    Launch(Box<GridSpec>),
    /// A launch of a program whose kernels launch grids themselves.
    LaunchNested(Box<GridSpec>),
    Copy(Transfer),
    CopyInline {
        dst: u64,
        bytes: Vec<u8>,
    },
    Scatter(Scatter),
    Fill(Fill),
    Stamp(Arc<Stamp>),
    HostFn(u64),
    WriteValue {
        addr: u64,
        value: u64,
        wide: bool,
    },
    WaitValue(Condition),
    Conditional(Arc<Conditional>),
    /// Until that record of an interprocess event is reached.
    WaitShared(Arc<SharedEvent>, Record),
    Open {
        addr: u64,
        size: u64,
    },
    Close {
        addr: u64,
        size: u64,
    },
    /// Somebody waits for the predecessors.
    Notify(Done),
    /// Releases what the work of a destroyed context may still have used.
    Release(Box<dyn FnOnce() + Send>),
}

/// Whether a task is over when `Work::run` returns; if not, `Runtime::complete` ends it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Done,
    Running,
}

impl Work {
    /// Whether the client submitted it, unlike what only waits.
    pub(super) fn is_operation(&self) -> bool {
        !matches!(self, Self::Notify(_) | Self::Release(_))
    }

    pub(super) fn runs_in_faulted_context(&self) -> bool {
        matches!(
            self,
            Self::Stamp(_)
                | Self::Notify(_)
                | Self::Release(_)
                | Self::Open { .. }
                | Self::Close { .. }
        )
    }

    /// Does the work, or has it done elsewhere.
    pub(super) fn run(self, runtime: &Arc<Runtime>, task: &Arc<Task>) -> Progress {
        let result = match self {
            Self::Nothing => Ok(()),
            Self::Begin(begun) => {
                runtime.graph_begins(&begun);
                Ok(())
            }
            Self::Stamp(stamp) => {
                stamp.set_now(runtime);
                Ok(())
            }
            Self::Launch(spec) => {
                let (runtime_then, task) = (Arc::clone(runtime), Arc::clone(task));
                let done = move |result| launch_over(&runtime_then, &task, result);
                runtime.pool.launch(*spec, Box::new(done));
                return Progress::Running;
            }
            Self::LaunchNested(spec) => {
                Nested::run(runtime, task, *spec);
                return Progress::Running;
            }
            Self::Copy(transfer) => {
                let bytes = transfer.bytes();
                let parts = transfer
                    .split()
                    .into_iter()
                    .map(|part| move |runtime: &Runtime| part.run(&runtime.memory, &*runtime.host));
                return sized(runtime, task, bytes, "copy", parts.collect());
            }
            Self::Fill(fill) => {
                let bytes = fill.bytes();
                let run = move |runtime: &Runtime| fill.run(&runtime.memory);
                return sized(runtime, task, bytes, "memset", vec![run]);
            }
            Self::Scatter(scatter) => {
                let bytes = scatter.bytes();
                let run = move |runtime: &Runtime| scatter.run(&runtime.memory, &*runtime.host);
                return sized(runtime, task, bytes, "copy", vec![run]);
            }
            Self::CopyInline { dst, bytes } => copy_inline(runtime, dst, &bytes),
            Self::HostFn(token) => {
                let (runtime_then, task) = (Arc::clone(runtime), Arc::clone(task));
                let done = Box::new(move |_| runtime_then.complete(&task));
                runtime.host.host_function(token, done);
                return Progress::Running;
            }
            Self::WriteValue { addr, value, wide } => write_value(runtime, addr, value, wide),
            Self::WaitValue(condition) => return condition.wait(runtime, task),
            Self::Conditional(conditional) => return conditional.run(runtime, task),
            Self::WaitShared(event, record) => {
                let (runtime_then, task) = (Arc::clone(runtime), Arc::clone(task));
                let done = move |reached: Result<(), CuError>| {
                    if let Err(error) = reached {
                        let what =
                            "a wait for an event that a process has recorded which has ended";
                        task.ctx.fault(error, what);
                    }
                    runtime_then.complete(&task);
                };
                event.when_reached(runtime, record, Box::new(done));
                return Progress::Running;
            }
            Self::Open { addr, size } => runtime.memory.open(addr, size),
            Self::Close { addr, size } => runtime.memory.close(addr, size),
            Self::Notify(done) => {
                done(task.ctx.status());
                Ok(())
            }
            Self::Release(release) => {
                release();
                Ok(())
            }
        };
        if let Err(error) = result {
            task.ctx.fault(error, "a stream operation on memory that is not valid");
        }
        Progress::Done
    }
}

/// Runs `parts` here where the whole is small, else on the engines.
fn sized<W>(
    runtime: &Arc<Runtime>,
    task: &Arc<Task>,
    bytes: u64,
    what: &'static str,
    parts: Vec<W>,
) -> Progress
where
    W: FnOnce(&Runtime) -> Result<(), CuError> + Send + 'static,
{
    let run = move |part: W, runtime: &Runtime, task: &Task| {
        if let Err(error) = part(runtime) {
            let what = format!("{what} of {bytes} bytes reaches memory that is not valid");
            task.ctx.fault(error, &what);
        }
    };
    if bytes <= INLINE_BYTES {
        parts.into_iter().for_each(|part| run(part, runtime, task));
        return Progress::Done;
    }
    let unfinished = Arc::new(AtomicUsize::new(parts.len()));
    for part in parts {
        let (runtime_then, task) = (Arc::clone(runtime), Arc::clone(task));
        let unfinished = Arc::clone(&unfinished);
        runtime.engines.spawn(move || {
            run(part, &runtime_then, &task);
            if unfinished.fetch_sub(1, Ordering::AcqRel) == 1 {
                runtime_then.complete(&task);
            }
        });
    }
    Progress::Running
}

fn launch_over(runtime: &Arc<Runtime>, task: &Arc<Task>, result: Result<(), Fault>) {
    if let Err(fault) = result {
        task.ctx.fault_of_kernel(&fault);
    }
    task.ctx.tell_findings();
    runtime.complete(task);
}

fn copy_inline(runtime: &Runtime, dst: u64, bytes: &[u8]) -> Result<(), CuError> {
    if !runtime.memory.spans.covers(dst, bytes.len() as u64) {
        return Err(CuError::ILLEGAL_ADDRESS);
    }
    // SAFETY: the range is valid device memory, which is mapped memory of this process. What else
    // uses it at the same time is the program's own race.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), dst as *mut u8, bytes.len()) };
    runtime.memory.wrote(dst, bytes.len() as u64);
    Ok(())
}

/// A word that a stream waits for or writes: 4 or 8 bytes, naturally aligned.
pub(super) fn check_word(runtime: &Runtime, addr: u64, wide: bool) -> Result<(), CuError> {
    let size = if wide { 8 } else { 4 };
    if !addr.is_multiple_of(size) {
        return Err(CuError::INVALID_VALUE);
    }
    if runtime.memory.spans.covers(addr, size) { Ok(()) } else { Err(CuError::ILLEGAL_ADDRESS) }
}

fn write_value(runtime: &Runtime, addr: u64, value: u64, wide: bool) -> Result<(), CuError> {
    check_word(runtime, addr, wide)?;
    // SAFETY: `check_word` found an aligned word of valid device memory.
    unsafe {
        if wide {
            (*(addr as *const AtomicU64)).store(value, Ordering::SeqCst);
        } else {
            (*(addr as *const AtomicU32)).store(value as u32, Ordering::SeqCst);
        }
    }
    runtime.memory.wrote(addr, if wide { 8 } else { 4 });
    Ok(())
}

/// What cuStreamWaitValue waits for.
#[derive(Clone, Copy)]
pub(super) struct Condition {
    pub(super) addr: u64,
    pub(super) value: u64,
    pub(super) wide: bool,
    /// CUstreamWaitValue_flags & 3.
    pub(super) mode: u32,
}

impl Condition {
    fn wait(self, runtime: &Arc<Runtime>, task: &Arc<Task>) -> Progress {
        match self.holds(runtime) {
            Ok(true) => return Progress::Done,
            Ok(false) => {}
            Err(error) => {
                task.ctx.fault(error, "a wait for a word that is not valid");
                return Progress::Done;
            }
        }
        let (runtime_then, task) = (Arc::clone(runtime), Arc::clone(task));
        runtime.engines.poll(move || {
            // A word that was freed meanwhile will never change.
            let over = task.ctx.is_faulted() || self.holds(&runtime_then).unwrap_or(true);
            if over {
                runtime_then.complete(&task);
            }
            over
        });
        Progress::Running
    }

    fn holds(&self, runtime: &Runtime) -> Result<bool, CuError> {
        check_word(runtime, self.addr, self.wide)?;
        // SAFETY: `check_word` found an aligned word of valid device memory.
        let (found, wanted) = unsafe {
            if self.wide {
                ((*(self.addr as *const AtomicU64)).load(Ordering::SeqCst), self.value)
            } else {
                let found = (*(self.addr as *const AtomicU32)).load(Ordering::SeqCst);
                (u64::from(found), u64::from(self.value as u32))
            }
        };
        Ok(match self.mode & 3 {
            // Cyclic: the difference is not negative.
            0 if self.wide => found.wrapping_sub(wanted) as i64 >= 0,
            0 => (found as u32).wrapping_sub(wanted as u32) as i32 >= 0,
            1 => found == wanted,
            2 => found & wanted != 0,
            _ if self.wide => !(found | wanted) != 0,
            _ => !(found as u32 | wanted as u32) != 0,
        })
    }
}
