//! Tasks: stream operations in execution, ordered by a graph of "runs after".
//!
//! A task waits for its predecessors and then runs where it became ready: tiny work on the spot,
//! copies on an engine thread, kernels on the pool. What finishes a task starts its successors, so
//! nothing here ever waits for a task.

use super::context::Context;
use super::runtime::Runtime;
use super::traced::Label;
use super::work::{Progress, Work};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

pub(super) struct Task {
    pub(super) ctx: Arc<Context>,
    /// Unfinished predecessors, plus one until `Runtime::start`.
    waiting: AtomicUsize,
    done: AtomicBool,
    /// Who waits for this task; `None` once it is done.
    successors: Mutex<Option<Vec<Arc<Task>>>>,
    work: Mutex<Option<Work>>,
    /// Whether it is the client's own operation, which [`Runtime::is_idle`] counts.
    counted: bool,
    /// What is told of it, where the program is traced.
    label: OnceLock<Label>,
}

impl Task {
    /// A task that `Runtime::start` may run once all of `after` are done.
    pub(super) fn new(ctx: Arc<Context>, work: Work, after: &[Arc<Task>]) -> Arc<Self> {
        let task = Arc::new(Self {
            ctx,
            waiting: AtomicUsize::new(1),
            done: AtomicBool::new(false),
            successors: Mutex::new(Some(Vec::new())),
            counted: work.is_operation(),
            work: Mutex::new(Some(work)),
            label: OnceLock::new(),
        });
        for predecessor in after {
            task.run_after(predecessor);
        }
        task
    }

    /// A task that has been done long ago.
    pub(super) fn over(ctx: Arc<Context>) -> Arc<Self> {
        Arc::new(Self {
            ctx,
            waiting: AtomicUsize::new(0),
            done: AtomicBool::new(true),
            successors: Mutex::new(None),
            counted: false,
            work: Mutex::new(None),
            label: OnceLock::new(),
        })
    }

    /// Only before `Runtime::start`.
    pub(super) fn run_after(self: &Arc<Self>, predecessor: &Arc<Task>) {
        let mut successors = lock(&predecessor.successors);
        if let Some(successors) = successors.as_mut() {
            self.waiting.fetch_add(1, Ordering::Relaxed);
            successors.push(Arc::clone(self));
        }
    }

    /// Only before `Runtime::start`, and once.
    pub(super) fn labelled(&self, label: Option<Label>) {
        if let Some(label) = label {
            let _ = self.label.set(label);
        }
    }

    pub(super) fn label(&self) -> Option<&Label> {
        self.label.get()
    }

    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Whether this was the last thing that the task waited for.
    fn release(&self) -> bool {
        self.waiting.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Marks the task done and gives those that waited for it.
    fn finish(&self) -> Vec<Arc<Task>> {
        let successors = lock(&self.successors).take();
        self.done.store(true, Ordering::Release);
        successors.unwrap_or_default()
    }
}

impl Runtime {
    /// Lets `task` run as soon as its predecessors are done; at once, on this thread, if they are
    /// and the work is small.
    pub(super) fn start(self: &Arc<Self>, task: &Arc<Task>) {
        self.unfinished.fetch_add(1, Ordering::SeqCst);
        if task.counted {
            self.outstanding.fetch_add(1, Ordering::SeqCst);
        }
        if task.release() {
            self.run(VecDeque::from([Arc::clone(task)]));
        }
    }

    /// Ends a task whose work went on after `Work::run` returned.
    pub(super) fn complete(self: &Arc<Self>, task: &Arc<Task>) {
        let mut ready = VecDeque::new();
        self.settle(task, &mut ready);
        self.run(ready);
    }

    /// Runs tasks that wait for nothing, and those that this makes ready. A loop, not recursion:
    /// a chain of a million small operations must not need a stack.
    fn run(self: &Arc<Self>, mut ready: VecDeque<Arc<Task>>) {
        while let Some(task) = ready.pop_front() {
            let work = lock(&task.work).take();
            let progress = match work {
                Some(work) if !task.ctx.is_faulted() || work.runs_in_faulted_context() => {
                    self.begins(&task);
                    work.run(self, &task)
                }
                _ => Progress::Done,
            };
            if progress == Progress::Done {
                self.settle(&task, &mut ready);
            }
        }
    }

    fn settle(self: &Arc<Self>, task: &Arc<Task>, ready: &mut VecDeque<Arc<Task>>) {
        self.ends(task);
        let successors = task.finish();
        if task.counted && self.outstanding.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.host.idle();
        }
        ready.extend(successors.into_iter().filter(|successor| successor.release()));
        self.unfinished.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether nothing that was ever started is unfinished: no thread works on device memory or on
    /// what has been released.
    pub(super) fn is_at_rest(&self) -> bool {
        self.unfinished.load(Ordering::SeqCst) == 0
    }

    pub(super) fn is_idle(&self) -> bool {
        self.outstanding.load(Ordering::SeqCst) == 0
    }
}

/// A poisoned lock guards nothing that a panic can leave half done: every critical section here is
/// a single update.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
