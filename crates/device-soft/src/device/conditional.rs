//! Conditional nodes: what they execute is known when their turn comes.

use super::graphs::Shared;
use super::runtime::Runtime;
use super::tasks::{Task, lock};
use super::work::{Progress, Work, check_word};
use kedge_cuda_types::CuError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// CUgraphConditionalNodeType.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The first body where the condition is not 0, or else the second, if there is one.
    If,
    /// The body, as long as the condition is not 0.
    While,
    /// The body whose number the condition is, if there is one.
    Switch,
}

pub(super) struct Conditional {
    /// Address of the condition, a 32-bit word of device memory.
    condition: u64,
    kind: Kind,
    bodies: Vec<Shared>,
}

impl Conditional {
    pub(super) fn new(condition: u64, kind: u32, bodies: Vec<Shared>) -> Result<Self, CuError> {
        let kind = match kind {
            0 => Kind::If,
            1 => Kind::While,
            2 => Kind::Switch,
            _ => return Err(CuError::INVALID_VALUE),
        };
        Ok(Self { condition, kind, bodies })
    }

    /// Executes what the condition asks for; ends `task` when that is over.
    pub(super) fn run(self: Arc<Self>, runtime: &Arc<Runtime>, task: &Arc<Task>) -> Progress {
        // Whoever came here may hold the tables, which a launch needs.
        let (runtime_then, task) = (Arc::clone(runtime), Arc::clone(task));
        runtime.engines.spawn(move || self.step(&runtime_then, &task));
        Progress::Running
    }

    fn step(self: Arc<Self>, runtime: &Arc<Runtime>, task: &Arc<Task>) {
        match self.launch(runtime, task) {
            Ok(Some(end)) => self.go_on_after(&end, runtime, task),
            Ok(None) => runtime.complete(task),
            Err(error) => {
                task.ctx.fault(error, "a conditional node that cannot be executed");
                runtime.complete(task);
            }
        }
    }

    /// Starts the body that is to be executed now; gives the task that ends it.
    fn launch(
        &self,
        runtime: &Arc<Runtime>,
        task: &Arc<Task>,
    ) -> Result<Option<Arc<Task>>, CuError> {
        if task.ctx.is_faulted() {
            return Ok(None);
        }
        let value = self.value(runtime)? as usize;
        let body = match self.kind {
            Kind::If => self.bodies.get(usize::from(value == 0)),
            Kind::While if value == 0 => None,
            Kind::While => self.bodies.first(),
            Kind::Switch => self.bodies.get(value),
        };
        // The tables go with the backend, and with them whoever could wait for this.
        match (body, runtime.tables.upgrade()) {
            (Some(body), Some(tables)) => {
                lock(&tables).launch_graph(runtime, &task.ctx, Vec::new(), body, None).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn value(&self, runtime: &Runtime) -> Result<u32, CuError> {
        check_word(runtime, self.condition, false)?;
        // SAFETY: `check_word` found an aligned word of valid device memory.
        Ok(unsafe { &*(self.condition as *const AtomicU32) }.load(Ordering::SeqCst))
    }

    fn go_on_after(self: Arc<Self>, end: &Arc<Task>, runtime: &Arc<Runtime>, task: &Arc<Task>) {
        let ctx = Arc::clone(&task.ctx);
        let (runtime_then, task) = (Arc::clone(runtime), Arc::clone(task));
        let next = Work::Notify(Box::new(move |_| match self.kind {
            Kind::While => {
                self.run(&runtime_then, &task);
            }
            Kind::If | Kind::Switch => runtime_then.complete(&task),
        }));
        runtime.start(&Task::new(ctx, next, std::slice::from_ref(end)));
    }
}
