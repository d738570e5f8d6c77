//! `cuGraphDebugDotPrint`: a graph in Graphviz's language.

use super::world::Graphs;
use super::{Payload, world};
use crate::{ffi, log};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::CUgraph;
use kedge_protocol::{Dim3, Launch};
use std::ffi::c_char;
use std::fmt::{self, Write};

/// Whatever the flags ask for, a node is told by its type and what is short about it.
pub(crate) unsafe fn cuGraphDebugDotPrint(
    graph: CUgraph,
    path: *const c_char,
    _flags: u32,
) -> Result<(), CuError> {
    // SAFETY: the caller's C string.
    let path = unsafe { ffi::string(path) }?;
    let text = world::ask(|graphs| {
        let mut text = "digraph dot {\n".to_owned();
        print(graphs, graph, &mut text)?;
        text.push_str("}\n");
        Ok(text)
    })?;
    std::fs::write(path, text).map_err(|error| {
        log::line(&format!("cuGraphDebugDotPrint: {path}: {error}"));
        CuError::OPERATING_SYSTEM
    })
}

fn print(graphs: &Graphs, graph: CUgraph, text: &mut String) -> Result<(), CuError> {
    let nodes = &graphs.get(graph)?.nodes;
    let outcome: fmt::Result = (|| {
        writeln!(text, "subgraph cluster_{:x} {{", graph.0)?;
        for (handle, node) in nodes.iter() {
            writeln!(text, "  node_{:x} [label=\"{}\"];", handle.0, label(&node.payload))?;
        }
        for (from, to, _) in nodes.edges() {
            writeln!(text, "  node_{:x} -> node_{:x};", from.0, to.0)?;
        }
        writeln!(text, "}}")
    })();
    outcome.map_err(|_| CuError::UNKNOWN)?;
    for (_, node) in nodes.iter() {
        for child in node.payload.children() {
            print(graphs, *child, text)?;
        }
    }
    Ok(())
}

fn label(payload: &Payload) -> String {
    match payload {
        Payload::Empty => "EMPTY".to_owned(),
        Payload::Kernel(kernel) => {
            let Launch { grid, block, shared_bytes, .. } = kernel.launch();
            let size = |Dim3 { x, y, z }: &Dim3| format!("{x}x{y}x{z}");
            format!("KERNEL\\ngrid {} block {} shared {shared_bytes}", size(grid), size(block))
        }
        Payload::Memcpy(copied) => {
            let params = copied.params();
            let (width, height, depth) = (params.WidthInBytes, params.Height, params.Depth);
            format!("MEMCPY\\n{width} bytes x {height} x {depth}")
        }
        Payload::Memset { params, .. } => {
            let (width, height) = (params.width, params.height);
            format!("MEMSET\\n{width} x {height} elements of {}", params.elementSize)
        }
        Payload::Host(_) => "HOST".to_owned(),
        Payload::Graph(child) => format!("GRAPH\\ncluster_{:x}", child.0),
        Payload::Conditional(conditional) => {
            let bodies: Vec<_> =
                conditional.bodies.iter().map(|body| format!("cluster_{:x}", body.0)).collect();
            format!("CONDITIONAL\\n{}", bodies.join(" "))
        }
        Payload::EventRecord(..) => "EVENT_RECORD".to_owned(),
        Payload::EventWait(..) => "EVENT_WAIT".to_owned(),
        Payload::MemAlloc(allocation) => {
            format!("MEM_ALLOC\\n{} bytes", allocation.params.bytesize)
        }
        Payload::MemFree { addr, .. } => format!("MEM_FREE\\n{addr:#x}"),
        Payload::MemOps(batch) => format!("BATCH_MEM_OP\\n{} operations", batch.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_edges_and_children_are_there() {
        let mut graphs = Graphs::default();
        let (graph, child) = (graphs.create(), graphs.create());
        let inner = graphs.add_node(child, &[], Payload::Empty).unwrap();
        let a = graphs.add_node(graph, &[], Payload::Empty).unwrap();
        let b = graphs.add_node(graph, &[a.into()], Payload::Graph(child)).unwrap();
        let mut text = String::new();
        print(&graphs, graph, &mut text).unwrap();
        assert!(text.contains(&format!("node_{:x} -> node_{:x};", a.0, b.0)), "{text}");
        assert!(text.contains(&format!("node_{:x} [label=\"EMPTY\"]", inner.0)), "{text}");
    }
}
