//! What a far end may reach of the client: the private memory and the host functions that messages
//! under way name. A server that has been taken over gets what its devices were given to work on,
//! and not the program.

use kedge_gpu_image::SavedStep;
use kedge_protocol::{Call, CtxId, GraphExecId, Message, Place, Post, Scattered, Shape, StreamOp};
use std::collections::{HashMap, VecDeque};

/// What messages name that may not be complete.
#[derive(Debug, Default)]
pub(super) struct Named {
    /// By those of one message, with its number.
    places: Vec<(u64, Named3d)>,
    /// By graphs.
    execs: HashMap<GraphExecId, Exec>,
    /// Each host function's messages: each has it run once.
    host_fns: HashMap<u64, VecDeque<u64>>,
}

/// A part of the client's private memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Named3d {
    place: Place,
    shape: Shape,
    /// It is read, or else written.
    read: bool,
}

/// A graph that can be launched.
#[derive(Debug)]
struct Exec {
    ctx: CtxId,
    /// The number that the next node has.
    next: u32,
    /// Those nodes that name anything.
    nodes: HashMap<u32, Node>,
    /// The newest message that has launched it.
    launched: u64,
}

#[derive(Debug)]
enum Node {
    Places(Vec<Named3d>),
    HostFn(u64),
    Bodies(Vec<GraphExecId>),
}

impl Node {
    /// `None` where it names nothing.
    fn of(op: &StreamOp) -> Option<Node> {
        match op {
            StreamOp::Copy { .. } | StreamOp::Scatter { .. } => {
                let places = places(op);
                (!places.is_empty()).then_some(Node::Places(places))
            }
            StreamOp::HostFn { token } => Some(Node::HostFn(*token)),
            StreamOp::Conditional { bodies, .. } => Some(Node::Bodies(bodies.to_vec())),
            _ => None,
        }
    }
}

/// The sides of a copy that are private.
fn places(op: &StreamOp) -> Vec<Named3d> {
    let copy = match op {
        StreamOp::Copy { copy } => copy,
        StreamOp::Scatter { pieces } => {
            let read = |piece: &Scattered| Named3d {
                place: Place::Client { addr: piece.src, pitch: 0, slice: 0 },
                shape: Shape::line(piece.bytes),
                read: true,
            };
            return pieces.iter().map(read).collect();
        }
        _ => return Vec::new(),
    };
    let shape = copy.shape();
    let sides = [(copy.src, true), (copy.dst, false)];
    let private = sides.into_iter().filter(|(place, _)| matches!(place, Place::Client { .. }));
    private.map(|(place, read)| Named3d { place, shape, read }).collect()
}

impl Named {
    /// Message `seq` is about to be sent.
    pub(super) fn add(&mut self, seq: u64, message: &Message) {
        match message {
            Message::Post { post: Post::Enqueue { op, .. } } => self.enqueued(seq, op),
            Message::Post { post } => self.graph(post),
            Message::Call { call: Call::ModuleLoad { image, .. } } => {
                self.places.push((seq, Named3d::bytes(image.addr, image.len)));
            }
            Message::Call { call: Call::ModuleLink { images, .. } } => {
                let bytes = images.iter().map(|image| (seq, Named3d::bytes(image.addr, image.len)));
                self.places.extend(bytes);
            }
            Message::Call { .. } => {}
        }
    }

    /// The client goes on from an image whose record has these steps.
    pub(super) fn remember(&mut self, steps: &[SavedStep]) {
        for step in steps {
            if let SavedStep::Message { message: Message::Post { post }, .. } = step {
                self.graph(post);
            }
        }
    }

    /// All messages up to `seq` are complete.
    pub(super) fn completed(&mut self, seq: u64) {
        self.places.retain(|(of, _)| *of > seq);
        self.host_fns.retain(|_, messages| {
            messages.retain(|of| *of > seq);
            !messages.is_empty()
        });
    }

    /// Returns whether a message that may not be complete has [addr, addr+len) read; `completed` is
    /// the newest that is known to be.
    pub(super) fn is_read(&self, addr: u64, len: u64, completed: u64) -> bool {
        self.any(completed, |named| named.read && named.reaches(addr, len))
    }

    /// The same of what is written, which has no gaps.
    pub(super) fn is_written(&self, addr: u64, len: u64, completed: u64) -> bool {
        self.any(completed, |named| !named.read && named.holds(addr, len))
    }

    /// Takes one run of a host function; `false` where no message has it run once more.
    pub(super) fn take_host_fn(&mut self, token: u64) -> bool {
        let Some(messages) = self.host_fns.get_mut(&token) else { return false };
        let taken = messages.pop_front().is_some();
        if messages.is_empty() {
            self.host_fns.remove(&token);
        }
        taken
    }

    fn any(&self, completed: u64, is_it: impl Fn(&Named3d) -> bool) -> bool {
        let under_way = self.execs.values().filter(|exec| exec.launched > completed);
        let nodes = under_way.flat_map(|exec| exec.nodes.values());
        let of_graphs = nodes.filter_map(|node| match node {
            Node::Places(places) => Some(places),
            _ => None,
        });
        self.places.iter().map(|(_, named)| named).chain(of_graphs.flatten()).any(is_it)
    }

    fn enqueued(&mut self, seq: u64, op: &StreamOp) {
        match op {
            StreamOp::GraphLaunch { exec } => self.launched(seq, *exec),
            StreamOp::HostFn { token } => self.host_fns.entry(*token).or_default().push_back(seq),
            _ => self.places.extend(places(op).into_iter().map(|named| (seq, named))),
        }
    }

    /// A graph, and what its conditional nodes may execute.
    fn launched(&mut self, seq: u64, exec: GraphExecId) {
        let mut all = vec![exec];
        while let Some(id) = all.pop() {
            let Some(exec) = self.execs.get_mut(&id).filter(|exec| exec.launched < seq) else {
                continue;
            };
            exec.launched = seq;
            for node in exec.nodes.values() {
                match node {
                    Node::HostFn(token) => {
                        self.host_fns.entry(*token).or_default().push_back(seq);
                    }
                    Node::Bodies(bodies) => all.extend(bodies),
                    Node::Places(_) => {}
                }
            }
        }
    }

    fn graph(&mut self, post: &Post) {
        match post {
            Post::GraphExecBegin { exec, ctx } => {
                let (next, nodes, launched) = Default::default();
                self.execs.insert(*exec, Exec { ctx: *ctx, next, nodes, launched });
            }
            Post::GraphExecNode { exec, op } => {
                let Some(exec) = self.execs.get_mut(exec) else { return };
                if let Some(node) = Node::of(op) {
                    exec.nodes.insert(exec.next, node);
                }
                exec.next += 1;
            }
            Post::GraphExecUpdate { exec, node, op } => {
                let Some(exec) = self.execs.get_mut(exec) else { return };
                let older = match Node::of(op) {
                    Some(newer) => exec.nodes.insert(*node, newer),
                    None => exec.nodes.remove(node),
                };
                let launched = exec.launched;
                self.keep(launched, older);
            }
            Post::GraphExecDestroy { exec } => self.destroyed(*exec),
            Post::CtxDestroy { ctx } => {
                let gone = self.execs.iter().filter(|(_, exec)| exec.ctx == *ctx);
                let gone: Vec<_> = gone.map(|(id, _)| *id).collect();
                gone.into_iter().for_each(|exec| self.destroyed(exec));
            }
            _ => {}
        }
    }

    fn destroyed(&mut self, exec: GraphExecId) {
        if let Some(Exec { nodes, launched, .. }) = self.execs.remove(&exec) {
            self.keep(launched, nodes.into_values());
        }
    }

    /// Launches that are under way have what the graph was.
    fn keep(&mut self, launched: u64, nodes: impl IntoIterator<Item = Node>) {
        for node in nodes {
            if let Node::Places(places) = node {
                self.places.extend(places.into_iter().map(|named| (launched, named)));
            }
        }
    }
}

impl Named3d {
    /// Bytes that are read.
    fn bytes(addr: u64, len: u64) -> Named3d {
        let place = Place::Client { addr, pitch: 0, slice: 0 };
        Named3d { place, shape: Shape::line(len), read: true }
    }

    /// Returns whether [addr, addr+len) lies between its first byte and its last. Devices read rows
    /// with the gaps between them where that is faster.
    fn reaches(&self, addr: u64, len: u64) -> bool {
        let Place::Client { addr: start, pitch, slice } = self.place else { return false };
        let (Some(from), Some(reach)) = (addr.checked_sub(start), self.shape.reach(pitch, slice))
        else {
            return false;
        };
        from.checked_add(len).is_some_and(|end| end <= reach)
    }

    /// Returns whether [addr, addr+len) lies in one of its rows.
    fn holds(&self, addr: u64, len: u64) -> bool {
        let Place::Client { addr: start, pitch, slice } = self.place else { return false };
        if !self.reaches(addr, len) || self.place.is_packed(self.shape) {
            return self.reaches(addr, len);
        }
        let from = addr - start;
        let split = |at: u64, size: u64, count: u64| match size {
            0 => (0, at),
            _ if count == 1 => (0, at),
            _ => (at / size, at % size),
        };
        let (z, from) = split(from, slice, self.shape.depth);
        let (y, x) = split(from, pitch, self.shape.height);
        z < self.shape.depth
            && y < self.shape.height
            && x.checked_add(len).is_some_and(|end| end <= self.shape.width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::{Copy3d, ModuleId, ModuleImage, StreamId};

    const EXEC: GraphExecId = GraphExecId(7);

    fn enqueue(op: StreamOp) -> Message {
        Message::Post { post: Post::Enqueue { stream: StreamId(1), op } }
    }

    fn copy(src: Place, dst: Place, shape: Shape) -> StreamOp {
        StreamOp::Copy { copy: Copy3d::new(src, dst, shape) }
    }

    fn own(addr: u64) -> Place {
        Place::Client { addr, pitch: 256, slice: 4096 }
    }

    fn device() -> Place {
        Place::Mapped { addr: 0x4000_0000_0000, pitch: 0, slice: 0 }
    }

    #[test]
    fn a_copy_names_its_own_bytes_until_it_is_complete() {
        let mut named = Named::default();
        named.add(5, &enqueue(copy(own(1000), device(), Shape::line(100))));
        named.add(6, &enqueue(copy(device(), own(5000), Shape::line(100))));
        assert!(named.is_read(1000, 100, 4) && named.is_read(1050, 50, 4));
        assert!(!named.is_read(999, 1, 4) && !named.is_read(1050, 51, 4));
        assert!(!named.is_read(5000, 1, 4) && !named.is_written(1000, 1, 4));
        assert!(named.is_written(5000, 100, 4) && !named.is_written(5000, 101, 4));
        assert!(!named.is_read(u64::MAX, 2, 4) && !named.is_read(1000, u64::MAX, 4));
        named.completed(5);
        assert!(!named.is_read(1000, 1, 5) && named.is_written(5000, 1, 5));
    }

    #[test]
    fn gaps_between_rows_are_not_written() {
        let mut named = Named::default();
        let shape = Shape { width: 100, height: 3, depth: 2 };
        named.add(1, &enqueue(copy(device(), own(0), shape)));
        let written = |addr, len| named.is_written(addr, len, 0);
        assert!(written(0, 100) && written(256, 100) && written(512 + 50, 50));
        assert!(written(4096 + 512, 100));
        assert!(!written(100, 1) && !written(0, 101) && !written(768, 1) && !written(4096, 300));
        assert!(!written(8192, 1));
        let mut named = Named::default();
        named.add(1, &enqueue(copy(own(0), device(), shape)));
        assert!(named.is_read(0, 4096 + 512 + 100, 0) && !named.is_read(0, 4096 + 512 + 101, 0));
        let mut named = Named::default();
        let packed = Place::Client { addr: 0, pitch: 100, slice: 300 };
        named.add(1, &enqueue(copy(device(), packed, shape)));
        assert!(named.is_written(0, 600, 0) && !named.is_written(0, 601, 0));
    }

    #[test]
    fn a_module_s_images_are_read() {
        let mut named = Named::default();
        let image = ModuleImage { addr: 4096, len: 10 };
        let call = Call::ModuleLoad { ctx: CtxId(1), module: ModuleId(1), image };
        named.add(3, &Message::Call { call });
        assert!(named.is_read(4096, 10, 2) && !named.is_read(4096, 11, 2));
    }

    #[test]
    fn a_host_function_runs_once_for_each_message() {
        let mut named = Named::default();
        assert!(!named.take_host_fn(9));
        named.add(1, &enqueue(StreamOp::HostFn { token: 9 }));
        named.add(2, &enqueue(StreamOp::HostFn { token: 9 }));
        assert!(named.take_host_fn(9) && named.take_host_fn(9) && !named.take_host_fn(9));
        named.add(3, &enqueue(StreamOp::HostFn { token: 9 }));
        named.completed(3);
        assert!(!named.take_host_fn(9));
    }

    fn graph(ops: Vec<StreamOp>) -> Vec<Post> {
        let begin = Post::GraphExecBegin { exec: EXEC, ctx: CtxId(1) };
        let nodes = ops.into_iter().map(|op| Post::GraphExecNode { exec: EXEC, op });
        std::iter::once(begin).chain(nodes).collect()
    }

    #[test]
    fn a_graph_names_what_its_launches_may_touch() {
        let ops = vec![
            StreamOp::Empty {},
            copy(own(1000), device(), Shape::line(100)),
            StreamOp::HostFn { token: 4 },
        ];
        let mut named = Named::default();
        // As after a restart.
        let step = |post| SavedStep::Message { result: 0, message: Message::Post { post } };
        named.remember(&graph(ops).into_iter().map(step).collect::<Vec<_>>());
        assert!(!named.is_read(1000, 1, 0) && !named.take_host_fn(4));
        named.add(10, &enqueue(StreamOp::GraphLaunch { exec: EXEC }));
        named.add(11, &enqueue(StreamOp::GraphLaunch { exec: EXEC }));
        assert!(named.is_read(1000, 100, 9) && !named.is_read(1000, 100, 11));
        assert!(named.take_host_fn(4) && named.take_host_fn(4) && !named.take_host_fn(4));
        let newer = copy(own(9000), device(), Shape::line(10));
        let update = Post::GraphExecUpdate { exec: EXEC, node: 1, op: newer };
        named.add(12, &Message::Post { post: update });
        assert!(named.is_read(1000, 100, 9), "by the launches that are under way");
        named.completed(11);
        assert!(!named.is_read(1000, 1, 11) && !named.is_read(9000, 1, 11));
        named.add(13, &enqueue(StreamOp::GraphLaunch { exec: EXEC }));
        named.add(14, &Message::Post { post: Post::GraphExecDestroy { exec: EXEC } });
        assert!(named.is_read(9000, 10, 12));
        named.completed(13);
        assert!(!named.is_read(9000, 10, 13));
    }

    #[test]
    fn a_body_is_launched_with_its_graph() {
        let body = GraphExecId(8);
        let mut named = Named::default();
        let bodies = kedge_wire::List::new(vec![body, EXEC]).unwrap();
        let op = StreamOp::Conditional { condition: 1, kind: 0, bodies };
        let inner = copy(own(1000), device(), Shape::line(100));
        for post in [
            Post::GraphExecBegin { exec: body, ctx: CtxId(1) },
            Post::GraphExecNode { exec: body, op: inner },
        ]
        .into_iter()
        .chain(graph(vec![op]))
        {
            named.add(1, &Message::Post { post });
        }
        named.add(2, &enqueue(StreamOp::GraphLaunch { exec: EXEC }));
        assert!(named.is_read(1000, 100, 1) && !named.is_read(1000, 100, 2));
    }
}
