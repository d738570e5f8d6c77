//! Graphs that are not ready yet. Their operations become the driver's nodes all at once, when the
//! graph that they are part of is made ready: the driver makes a conditional node's bodies with the
//! node, and the client tells of bodies first.
//!
//! The driver numbers a graph's conditions, its bodies' included, from 1 on in the order of their
//! making, and the numbers are what kernels are given. So the client counts as the driver does, and
//! each graph gets as many conditions as its numbers say.

use crate::context::Context;
use crate::driver::Driver;
use crate::graphs::Graph;
use crate::tables::Tables;
use kedge_cuda_types::CuError;
use kedge_device::Host;
use kedge_protocol::{GraphExecId, MAX_CONDITIONS, StreamOp};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Nodes and edges of one graph; beyond this a client's graph is refused.
const MAX_NODES: usize = 1 << 20;
const MAX_EDGES: usize = 1 << 23;
/// Conditional nodes inside of each other's bodies.
const MAX_DEPTH: u32 = 16;

pub(crate) type Drafts = FxHashMap<GraphExecId, Draft>;

/// What a graph will be made of.
pub(crate) struct Draft {
    pub(crate) ctx: Arc<Context>,
    ops: Vec<StreamOp>,
    /// From and to, by the operations' numbers.
    edges: Vec<(u32, u32)>,
}

impl Draft {
    pub(crate) fn new(ctx: &Arc<Context>) -> Draft {
        Draft { ctx: Arc::clone(ctx), ops: Vec::new(), edges: Vec::new() }
    }

    pub(crate) fn push(&mut self, op: StreamOp) -> Result<(), CuError> {
        if self.ops.len() == MAX_NODES {
            return Err(CuError::OUT_OF_MEMORY);
        }
        self.ops.push(op);
        Ok(())
    }

    pub(crate) fn connect(&mut self, edges: &[(u32, u32)]) -> Result<(), CuError> {
        if edges.len() > MAX_EDGES - self.edges.len() {
            return Err(CuError::OUT_OF_MEMORY);
        }
        self.edges.extend_from_slice(edges);
        Ok(())
    }
}

/// Makes the graph `exec` of its draft, and those of the bodies in it, which come back too.
///
/// # Errors
/// INVALID_HANDLE where there is no such draft, NOT_SUPPORTED where its conditions are not
/// numbered, and what the driver says.
pub(crate) fn build(
    driver: &Arc<Driver>,
    (tables, host): (&Tables, &Arc<dyn Host>),
    drafts: &mut Drafts,
    exec: GraphExecId,
    priorities: bool,
) -> Result<Vec<(GraphExecId, Graph)>, CuError> {
    let draft = drafts.remove(&exec).ok_or(CuError::INVALID_HANDLE)?;
    let mut conditions = Conditions::default();
    conditions.look(&draft, drafts, 0)?;
    let mut graph = Graph::begin(driver, &draft.ctx)?;
    for number in 1..=conditions.last {
        graph.add_condition(number, conditions.defaults.get(&number).copied())?;
    }
    let mut builder = Builder { tables, host, drafts, made: Vec::new() };
    builder.fill(&mut graph, &draft)?;
    graph.ready(priorities)?;
    let mut made = builder.made;
    made.push((exec, graph));
    Ok(made)
}

/// The conditions that a graph and the bodies in it name.
#[derive(Default)]
struct Conditions {
    last: u64,
    /// What they are when a launch begins, by their numbers.
    defaults: BTreeMap<u64, u32>,
    bodies: BTreeSet<u32>,
}

impl Conditions {
    fn look(&mut self, draft: &Draft, drafts: &Drafts, depth: u32) -> Result<(), CuError> {
        if depth > MAX_DEPTH {
            return Err(CuError::NOT_SUPPORTED);
        }
        for op in &draft.ops {
            match op {
                StreamOp::SetCondition { condition, value } => {
                    self.count(*condition)?;
                    self.defaults.insert(*condition, *value);
                }
                StreamOp::Conditional { condition, bodies, .. } => {
                    self.count(*condition)?;
                    for body in bodies.iter() {
                        let inner = drafts.get(body).ok_or(CuError::INVALID_HANDLE)?;
                        // A body is one node's.
                        if !self.bodies.insert(body.0) || inner.ctx.id != draft.ctx.id {
                            return Err(CuError::INVALID_VALUE);
                        }
                        self.look(inner, drafts, depth + 1)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// A job that began on a software device has addresses.
    fn count(&mut self, condition: u64) -> Result<(), CuError> {
        if condition == 0 || condition >= MAX_CONDITIONS {
            return Err(CuError::NOT_SUPPORTED);
        }
        self.last = self.last.max(condition);
        Ok(())
    }
}

struct Builder<'a> {
    tables: &'a Tables,
    host: &'a Arc<dyn Host>,
    drafts: &'a mut Drafts,
    /// The bodies.
    made: Vec<(GraphExecId, Graph)>,
}

impl Builder<'_> {
    fn fill(&mut self, graph: &mut Graph, draft: &Draft) -> Result<(), CuError> {
        for (number, op) in draft.ops.iter().enumerate() {
            match op {
                StreamOp::Conditional { condition, kind, bodies } => {
                    let raw = graph.add_conditional(*condition, *kind, bodies.len())?;
                    for (body, raw) in bodies.iter().zip(raw) {
                        let draft = self.drafts.remove(body).ok_or(CuError::INVALID_HANDLE)?;
                        let mut inner = graph.body(raw);
                        self.fill(&mut inner, &draft)?;
                        self.made.push((*body, inner));
                    }
                    graph.fix(op);
                }
                op => {
                    let added = self.tables.node(op, self.host).and_then(|node| graph.add(node));
                    // A graph's error does not name the node, and a restart may be refused for it.
                    added.inspect_err(|error| {
                        self.host.log(&format!("a graph's node {number}, {op:?}: {error}"));
                    })?;
                    if matches!(op, StreamOp::SetCondition { .. }) {
                        graph.fix(op);
                    }
                }
            }
        }
        graph.edges(&draft.edges)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NvidiaBackend;
    use crate::fake::Turn;
    use crate::snapshot_tests::backend;
    use crate::spare::CacheLimits;
    use kedge_device::Backend;
    use kedge_protocol::CtxId;
    use kedge_wire::List;

    const CTX: CtxId = CtxId(1);
    const BODY: GraphExecId = GraphExecId(1);
    const INNER: GraphExecId = GraphExecId(2);
    const WHOLE: GraphExecId = GraphExecId(3);

    fn fill(dst: u64) -> StreamOp {
        StreamOp::Memset { dst, pitch: 4, value: 0, element: 4, width: 1, height: 1 }
    }

    fn conditional(condition: u64, bodies: &[GraphExecId]) -> StreamOp {
        StreamOp::Conditional { condition, kind: 0, bodies: List::new(bodies.to_vec()).unwrap() }
    }

    fn draft(backend: &NvidiaBackend, exec: GraphExecId, ops: &[StreamOp]) {
        backend.graph_begin(exec, CTX).unwrap();
        ops.iter().for_each(|op| backend.graph_node(exec, op.clone()).unwrap());
    }

    /// A loop's body, in which there is another.
    fn nested(backend: &NvidiaBackend) {
        draft(backend, INNER, &[fill(64)]);
        draft(backend, BODY, &[StreamOp::Empty {}, conditional(2, &[INNER])]);
        let default = StreamOp::SetCondition { condition: 1, value: 7 };
        draft(backend, WHOLE, &[conditional(1, &[BODY]), fill(0), default]);
    }

    #[test]
    fn bodies_are_made_where_the_driver_has_them_and_conditions_by_their_numbers() {
        let (turn, driver) = Turn::begin(0);
        let backend = backend(&driver, CacheLimits::default());
        nested(&backend);
        backend.graph_ready(WHOLE, false).unwrap();
        let (conditions, bodies, nodes) =
            turn.set(|fake| (fake.conditions.clone(), fake.bodies.clone(), fake.nodes.clone()));
        assert_eq!(conditions.into_values().collect::<Vec<_>>(), [vec![(7, true), (0, false)]]);
        let within = |graph: usize| nodes.values().filter(|at| **at == graph).count();
        assert_eq!([within(bodies[&1][0].0), within(bodies[&2][0].0)], [2, 1]);
        // Nodes of bodies are updated like others; conditional nodes stay as they are.
        let disabled = || turn.set(|fake| fake.disabled.len());
        backend.graph_update(INNER, 0, StreamOp::Empty {}).unwrap();
        assert_eq!(disabled(), 1);
        backend.graph_update(INNER, 0, fill(128)).unwrap();
        assert_eq!(disabled(), 0);
        assert_eq!(backend.graph_update(BODY, 1, conditional(2, &[INNER])), Ok(()));
        let other = backend.graph_update(BODY, 1, conditional(1, &[INNER]));
        assert_eq!(other, Err(CuError::NOT_SUPPORTED));
        let default = StreamOp::SetCondition { condition: 1, value: 8 };
        assert_eq!(backend.graph_update(WHOLE, 2, default), Err(CuError::NOT_SUPPORTED));
        assert_eq!(backend.graph_update(WHOLE, 2, StreamOp::Empty {}), Ok(()));
        // They go with the graph, and then there is nothing to update.
        backend.graph_destroy(WHOLE).unwrap();
        assert_eq!(turn.set(|fake| fake.ended), 1);
        let gone = backend.graph_update(INNER, 0, fill(0));
        assert_eq!(gone, Err(CuError::INVALID_HANDLE));
        backend.graph_destroy(INNER).unwrap();
        assert_eq!(turn.set(|fake| fake.ended), 1);
    }

    #[test]
    fn what_cannot_be_a_body_or_a_condition_is_refused() {
        let (_turn, driver) = Turn::begin(0);
        let backend = backend(&driver, CacheLimits::default());
        let refused = |ops: &[StreamOp]| {
            draft(&backend, WHOLE, ops);
            backend.graph_ready(WHOLE, false).unwrap_err()
        };
        let body = |ops: &[StreamOp]| draft(&backend, BODY, ops);
        assert_eq!(refused(&[conditional(1, &[BODY])]), CuError::INVALID_HANDLE);
        assert_eq!(refused(&[conditional(1, &[WHOLE])]), CuError::INVALID_HANDLE);
        body(&[conditional(1, &[BODY])]);
        assert_eq!(refused(&[conditional(1, &[BODY])]), CuError::INVALID_VALUE, "its own body");
        body(&[]);
        assert_eq!(refused(&[conditional(1, &[BODY, BODY])]), CuError::INVALID_VALUE);
        for condition in [0, MAX_CONDITIONS, 0x3000_0000_0000] {
            body(&[]);
            assert_eq!(refused(&[conditional(condition, &[BODY])]), CuError::NOT_SUPPORTED);
            let default = StreamOp::SetCondition { condition, value: 0 };
            assert_eq!(refused(&[default]), CuError::NOT_SUPPORTED);
        }
        body(&[StreamOp::HostFn { token: 1 }]);
        assert_eq!(refused(&[conditional(1, &[BODY])]), CuError::NOT_SUPPORTED, "the host's work");
    }

    #[test]
    fn nesting_has_an_end() {
        let (_turn, driver) = Turn::begin(0);
        let backend = backend(&driver, CacheLimits::default());
        let mut inner: Vec<GraphExecId> = Vec::new();
        for level in 0..=MAX_DEPTH + 1 {
            let exec = GraphExecId(100 + level);
            let ops: Vec<_> = inner.iter().map(|body| conditional(1, &[*body])).collect();
            draft(&backend, exec, &ops);
            inner = vec![exec];
        }
        assert_eq!(backend.graph_ready(inner[0], false), Err(CuError::NOT_SUPPORTED));
    }
}
