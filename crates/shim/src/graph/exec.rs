//! Executable graphs: a private copy of a graph, and its operations in the proxy.

use super::conditional::{Condition, Conditional};
use super::flatten::{Flat, Unfit, flatten};
use super::update::{Changes, compare};
use super::{Payload, world};
use crate::handle::{Kind, Table};
use crate::{callback, capture, context, entry, event, memory, session, stream};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::{
    CU_GRAPH_EXEC_UPDATE_ERROR, CU_GRAPH_EXEC_UPDATE_SUCCESS,
    CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH, CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH,
    CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD, CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY,
    CUgraphExecUpdateResultInfo,
};
use kedge_cuda_types::handle::{CUevent, CUgraph, CUgraphExec, CUgraphNode, CUstream};
use kedge_protocol::{CtxId, GraphExecId, MAX_BODIES, Post, StreamOp};
use kedge_wire::List;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Edges of one message.
const EDGES_PER_POST: usize = 4096;

/// An executable graph.
#[derive(Debug)]
pub(crate) struct Exec {
    id: GraphExecId,
    ctx: CtxId,
    pub(crate) flags: u64,
    /// The copy that it was made of, which the program cannot reach: what its nodes do now.
    graph: CUgraph,
    /// Which node of the copy stands for which node that the program knows.
    copies: HashMap<CUgraphNode, CUgraphNode>,
    made: Made,
    /// Addresses that its nodes allocate and free.
    allocates: Vec<u64>,
    frees: Vec<u64>,
    /// It was launched or uploaded.
    mapped: AtomicBool,
    state: Mutex<State>,
}

/// What the proxy has of an executable graph.
#[derive(Debug, Default)]
struct Made {
    /// Which operations each node of the copy has become, and in which of the proxy's graphs.
    places: HashMap<CUgraphNode, Place>,
    /// Which operations a launch begins with for the copy and each graph in it: one for each of its
    /// conditions.
    conditions: HashMap<CUgraph, Place>,
    /// The bodies of each operation that has some.
    bodies: HashMap<(GraphExecId, u32), List<GraphExecId, MAX_BODIES>>,
    /// Bodies of conditional nodes, and the graph itself, which is the last.
    graphs: Vec<GraphExecId>,
}

#[derive(Debug, Clone)]
struct Place {
    exec: GraphExecId,
    ops: Range<u32>,
}

/// Changes are posted under its lock, so that the proxy sees them in the order of their making.
#[derive(Debug, Default)]
struct State {
    /// Nodes, of the copy, that do nothing for now.
    disabled: HashSet<CUgraphNode>,
    /// Events that a launch records.
    events: Vec<CUevent>,
}

static EXECS: Table<Exec> = Table::new(Kind::GraphExec);

pub(crate) fn find(exec: CUgraphExec) -> Result<Arc<Exec>, CuError> {
    EXECS.get(exec.0).ok_or(CuError::INVALID_VALUE)
}

/// Makes an executable graph. What is wrong with the graph comes back with the node, if it is one's
/// fault.
pub(crate) fn instantiate(graph: CUgraph, flags: u64) -> Result<CUgraphExec, Unfit> {
    let plain = |error| Unfit { node: CUgraphNode::NULL, error, cycle: false };
    let known = CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH
        | CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD
        | CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
    if flags & CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH != 0 {
        return Err(plain(entry::not_supported("CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH")));
    }
    if flags & !known != 0 {
        return Err(plain(CuError::INVALID_VALUE));
    }
    callback::check_not_inside().map_err(plain)?;
    let ctx = context::current().map_err(plain)?.id();
    let (copy, flat) = world::with(|graphs| {
        // Of the original first, so that an error names a node that the program knows.
        flatten(graphs, graph)?;
        let copy = graphs.duplicate(graph, false).map_err(plain)?;
        Ok((copy, flatten(graphs, copy)?))
    })?;
    make(ctx, copy, flat, flags).map_err(|error| {
        let _ = super::destroy(copy);
        plain(error)
    })
}

fn make(ctx: CtxId, graph: CUgraph, flat: Flat, flags: u64) -> Result<CUgraphExec, CuError> {
    let priorities = flags & CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY != 0;
    let mut made = Made::default();
    let id = post_graph(ctx, flat, priorities, false, &mut made)?;
    let copies = world::with(|graphs| graphs.copies(graph));
    let (allocates, frees) = memory_of(&made);
    let (mapped, state) = (AtomicBool::new(false), Mutex::default());
    let exec = Exec { id, ctx, flags, graph, copies, made, allocates, frees, mapped, state };
    exec.state().events = exec.recorded_events();
    EXECS.insert(exec).map(CUgraphExec).ok_or(CuError::OUT_OF_MEMORY)
}

/// The addresses that the graph's nodes allocate, and those that they free.
fn memory_of(made: &Made) -> (Vec<u64>, Vec<u64>) {
    let (mut allocates, mut frees) = (Vec::new(), Vec::new());
    world::with(|graphs| {
        for payload in made.places.keys().filter_map(|&node| graphs.payload(node).ok()) {
            match payload {
                Payload::MemAlloc(allocation) => allocates.push(allocation.params.dptr),
                Payload::MemFree { addr, .. } => frees.push(*addr),
                _ => {}
            }
        }
    });
    // Nodes that follow each other may have one address.
    allocates.sort_unstable();
    allocates.dedup();
    (allocates, frees)
}

/// Makes the proxy's graph of `flat`, after those of its conditional nodes' bodies, which become
/// ready with it; adds to what was made.
fn post_graph(
    ctx: CtxId,
    flat: Flat,
    priorities: bool,
    is_body: bool,
    made: &mut Made,
) -> Result<GraphExecId, CuError> {
    static LAST: AtomicU32 = AtomicU32::new(0);
    let mut bodies = Vec::with_capacity(flat.bodies.len());
    for body in flat.bodies {
        bodies.push(post_graph(ctx, body, priorities, true, made)?);
    }
    let id = GraphExecId(LAST.fetch_add(1, Ordering::Relaxed) + 1);
    let session = session::get()?;
    session.post(&Post::GraphExecBegin { exec: id, ctx })?;
    for (number, op) in (0..).zip(flat.ops) {
        let op = named(op, &bodies)?;
        if let StreamOp::Conditional { bodies, .. } = &op {
            made.bodies.insert((id, number), bodies.clone());
        }
        session.post(&Post::GraphExecNode { exec: id, op })?;
    }
    for edges in flat.edges.chunks(EDGES_PER_POST) {
        let edges = List::new(edges.to_vec()).map_err(|_| CuError::UNKNOWN)?;
        session.post(&Post::GraphExecEdges { exec: id, edges })?;
    }
    if !is_body {
        session.post(&Post::GraphExecReady { exec: id, priorities })?;
    }
    let place = |ops| Place { exec: id, ops };
    made.places.extend(flat.places.into_iter().map(|(node, ops)| (node, place(ops))));
    made.conditions.extend(flat.conditions.into_iter().map(|(graph, ops)| (graph, place(ops))));
    made.graphs.push(id);
    Ok(id)
}

/// An operation whose bodies are told by their names, and no more by their places.
fn named(op: StreamOp, made: &[GraphExecId]) -> Result<StreamOp, CuError> {
    Ok(match op {
        StreamOp::Conditional { condition, kind, bodies } => {
            let named = bodies.iter().map(|place| made.get(place.0 as usize).copied());
            let named = named.collect::<Option<Vec<_>>>().ok_or(CuError::UNKNOWN)?;
            let bodies = List::new(named).map_err(|_| CuError::UNKNOWN)?;
            StreamOp::Conditional { condition, kind, bodies }
        }
        op => op,
    })
}

/// Launches that run or wait are still carried out.
pub(crate) fn destroy(exec: CUgraphExec) -> Result<(), CuError> {
    let exec = EXECS.remove(exec.0).ok_or(CuError::INVALID_VALUE)?;
    for made in exec.made.graphs.iter().rev() {
        session::get()?.post(&Post::GraphExecDestroy { exec: *made })?;
    }
    exec.unmap();
    super::destroy(exec.graph)
}

/// The executables of a destroyed context are gone from the proxy too.
pub(crate) fn context_destroyed(ctx: CtxId) {
    for exec in EXECS.remove_where(|exec| exec.ctx == ctx) {
        exec.unmap();
        // Fails only if it is no graph any more.
        let _ = super::destroy(exec.graph);
    }
}

pub(crate) fn launch(exec: CUgraphExec, handle: CUstream) -> Result<(), CuError> {
    let exec = find(exec)?;
    let stream = stream::open(handle)?;
    if capture::intercepts(&stream)? {
        // As real drivers do: no child graph, and the capture is spoilt.
        return capture::check_wait(&stream).and(Err(CuError::STREAM_CAPTURE_UNSUPPORTED));
    }
    stream.post(StreamOp::GraphLaunch { exec: exec.id })?;
    exec.map(true);
    for &addr in &exec.frees {
        if memory::graph_freed(addr) {
            callback::after_device(move || {
                // Fails only where the proxy is gone, and the memory with it.
                let _ = memory::graph_release(addr);
            });
        }
    }
    exec.state().events.iter().for_each(|&event| event::recorded_by_graph(event));
    Ok(())
}

impl Exec {
    /// Counts the memory that its nodes allocate, from now on: a launch makes it `live`.
    pub(crate) fn map(&self, live: bool) {
        if !self.allocates.is_empty() {
            let first = !self.mapped.swap(true, Ordering::Relaxed);
            memory::graph_begins(&self.allocates, live, first);
        }
    }

    fn unmap(&self) {
        if self.mapped.swap(false, Ordering::Relaxed) {
            memory::graph_ends(&self.allocates);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The node of the copy that stands for `node` of the graph that was instantiated.
    fn node(&self, node: CUgraphNode) -> Result<CUgraphNode, CuError> {
        self.copies.get(&node).copied().ok_or(CuError::INVALID_VALUE)
    }

    fn recorded_events(&self) -> Vec<CUevent> {
        let event = |payload: &Payload| match payload {
            Payload::EventRecord(event, _) => Some(*event),
            _ => None,
        };
        world::with(|graphs| {
            let payloads = self.made.places.keys().filter_map(|&node| graphs.payload(node).ok());
            payloads.filter_map(event).collect()
        })
    }

    /// What `node` does in later launches; it must keep its type.
    pub(crate) fn set(&self, node: CUgraphNode, payload: Payload) -> Result<(), CuError> {
        let node = self.node(node)?;
        let records = matches!(payload, Payload::EventRecord(..));
        let mut state = self.state();
        self.replace(&state, node, payload)?;
        if records {
            state.events = self.recorded_events();
        }
        Ok(())
    }

    /// Puts a child graph's new parameters in the place of the old ones.
    pub(crate) fn set_child(&self, node: CUgraphNode, graph: CUgraph) -> Result<(), CuError> {
        let node = self.node(node)?;
        let changes = world::ask(|graphs| match *graphs.payload(node)? {
            Payload::Graph(child) => {
                compare(graphs, child, graph).map_err(|_| CuError::INVALID_VALUE)
            }
            _ => Err(CuError::INVALID_VALUE),
        })?;
        self.apply(changes)
    }

    /// Takes over what `graph`, of the same shape, does.
    pub(crate) fn update(
        &self,
        graph: CUgraph,
    ) -> Result<(), (CuError, CUgraphExecUpdateResultInfo)> {
        let changes = world::with(|graphs| {
            graphs.get(graph).map_err(|error| (error, failed()))?;
            compare(graphs, self.graph, graph)
                .map_err(|refused| (CuError::GRAPH_EXEC_UPDATE_FAILURE, refused))
        })?;
        self.apply(changes).map_err(|error| (error, failed()))
    }

    fn apply(&self, changes: Changes) -> Result<(), CuError> {
        let mut state = self.state();
        for (node, payload) in changes.nodes {
            self.replace(&state, node, payload)?;
        }
        for (graph, conditions) in changes.conditions {
            self.set_conditions(graph, conditions)?;
        }
        state.events = self.recorded_events();
        Ok(())
    }

    /// Has `graph`, the copy or a body in it, begin with other conditions, and keeps these.
    fn set_conditions(
        &self,
        graph: CUgraph,
        conditions: Vec<Arc<Condition>>,
    ) -> Result<(), CuError> {
        let place = self.made.conditions.get(&graph).ok_or(CuError::INVALID_VALUE)?;
        self.post(place, conditions.iter().map(|condition| condition.reset()).collect())?;
        let old = world::ask(|graphs| {
            Ok(std::mem::replace(&mut graphs.get_mut(graph)?.conditions, conditions))
        })?;
        // Outside of the lock.
        drop(old);
        Ok(())
    }

    fn replace(&self, state: &State, node: CUgraphNode, payload: Payload) -> Result<(), CuError> {
        let place = self.made.places.get(&node).ok_or(CuError::INVALID_VALUE)?;
        let ops = match &payload {
            Payload::Conditional(Conditional { condition, kind, .. }) => {
                let bodies = self.made.bodies.get(&(place.exec, place.ops.start));
                let bodies = bodies.ok_or(CuError::INVALID_VALUE)?.clone();
                vec![StreamOp::Conditional { condition: *condition, kind: *kind, bodies }]
            }
            payload => payload.ops()?,
        };
        if ops.len() != place.ops.len() {
            return Err(CuError::INVALID_VALUE);
        }
        let old = world::ask(|graphs| {
            let slot = graphs.payload_mut(node)?;
            if slot.node_type() != payload.node_type() {
                return Err(CuError::INVALID_VALUE);
            }
            Ok(std::mem::replace(slot, payload))
        })?;
        // Outside of the lock.
        drop(old);
        if state.disabled.contains(&node) { Ok(()) } else { self.post(place, ops) }
    }

    fn post(&self, place: &Place, ops: Vec<StreamOp>) -> Result<(), CuError> {
        let session = session::get()?;
        for (node, op) in place.ops.clone().zip(ops) {
            session.post(&Post::GraphExecUpdate { exec: place.exec, node, op })?;
        }
        Ok(())
    }

    /// A disabled node does nothing but keep its place. Only kernels, copies and fills can be.
    pub(crate) fn set_enabled(&self, node: CUgraphNode, enabled: bool) -> Result<(), CuError> {
        let node = self.node(node)?;
        let place = self.made.places.get(&node).ok_or(CuError::INVALID_VALUE)?;
        let mut state = self.state();
        let ops = world::ask(|graphs| match graphs.payload(node)? {
            payload @ (Payload::Kernel(_) | Payload::Memcpy(_) | Payload::Memset { .. }) => {
                payload.ops()
            }
            _ => Err(CuError::INVALID_VALUE),
        })?;
        let changed =
            if enabled { state.disabled.remove(&node) } else { state.disabled.insert(node) };
        match (changed, enabled) {
            (false, _) => Ok(()),
            (true, true) => self.post(place, ops),
            (true, false) => self.post(place, vec![StreamOp::Empty {}; place.ops.len()]),
        }
    }

    pub(crate) fn is_enabled(&self, node: CUgraphNode) -> Result<bool, CuError> {
        let node = self.node(node)?;
        Ok(!self.state().disabled.contains(&node))
    }
}

fn failed() -> CUgraphExecUpdateResultInfo {
    CUgraphExecUpdateResultInfo { result: CU_GRAPH_EXEC_UPDATE_ERROR, ..Default::default() }
}

/// What `cuGraphExecUpdate` reports of a success.
pub(crate) const UPDATED: CUgraphExecUpdateResultInfo = CUgraphExecUpdateResultInfo {
    result: CU_GRAPH_EXEC_UPDATE_SUCCESS,
    errorNode: CUgraphNode::NULL,
    errorFromNode: CUgraphNode::NULL,
};
