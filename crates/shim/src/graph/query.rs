//! Creating, copying and looking at graphs and their dependencies.

use super::edges::Edge;
use super::{Payload, conditional, create, destroy, read_edges, world};
use crate::{callback, ffi};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::CUgraphEdgeData;
use kedge_cuda_types::handle::{CUgraph, CUgraphNode};
use std::ptr::{null, null_mut};

pub(crate) unsafe fn cuGraphCreate(out: *mut CUgraph, flags: u32) -> Result<(), CuError> {
    if out.is_null() || flags != 0 {
        return Err(CuError::INVALID_VALUE);
    }
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(out, create()) }
}

pub(crate) unsafe fn cuGraphDestroy(graph: CUgraph) -> Result<(), CuError> {
    destroy(graph)
}

pub(crate) unsafe fn cuGraphClone(out: *mut CUgraph, original: CUgraph) -> Result<(), CuError> {
    if out.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let copy = world::ask(|graphs| {
        if graphs.allocates(original) {
            // Two graphs cannot own one address.
            return Err(CuError::NOT_SUPPORTED);
        }
        conditional::check_copy(graphs, original)?;
        graphs.duplicate(original, false)
    })?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(out, copy) }
}

pub(crate) unsafe fn cuGraphNodeFindInClone(
    out: *mut CUgraphNode,
    original: CUgraphNode,
    clone: CUgraph,
) -> Result<(), CuError> {
    let found = world::ask(|graphs| graphs.find_copy(original, clone))?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(out, found) }
}

pub(crate) unsafe fn cuGraphNodeGetType(node: CUgraphNode, kind: *mut u32) -> Result<(), CuError> {
    let found = world::ask(|graphs| graphs.payload(node).map(Payload::node_type))?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(kind, found) }
}

pub(crate) unsafe fn cuGraphDestroyNode(node: CUgraphNode) -> Result<(), CuError> {
    let removed = world::ask(|graphs| match graphs.payload(node)? {
        // CUDA does not let memory go without its graph.
        Payload::MemAlloc(_) | Payload::MemFree { .. } => Err(CuError::NOT_SUPPORTED),
        _ => graphs.remove_node(node),
    })?;
    drop(removed);
    callback::sweep();
    Ok(())
}

/// Answers "how many, and which": with NULL for the array the number of `found`; else as many as
/// fit, the rest of the array NULL, and how many those are.
///
/// # Safety
/// `out`, unless NULL, has room for `*count` values, and `count` is NULL or valid.
unsafe fn fill<T: Copy>(
    found: &[T],
    absent: T,
    out: *mut T,
    count: *mut usize,
) -> Result<(), CuError> {
    // SAFETY: `count` is NULL or valid for a read, by this function's contract.
    let room = unsafe { ffi::read(count) }?;
    if out.is_null() {
        // SAFETY: `count` is NULL or valid for a write, by this function's contract.
        return unsafe { ffi::write(count, found.len()) };
    }
    let given = found.iter().copied().chain(std::iter::repeat(absent)).take(room);
    for (index, value) in given.enumerate() {
        // SAFETY: `index` is below the room that the caller promised.
        unsafe { ffi::write(out.add(index), value) }?;
    }
    // SAFETY: `count` is NULL or valid for a write, by this function's contract.
    unsafe { ffi::write(count, found.len().min(room)) }
}

pub(crate) unsafe fn cuGraphGetNodes(
    graph: CUgraph,
    nodes: *mut CUgraphNode,
    count: *mut usize,
) -> Result<(), CuError> {
    let found: Vec<_> = world::ask(|graphs| {
        Ok(graphs.get(graph)?.nodes.iter().map(|(handle, _)| handle).collect())
    })?;
    // SAFETY: `nodes` is NULL or has room for `*count` values, and `count` is NULL or valid: the
    // API asks that of the program.
    unsafe { fill(&found, CUgraphNode::NULL, nodes, count) }
}

pub(crate) unsafe fn cuGraphGetRootNodes(
    graph: CUgraph,
    nodes: *mut CUgraphNode,
    count: *mut usize,
) -> Result<(), CuError> {
    let found: Vec<_> = world::ask(|graphs| Ok(graphs.get(graph)?.nodes.roots().collect()))?;
    // SAFETY: `nodes` is NULL or has room for `*count` values, and `count` is NULL or valid: the
    // API asks that of the program.
    unsafe { fill(&found, CUgraphNode::NULL, nodes, count) }
}

/// Whether a query that cannot tell edge data would have to.
fn is_lossy(data: &[CUgraphEdgeData]) -> bool {
    data.iter().any(|data| *data != CUgraphEdgeData::default())
}

/// Stores parallel arrays of the same count.
///
/// # Safety
/// Each array, unless NULL, has room for `*count` values; `count` is NULL or valid.
unsafe fn fill_edges(
    ends: [(&[CUgraphNode], *mut CUgraphNode); 2],
    data: (&[CUgraphEdgeData], *mut CUgraphEdgeData),
    count: *mut usize,
) -> Result<(), CuError> {
    // SAFETY: `count` is NULL or valid for a read, by this function's contract.
    let room = unsafe { ffi::read(count) }?;
    let asked = ends.iter().any(|(_, out)| !out.is_null());
    if asked && data.1.is_null() && is_lossy(data.0) {
        return Err(CuError::LOSSY_QUERY);
    }
    let mut given = data.0.len();
    for (found, out) in ends.into_iter().filter(|(_, out)| !out.is_null()) {
        let mut fits = room;
        // SAFETY: `out` has room for `room` values, by this function's contract; `fits` is a copy
        // of that.
        unsafe { fill(found, CUgraphNode::NULL, out, &mut fits) }?;
        given = fits;
    }
    if !data.1.is_null() {
        let mut fits = room;
        // SAFETY: `data.1` has room for `room` values, by this function's contract; `fits` is a
        // copy of that.
        unsafe { fill(data.0, CUgraphEdgeData::default(), data.1, &mut fits) }?;
    }
    // SAFETY: `count` is NULL or valid for a write, by this function's contract.
    unsafe { ffi::write(count, given) }
}

pub(crate) unsafe fn cuGraphGetEdges_v2(
    graph: CUgraph,
    from: *mut CUgraphNode,
    to: *mut CUgraphNode,
    data: *mut CUgraphEdgeData,
    count: *mut usize,
) -> Result<(), CuError> {
    if from.is_null() != to.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let edges = world::ask(|graphs| Ok(graphs.get(graph)?.nodes.edges()))?;
    let froms: Vec<_> = edges.iter().map(|edge| edge.0).collect();
    let tos: Vec<_> = edges.iter().map(|edge| edge.1).collect();
    let datas: Vec<_> = edges.iter().map(|edge| edge.2).collect();
    // SAFETY: each array is NULL or has room for `*count` values, and `count` is NULL or valid: the
    // API asks that of the program.
    unsafe { fill_edges([(&froms, from), (&tos, to)], (&datas, data), count) }
}

pub(crate) unsafe fn cuGraphGetEdges(
    graph: CUgraph,
    from: *mut CUgraphNode,
    to: *mut CUgraphNode,
    count: *mut usize,
) -> Result<(), CuError> {
    // SAFETY: `cuGraphGetEdges_v2` asks the same of these arguments as this call does.
    unsafe { cuGraphGetEdges_v2(graph, from, to, null_mut(), count) }
}

/// # Safety
/// As [`fill_edges`].
unsafe fn neighbours(
    edges: Vec<Edge>,
    nodes: *mut CUgraphNode,
    data: *mut CUgraphEdgeData,
    count: *mut usize,
) -> Result<(), CuError> {
    let found: Vec<_> = edges.iter().map(|edge| edge.node).collect();
    let datas: Vec<_> = edges.iter().map(|edge| edge.data).collect();
    // SAFETY: each array is NULL or has room for `*count` values, and `count` is NULL or valid, by
    // this function's contract.
    unsafe { fill_edges([(&found, nodes), (&[], null_mut())], (&datas, data), count) }
}

pub(crate) unsafe fn cuGraphNodeGetDependencies_v2(
    node: CUgraphNode,
    dependencies: *mut CUgraphNode,
    data: *mut CUgraphEdgeData,
    count: *mut usize,
) -> Result<(), CuError> {
    let edges = world::ask(|graphs| {
        let owner = graphs.get(graphs.owner(node)?)?;
        Ok(owner.nodes.get(node)?.dependencies().to_vec())
    })?;
    // SAFETY: each array is NULL or has room for `*count` values, and `count` is NULL or valid: the
    // API asks that of the program.
    unsafe { neighbours(edges, dependencies, data, count) }
}

pub(crate) unsafe fn cuGraphNodeGetDependencies(
    node: CUgraphNode,
    dependencies: *mut CUgraphNode,
    count: *mut usize,
) -> Result<(), CuError> {
    // SAFETY: `cuGraphNodeGetDependencies_v2` asks the same of these arguments as this call does.
    unsafe { cuGraphNodeGetDependencies_v2(node, dependencies, null_mut(), count) }
}

pub(crate) unsafe fn cuGraphNodeGetDependentNodes_v2(
    node: CUgraphNode,
    dependents: *mut CUgraphNode,
    data: *mut CUgraphEdgeData,
    count: *mut usize,
) -> Result<(), CuError> {
    let edges = world::ask(|graphs| {
        let owner = graphs.get(graphs.owner(node)?)?;
        Ok(owner.nodes.get(node)?.dependents().to_vec())
    })?;
    // SAFETY: each array is NULL or has room for `*count` values, and `count` is NULL or valid: the
    // API asks that of the program.
    unsafe { neighbours(edges, dependents, data, count) }
}

pub(crate) unsafe fn cuGraphNodeGetDependentNodes(
    node: CUgraphNode,
    dependents: *mut CUgraphNode,
    count: *mut usize,
) -> Result<(), CuError> {
    // SAFETY: `cuGraphNodeGetDependentNodes_v2` asks the same of these arguments as this call does.
    unsafe { cuGraphNodeGetDependentNodes_v2(node, dependents, null_mut(), count) }
}

pub(crate) unsafe fn cuGraphAddDependencies_v2(
    graph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
) -> Result<(), CuError> {
    // SAFETY: `from` and `to` have `count` values, and `data` is NULL or has as many: the API asks
    // that of the program.
    let (from, to) = unsafe { (read_edges(from, data, count)?, ffi::read_array(to, count)?) };
    world::ask(|graphs| {
        let nodes = &mut graphs.get_mut(graph)?.nodes;
        from.iter().zip(to).try_for_each(|(from, to)| nodes.connect(from.node, to, from.data))
    })
}

pub(crate) unsafe fn cuGraphAddDependencies(
    graph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    count: usize,
) -> Result<(), CuError> {
    // SAFETY: `cuGraphAddDependencies_v2` asks the same of these arguments as this call does.
    unsafe { cuGraphAddDependencies_v2(graph, from, to, null(), count) }
}

pub(crate) unsafe fn cuGraphRemoveDependencies_v2(
    graph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    data: *const CUgraphEdgeData,
    count: usize,
) -> Result<(), CuError> {
    // SAFETY: `from` and `to` have `count` values, and `data` is NULL or has as many: the API asks
    // that of the program.
    let (from, to) = unsafe { (read_edges(from, data, count)?, ffi::read_array(to, count)?) };
    world::ask(|graphs| {
        let nodes = &mut graphs.get_mut(graph)?.nodes;
        from.iter().zip(to).try_for_each(|(from, to)| nodes.disconnect(from.node, to, from.data))
    })
}

pub(crate) unsafe fn cuGraphRemoveDependencies(
    graph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    count: usize,
) -> Result<(), CuError> {
    // SAFETY: `cuGraphRemoveDependencies_v2` asks the same of these arguments as this call does.
    unsafe { cuGraphRemoveDependencies_v2(graph, from, to, null(), count) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_counts_first_and_pads_what_is_left() {
        let found = [CUgraphNode(16), CUgraphNode(32)];
        let ask = |out: *mut CUgraphNode, mut room: usize| {
            // SAFETY: `out` is NULL or has `room` places.
            unsafe { fill(&found, CUgraphNode::NULL, out, &mut room) }.unwrap();
            room
        };
        assert_eq!(ask(null_mut(), 0), 2);
        let mut out = [CUgraphNode(9); 3];
        assert_eq!(ask(out.as_mut_ptr(), 1), 1);
        assert_eq!(out, [CUgraphNode(16), CUgraphNode(9), CUgraphNode(9)]);
        assert_eq!(ask(out.as_mut_ptr(), 3), 2);
        assert_eq!(out, [CUgraphNode(16), CUgraphNode(32), CUgraphNode::NULL]);
    }

    #[test]
    fn edge_data_is_not_lost_silently() {
        let node = [CUgraphNode(16)];
        let data = [CUgraphEdgeData { type_: 1, ..Default::default() }];
        let mut out = CUgraphNode::NULL;
        let mut count = 1;
        let ends = [(&node[..], &raw mut out), (&[][..], null_mut())];
        // SAFETY: `out` has room for one.
        let asked = unsafe { fill_edges(ends, (&data, null_mut()), &mut count) };
        assert_eq!(asked, Err(CuError::LOSSY_QUERY));
    }
}
