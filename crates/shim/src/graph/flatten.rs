//! From a graph to what the proxy executes: numbered operations and the edges between them, child
//! graphs dissolved.

use super::conditional::{Condition, Conditional};
use super::world::Graphs;
use crate::entry;
use crate::graph::Payload;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUgraph, CUgraphNode};
use kedge_protocol::{GraphExecId, MAX_CONDITIONS, StreamOp};
use kedge_wire::List;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// An executable graph's operations. A node's operations run one after the other.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Flat {
    pub(crate) ops: Vec<StreamOp>,
    /// (from, to), as numbers of operations.
    pub(crate) edges: Vec<(u32, u32)>,
    /// Which operations a node has become; child graphs' nodes included.
    pub(crate) places: HashMap<CUgraphNode, Range<u32>>,
    /// The graph and those in it, and the operations that begin with each one's conditions, one for
    /// each.
    pub(crate) conditions: Vec<(CUgraph, Range<u32>)>,
    /// Bodies of conditional nodes, whose operations name them by their place in here until they
    /// are made.
    pub(crate) bodies: Vec<Flat>,
}

/// Why a graph cannot be executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unfit {
    pub(crate) node: CUgraphNode,
    pub(crate) error: CuError,
    /// The dependencies form a cycle.
    pub(crate) cycle: bool,
}

/// Where a node begins and where it ends.
#[derive(Clone, Copy)]
struct Ends {
    first: u32,
    last: u32,
}

pub(crate) fn flatten(graphs: &Graphs, graph: CUgraph) -> Result<Flat, Unfit> {
    let mut flat = Flat::default();
    let inner = flat.add_graph(graphs, graph)?;
    let parts = graphs.parts(graph);
    check_numbered(graphs, &parts)?;
    flat.begin_with_conditions(graphs, &parts, &inner);
    Ok(flat)
}

impl Flat {
    /// Adds a graph's nodes and edges; the ends of all nodes come back with whether something
    /// inside the graph precedes or follows them.
    fn add_graph(&mut self, graphs: &Graphs, graph: CUgraph) -> Result<Vec<Inner>, Unfit> {
        let missing = |error| Unfit { node: CUgraphNode::NULL, error, cycle: false };
        let nodes = &graphs.get(graph).map_err(missing)?.nodes;
        let order = nodes.topological_order().map_err(|node| Unfit {
            node,
            error: CuError::INVALID_VALUE,
            cycle: true,
        })?;
        let mut ends: HashMap<CUgraphNode, Ends> = HashMap::new();
        let mut inner = Vec::new();
        for handle in order {
            let unfit = |error| Unfit { node: handle, error, cycle: false };
            let node = nodes.get(handle).map_err(unfit)?;
            let here = self.add_node(graphs, handle, &node.payload)?;
            for edge in node.dependencies() {
                if let Some(from) = ends.get(&edge.node) {
                    self.edges.push((from.last, here.first));
                }
            }
            if node.dependencies().is_empty() && matches!(node.payload, Payload::Conditional(_)) {
                // Hardware begins a graph's roots in their order, and programs rely on it: a kernel
                // that sets the condition is often a root, too.
                let roots = inner.iter().filter(|earlier: &&Inner| earlier.root);
                self.edges.extend(roots.map(|earlier| (earlier.ends.last, here.first)));
            }
            ends.insert(handle, here);
            let (root, leaf) = (node.dependencies().is_empty(), node.dependents().is_empty());
            inner.push(Inner { ends: here, root, leaf });
        }
        Ok(inner)
    }

    fn add_node(
        &mut self,
        graphs: &Graphs,
        node: CUgraphNode,
        payload: &Payload,
    ) -> Result<Ends, Unfit> {
        let unfit = |error| Unfit { node, error, cycle: false };
        if let Payload::Graph(child) = payload {
            return self.add_child(graphs, *child);
        }
        let ops = match payload {
            Payload::Conditional(node) => vec![self.add_bodies(graphs, node)?],
            _ => payload.ops().map_err(unfit)?,
        };
        let first = self.ops.len() as u32;
        self.ops.extend(ops);
        let end = self.ops.len() as u32;
        self.edges.extend((first + 1..end).map(|op| (op - 1, op)));
        self.places.insert(node, first..end);
        Ok(Ends { first, last: end - 1 })
    }

    /// A child graph stands between two empty operations, so that its m roots and n leaves need
    /// m + n edges, whatever it depends on.
    fn add_child(&mut self, graphs: &Graphs, child: CUgraph) -> Result<Ends, Unfit> {
        let first = self.push_empty();
        let inner = self.add_graph(graphs, child)?;
        let last = self.push_empty();
        if inner.is_empty() {
            self.edges.push((first, last));
        }
        for node in inner {
            if node.root {
                self.edges.push((first, node.ends.first));
            }
            if node.leaf {
                self.edges.push((node.ends.last, last));
            }
        }
        Ok(Ends { first, last })
    }

    /// A conditional node's operation; its bodies are graphs of their own.
    fn add_bodies(&mut self, graphs: &Graphs, node: &Conditional) -> Result<StreamOp, Unfit> {
        let mut bodies = Vec::with_capacity(node.bodies.len());
        for &body in &node.bodies {
            check_body(graphs, body, node.condition < MAX_CONDITIONS)?;
            bodies.push(GraphExecId(self.bodies.len() as u32));
            let mut flat = Flat::default();
            flat.add_graph(graphs, body)?;
            self.bodies.push(flat);
        }
        let too_many =
            |_| Unfit { node: CUgraphNode::NULL, error: CuError::INVALID_VALUE, cycle: false };
        let bodies = List::new(bodies).map_err(too_many)?;
        Ok(StreamOp::Conditional { condition: node.condition, kind: node.kind, bodies })
    }

    /// Before anything else, and once a launch, the conditions of the graph and of those in it get
    /// their defaults; however often a body then runs (seen with driver 580).
    fn begin_with_conditions(&mut self, graphs: &Graphs, parts: &[CUgraph], inner: &[Inner]) {
        for &part in parts {
            let first = self.ops.len() as u32;
            for condition in conditions(graphs, part) {
                let at = self.ops.len() as u32;
                self.ops.push(condition.reset());
                let roots = inner.iter().filter(|node| node.root);
                self.edges.extend(roots.map(|node| (at, node.ends.first)));
            }
            self.conditions.push((part, first..self.ops.len() as u32));
        }
    }

    fn push_empty(&mut self) -> u32 {
        self.ops.push(StreamOp::Empty {});
        self.ops.len() as u32 - 1
    }
}

fn conditions(graphs: &Graphs, graph: CUgraph) -> &[Arc<Condition>] {
    graphs.get(graph).map_or(&[][..], |graph| &graph.conditions)
}

/// Each of the driver's own conditions must be one node's, or the driver makes nothing of the
/// graph.
fn check_numbered(graphs: &Graphs, parts: &[CUgraph]) -> Result<(), Unfit> {
    let nodes = parts.iter().filter_map(|part| graphs.get(*part).ok()).flat_map(|g| g.nodes.iter());
    let used: Vec<u64> = nodes
        .filter_map(|(_, node)| match &node.payload {
            Payload::Conditional(node) => Some(node.condition),
            _ => None,
        })
        .collect();
    let all = parts.iter().flat_map(|part| conditions(graphs, *part));
    let mut numbered = all.filter(|condition| condition.is_numbered());
    let nodes_of = |condition: &Condition| used.iter().filter(|u| **u == condition.handle).count();
    if numbered.all(|condition| nodes_of(condition) == 1) {
        return Ok(());
    }
    Err(Unfit { node: CUgraphNode::NULL, error: CuError::INVALID_VALUE, cycle: false })
}

/// What a body may not have is refused at the node, its child graphs' included; where the driver
/// makes it, so is what kedge needs the host for.
fn check_body(graphs: &Graphs, body: CUgraph, by_driver: bool) -> Result<(), Unfit> {
    let missing = |error| Unfit { node: CUgraphNode::NULL, error, cycle: false };
    for (handle, node) in graphs.get(body).map_err(missing)?.nodes.iter() {
        if !node.payload.fits_in_body() || (by_driver && node.payload.is_private_copy()) {
            let error = entry::not_supported("such a node in a conditional node's body");
            return Err(Unfit { node: handle, error, cycle: false });
        }
        if let Payload::Graph(child) = node.payload {
            check_body(graphs, child, by_driver)?;
        }
    }
    Ok(())
}

/// A node of a graph that is being added.
struct Inner {
    ends: Ends,
    root: bool,
    leaf: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_cuda_types::graph::{
        CU_STREAM_MEM_OP_WRITE_VALUE_32, CUgraphEdgeData, CUstreamBatchMemOpParams,
    };
    use kedge_protocol::{Copy3d, Place, Shape};

    fn memset(dst: u64) -> Payload {
        let (value, element, width, height) = (0, 1, 1, 1);
        let op = StreamOp::Memset { dst, pitch: 0, value, element, width, height };
        Payload::from_op(op).unwrap()
    }

    fn dst(op: &StreamOp) -> u64 {
        match op {
            StreamOp::Memset { dst, .. } => *dst,
            StreamOp::WriteValue { value, .. } => *value,
            _ => 0,
        }
    }

    /// What must be over before what, as pairs of destinations, empty operations seen through.
    fn orders(flat: &Flat) -> Vec<(u64, u64)> {
        let reaches = |from: u32| {
            let mut seen = vec![from];
            let mut at = 0;
            while let Some(&op) = seen.get(at) {
                let next = flat.edges.iter().filter(|(a, _)| *a == op).map(|(_, b)| *b);
                let new: Vec<u32> = next.filter(|b| !seen.contains(b)).collect();
                seen.extend(new);
                at += 1;
            }
            seen.into_iter().skip(1).map(|op| dst(&flat.ops[op as usize])).collect::<Vec<_>>()
        };
        let mut all = Vec::new();
        for (index, op) in flat.ops.iter().enumerate().filter(|(_, op)| dst(op) != 0) {
            let after = reaches(index as u32).into_iter().filter(|&d| d != 0);
            all.extend(after.map(|d| (dst(op), d)));
        }
        all.sort_unstable();
        all
    }

    #[test]
    fn a_child_graph_keeps_its_place() {
        let mut graphs = Graphs::default();
        let child = graphs.create();
        let two = graphs.add_node(child, &[], memset(2)).unwrap();
        graphs.add_node(child, &[two.into()], memset(3)).unwrap();
        graphs.add_node(child, &[two.into()], memset(4)).unwrap();
        let graph = graphs.create();
        let one = graphs.add_node(graph, &[], memset(1)).unwrap();
        let middle = graphs.add_node(graph, &[one.into()], Payload::Graph(child)).unwrap();
        graphs.add_node(graph, &[middle.into()], memset(5)).unwrap();
        let flat = flatten(&graphs, graph).unwrap();
        let expected =
            [(1, 2), (1, 3), (1, 4), (1, 5), (2, 3), (2, 4), (2, 5), (3, 5), (4, 5)].to_vec();
        assert_eq!(orders(&flat), expected);
        assert!(flat.places.contains_key(&two) && !flat.places.contains_key(&middle));
    }

    #[test]
    fn an_empty_child_still_orders() {
        let mut graphs = Graphs::default();
        let (graph, child) = (graphs.create(), graphs.create());
        let one = graphs.add_node(graph, &[], memset(1)).unwrap();
        let middle = graphs.add_node(graph, &[one.into()], Payload::Graph(child)).unwrap();
        graphs.add_node(graph, &[middle.into()], memset(2)).unwrap();
        assert_eq!(orders(&flatten(&graphs, graph).unwrap()), [(1, 2)]);
    }

    #[test]
    fn bodies_are_graphs_of_their_own() {
        let mut graphs = Graphs::default();
        let graph = graphs.create();
        let body = graphs.create_body(graph).unwrap();
        graphs.add_node(graph, &[], memset(1)).unwrap();
        let bodies = Box::new([body]);
        let node = Payload::Conditional(Conditional { condition: 64, kind: 1, bodies });
        let node = graphs.add_node(graph, &[], node).unwrap();
        graphs.add_node(graph, &[node.into()], memset(2)).unwrap();
        let inner = graphs.add_node(body, &[], memset(3)).unwrap();
        let flat = flatten(&graphs, graph).unwrap();
        let conditional = flat.places[&node].start;
        assert!(flat.edges.contains(&(0, conditional)), "after the root that is older");
        assert!(matches!(
            &flat.ops[conditional as usize],
            StreamOp::Conditional { condition: 64, kind: 1, bodies } if **bodies == [GraphExecId(0)]
        ));
        assert_eq!(flat.bodies[0].places[&inner], 0..1);
        let shape = Shape { width: 4, height: 1, depth: 1 };
        let src = Place::Client { addr: 64, pitch: 4, slice: 4 };
        let dst = Place::Mapped { addr: 1 << 40, pitch: 4, slice: 4 };
        let copy = StreamOp::Copy { copy: Copy3d::new(src, dst, shape) };
        let copy = graphs.add_node(body, &[], Payload::from_op(copy).unwrap()).unwrap();
        let unfit = flatten(&graphs, graph).unwrap_err();
        assert_eq!((unfit.node, unfit.error), (copy, CuError::NOT_SUPPORTED), "by the driver");
        graphs.remove_node(copy).unwrap();
        graphs.add_node(body, &[], Payload::MemFree { addr: 64, size: 4 }).unwrap();
        assert_eq!(flatten(&graphs, graph).unwrap_err().error, CuError::NOT_SUPPORTED);
        assert_eq!(graphs.destroy(graph).unwrap().len(), 2);
    }

    #[test]
    fn conditions_get_their_defaults_once_a_launch_and_the_driver_s_are_each_one_node_s() {
        let mut graphs = Graphs::default();
        let graph = graphs.create();
        let body = graphs.create_body(graph).unwrap();
        let inner = graphs.create_body(body).unwrap();
        let know = |graphs: &mut Graphs, graph: CUgraph, handle, default| {
            let condition = Arc::new(Condition::new(handle, default));
            graphs.get_mut(graph).unwrap().conditions.push(condition);
        };
        know(&mut graphs, graph, 1, Some(7));
        know(&mut graphs, body, 2, Some(8));
        let node = |condition, body| {
            Payload::Conditional(Conditional { condition, kind: 1, bodies: Box::new([body]) })
        };
        graphs.add_node(graph, &[], node(1, body)).unwrap();
        let unused = flatten(&graphs, graph).unwrap_err();
        assert_eq!(unused.error, CuError::INVALID_VALUE);
        graphs.add_node(body, &[], node(2, inner)).unwrap();
        let flat = flatten(&graphs, graph).unwrap();
        let set = |condition, value| StreamOp::SetCondition { condition, value };
        assert_eq!(flat.ops[1..], [set(1, 7), set(2, 8)]);
        assert_eq!(flat.edges, [(1, 0), (2, 0)]);
        assert_eq!(flat.conditions, [(graph, 1..2), (body, 2..3), (inner, 3..3)]);
        assert_eq!(flat.bodies[0].ops.len(), 1);
        let other = graphs.create_body(graph).unwrap();
        graphs.add_node(graph, &[], node(1, other)).unwrap();
        assert_eq!(flatten(&graphs, graph).unwrap_err().error, CuError::INVALID_VALUE, "of two");
    }

    #[test]
    fn a_batch_runs_in_order() {
        let mut graphs = Graphs::default();
        let graph = graphs.create();
        let write = |value| CUstreamBatchMemOpParams {
            operation: CU_STREAM_MEM_OP_WRITE_VALUE_32,
            address: 64,
            value,
            ..Default::default()
        };
        let batch = Payload::MemOps(vec![write(1), write(2)]);
        let node = graphs.add_node(graph, &[], batch).unwrap();
        graphs.add_node(graph, &[node.into()], memset(3)).unwrap();
        let flat = flatten(&graphs, graph).unwrap();
        assert_eq!(orders(&flat), [(1, 2), (1, 3), (2, 3)]);
        assert_eq!(flat.places[&node], 0..2);
    }

    #[test]
    fn a_cycle_names_a_node_of_it() {
        let mut graphs = Graphs::default();
        let graph = graphs.create();
        let a = graphs.add_node(graph, &[], memset(1)).unwrap();
        let b = graphs.add_node(graph, &[a.into()], memset(2)).unwrap();
        let nodes = &mut graphs.get_mut(graph).unwrap().nodes;
        nodes.connect(b, a, CUgraphEdgeData::default()).unwrap();
        let unfit = flatten(&graphs, graph).unwrap_err();
        assert!(unfit.cycle && (unfit.node == a || unfit.node == b));
    }
}
