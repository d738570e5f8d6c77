//! Instantiated graphs: operations and their order, launched as a whole.

use super::tasks::{Task, lock};
use kedge_cuda_types::CuError;
use kedge_protocol::{CtxId, GraphExecId, MAX_CONDITIONS, StreamOp};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Nodes of one graph; beyond this a client's graph is refused.
const MAX_NODES: usize = 1 << 20;
const MAX_EDGES: usize = 1 << 23;
/// Conditional nodes inside of each other's bodies.
const MAX_DEPTH: u32 = 16;

/// A graph, and the conditional nodes whose body it is: they may need it when its name is gone.
pub(super) type Shared = Arc<Mutex<Graph>>;

pub(super) struct Graph {
    pub(super) ctx: CtxId,
    pub(super) nodes: Vec<StreamOp>,
    edges: Vec<(u32, u32)>,
    /// What each node runs after, by node; made by `ready`.
    plan: Option<Plan>,
    /// The end of the latest launch: a graph never runs twice at once.
    pub(super) last: Option<Arc<Task>>,
    /// Bodies of conditional nodes. They were closed before they came here, so none holds its
    /// holder.
    pub(super) bodies: HashMap<GraphExecId, Shared>,
    depth: u32,
}

/// The order of a graph's nodes.
pub(super) struct Plan {
    /// A topological order.
    pub(super) order: Vec<u32>,
    pub(super) predecessors: Vec<Vec<u32>>,
    /// Nodes that nothing runs after.
    pub(super) leaves: Vec<u32>,
}

impl Graph {
    pub(super) fn new(ctx: CtxId) -> Self {
        let (nodes, edges, bodies) = (Vec::new(), Vec::new(), HashMap::new());
        Self { ctx, nodes, edges, plan: None, last: None, bodies, depth: 0 }
    }

    /// Takes over the graph that a conditional node, to be added next, has as a body, and closes
    /// it.
    ///
    /// # Errors
    /// As for [`Graph::ready`]; NOT_SUPPORTED where conditional nodes nest too deep.
    pub(super) fn adopt(&mut self, exec: GraphExecId, body: Shared) -> Result<(), CuError> {
        let depth = {
            let mut body = lock(&body);
            // Images of older versions have bodies that are ready.
            if body.plan.is_none() {
                body.ready()?;
            }
            body.depth + 1
        };
        if depth > MAX_DEPTH {
            return Err(CuError::NOT_SUPPORTED);
        }
        self.depth = self.depth.max(depth);
        self.bodies.insert(exec, body);
        Ok(())
    }

    pub(super) fn add_node(&mut self, op: StreamOp) -> Result<(), CuError> {
        self.check_open()?;
        check_node(&op)?;
        if self.nodes.len() == MAX_NODES {
            return Err(CuError::OUT_OF_MEMORY);
        }
        self.nodes.push(op);
        Ok(())
    }

    pub(super) fn add_edges(&mut self, edges: &[(u32, u32)]) -> Result<(), CuError> {
        self.check_open()?;
        if edges.len() > MAX_EDGES - self.edges.len() {
            return Err(CuError::OUT_OF_MEMORY);
        }
        self.edges.extend_from_slice(edges);
        Ok(())
    }

    fn check_open(&self) -> Result<(), CuError> {
        if self.plan.is_some() { Err(CuError::ILLEGAL_STATE) } else { Ok(()) }
    }

    /// Orders the nodes.
    ///
    /// # Errors
    /// INVALID_VALUE where an edge names no node, or the edges form a cycle.
    pub(super) fn ready(&mut self) -> Result<(), CuError> {
        self.check_open()?;
        self.plan = Some(Plan::new(self.nodes.len(), &self.edges)?);
        self.edges = Vec::new();
        Ok(())
    }

    /// # Errors
    /// NOT_SUPPORTED for a conditional node that is to have other bodies, or to use them otherwise:
    /// only the condition can change.
    pub(super) fn update(&mut self, node: u32, op: StreamOp) -> Result<(), CuError> {
        check_node(&op)?;
        let node = self.nodes.get_mut(node as usize).ok_or(CuError::INVALID_VALUE)?;
        if let StreamOp::Conditional { kind, bodies, .. } = &op
            && !matches!(node, StreamOp::Conditional { kind: k, bodies: b, .. } if k == kind && b == bodies)
        {
            return Err(CuError::NOT_SUPPORTED);
        }
        *node = op;
        Ok(())
    }

    pub(super) fn plan(&self) -> Result<&Plan, CuError> {
        self.plan.as_ref().ok_or(CuError::ILLEGAL_STATE)
    }
}

/// Child graphs arrive flattened, so a launch inside of a graph is nothing that a client sends.
/// Numbered conditions are those of a job that began on a GPU: the kernels' parameters have the
/// numbers.
fn check_node(op: &StreamOp) -> Result<(), CuError> {
    match op {
        StreamOp::GraphLaunch { .. } | StreamOp::SetCondition { .. } => Err(CuError::NOT_SUPPORTED),
        StreamOp::Conditional { condition, .. } if *condition < MAX_CONDITIONS => {
            Err(CuError::NOT_SUPPORTED)
        }
        _ => Ok(()),
    }
}

impl Plan {
    fn new(nodes: usize, edges: &[(u32, u32)]) -> Result<Self, CuError> {
        let mut predecessors = vec![Vec::new(); nodes];
        let mut successors = vec![Vec::new(); nodes];
        for &(from, to) in edges {
            if from as usize >= nodes || to as usize >= nodes {
                return Err(CuError::INVALID_VALUE);
            }
            predecessors[to as usize].push(from);
            successors[from as usize].push(to);
        }
        let mut waiting: Vec<usize> = predecessors.iter().map(Vec::len).collect();
        let all = 0..nodes as u32;
        let mut order: Vec<u32> = all.clone().filter(|node| waiting[*node as usize] == 0).collect();
        let mut next = 0;
        while let Some(&node) = order.get(next) {
            next += 1;
            for &successor in &successors[node as usize] {
                waiting[successor as usize] -= 1;
                if waiting[successor as usize] == 0 {
                    order.push(successor);
                }
            }
        }
        if order.len() != nodes {
            return Err(CuError::INVALID_VALUE);
        }
        let leaves = all.filter(|node| successors[*node as usize].is_empty()).collect();
        Ok(Self { order, predecessors, leaves })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_wire::List;

    #[test]
    fn a_conditional_node_gets_another_condition_and_nothing_else() {
        let node = |condition, kind, body: u32| {
            let bodies = List::new(vec![GraphExecId(body)]).unwrap();
            StreamOp::Conditional { condition, kind, bodies }
        };
        let mut graph = Graph::new(CtxId(1));
        let body = Arc::new(Mutex::new(Graph::new(CtxId(1))));
        graph.adopt(GraphExecId(7), Arc::clone(&body)).unwrap();
        assert_eq!(lock(&body).add_node(StreamOp::Empty {}), Err(CuError::ILLEGAL_STATE));
        graph.adopt(GraphExecId(7), body).unwrap();
        graph.add_node(node(0x1000, 0, 7)).unwrap();
        graph.add_node(StreamOp::Empty {}).unwrap();
        graph.ready().unwrap();
        assert_eq!(graph.update(0, node(0x2000, 0, 7)), Ok(()));
        assert_eq!(graph.nodes[0], node(0x2000, 0, 7));
        for (place, op) in
            [(0, node(0x2000, 1, 7)), (0, node(0x2000, 0, 8)), (1, node(0x2000, 0, 7))]
        {
            assert_eq!(graph.update(place, op), Err(CuError::NOT_SUPPORTED));
        }
    }

    #[test]
    fn conditions_of_a_gpu_are_refused() {
        let mut graph = Graph::new(CtxId(1));
        let bodies = List::new(vec![]).unwrap();
        let condition = MAX_CONDITIONS - 1;
        let numbered = StreamOp::Conditional { condition, kind: 0, bodies };
        for op in [numbered, StreamOp::SetCondition { condition: 1, value: 1 }] {
            assert_eq!(graph.add_node(op), Err(CuError::NOT_SUPPORTED));
        }
    }

    #[test]
    fn plans_follow_the_edges() {
        let plan = Plan::new(4, &[(3, 1), (1, 0), (3, 2)]).unwrap();
        let place = |node| plan.order.iter().position(|n| *n == node).unwrap();
        assert!(place(3) < place(1) && place(1) < place(0) && place(3) < place(2));
        assert_eq!(plan.leaves, [0, 2]);
        assert_eq!(plan.predecessors[1], [3]);
    }

    #[test]
    fn cycles_and_unknown_nodes_are_refused() {
        assert_eq!(Plan::new(2, &[(0, 1), (1, 0)]).err(), Some(CuError::INVALID_VALUE));
        assert_eq!(Plan::new(2, &[(0, 2)]).err(), Some(CuError::INVALID_VALUE));
        assert_eq!(Plan::new(1, &[(0, 0)]).err(), Some(CuError::INVALID_VALUE));
    }
}
