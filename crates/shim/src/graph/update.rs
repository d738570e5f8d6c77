//! Comparing an executable graph with a graph that is to take its place: nodes pair in order of
//! creation, and must have the same types and dependencies.

use super::Payload;
use super::conditional::Condition;
use super::world::Graphs;
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::{
    CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED, CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED,
    CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED, CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED,
    CUgraphExecUpdateResultInfo,
};
use kedge_cuda_types::handle::{CUgraph, CUgraphNode};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// What changes of an executable graph.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Nodes, and what they are to do from now on.
    pub(crate) nodes: Vec<(CUgraphNode, Payload)>,
    /// Graphs, the executable one or bodies in it, and the conditions that they have from now on.
    pub(crate) conditions: Vec<(CUgraph, Vec<Arc<Condition>>)>,
}

/// What has to change in `old` so that it does what `new` says; else why it cannot.
pub(crate) fn compare(
    graphs: &Graphs,
    old: CUgraph,
    new: CUgraph,
) -> Result<Changes, CUgraphExecUpdateResultInfo> {
    let mut changes = Changes::default();
    pair(graphs, old, new, &mut changes)?;
    Ok(changes)
}

fn refuse(result: u32, node: CUgraphNode) -> CUgraphExecUpdateResultInfo {
    CUgraphExecUpdateResultInfo { result, errorNode: node, errorFromNode: CUgraphNode::NULL }
}

fn pair(
    graphs: &Graphs,
    old_graph: CUgraph,
    new: CUgraph,
    changes: &mut Changes,
) -> Result<(), CUgraphExecUpdateResultInfo> {
    let topology = |node| refuse(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, node);
    let gone = |_: CuError| topology(CUgraphNode::NULL);
    let (old, new) = (graphs.get(old_graph).map_err(gone)?, graphs.get(new).map_err(gone)?);
    // Handles pair in the order of their making; theirs are flags and default values (cuda.h).
    if old.conditions.len() != new.conditions.len() {
        let changed = CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
        return Err(refuse(changed, CUgraphNode::NULL));
    }
    let mut pairs = old.conditions.iter().zip(&new.conditions);
    if !pairs.all(|(old, new)| old.can_become(new)) {
        // The driver's own conditions are given their defaults as the graph is made ready.
        return Err(refuse(CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED, CUgraphNode::NULL));
    }
    if !new.conditions.is_empty() {
        changes.conditions.push((old_graph, new.conditions.clone()));
    }
    let (old, new) = (&old.nodes, &new.nodes);
    if old.len() != new.len() {
        // The first node without a partner, if it is the new graph that has it.
        return Err(topology(new.iter().nth(old.len()).map_or(CUgraphNode::NULL, |(n, _)| n)));
    }
    let partner: HashMap<_, _> =
        new.iter().map(|(n, _)| n).zip(old.iter().map(|(o, _)| o)).collect();
    for ((o, old_node), (n, new_node)) in old.iter().zip(new.iter()) {
        if old_node.payload.node_type() != new_node.payload.node_type() {
            return Err(refuse(CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED, n));
        }
        let before: BTreeSet<_> = old_node.dependencies().iter().map(|e| Some(e.node)).collect();
        let after: BTreeSet<_> =
            new_node.dependencies().iter().map(|e| partner.get(&e.node).copied()).collect();
        if before != after {
            return Err(topology(n));
        }
        match (&old_node.payload, &new_node.payload) {
            (Payload::Graph(old), Payload::Graph(new)) => pair(graphs, *old, *new, changes)?,
            (Payload::Conditional(old), Payload::Conditional(new)) => {
                if !old.alike(new) {
                    return Err(refuse(CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED, n));
                }
                changes.nodes.push((o, Payload::Conditional(old.with_condition(new.condition))));
                for (old, new) in old.bodies.iter().zip(&new.bodies) {
                    pair(graphs, *old, *new, changes)?;
                }
            }
            (_, payload) => changes.nodes.push((o, payload.clone())),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::StreamOp;

    fn memset(dst: u64) -> Payload {
        let (value, element, width, height) = (0, 1, 1, 1);
        let op = StreamOp::Memset { dst, pitch: 0, value, element, width, height };
        Payload::from_op(op).unwrap()
    }

    /// A root and two nodes behind it.
    fn fork(graphs: &mut Graphs, at: u64) -> CUgraph {
        let graph = graphs.create();
        let root = graphs.add_node(graph, &[], memset(at)).unwrap();
        graphs.add_node(graph, &[root.into()], memset(at + 1)).unwrap();
        graphs.add_node(graph, &[root.into()], memset(at + 2)).unwrap();
        graph
    }

    #[test]
    fn the_same_shape_gives_new_parameters() {
        let mut graphs = Graphs::default();
        let old = fork(&mut graphs, 10);
        let new = fork(&mut graphs, 20);
        let changes = compare(&graphs, old, new).unwrap().nodes;
        let dst = |payload: &Payload| match payload {
            Payload::Memset { params, .. } => params.dst,
            _ => 0,
        };
        assert_eq!(changes.iter().map(|(_, p)| dst(p)).collect::<Vec<_>>(), [20, 21, 22]);
        assert!(changes.iter().all(|(node, _)| graphs.owner(*node) == Ok(old)));
    }

    #[test]
    fn another_shape_is_refused_at_its_node() {
        let mut graphs = Graphs::default();
        let old = fork(&mut graphs, 10);
        let new = graphs.create();
        let root = graphs.add_node(new, &[], memset(1)).unwrap();
        let second = graphs.add_node(new, &[root.into()], memset(2)).unwrap();
        let third = graphs.add_node(new, &[second.into()], memset(3)).unwrap();
        let refused = compare(&graphs, old, new).unwrap_err();
        assert_eq!(refused, refuse(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, third));
    }

    #[test]
    fn another_type_and_another_size_are_refused() {
        let mut graphs = Graphs::default();
        let old = fork(&mut graphs, 10);
        let new = fork(&mut graphs, 20);
        let extra = graphs.add_node(new, &[], memset(9)).unwrap();
        let refused = compare(&graphs, old, new).unwrap_err();
        assert_eq!(refused, refuse(CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, extra));
        graphs.remove_node(extra).unwrap();
        let root = graphs.get(new).unwrap().nodes.roots().next().unwrap();
        *graphs.payload_mut(root).unwrap() = Payload::Empty;
        let refused = compare(&graphs, old, new).unwrap_err();
        assert_eq!(refused, refuse(CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED, root));
    }
}
