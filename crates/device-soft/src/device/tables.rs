//! What the client has named, and how its operations become tasks. Only the dispatcher's thread
//! comes here, and a conditional node that launches its body.

use super::arrays::Array;
use super::conditional::Conditional;
use super::context::Context;
use super::copies::{Fill, Scatter, Transfer};
use super::events::Event;
use super::graphs::{Graph, Shared};
use super::modules::Module;
use super::runtime::Runtime;
use super::streams::Streams;
use super::tasks::{Task, lock};
use super::traced::Label;
use super::work::{Condition, Work};
use crate::launch::GridSpec;
use kedge_cuda_types::CuError;
use kedge_device::Ranges;
use kedge_protocol::{
    ArrayId, CtxId, Dim3, EventId, GraphExecId, Launch, ModuleId, StreamId, StreamOp,
};
use std::collections::HashMap;
use std::sync::Arc;

#[derive(Default)]
pub(super) struct Tables {
    pub(super) streams: Streams,
    pub(super) events: HashMap<EventId, (CtxId, Event)>,
    pub(super) modules: HashMap<ModuleId, Module>,
    pub(super) arrays: HashMap<ArrayId, (CtxId, Arc<Array>)>,
    pub(super) graphs: HashMap<GraphExecId, Shared>,
    /// What each context has allocated, to be taken back when it goes.
    pub(super) allocations: HashMap<CtxId, Ranges>,
    /// The program has made tensor maps.
    pub(super) tensor_maps: bool,
}

impl Tables {
    /// Appends `op` to a stream.
    pub(super) fn enqueue(
        &mut self,
        runtime: &Arc<Runtime>,
        stream: StreamId,
        op: StreamOp,
    ) -> Result<(), CuError> {
        let (ctx, after) = self.streams.order(stream)?;
        let last = match op {
            StreamOp::GraphLaunch { exec } => self.graph(exec).and_then(|graph| {
                let traced = runtime.tracer.is_some().then_some(stream);
                self.launch_graph(runtime, &ctx, after, &graph, traced)
            }),
            op => {
                let label = runtime.tracer.as_ref().and_then(|_| self.label(stream, &op));
                self.task(&ctx, op, after).inspect(|task| {
                    task.labelled(label);
                    runtime.start(task);
                })
            }
        };
        match last {
            Ok(task) => self.streams.set_last(stream, &task),
            Err(error) => {
                ctx.fault(error, "an operation could not be submitted");
                return Err(error);
            }
        }
        Ok(())
    }

    /// A task, not yet started, that does `op` after the tasks in `after`.
    fn task(
        &mut self,
        ctx: &Arc<Context>,
        op: StreamOp,
        mut after: Vec<Arc<Task>>,
    ) -> Result<Arc<Task>, CuError> {
        let mut recorded = None;
        let work = match op {
            StreamOp::Empty {} => Work::Nothing,
            StreamOp::Launch { launch } => self.grid(ctx, launch)?,
            StreamOp::Copy { copy } => Work::Copy(Transfer::new(&copy, |id| self.array(id))?),
            StreamOp::CopyInline { dst, bytes } => {
                Work::CopyInline { dst, bytes: bytes.into_inner() }
            }
            StreamOp::Scatter { pieces } => Work::Scatter(Scatter::new(pieces.into_inner())?),
            StreamOp::Memset { dst, pitch, value, element, width, height } => {
                Work::Fill(Fill { dst, pitch, value, element, width, height })
            }
            StreamOp::EventRecord { event } => {
                let (_, known) = self.events.get(&event).ok_or(CuError::INVALID_HANDLE)?;
                let stamp = known.next_stamp();
                recorded = Some((event, Arc::clone(&stamp)));
                Work::Stamp(stamp)
            }
            StreamOp::EventWait { event } => {
                let (_, event) = self.events.get(&event).ok_or(CuError::INVALID_HANDLE)?;
                after.extend(event.pending().cloned());
                match event.elsewhere() {
                    Some((event, record)) => Work::WaitShared(event, record),
                    None => Work::Nothing,
                }
            }
            StreamOp::HostFn { token } => Work::HostFn(token),
            StreamOp::WriteValue { addr, value, wide } => Work::WriteValue { addr, value, wide },
            StreamOp::WaitValue { addr, value, wide, mode } => {
                Work::WaitValue(Condition { addr, value, wide, mode })
            }
            StreamOp::MemAlloc { addr, size } => {
                addr.checked_add(size).ok_or(CuError::INVALID_VALUE)?;
                self.allocations.entry(ctx.id).or_default().add(addr, size);
                Work::Open { addr, size }
            }
            StreamOp::MemFree { addr, size } => {
                self.forget_allocation(addr, size)?;
                Work::Close { addr, size }
            }
            StreamOp::GraphLaunch { .. }
            | StreamOp::Conditional { .. }
            | StreamOp::SetCondition { .. } => {
                return Err(CuError::NOT_SUPPORTED);
            }
        };
        let task = Task::new(Arc::clone(ctx), work, &after);
        if let Some((id, stamp)) = recorded {
            let (_, event) = self.events.get_mut(&id).ok_or(CuError::INVALID_HANDLE)?;
            event.record(Arc::clone(&task), stamp);
        }
        Ok(task)
    }

    fn grid(&self, ctx: &Arc<Context>, launch: Launch) -> Result<Work, CuError> {
        let module = self.modules.get(&launch.kernel.module).ok_or(CuError::INVALID_HANDLE)?;
        let program = Arc::clone(&module.program);
        let index = module.launched_by(launch.kernel.index).ok_or(CuError::INVALID_HANDLE)?;
        let kernel = program.kernels.get(index as usize).ok_or(CuError::INVALID_HANDLE)?;
        if let Some(missing) = &kernel.unsupported {
            ctx.fault(CuError::NOT_SUPPORTED, &format!("kernel {}: {missing}", kernel.name));
            return Err(CuError::NOT_SUPPORTED);
        }
        let (grid, block) = (dims(launch.grid), dims(launch.block));
        if grid.contains(&0) || block.contains(&0) {
            return Err(CuError::INVALID_VALUE);
        }
        let spec = Box::new(GridSpec {
            program,
            kernel: index,
            grid,
            block,
            cluster: dims(launch.cluster).map(|blocks| blocks.max(1)),
            shared_bytes: launch.shared_bytes,
            cooperative: launch.cooperative,
            params: launch.params.into_inner(),
            stack_limit: ctx.stack_limit(),
            spans: ctx.spans(),
            services: Arc::clone(ctx) as _,
        });
        Ok(if module.nests { Work::LaunchNested(spec) } else { Work::Launch(spec) })
    }

    pub(super) fn module(&mut self, id: ModuleId) -> Result<&mut Module, CuError> {
        self.modules.get_mut(&id).ok_or(CuError::INVALID_HANDLE)
    }

    pub(super) fn graph(&self, exec: GraphExecId) -> Result<Shared, CuError> {
        self.graphs.get(&exec).cloned().ok_or(CuError::INVALID_HANDLE)
    }

    pub(super) fn add_graph_node(&self, exec: GraphExecId, op: StreamOp) -> Result<(), CuError> {
        let graph = self.graph(exec)?;
        let mut graph = lock(&graph);
        if let StreamOp::Conditional { bodies, .. } = &op {
            for &body in bodies.iter() {
                if body == exec {
                    return Err(CuError::INVALID_VALUE);
                }
                graph.adopt(body, self.graph(body)?)?;
            }
        }
        graph.add_node(op)
    }

    pub(super) fn array(&self, id: ArrayId) -> Result<Arc<Array>, CuError> {
        self.arrays.get(&id).map(|(_, array)| Arc::clone(array)).ok_or(CuError::INVALID_HANDLE)
    }

    /// Starts every node of a graph after `after`; gives the task that ends it. In a stream that is
    /// `traced` it is told of.
    pub(super) fn launch_graph(
        &mut self,
        runtime: &Arc<Runtime>,
        ctx: &Arc<Context>,
        mut after: Vec<Arc<Task>>,
        graph: &Shared,
        traced: Option<StreamId>,
    ) -> Result<Arc<Task>, CuError> {
        let (label, begins) = traced.map(Label::of_graph).unzip();
        let (tasks, end) = {
            let mut graph = lock(graph);
            if let Some(begins) = begins {
                after.extend(graph.last.iter().filter(|task| !task.is_done()).cloned());
                let task = Task::new(Arc::clone(ctx), begins, &after);
                runtime.start(&task);
                after = vec![task];
            }
            let (tasks, end) = self.graph_tasks(ctx, after, &graph)?;
            end.labelled(label);
            graph.last = Some(Arc::clone(&end));
            (tasks, end)
        };
        for task in &tasks {
            runtime.start(task);
        }
        runtime.start(&end);
        Ok(end)
    }

    /// The tasks of a launch in an order in which they may start, and the one that ends it.
    fn graph_tasks(
        &mut self,
        ctx: &Arc<Context>,
        mut after: Vec<Arc<Task>>,
        graph: &Graph,
    ) -> Result<(Vec<Arc<Task>>, Arc<Task>), CuError> {
        let plan = graph.plan()?;
        after.extend(graph.last.iter().filter(|task| !task.is_done()).cloned());
        let mut tasks = Vec::with_capacity(plan.order.len());
        let mut by_node: Vec<Option<Arc<Task>>> = vec![None; plan.order.len()];
        let find = |by_node: &[Option<Arc<Task>>], nodes: &[u32]| -> Vec<Arc<Task>> {
            nodes.iter().filter_map(|node| by_node[*node as usize].clone()).collect()
        };
        for &node in &plan.order {
            let before = match &plan.predecessors[node as usize] {
                none if none.is_empty() => after.clone(),
                nodes => find(&by_node, nodes),
            };
            let task = match &graph.nodes[node as usize] {
                StreamOp::Conditional { condition, kind, bodies } => {
                    let bodies = bodies.iter().filter_map(|id| graph.bodies.get(id).cloned());
                    let work = Conditional::new(*condition, *kind, bodies.collect())?;
                    Task::new(Arc::clone(ctx), Work::Conditional(Arc::new(work)), &before)
                }
                op => self.task(ctx, op.clone(), before)?,
            };
            by_node[node as usize] = Some(Arc::clone(&task));
            tasks.push(task);
        }
        let leaves = if tasks.is_empty() { after } else { find(&by_node, &plan.leaves) };
        Ok((tasks, Task::new(Arc::clone(ctx), Work::Nothing, &leaves)))
    }

    pub(super) fn forget_allocation(&mut self, addr: u64, size: u64) -> Result<(), CuError> {
        addr.checked_add(size).ok_or(CuError::INVALID_VALUE)?;
        for ranges in self.allocations.values_mut() {
            ranges.cut(addr, size);
        }
        Ok(())
    }

    /// Calls `release` once everything that is pending in `ctx` is over.
    pub(super) fn after_context(
        &mut self,
        runtime: &Arc<Runtime>,
        ctx: CtxId,
        release: impl FnOnce() + Send + 'static,
    ) {
        let pending = self.streams.pending_in_context(ctx).unwrap_or_default();
        match self.streams.context(ctx) {
            Ok(ctx) if !pending.is_empty() => {
                let work = Work::Release(Box::new(release));
                runtime.start(&Task::new(Arc::clone(ctx), work, &pending));
            }
            _ => release(),
        }
    }

    /// Forgets a context and all that belongs to it; its memory goes when nothing runs there any
    /// more.
    pub(super) fn destroy_context(
        &mut self,
        runtime: &Arc<Runtime>,
        id: CtxId,
    ) -> Result<(), CuError> {
        let (ctx, pending) = self.streams.remove_context(id)?;
        ctx.kill();
        self.events.retain(|_, (owner, _)| *owner != id);
        self.graphs.retain(|_, graph| lock(graph).ctx != id);
        let modules: Vec<_> = self.modules.extract_if(|_, module| module.ctx == id).collect();
        let arrays: Vec<_> = self.arrays.extract_if(|_, (owner, _)| *owner == id).collect();
        let allocations = self.allocations.remove(&id).unwrap_or_default();
        let memory = Arc::clone(&runtime.memory);
        let release = Work::Release(Box::new(move || {
            drop((modules, arrays));
            for (addr, size) in allocations.iter() {
                // The range was checked when it was allocated.
                let _ = memory.close(addr, size);
            }
        }));
        runtime.start(&Task::new(ctx, release, &pending));
        Ok(())
    }
}

fn dims(dim: Dim3) -> [u32; 3] {
    [dim.x, dim.y, dim.z]
}
