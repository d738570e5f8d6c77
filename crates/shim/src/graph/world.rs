//! Every graph of the process, its nodes' owners, and child graphs.

use super::conditional::Condition;
use super::edges::{Edge, Nodes};
use super::payload::Payload;
use super::user_object::UserObjects;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUgraph, CUgraphNode};
use kedge_protocol::MAX_CONDITIONS;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

/// Handles look like aligned addresses, and a node's only grow: their order is that of creation.
const FIRST_GRAPH: usize = 12 << 42;
const FIRST_NODE: usize = 13 << 42;
const STEP: usize = 16;

#[derive(Debug, Default)]
pub(crate) struct Graph {
    pub(crate) nodes: Nodes<Payload>,
    /// A child graph belongs to a node and goes with it.
    pub(crate) owned: bool,
    pub(crate) user_objects: UserObjects,
    /// What its conditional nodes look at.
    pub(crate) conditions: Vec<Arc<Condition>>,
    /// Of a conditional node's body: the graph that is nobody's body, in which it is.
    root: Option<CUgraph>,
    /// How many conditions of it and of the bodies in it were numbered.
    numbered: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Graphs {
    graphs: HashMap<CUgraph, Graph>,
    owner: HashMap<CUgraphNode, CUgraph>,
    graphs_made: usize,
    nodes_made: usize,
}

static GRAPHS: Mutex<Option<Graphs>> = Mutex::new(None);

/// Works on the graphs. Nothing inside may call the program or wait.
pub(crate) fn with<T>(f: impl FnOnce(&mut Graphs) -> T) -> T {
    let mut guard = GRAPHS.lock().unwrap_or_else(PoisonError::into_inner);
    f(guard.get_or_insert_with(Graphs::default))
}

/// As [`with`], for what can fail.
pub(crate) fn ask<T>(f: impl FnOnce(&mut Graphs) -> Result<T, CuError>) -> Result<T, CuError> {
    with(f)
}

impl Graphs {
    pub(crate) fn create(&mut self) -> CUgraph {
        self.insert(Graph::default())
    }

    /// A new empty graph that belongs to a conditional node of `graph`.
    pub(crate) fn create_body(&mut self, graph: CUgraph) -> Result<CUgraph, CuError> {
        let root = Some(self.get(graph)?.root.unwrap_or(graph));
        Ok(self.insert(Graph { owned: true, root, ..Graph::default() }))
    }

    /// The number of the next condition of a graph, or of the one in which it is a body.
    ///
    /// # Errors
    /// OUT_OF_MEMORY where there can be no more.
    pub(crate) fn next_condition(&mut self, graph: CUgraph) -> Result<u64, CuError> {
        let root = self.get(graph)?.root.unwrap_or(graph);
        let root = self.get_mut(root)?;
        let next = root.numbered + 1;
        if next >= MAX_CONDITIONS {
            return Err(CuError::OUT_OF_MEMORY);
        }
        root.numbered = next;
        Ok(next)
    }

    fn insert(&mut self, graph: Graph) -> CUgraph {
        self.graphs_made += 1;
        let handle = CUgraph(FIRST_GRAPH + STEP * self.graphs_made);
        self.graphs.insert(handle, graph);
        handle
    }

    pub(crate) fn get(&self, graph: CUgraph) -> Result<&Graph, CuError> {
        self.graphs.get(&graph).ok_or(CuError::INVALID_VALUE)
    }

    pub(crate) fn get_mut(&mut self, graph: CUgraph) -> Result<&mut Graph, CuError> {
        self.graphs.get_mut(&graph).ok_or(CuError::INVALID_VALUE)
    }

    /// The graph that a node belongs to.
    pub(crate) fn owner(&self, node: CUgraphNode) -> Result<CUgraph, CuError> {
        self.owner.get(&node).copied().ok_or(CuError::INVALID_VALUE)
    }

    pub(crate) fn payload(&self, node: CUgraphNode) -> Result<&Payload, CuError> {
        Ok(&self.get(self.owner(node)?)?.nodes.get(node)?.payload)
    }

    pub(crate) fn payload_mut(&mut self, node: CUgraphNode) -> Result<&mut Payload, CuError> {
        let owner = self.owner(node)?;
        self.get_mut(owner)?.nodes.payload_mut(node)
    }

    pub(crate) fn add_node(
        &mut self,
        graph: CUgraph,
        dependencies: &[Edge],
        payload: Payload,
    ) -> Result<CUgraphNode, CuError> {
        let node = CUgraphNode(FIRST_NODE + STEP * (self.nodes_made + 1));
        self.get_mut(graph)?.nodes.insert(node, payload, dependencies)?;
        self.nodes_made += 1;
        self.owner.insert(node, graph);
        Ok(node)
    }

    /// Removes a node; a child graph goes with it. What it held is returned, to be dropped outside
    /// of the lock.
    pub(crate) fn remove_node(&mut self, node: CUgraphNode) -> Result<Vec<Graph>, CuError> {
        let owner = self.owner(node)?;
        let payload = self.get_mut(owner)?.nodes.remove(node)?;
        self.owner.remove(&node);
        Ok(payload.children().iter().flat_map(|child| self.discard(*child)).collect())
    }

    /// Destroys a graph that is nobody's child.
    pub(crate) fn destroy(&mut self, graph: CUgraph) -> Result<Vec<Graph>, CuError> {
        if self.get(graph)?.owned {
            return Err(CuError::INVALID_VALUE);
        }
        Ok(self.discard(graph))
    }

    /// Destroys a graph whoever owns it.
    pub(crate) fn discard(&mut self, graph: CUgraph) -> Vec<Graph> {
        let mut removed = Vec::new();
        self.take(graph, &mut removed);
        removed
    }

    /// Whether a graph, or a child of it, allocates or frees memory.
    pub(crate) fn allocates(&self, graph: CUgraph) -> bool {
        let Some(graph) = self.graphs.get(&graph) else { return false };
        graph.nodes.iter().any(|(_, node)| match node.payload {
            Payload::MemAlloc(_) | Payload::MemFree { .. } => true,
            ref payload => payload.children().iter().any(|child| self.allocates(*child)),
        })
    }

    /// A graph and those in its nodes, at whatever depth.
    pub(crate) fn parts(&self, graph: CUgraph) -> Vec<CUgraph> {
        let nodes = self.graphs.get(&graph).into_iter().flat_map(|graph| graph.nodes.iter());
        let inner = nodes.flat_map(|(_, node)| node.payload.children());
        let inner: Vec<_> = inner.flat_map(|child| self.parts(*child)).collect();
        [vec![graph], inner].concat()
    }

    fn take(&mut self, graph: CUgraph, removed: &mut Vec<Graph>) {
        let Some(graph) = self.graphs.remove(&graph) else { return };
        for (handle, node) in graph.nodes.iter() {
            self.owner.remove(&handle);
            for child in node.payload.children() {
                self.take(*child, removed);
            }
        }
        removed.push(graph);
    }

    /// A copy of a graph, its children included; each node remembers its original.
    pub(crate) fn duplicate(&mut self, graph: CUgraph, owned: bool) -> Result<CUgraph, CuError> {
        let original = self.get(graph)?;
        let user_objects = original.user_objects.clone();
        let conditions = original.conditions.clone();
        let mut made = self.nodes_made;
        let nodes = original.nodes.renamed(|| {
            made += 1;
            CUgraphNode(FIRST_NODE + STEP * made)
        });
        self.nodes_made = made;
        let handles: Vec<_> = nodes.iter().map(|(handle, _)| handle).collect();
        let copy = Graph { nodes, owned, user_objects, conditions, ..Graph::default() };
        let copy = self.insert(copy);
        for handle in handles {
            self.owner.insert(handle, copy);
            let children = self.payload(handle)?.children().to_vec();
            if children.is_empty() {
                continue;
            }
            let copies = children.into_iter().map(|child| self.duplicate(child, true));
            let copies = copies.collect::<Result<Box<[_]>, _>>()?;
            match self.payload_mut(handle)? {
                Payload::Graph(child) => *child = copies[0],
                Payload::Conditional(conditional) => conditional.bodies = copies,
                _ => {}
            }
        }
        Ok(copy)
    }

    /// The node of `copy`, or of one of its children, that was made of `original`.
    pub(crate) fn find_copy(
        &self,
        original: CUgraphNode,
        copy: CUgraph,
    ) -> Result<CUgraphNode, CuError> {
        self.search(original, copy).ok_or(CuError::INVALID_VALUE)
    }

    fn search(&self, original: CUgraphNode, graph: CUgraph) -> Option<CUgraphNode> {
        let graph = self.graphs.get(&graph)?;
        let direct = graph.nodes.iter().find(|(_, node)| node.origin == Some(original));
        if let Some((handle, _)) = direct {
            return Some(handle);
        }
        let mut children = graph.nodes.iter().flat_map(|(_, node)| node.payload.children());
        children.find_map(|child| self.search(original, *child))
    }

    /// Every original of a node of `copy`, or of a child of it, with the node that it has become.
    pub(crate) fn copies(&self, copy: CUgraph) -> HashMap<CUgraphNode, CUgraphNode> {
        let mut found = HashMap::new();
        self.add_copies(copy, &mut found);
        found
    }

    fn add_copies(&self, copy: CUgraph, found: &mut HashMap<CUgraphNode, CUgraphNode>) {
        let Some(graph) = self.graphs.get(&copy) else { return };
        for (handle, node) in graph.nodes.iter() {
            found.extend(node.origin.map(|origin| (origin, handle)));
            for child in node.payload.children() {
                self.add_copies(*child, found);
            }
        }
    }

    /// Every node that `seeds` depend on, themselves included.
    pub(crate) fn ancestors(
        &self,
        graph: CUgraph,
        seeds: Vec<CUgraphNode>,
    ) -> HashSet<CUgraphNode> {
        self.graphs.get(&graph).map_or_else(HashSet::new, |graph| graph.nodes.ancestors(seeds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A graph of two nodes, the second holding a child graph of one.
    fn nested(graphs: &mut Graphs) -> (CUgraph, CUgraphNode, CUgraphNode) {
        let graph = graphs.create();
        let first = graphs.add_node(graph, &[], Payload::Empty).unwrap();
        let child = graphs.create();
        graphs.get_mut(child).unwrap().owned = true;
        let inner = graphs.add_node(child, &[], Payload::Empty).unwrap();
        graphs.add_node(graph, &[first.into()], Payload::Graph(child)).unwrap();
        (graph, first, inner)
    }

    #[test]
    fn a_copy_is_deep_and_finds_originals() {
        let mut graphs = Graphs::default();
        let (graph, first, inner) = nested(&mut graphs);
        let copy = graphs.duplicate(graph, false).unwrap();
        let found = graphs.find_copy(first, copy).unwrap();
        assert!(found != first && graphs.owner(found) == Ok(copy));
        let found = graphs.find_copy(inner, copy).unwrap();
        let copies = graphs.copies(copy);
        assert_eq!((copies.len(), copies[&inner]), (3, found));
        assert!(found != inner && graphs.get(graphs.owner(found).unwrap()).unwrap().owned);
        assert_eq!(graphs.find_copy(found, copy), Err(CuError::INVALID_VALUE));
        graphs.destroy(graph).unwrap();
        assert_eq!(graphs.get(copy).unwrap().nodes.edges().len(), 1, "the copy lives on");
    }

    #[test]
    fn conditions_of_a_graph_and_of_its_bodies_are_counted_together() {
        let mut graphs = Graphs::default();
        let (graph, other) = (graphs.create(), graphs.create());
        assert_eq!(graphs.next_condition(graph), Ok(1));
        let body = graphs.create_body(graph).unwrap();
        assert_eq!(graphs.next_condition(body), Ok(2));
        let inner = graphs.create_body(body).unwrap();
        assert_eq!(graphs.next_condition(graph), Ok(3));
        assert_eq!(graphs.next_condition(inner), Ok(4));
        assert_eq!(graphs.next_condition(other), Ok(1));
        for expected in 5..MAX_CONDITIONS {
            assert_eq!(graphs.next_condition(inner), Ok(expected));
        }
        assert_eq!(graphs.next_condition(graph), Err(CuError::OUT_OF_MEMORY));
    }

    #[test]
    fn children_go_with_their_parents() {
        let mut graphs = Graphs::default();
        let (graph, first, inner) = nested(&mut graphs);
        let child = graphs.owner(inner).unwrap();
        assert!(graphs.destroy(child).is_err(), "a child is its node's");
        assert_eq!(graphs.destroy(graph).unwrap().len(), 2);
        for node in [first, inner] {
            assert_eq!(graphs.owner(node), Err(CuError::INVALID_VALUE));
        }
        assert!(graphs.graphs.is_empty() && graphs.owner.is_empty());
    }

    #[test]
    fn removing_a_node_removes_its_child() {
        let mut graphs = Graphs::default();
        let (graph, _, inner) = nested(&mut graphs);
        let holder = graphs.get(graph).unwrap().nodes.iter().last().unwrap().0;
        assert_eq!(graphs.remove_node(holder).unwrap().len(), 1);
        assert!(graphs.owner(inner).is_err() && graphs.owner(holder).is_err());
    }
}
