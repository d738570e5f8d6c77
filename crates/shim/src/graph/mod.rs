//! Graphs: kept in the client as nodes and edges, sent to the proxy when they are instantiated.
//!
//! - [`edges`]: nodes and dependencies, pure. [`world`]: all graphs, their children and copies.
//! - [`payload`], [`kernel`], [`memory`]: what nodes do; [`reuse`]: which memory serves twice.
//! - [`flatten`], [`exec`], [`update`]: executable graphs.
//! - the others: the exported functions, by subject.

mod conditional;
mod create;
mod device_memory;
mod dot;
mod edges;
mod exec;
mod flatten;
mod instance;
mod kernel;
mod memory;
mod params;
mod payload;
mod query;
pub(crate) mod reuse;
mod update;
mod user_object;
mod world;

pub(crate) use conditional::cuGraphConditionalHandleCreate;
pub(crate) use create::*;
pub(crate) use device_memory::*;
pub(crate) use dot::*;
pub(crate) use edges::Edge;
pub(crate) use exec::context_destroyed;
pub(crate) use instance::*;
pub(crate) use kernel::*;
pub(crate) use params::*;
pub(crate) use payload::Payload;
pub(crate) use query::*;
pub(crate) use user_object::*;

use crate::{callback, ffi};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::CUgraphEdgeData;
use kedge_cuda_types::handle::{CUgraph, CUgraphNode};
use std::collections::HashSet;

/// A new empty graph.
pub(crate) fn create() -> CUgraph {
    world::with(|graphs| graphs.create())
}

/// Destroys a graph that is not a node's child.
pub(crate) fn destroy(graph: CUgraph) -> Result<(), CuError> {
    let removed = world::with(|graphs| graphs.destroy(graph))?;
    // Outside of the lock: what nodes held may run a program's destructor.
    drop(removed);
    callback::sweep();
    Ok(())
}

/// Throws away the graphs of a node that could not be added.
fn discard_children(children: &[CUgraph]) {
    let removed: Vec<_> =
        world::with(|graphs| children.iter().flat_map(|child| graphs.discard(*child)).collect());
    drop(removed);
    callback::sweep();
}

/// Adds a node behind `dependencies`.
pub(crate) fn add_node(
    graph: CUgraph,
    dependencies: &[Edge],
    payload: Payload,
) -> Result<CUgraphNode, CuError> {
    world::with(|graphs| graphs.add_node(graph, dependencies, payload))
}

/// INVALID_VALUE unless every edge starts at a node of `graph`, no node named twice.
pub(crate) fn check_nodes(graph: CUgraph, edges: &[Edge]) -> Result<(), CuError> {
    let mut seen = HashSet::new();
    world::with(|graphs| {
        let nodes = &graphs.get(graph)?.nodes;
        for edge in edges {
            nodes.get(edge.node)?;
            if !seen.insert(edge.node) {
                return Err(CuError::INVALID_VALUE);
            }
        }
        Ok(())
    })
}

/// Every node that `seeds` depend on, themselves included.
pub(crate) fn ancestors(graph: CUgraph, seeds: Vec<CUgraphNode>) -> HashSet<CUgraphNode> {
    world::with(|graphs| graphs.ancestors(graph, seeds))
}

/// Reads parallel arrays of nodes and, unless NULL, edge data.
///
/// # Safety
/// `nodes`, and `data` if not NULL, are valid for reads of `count` values.
pub(crate) unsafe fn read_edges(
    nodes: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
) -> Result<Vec<Edge>, CuError> {
    // SAFETY: `nodes` is NULL or has `count` values, by this function's contract.
    let nodes = unsafe { ffi::read_array(nodes, count) }?;
    if data.is_null() {
        return Ok(nodes.into_iter().map(Edge::from).collect());
    }
    // SAFETY: `data` is NULL or has `count` values, by this function's contract.
    let data = unsafe { ffi::read_array(data, count) }?;
    Ok(nodes.into_iter().zip(data).map(|(node, data)| Edge { node, data }).collect())
}
