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
use kedge_protocol::Launch;
use std::collections::BTreeMap;
use std::ptr;
use std::sync::Arc;

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
}

pub(crate) struct Graph {
    pub(crate) ctx: Arc<Context>,
    driver: Arc<Driver>,
    raw: CUgraph,
    nodes: Vec<Place>,
    /// What its nodes record, by their numbers.
    records: BTreeMap<u32, Arc<Event>>,
    exec: CUgraphExec,
    /// What its host nodes point at, for as long as it may run.
    #[expect(clippy::vec_box, reason = "the driver keeps each call's address")]
    calls: Vec<Box<HostCall>>,
    /// As `calls`, for copies.
    #[expect(clippy::vec_box, reason = "the driver keeps each step's address")]
    steps: Vec<Box<HostStep>>,
}

/// A node of the client's in the driver's graph: one node, or the first and the last of two.
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
        Ok(Graph {
            ctx,
            driver,
            raw,
            nodes: Vec::new(),
            records: BTreeMap::new(),
            exec: CUgraphExec::NULL,
            calls: Vec::new(),
            steps: Vec::new(),
        })
    }

    /// Appends a node; nodes are numbered from 0.
    pub(crate) fn add(&mut self, node: Node<'_>) -> Result<(), CuError> {
        self.ctx.enter()?;
        let (driver, graph, ctx) = (&*self.driver, self.raw, self.ctx.raw);
        if let Node::Staged(copy) = node {
            let place = self.add_staged(&copy)?;
            self.nodes.push(place);
            self.steps.push(copy.into_step());
            return Ok(());
        }
        let mut made = CUgraphNode::NULL;
        let (out, none) = (ptr::from_mut(&mut made), ptr::null());
        // SAFETY: a graph of the driver's, live out pointers, parameters that outlive each call.
        unsafe {
            match &node {
                // Added above.
                Node::Staged(_) => {}
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
                Node::Copy(copy) => {
                    let params = copies::shaped(*copy);
                    check((driver.cuGraphAddMemcpyNode)(out, graph, none, 0, &params, ctx))?;
                }
                Node::Fill(fill) => {
                    check((driver.cuGraphAddMemsetNode)(out, graph, none, 0, fill, ctx))?;
                }
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
    pub(crate) fn ready(&mut self, priorities: bool) -> Result<(), CuError> {
        self.ctx.enter()?;
        let flags = if priorities { CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY } else { 0 };
        // SAFETY: a live out pointer; the graph is complete.
        check(unsafe { (self.driver.cuGraphInstantiateWithFlags)(&mut self.exec, self.raw, flags) })
    }

    /// As the next operation of `stream`.
    pub(crate) fn launch(&self, stream: &Arc<Stream>) -> Result<(), CuError> {
        // SAFETY: instantiated, or NULL, which the driver refuses.
        check(unsafe { (self.driver.cuGraphLaunch)(self.exec, stream.raw) })?;
        for event in self.records.values() {
            event.record(stream, stream.next_number());
        }
        Ok(())
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
        let place = self.nodes.get_mut(number as usize).ok_or(CuError::INVALID_VALUE)?;
        if place.off != on {
            return Ok(());
        }
        let (driver, exec) = (&*self.driver, self.exec);
        if let Some(node) = place.switched {
            // SAFETY: a kernel, copy or fill node of the executable.
            check(unsafe { (driver.cuGraphNodeSetEnabled)(exec, node, on.into()) })?;
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
        let Place { first: at, last, .. } = place;
        let (driver, exec, ctx) = (&*self.driver, self.exec, self.ctx.raw);
        // SAFETY: as in `add`.
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
                Node::Copy(copy) => {
                    let params = copies::shaped(*copy);
                    check((driver.cuGraphExecMemcpyNodeSetParams)(exec, at, &params, ctx))
                }
                Node::Fill(fill) => {
                    check((driver.cuGraphExecMemsetNodeSetParams)(exec, at, fill, ctx))
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

impl Drop for Graph {
    fn drop(&mut self) {
        if self.ctx.enter().is_err() {
            return;
        }
        // SAFETY: this graph's own objects, once; the driver lets a launched graph finish.
        unsafe {
            if !self.exec.is_null() {
                (self.driver.cuGraphExecDestroy)(self.exec);
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
}
