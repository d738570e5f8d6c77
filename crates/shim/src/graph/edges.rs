//! Which nodes a graph has and how they depend on each other. Pure data: nothing here knows what a
//! node does.

use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::CUgraphEdgeData;
use kedge_cuda_types::handle::CUgraphNode;
use std::collections::{BTreeMap, HashMap, HashSet};

/// The end of an edge, seen from its other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Edge {
    pub(crate) node: CUgraphNode,
    pub(crate) data: CUgraphEdgeData,
}

impl From<CUgraphNode> for Edge {
    fn from(node: CUgraphNode) -> Self {
        Self { node, data: CUgraphEdgeData::default() }
    }
}

/// One node: what it does and whom it waits for.
#[derive(Debug, Clone)]
pub(crate) struct Node<T> {
    pub(crate) payload: T,
    /// The node of which a clone made this one.
    pub(crate) origin: Option<CUgraphNode>,
    dependencies: Vec<Edge>,
    dependents: Vec<Edge>,
}

impl<T> Node<T> {
    pub(crate) fn dependencies(&self) -> &[Edge] {
        &self.dependencies
    }

    pub(crate) fn dependents(&self) -> &[Edge] {
        &self.dependents
    }
}

/// The nodes of one graph in order of creation, because handles only grow.
#[derive(Debug, Clone)]
pub(crate) struct Nodes<T> {
    nodes: BTreeMap<CUgraphNode, Node<T>>,
}

impl<T> Default for Nodes<T> {
    fn default() -> Self {
        Self { nodes: BTreeMap::new() }
    }
}

impl<T> Nodes<T> {
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (CUgraphNode, &Node<T>)> {
        self.nodes.iter().map(|(&handle, node)| (handle, node))
    }

    pub(crate) fn get(&self, node: CUgraphNode) -> Result<&Node<T>, CuError> {
        self.nodes.get(&node).ok_or(CuError::INVALID_VALUE)
    }

    pub(crate) fn payload_mut(&mut self, node: CUgraphNode) -> Result<&mut T, CuError> {
        let node = self.nodes.get_mut(&node).ok_or(CuError::INVALID_VALUE)?;
        Ok(&mut node.payload)
    }

    /// Adds `node` behind `dependencies`, which must be nodes of this graph, each named once.
    pub(crate) fn insert(
        &mut self,
        node: CUgraphNode,
        payload: T,
        dependencies: &[Edge],
    ) -> Result<(), CuError> {
        let mut seen = HashSet::new();
        if !dependencies.iter().all(|e| self.nodes.contains_key(&e.node) && seen.insert(e.node)) {
            return Err(CuError::INVALID_VALUE);
        }
        for edge in dependencies {
            if let Some(from) = self.nodes.get_mut(&edge.node) {
                from.dependents.push(Edge { node, data: edge.data });
            }
        }
        let dependencies = dependencies.to_vec();
        self.nodes
            .insert(node, Node { payload, origin: None, dependencies, dependents: Vec::new() });
        Ok(())
    }

    /// Removes a node with its edges and returns what it did.
    pub(crate) fn remove(&mut self, node: CUgraphNode) -> Result<T, CuError> {
        let removed = self.nodes.remove(&node).ok_or(CuError::INVALID_VALUE)?;
        for edge in &removed.dependencies {
            if let Some(from) = self.nodes.get_mut(&edge.node) {
                from.dependents.retain(|e| e.node != node);
            }
        }
        for edge in &removed.dependents {
            if let Some(to) = self.nodes.get_mut(&edge.node) {
                to.dependencies.retain(|e| e.node != node);
            }
        }
        Ok(removed.payload)
    }

    /// Makes `to` depend on `from`. An edge that exists, or from a node to itself, is an error;
    /// a longer cycle is found by instantiation.
    pub(crate) fn connect(
        &mut self,
        from: CUgraphNode,
        to: CUgraphNode,
        data: CUgraphEdgeData,
    ) -> Result<(), CuError> {
        if from == to || !self.nodes.contains_key(&from) {
            return Err(CuError::INVALID_VALUE);
        }
        let target = self.nodes.get_mut(&to).ok_or(CuError::INVALID_VALUE)?;
        if target.dependencies.iter().any(|e| e.node == from) {
            return Err(CuError::INVALID_VALUE);
        }
        target.dependencies.push(Edge { node: from, data });
        if let Some(source) = self.nodes.get_mut(&from) {
            source.dependents.push(Edge { node: to, data });
        }
        Ok(())
    }

    /// Removes the edge from `from` to `to` with exactly this edge data.
    pub(crate) fn disconnect(
        &mut self,
        from: CUgraphNode,
        to: CUgraphNode,
        data: CUgraphEdgeData,
    ) -> Result<(), CuError> {
        let target = self.nodes.get_mut(&to).ok_or(CuError::INVALID_VALUE)?;
        let at = target.dependencies.iter().position(|e| e.node == from && e.data == data);
        target.dependencies.remove(at.ok_or(CuError::INVALID_VALUE)?);
        if let Some(source) = self.nodes.get_mut(&from) {
            source.dependents.retain(|e| e.node != to);
        }
        Ok(())
    }

    pub(crate) fn roots(&self) -> impl Iterator<Item = CUgraphNode> {
        self.iter().filter(|(_, node)| node.dependencies.is_empty()).map(|(handle, _)| handle)
    }

    /// Every edge as (from, to, data), ordered by the node that waits.
    pub(crate) fn edges(&self) -> Vec<(CUgraphNode, CUgraphNode, CUgraphEdgeData)> {
        let into = |(to, node): (CUgraphNode, &Node<T>)| {
            node.dependencies.iter().map(move |e| (e.node, to, e.data)).collect::<Vec<_>>()
        };
        self.iter().flat_map(into).collect()
    }

    /// `seeds` and all nodes that they depend on, directly or not.
    pub(crate) fn ancestors(
        &self,
        seeds: impl IntoIterator<Item = CUgraphNode>,
    ) -> HashSet<CUgraphNode> {
        let mut seen = HashSet::new();
        let mut open: Vec<_> = seeds.into_iter().collect();
        while let Some(handle) = open.pop() {
            if !seen.insert(handle) {
                continue;
            }
            if let Some(node) = self.nodes.get(&handle) {
                open.extend(node.dependencies.iter().map(|e| e.node));
            }
        }
        seen
    }

    /// An order in which every node follows all that it depends on; else a node on a cycle.
    pub(crate) fn topological_order(&self) -> Result<Vec<CUgraphNode>, CUgraphNode> {
        let mut waiting: HashMap<_, _> =
            self.iter().map(|(handle, node)| (handle, node.dependencies.len())).collect();
        let mut order: Vec<_> = self.roots().collect();
        let mut next = 0;
        while let Some(&handle) = order.get(next) {
            next += 1;
            for edge in self.nodes.get(&handle).map_or(&[][..], Node::dependents) {
                if let Some(left) = waiting.get_mut(&edge.node) {
                    *left -= 1;
                    if *left == 0 {
                        order.push(edge.node);
                    }
                }
            }
        }
        if order.len() == self.len() {
            return Ok(order);
        }
        let done: HashSet<_> = order.into_iter().collect();
        Err(self.iter().map(|(handle, _)| handle).find(|h| !done.contains(h)).unwrap_or_default())
    }
}

impl<T: Clone> Nodes<T> {
    /// A copy whose nodes have the handles that `rename` gives and remember their originals.
    pub(crate) fn renamed(&self, mut rename: impl FnMut() -> CUgraphNode) -> Self {
        let names: HashMap<_, _> = self.nodes.keys().map(|&old| (old, rename())).collect();
        let ends = |edges: &[Edge]| {
            edges.iter().map(|e| Edge { node: names[&e.node], data: e.data }).collect()
        };
        let copy = |(old, node): (&CUgraphNode, &Node<T>)| {
            let copy = Node {
                payload: node.payload.clone(),
                origin: Some(*old),
                dependencies: ends(&node.dependencies),
                dependents: ends(&node.dependents),
            };
            (names[old], copy)
        };
        Self { nodes: self.nodes.iter().map(copy).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(n: usize) -> CUgraphNode {
        CUgraphNode(n)
    }

    fn graph(edges: &[(usize, usize)], count: usize) -> Nodes<usize> {
        let mut nodes = Nodes::default();
        for n in 1..=count {
            nodes.insert(node(n), n, &[]).unwrap();
        }
        for &(from, to) in edges {
            nodes.connect(node(from), node(to), CUgraphEdgeData::default()).unwrap();
        }
        nodes
    }

    #[test]
    fn an_order_respects_every_edge() {
        let edges = [(4, 1), (1, 2), (4, 3), (3, 2), (2, 5)];
        let order = graph(&edges, 5).topological_order().unwrap();
        let place = |n| order.iter().position(|&x| x == node(n)).unwrap();
        assert_eq!(order.len(), 5);
        assert!(edges.iter().all(|&(from, to)| place(from) < place(to)), "{order:?}");
    }

    #[test]
    fn a_cycle_is_found_behind_a_root() {
        let at = graph(&[(1, 2), (2, 3), (3, 2)], 3).topological_order().unwrap_err();
        assert!(at == node(2) || at == node(3));
    }

    #[test]
    fn dependencies_must_exist_and_differ() {
        let mut nodes = graph(&[], 1);
        let invalid = Err(CuError::INVALID_VALUE);
        assert_eq!(nodes.insert(node(2), 2, &[node(9).into()]), invalid);
        assert_eq!(nodes.insert(node(2), 2, &[node(1).into(), node(1).into()]), invalid);
        assert_eq!(nodes.len(), 1);
        assert!(nodes.get(node(1)).unwrap().dependents().is_empty());
        let none = CUgraphEdgeData::default();
        assert_eq!(nodes.connect(node(1), node(1), none), invalid);
        nodes.insert(node(2), 2, &[node(1).into()]).unwrap();
        assert_eq!(nodes.connect(node(1), node(2), none), invalid, "the edge exists");
    }

    #[test]
    fn removing_a_node_removes_its_edges() {
        let mut nodes = graph(&[(1, 2), (2, 3)], 3);
        assert_eq!(nodes.remove(node(2)), Ok(2));
        assert!(nodes.edges().is_empty());
        assert_eq!(nodes.roots().collect::<Vec<_>>(), [node(1), node(3)]);
    }

    #[test]
    fn an_edge_is_removed_only_with_its_data() {
        let mut nodes = graph(&[(1, 2)], 2);
        let other = CUgraphEdgeData { from_port: 1, ..Default::default() };
        assert!(nodes.disconnect(node(1), node(2), other).is_err());
        nodes.disconnect(node(1), node(2), CUgraphEdgeData::default()).unwrap();
        assert!(nodes.edges().is_empty() && nodes.get(node(1)).unwrap().dependents().is_empty());
    }

    #[test]
    fn ancestors_are_what_a_node_waits_for() {
        let nodes = graph(&[(1, 2), (2, 3), (4, 5)], 5);
        let ancestors = nodes.ancestors([node(3)]);
        assert_eq!(ancestors, HashSet::from([node(1), node(2), node(3)]));
    }

    #[test]
    fn a_clone_keeps_shape_and_remembers_its_origins() {
        let mut next = 100;
        let clone = graph(&[(1, 2), (1, 3)], 3).renamed(|| {
            next += 1;
            node(next)
        });
        let origin = |n| clone.get(node(n)).unwrap().origin;
        assert_eq!([origin(101), origin(102)], [Some(node(1)), Some(node(2))]);
        let edges: Vec<_> = clone.edges().into_iter().map(|(from, to, _)| (from, to)).collect();
        assert_eq!(edges, [(node(101), node(102)), (node(101), node(103))]);
    }
}
