//! Graphs: the client's operations become nodes of one of the driver's.

use crate::context::Context;
use crate::copies::{self, RawCopy};
use crate::driver::{Driver, check};
use crate::graph_copies::{HostStep, StagedCopy};
use crate::host_call::{self, HostCall};
use crate::launch;
use crate::modules::Kernel;
use crate::stream::{Event, Stream};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::*;
use kedge_cuda_types::handle::{CUcontext, CUevent, CUgraph, CUgraphExec, CUgraphNode};
use kedge_protocol::{Launch, StreamOp};
use std::collections::BTreeMap;
use std::ptr;
use std::sync::{Arc, OnceLock, Weak};

/// An operation with everything that it names found.
pub(crate) enum Node<'a> {
    Empty,
    Kernel(&'a Kernel, &'a Launch),
    Copy(RawCopy),
    Staged(StagedCopy),
    Fill(CUDA_MEMSET_NODE_PARAMS_v1),
    Record(&'a Arc<Event>),
    Wait(CUevent),
    Host(Box<HostCall>),
    Memory(CUstreamBatchMemOpParams),
    /// Copies or fills, one after the other, that the driver does not take as one.
    Pieces(Vec<Node<'a>>),
}

impl<'a> Node<'a> {
    /// Some copies or fills, at least one, as one node.
    pub(crate) fn of(mut pieces: Vec<Node<'a>>) -> Node<'a> {
        match pieces.len() {
            1 => pieces.remove(0),
            _ => Node::Pieces(pieces),
        }
    }

    /// Whether a conditional node's body may have it: nothing that the host does, and no events.
    fn fits_in_body(&self) -> bool {
        matches!(
            self,
            Node::Empty | Node::Kernel(..) | Node::Copy(_) | Node::Fill(_) | Node::Pieces(_)
        )
    }
}

pub(crate) struct Graph {
    pub(crate) ctx: Arc<Context>,
    driver: Arc<Driver>,
    raw: CUgraph,
    /// What it is part of: a conditional node's body of another graph's, else of its own.
    whole: Weak<Whole>,
    /// None: it is a body.
    own: Option<Arc<Whole>>,
    nodes: Vec<Place>,
    /// What its nodes record, by their numbers.
    records: BTreeMap<u32, Arc<Event>>,
    /// Of nodes in pieces, by their numbers: those of the driver's behind the first.
    behind: BTreeMap<u32, Vec<CUgraphNode>>,
    /// Operations that stay as they are, by their nodes' numbers.
    fixed: BTreeMap<u32, StreamOp>,
    /// What its host nodes point at, for as long as it may run.
    #[expect(clippy::vec_box, reason = "the driver keeps each call's address")]
    calls: Vec<Box<HostCall>>,
    /// As `calls`, for copies.
    #[expect(clippy::vec_box, reason = "the driver keeps each step's address")]
    steps: Vec<Box<HostStep>>,
}

/// A graph of the driver's with the bodies in it, and what was made of it to be launched.
struct Whole {
    ctx: Arc<Context>,
    driver: Arc<Driver>,
    raw: CUgraph,
    exec: OnceLock<CUgraphExec>,
}

impl Whole {
    /// NULL, which the driver refuses, until the graph is ready.
    fn exec(&self) -> CUgraphExec {
        self.exec.get().copied().unwrap_or(CUgraphExec::NULL)
    }
}

/// A node of the client's in the driver's graph: one node, or the first and the last of several.
#[derive(Debug, Clone, Copy)]
struct Place {
    first: CUgraphNode,
    last: CUgraphNode,
    /// The kernel, copy or fill that is disabled where the client's node does nothing for now.
    switched: Option<CUgraphNode>,
    /// A staged copy's host node, which then does nothing: the driver disables none of its kind.
    step: Option<CUgraphNode>,
    off: bool,
}

impl Place {
    fn one(node: CUgraphNode, can_be_disabled: bool) -> Place {
        let switched = can_be_disabled.then_some(node);
        Place { first: node, last: node, switched, step: None, off: false }
    }
}

impl Graph {
    pub(crate) fn begin(driver: &Arc<Driver>, ctx: &Arc<Context>) -> Result<Graph, CuError> {
        ctx.enter()?;
        let mut raw = CUgraph::NULL;
        // SAFETY: a live out pointer.
        check(unsafe { (driver.cuGraphCreate)(&mut raw, 0) })?;
        let (ctx, driver) = (Arc::clone(ctx), Arc::clone(driver));
        let whole = Arc::new(Whole { ctx, driver, raw, exec: OnceLock::new() });
        let part = Graph::part(&whole.ctx, &whole.driver, raw, Arc::downgrade(&whole));
        Ok(Graph { own: Some(whole), ..part })
    }

    /// A body of the last node, which the driver has made with it.
    pub(crate) fn body(&self, raw: CUgraph) -> Graph {
        Graph::part(&self.ctx, &self.driver, raw, Weak::clone(&self.whole))
    }

    fn part(ctx: &Arc<Context>, driver: &Arc<Driver>, raw: CUgraph, whole: Weak<Whole>) -> Graph {
        Graph {
            ctx: Arc::clone(ctx),
            driver: Arc::clone(driver),
            raw,
            whole,
            own: None,
            nodes: Vec::new(),
            records: BTreeMap::new(),
            behind: BTreeMap::new(),
            fixed: BTreeMap::new(),
            calls: Vec::new(),
            steps: Vec::new(),
        }
    }

    /// Makes the condition that has this number, before there are nodes.
    ///
    /// # Errors
    /// NOT_SUPPORTED where the driver has no conditions, or numbers them otherwise.
    pub(crate) fn add_condition(&self, number: u64, default: Option<u32>) -> Result<(), CuError> {
        let create = self.driver.cuGraphConditionalHandleCreate.ok_or(CuError::NOT_SUPPORTED)?;
        self.ctx.enter()?;
        let (mut made, raw) = (0, self.ctx.raw);
        let flags = if default.is_some() { CU_GRAPH_COND_ASSIGN_DEFAULT } else { 0 };
        // SAFETY: a live out pointer; a graph and a context of the driver's.
        check(unsafe { create(&mut made, self.raw, raw, default.unwrap_or(0), flags) })?;
        if made == number { Ok(()) } else { Err(CuError::NOT_SUPPORTED) }
    }

    /// Appends a conditional node: the bodies that the driver has made come back.
    pub(crate) fn add_conditional(
        &mut self,
        condition: u64,
        kind: u32,
        bodies: usize,
    ) -> Result<Vec<CUgraph>, CuError> {
        let add = self.driver.cuGraphAddNode_v2.ok_or(CuError::NOT_SUPPORTED)?;
        self.ctx.enter()?;
        let size = u32::try_from(bodies).map_err(|_| CuError::INVALID_VALUE)?;
        let mut params = CUgraphNodeParams {
            type_: CU_GRAPH_NODE_TYPE_CONDITIONAL,
            reserved0: [0; 3],
            value: CUgraphNodeParamsValue { bytes: [0; 29] },
            reserved2: 0,
        };
        params.value.conditional = CUDA_CONDITIONAL_NODE_PARAMS {
            handle: condition,
            type_: kind,
            size,
            phGraph_out: ptr::null_mut(),
            ctx: self.ctx.raw,
        };
        let mut made = CUgraphNode::NULL;
        // SAFETY: a graph of the driver's, live out pointers, no dependencies.
        check(unsafe { add(&mut made, self.raw, ptr::null(), ptr::null(), 0, &mut params) })?;
        // SAFETY: the type says which member of the union the driver has filled in.
        let first = unsafe { params.value.conditional.phGraph_out };
        if first.is_null() {
            return Err(CuError::NOT_SUPPORTED);
        }
        // SAFETY: the driver keeps so many bodies there for the node's life.
        let raw = unsafe { std::slice::from_raw_parts(first, bodies) }.to_vec();
        self.nodes.push(Place::one(made, false));
        Ok(raw)
    }

    /// Has the last node stay as it is: it can only be updated to the same operation.
    pub(crate) fn fix(&mut self, op: &StreamOp) {
        let last = self.nodes.len().saturating_sub(1) as u32;
        self.fixed.insert(last, op.clone());
    }

    /// Whether a node may have `op` as an update, which then changes nothing: `None` where it is no
    /// such node.
    pub(crate) fn stays(&self, number: u32, op: &StreamOp) -> Option<Result<(), CuError>> {
        let fixed = self.fixed.get(&number)?;
        // Without a default, a condition is at first what it happens to be.
        let same = fixed == op || *op == StreamOp::Empty {};
        Some(if same { Ok(()) } else { Err(CuError::NOT_SUPPORTED) })
    }

    /// Appends a node; nodes are numbered from 0.
    pub(crate) fn add(&mut self, node: Node<'_>) -> Result<(), CuError> {
        self.ctx.enter()?;
        if self.own.is_none() && !node.fits_in_body() {
            return Err(CuError::NOT_SUPPORTED);
        }
        let (driver, graph, ctx) = (&*self.driver, self.raw, self.ctx.raw);
        if let Node::Staged(copy) = node {
            let place = self.add_staged(&copy)?;
            self.nodes.push(place);
            self.steps.push(copy.into_step());
            return Ok(());
        }
        if let Node::Pieces(pieces) = &node {
            let place = self.add_pieces(pieces)?;
            self.nodes.push(place);
            return Ok(());
        }
        let mut made = CUgraphNode::NULL;
        let (out, none) = (ptr::from_mut(&mut made), ptr::null());
        // SAFETY: a graph of the driver's, live out pointers, parameters that outlive each call.
        unsafe {
            match &node {
                // Added above.
                Node::Staged(_) | Node::Pieces(_) => {}
                Node::Empty => check((driver.cuGraphAddEmptyNode)(out, graph, none, 0))?,
                Node::Kernel(kernel, launch) => {
                    launch::with_node_params(kernel, launch, |params| {
                        check((driver.cuGraphAddKernelNode_v2)(out, graph, none, 0, params))
                    })?;
                    let (needed, hints) = launch::node_attributes(launch);
                    for attribute in needed {
                        let (id, value) = (attribute.id, &attribute.value);
                        check((driver.cuGraphKernelNodeSetAttribute)(*out, id, value))?;
                    }
                    for hint in hints {
                        // A driver that cannot take a hint does without.
                        (driver.cuGraphKernelNodeSetAttribute)(*out, hint.id, &hint.value);
                    }
                }
                Node::Copy(_) | Node::Fill(_) => *out = self.add_transfer(&node, &[])?,
                Node::Record(event) => {
                    check((driver.cuGraphAddEventRecordNode)(out, graph, none, 0, event.raw))?;
                }
                Node::Wait(event) => {
                    check((driver.cuGraphAddEventWaitNode)(out, graph, none, 0, *event))?;
                }
                Node::Host(call) => {
                    let params = call.node_params();
                    check((driver.cuGraphAddHostNode)(out, graph, none, 0, &params))?;
                }
                Node::Memory(operation) => {
                    let mut operation = *operation;
                    let params = batch(ctx, &mut operation);
                    check((driver.cuGraphAddBatchMemOpNode)(out, graph, none, 0, &params))?;
                }
            }
        }
        let switched = matches!(node, Node::Kernel(..) | Node::Copy(_) | Node::Fill(_));
        self.nodes.push(Place::one(made, switched));
        self.keep(self.nodes.len() as u32 - 1, node);
        Ok(())
    }

    /// A copy or a fill, after others.
    fn add_transfer(&self, node: &Node<'_>, after: &[CUgraphNode]) -> Result<CUgraphNode, CuError> {
        let (driver, graph, ctx) = (&*self.driver, self.raw, self.ctx.raw);
        let (before, count) = (after.as_ptr(), after.len());
        let mut made = CUgraphNode::NULL;
        // SAFETY: a graph of the driver's and nodes of it, a live out pointer, parameters that
        // outlive each call.
        check(unsafe {
            match node {
                Node::Copy(copy) => {
                    let params = copies::shaped(*copy);
                    (driver.cuGraphAddMemcpyNode)(&mut made, graph, before, count, &params, ctx)
                }
                Node::Fill(fill) => {
                    (driver.cuGraphAddMemsetNode)(&mut made, graph, before, count, fill, ctx)
                }
                _ => return Err(CuError::INVALID_VALUE),
            }
        })?;
        Ok(made)
    }

    /// The next node, in pieces that follow each other.
    fn add_pieces(&mut self, pieces: &[Node<'_>]) -> Result<Place, CuError> {
        let mut made: Vec<CUgraphNode> = Vec::new();
        for piece in pieces {
            let before = made.last().copied();
            made.push(self.add_transfer(piece, before.as_slice())?);
        }
        let (Some(first), Some(last)) = (made.first().copied(), made.last().copied()) else {
            return Err(CuError::INVALID_VALUE);
        };
        self.behind.insert(self.nodes.len() as u32, made.split_off(1));
        Ok(Place { last, ..Place::one(first, true) })
    }

    /// A host node and the driver's copy, one after the other.
    fn add_staged(&self, copy: &StagedCopy) -> Result<Place, CuError> {
        let (driver, graph, none) = (&*self.driver, self.raw, ptr::null());
        let (mut step, mut moved) = (CUgraphNode::NULL, CUgraphNode::NULL);
        let params = copy.node_params();
        // SAFETY: a graph of the driver's, live out pointers, parameters that outlive each call.
        unsafe {
            check((driver.cuGraphAddHostNode)(&mut step, graph, none, 0, &params))?;
            let Some(raw) = copy.copy else {
                return Ok(Place { step: Some(step), ..Place::one(step, false) });
            };
            let params = copies::shaped(raw);
            check((driver.cuGraphAddMemcpyNode)(
                &mut moved,
                graph,
                none,
                0,
                &params,
                self.ctx.raw,
            ))?;
            let (first, last) = if copy.fills { (step, moved) } else { (moved, step) };
            check((driver.cuGraphAddDependencies)(graph, &first, &last, 1))?;
            Ok(Place { first, last, switched: Some(moved), step: Some(step), off: false })
        }
    }

    /// A host node's call lives as long as the graph: an earlier launch may still make it.
    fn keep(&mut self, number: u32, node: Node<'_>) {
        match node {
            Node::Record(event) => drop(self.records.insert(number, Arc::clone(event))),
            Node::Host(call) => self.calls.push(call),
            Node::Staged(copy) => self.steps.push(copy.into_step()),
            _ => {}
        }
    }

    fn node(&self, number: u32) -> Result<Place, CuError> {
        self.nodes.get(number as usize).copied().ok_or(CuError::INVALID_VALUE)
    }

    pub(crate) fn edges(&self, edges: &[(u32, u32)]) -> Result<(), CuError> {
        if edges.is_empty() {
            return Ok(());
        }
        let from = edges.iter().map(|(from, _)| Ok(self.node(*from)?.last));
        let from = from.collect::<Result<Vec<_>, CuError>>()?;
        let to = edges.iter().map(|(_, to)| Ok(self.node(*to)?.first));
        let to = to.collect::<Result<Vec<_>, CuError>>()?;
        self.ctx.enter()?;
        // SAFETY: two arrays of that length, of nodes of this graph.
        check(unsafe {
            (self.driver.cuGraphAddDependencies)(self.raw, from.as_ptr(), to.as_ptr(), edges.len())
        })
    }

    /// `priorities`: by the nodes' own.
    pub(crate) fn ready(&self, priorities: bool) -> Result<(), CuError> {
        let own = self.own.as_ref().ok_or(CuError::ILLEGAL_STATE)?;
        self.ctx.enter()?;
        let flags = if priorities { CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY } else { 0 };
        let mut exec = CUgraphExec::NULL;
        // SAFETY: a live out pointer; the graph is complete.
        check(unsafe { (self.driver.cuGraphInstantiateWithFlags)(&mut exec, self.raw, flags) })?;
        own.exec.set(exec).map_err(|_| CuError::ILLEGAL_STATE)
    }

    /// As the next operation of `stream`.
    pub(crate) fn launch(&self, stream: &Arc<Stream>) -> Result<(), CuError> {
        let exec = self.own.as_ref().ok_or(CuError::INVALID_VALUE)?.exec();
        // SAFETY: instantiated, or NULL, which the driver refuses.
        check(unsafe { (self.driver.cuGraphLaunch)(exec, stream.raw) })?;
        for event in self.records.values() {
            event.record(stream, stream.next_number());
        }
        Ok(())
    }

    /// What it is part of, which a body outlives.
    fn whole(&self) -> Result<Arc<Whole>, CuError> {
        self.whole.upgrade().ok_or(CuError::INVALID_HANDLE)
    }

    /// Replaces one node's operation in later launches.
    pub(crate) fn update(&mut self, number: u32, node: Node<'_>) -> Result<(), CuError> {
        let place = self.node(number)?;
        self.ctx.enter()?;
        if matches!(node, Node::Empty) {
            return self.switch(number, false);
        }
        self.set_operation(number, place, node)?;
        self.switch(number, true)
    }

    /// Has a node do what it does, or nothing.
    fn switch(&mut self, number: u32, on: bool) -> Result<(), CuError> {
        let whole = self.whole()?;
        let place = self.nodes.get_mut(number as usize).ok_or(CuError::INVALID_VALUE)?;
        if place.off != on {
            return Ok(());
        }
        let (driver, exec) = (&*self.driver, whole.exec());
        let behind = self.behind.get(&number).into_iter().flatten();
        for node in place.switched.iter().chain(behind) {
            // SAFETY: a kernel, copy or fill node of the executable.
            check(unsafe { (driver.cuGraphNodeSetEnabled)(exec, *node, on.into()) })?;
        }
        // `set_operation` has given it something to do.
        if let (Some(step), false) = (place.step, on) {
            let nothing = host_call::nothing();
            // SAFETY: a host node of the executable.
            check(unsafe { (driver.cuGraphExecHostNodeSetParams)(exec, step, &nothing) })?;
        }
        place.off = !on;
        Ok(())
    }

    fn set_operation(&mut self, number: u32, place: Place, node: Node<'_>) -> Result<(), CuError> {
        if self.own.is_none() && !node.fits_in_body() {
            return Err(CuError::NOT_SUPPORTED);
        }
        let Place { first: at, last, .. } = place;
        let whole = self.whole()?;
        let (driver, exec, ctx) = (&*self.driver, whole.exec(), self.ctx.raw);
        let behind = self.behind.get(&number).map_or(&[][..], |behind| behind);
        let pieces = match &node {
            Node::Pieces(pieces) => pieces,
            one => std::slice::from_ref(one),
        };
        // Where it is cut is decided as the graph is made.
        if pieces.len() != 1 + behind.len() && !matches!(node, Node::Empty) {
            return Err(CuError::NOT_SUPPORTED);
        }
        for (node, piece) in behind.iter().zip(pieces.iter().skip(1)) {
            set_transfer(driver, exec, *node, piece, ctx)?;
        }
        // SAFETY: the node and the handles are the driver's, of this graph, and each structure that
        // a pointer leads to outlives the call.
        unsafe {
            match &node {
                // Seen to by `switch`.
                Node::Empty => Ok(()),
                Node::Staged(copy) => update_staged(driver, exec, at, last, copy, ctx),
                Node::Kernel(kernel, launch) => {
                    launch::with_node_params(kernel, launch, |params| {
                        check((driver.cuGraphExecKernelNodeSetParams_v2)(exec, at, params))
                    })
                }
                Node::Copy(_) | Node::Fill(_) | Node::Pieces(_) => {
                    set_transfer(driver, exec, at, &pieces[0], ctx)
                }
                Node::Record(event) => {
                    check((driver.cuGraphExecEventRecordNodeSetEvent)(exec, at, event.raw))
                }
                Node::Wait(event) => {
                    check((driver.cuGraphExecEventWaitNodeSetEvent)(exec, at, *event))
                }
                Node::Host(call) => {
                    let params = call.node_params();
                    check((driver.cuGraphExecHostNodeSetParams)(exec, at, &params))
                }
                Node::Memory(operation) => {
                    let mut operation = *operation;
                    let params = batch(ctx, &mut operation);
                    check((driver.cuGraphExecBatchMemOpNodeSetParams)(exec, at, &params))
                }
            }?;
        }
        self.keep(number, node);
        Ok(())
    }
}

/// Replaces a copy or a fill.
fn set_transfer(
    driver: &Driver,
    exec: CUgraphExec,
    at: CUgraphNode,
    node: &Node<'_>,
    ctx: CUcontext,
) -> Result<(), CuError> {
    // SAFETY: a node of the executable; parameters that outlive each call.
    check(unsafe {
        match node {
            Node::Copy(copy) => {
                let params = copies::shaped(*copy);
                (driver.cuGraphExecMemcpyNodeSetParams)(exec, at, &params, ctx)
            }
            Node::Fill(fill) => (driver.cuGraphExecMemsetNodeSetParams)(exec, at, fill, ctx),
            _ => return Err(CuError::INVALID_VALUE),
        }
    })
}

/// Replaces a staged copy by another of the same kind.
fn update_staged(
    driver: &Driver,
    exec: CUgraphExec,
    first: CUgraphNode,
    last: CUgraphNode,
    copy: &StagedCopy,
    ctx: CUcontext,
) -> Result<(), CuError> {
    let (step, moved) = if copy.fills { (first, last) } else { (last, first) };
    let params = copy.node_params();
    // SAFETY: nodes of the executable; parameters that outlive each call.
    unsafe {
        check((driver.cuGraphExecHostNodeSetParams)(exec, step, &params))?;
        let Some(raw) = copy.copy else { return Ok(()) };
        let params = copies::shaped(raw);
        check((driver.cuGraphExecMemcpyNodeSetParams)(exec, moved, &params, ctx))
    }
}

fn batch(
    ctx: CUcontext,
    operation: &mut CUstreamBatchMemOpParams,
) -> CUDA_BATCH_MEM_OP_NODE_PARAMS {
    CUDA_BATCH_MEM_OP_NODE_PARAMS { ctx, count: 1, paramArray: operation, flags: 0 }
}

impl Drop for Whole {
    fn drop(&mut self) {
        if self.ctx.enter().is_err() {
            return;
        }
        // SAFETY: this graph's own objects, once; the driver lets a launched graph finish.
        unsafe {
            if !self.exec().is_null() {
                (self.driver.cuGraphExecDestroy)(self.exec());
            }
            (self.driver.cuGraphDestroy)(self.raw);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Turn;
    use crate::tables::fill;
    use kedge_protocol::CtxId;

    #[test]
    fn an_empty_operation_disables_a_node_until_the_next() {
        let (turn, driver) = Turn::begin(0);
        let ctx = Context::create(&driver, CtxId(1), 0, 0).unwrap();
        let mut graph = Graph::begin(&driver, &ctx).unwrap();
        let zero = || Node::Fill(fill(1 << 40, 0, 0, 4, 8, 1));
        for node in [zero(), Node::Empty, zero()] {
            graph.add(node).unwrap();
        }
        graph.ready(true).unwrap();
        assert_eq!(
            turn.set(|fake| fake.instantiated),
            CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
        );
        let disabled = || turn.set(|fake| fake.disabled.len());
        for number in [2, 2, 1] {
            graph.update(number, Node::Empty).unwrap();
            assert_eq!(disabled(), 1, "the empty node stays as it is");
        }
        graph.update(0, zero()).unwrap();
        assert_eq!(disabled(), 1);
        graph.update(2, zero()).unwrap();
        assert_eq!(disabled(), 0);
        assert_eq!(graph.update(3, Node::Empty), Err(CuError::INVALID_VALUE));
    }

    #[test]
    fn a_fill_in_pieces_is_one_node() {
        let (turn, driver) = Turn::begin(0);
        let ctx = Context::create(&driver, CtxId(1), 0, 0).unwrap();
        let mut graph = Graph::begin(&driver, &ctx).unwrap();
        let zeros = |count: u64| {
            let zero = |at| Node::Fill(fill((1 << 40) + at * 4096, 0, 0, 4, 8, 1));
            Node::of((0..count).map(zero).collect())
        };
        graph.add(zeros(3)).unwrap();
        graph.add(zeros(1)).unwrap();
        let nodes = turn.set(|fake| fake.nodes.len());
        assert_eq!((nodes, graph.nodes.len()), (4, 2));
        assert!(graph.nodes[0].first != graph.nodes[0].last);
        graph.ready(false).unwrap();
        let disabled = || turn.set(|fake| fake.disabled.len());
        graph.update(0, Node::Empty).unwrap();
        assert_eq!(disabled(), 3);
        graph.update(0, zeros(3)).unwrap();
        assert_eq!(disabled(), 0);
        for (node, pieces) in [(0, 2), (0, 1), (1, 3)] {
            assert_eq!(graph.update(node, zeros(pieces)), Err(CuError::NOT_SUPPORTED));
        }
        assert_eq!(disabled(), 0, "what is refused leaves it as it was");
    }
}
