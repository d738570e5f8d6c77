use super::*;
use kedge_protocol::{ModuleImage, StreamOp};
use kedge_wire::{List, Text};

const CTX: CtxId = CtxId(1);

fn kernel(module: u32, index: u32) -> Call {
    let name = Text::truncated(format!("k{index}"));
    Call::Kernel { module: ModuleId(module), index, name }
}

fn names(record: &Record) -> Vec<&'static str> {
    let name = |step: &Step| match step {
        Step::Message { message: Message::Post { post }, .. } => post.name(),
        Step::Message { message: Message::Call { call }, .. } => call.name(),
        Step::Module { .. } => "Module",
    };
    record.steps().iter().map(name).collect()
}

#[test]
fn what_becomes_the_client_s_own_is_made_by_it() {
    let name = kedge_protocol::PeerName { proxy: [1; 16], key: [2; 16] };
    let (handle, event, addr, size) = (MemHandleId(1), EventId(1), 1 << 30, 2 << 20);
    let mut record = Record::default();
    record.call(Call::CtxCreate { ctx: CTX, device: 0, legacy: StreamId(1) }, 0);
    record.call(Call::EventOpen { event, ctx: CTX, name }, 0);
    record.call(Call::PeerOpen { handle, name }, 0);
    record.call(Call::HandleMap { handle, addr, size, offset: size }, 0);
    assert_eq!(names(&record), ["CtxCreate", "EventOpen", "PeerOpen", "HandleMap"]);
    assert_eq!(record.mapped_bytes(handle), 2 * size);
    assert_eq!(record.mapped_bytes(MemHandleId(2)), 0);
    record.adopt_handle(handle, 0, 2 * size);
    record.adopt_event(event, CTX);
    assert_eq!(names(&record), ["HandleCreate", "CtxCreate", "EventCreate", "HandleMap"]);
    record.post(Post::HandleUnmap { addr, size });
    record.post(Post::HandleDestroy { handle });
    record.post(Post::EventDestroy { event });
    assert_eq!(names(&record), ["CtxCreate"]);
}

#[test]
fn what_comes_and_goes_leaves_nothing() {
    let mut record = Record::default();
    let legacy = StreamId(1);
    record.call(Call::CtxCreate { ctx: CTX, device: 0, legacy }, 0);
    for round in 0..1000 {
        let (module, event) = (ModuleId(round), EventId(round));
        record.module(CTX, module, Code::Whole(Image::default()));
        record.call(kernel(round, 0), 0);
        record.call(kernel(round, 0), 0);
        let kernel = KernelRef { module, index: 0 };
        record.post(Post::KernelAttribute { kernel, attribute: 8, value: 1 });
        record.post(Post::KernelAttribute { kernel, attribute: 8, value: 2 });
        record.post(Post::EventCreate { event, ctx: CTX, timing: true, interprocess: false });
        let exec = GraphExecId(round);
        record.post(Post::GraphExecBegin { exec, ctx: CTX });
        record.post(Post::GraphExecNode { exec, op: StreamOp::Empty {} });
        record.post(Post::GraphExecReady { exec, priorities: false });
        assert_eq!(record.len(), 6);
        record.post(Post::GraphExecDestroy { exec });
        record.post(Post::EventDestroy { event });
        record.post(Post::ModuleUnload { module });
    }
    assert_eq!(names(&record), ["CtxCreate"]);
    assert_eq!(record.subjects.len(), 1);
}

fn attribute(value: i32) -> Post {
    let kernel = KernelRef { module: ModuleId(1), index: 0 };
    Post::KernelAttribute { kernel, attribute: 8, value }
}

fn graph(record: &mut Record, exec: u32) {
    let exec = GraphExecId(exec);
    record.post(Post::GraphExecBegin { exec, ctx: CTX });
    record.post(Post::GraphExecReady { exec, priorities: false });
}

/// The values of an attribute in the record's order, and graphs.
fn values(record: &Record) -> Vec<String> {
    let told = record.steps().into_iter().filter_map(|step| match step {
        Step::Message { message: Message::Post { post }, .. } => Some(post),
        _ => None,
    });
    let told = told.filter_map(|post| match post {
        Post::KernelAttribute { value, .. } => Some(value.to_string()),
        Post::GraphExecReady { .. } => Some("graph".to_owned()),
        _ => None,
    });
    told.collect()
}

#[test]
fn graphs_are_made_again_under_the_attributes_that_they_were_made_under() {
    let mut record = Record::default();
    record.post(attribute(70_000));
    graph(&mut record, 1);
    // Frameworks set it again before each launch.
    record.post(attribute(70_000));
    assert_eq!(values(&record), ["70000", "graph"]);
    for value in [0, 5, 0] {
        record.post(attribute(value));
    }
    assert_eq!(values(&record), ["70000", "graph", "0"]);
    graph(&mut record, 2);
    record.post(attribute(90_000));
    assert_eq!(values(&record), ["70000", "graph", "0", "graph", "90000"]);
    // Nothing stays for graphs that are gone.
    record.post(Post::GraphExecDestroy { exec: GraphExecId(1) });
    record.post(attribute(1));
    assert_eq!(values(&record), ["0", "graph", "1"]);
    record.post(Post::GraphExecDestroy { exec: GraphExecId(2) });
    record.post(attribute(2));
    assert_eq!(values(&record), ["2"]);
}

#[test]
fn a_context_takes_its_own_with_it() {
    let mut record = Record::default();
    for ctx in [CTX, CtxId(2)] {
        record.call(Call::CtxCreate { ctx, device: 0, legacy: StreamId(ctx.0) }, 0);
        record.module(ctx, ModuleId(ctx.0), Code::Whole(Image::default()));
        record.call(kernel(ctx.0, 0), 0);
    }
    record.call(Call::Grant { device: 0, addr: 1 << 40, bytes: 2 << 20 }, 0);
    record.post(Post::CtxDestroy { ctx: CTX });
    assert_eq!(names(&record), ["CtxCreate", "Module", "Kernel", "Grant"]);
}

#[test]
fn a_graph_is_built_as_it_is_now() {
    let mut record = Record::default();
    let exec = GraphExecId(3);
    let write = |value| StreamOp::WriteValue { addr: 0, value, wide: true };
    record.post(Post::GraphExecBegin { exec, ctx: CTX });
    for value in [1, 2] {
        record.post(Post::GraphExecNode { exec, op: write(value) });
    }
    record.post(Post::GraphExecEdges { exec, edges: List::new(vec![(0, 1)]).unwrap() });
    record.post(Post::GraphExecReady { exec, priorities: false });
    record.post(Post::GraphExecUpdate { exec, node: 1, op: write(9) });
    record.post(Post::GraphExecUpdate { exec, node: 7, op: write(9) });
    record.post(Post::GraphExecUpdate { exec, node: 0, op: StreamOp::Empty {} });
    record.post(Post::GraphExecUpdate { exec, node: 1, op: StreamOp::Empty {} });
    record.post(Post::GraphExecUpdate { exec, node: 1, op: write(9) });
    assert_eq!(
        names(&record),
        [
            "GraphExecBegin",
            "GraphExecNode",
            "GraphExecNode",
            "GraphExecEdges",
            "GraphExecReady",
            "GraphExecUpdate"
        ]
    );
    let node = Post::GraphExecNode { exec, op: write(9) };
    let message = Message::Post { post: node };
    assert_eq!(record.steps()[2], Step::Message { message, result: 0 });
}

#[test]
fn a_mipmap_stays_until_its_last_level_ends() {
    let mut record = Record::default();
    let levels: Vec<ArrayId> = (1..=3).map(ArrayId).collect();
    let list = List::new(levels.clone()).unwrap();
    let desc = kedge_protocol::ArrayDesc {
        device: 0,
        width: 4,
        height: 4,
        depth: 0,
        format: 1,
        channels: 1,
        flags: 0,
    };
    record.call(Call::MipmapCreate { ctx: CTX, levels: list, desc }, 0);
    record.post(Post::ArrayDestroy { array: levels[1] });
    assert_eq!(names(&record), ["MipmapCreate", "ArrayDestroy"]);
    record.post(Post::ArrayDestroy { array: levels[0] });
    record.post(Post::ArrayDestroy { array: levels[2] });
    assert_eq!(record.len(), 0);
}

#[test]
fn aliases_are_cut_where_they_end() {
    let mut record = Record::default();
    for at in [0x10_0000, 0x10_4000] {
        record.call(Call::Alias { alias: at, addr: at << 8, size: 0x4000 }, 0);
    }
    record.post(Post::Unalias { alias: 0x10_2000, size: 0x3000 });
    let alias = |alias, addr, size| {
        let message = Message::Call { call: Call::Alias { alias, addr, size } };
        Step::Message { message, result: 0 }
    };
    let left =
        [alias(0x10_5000, 0x1040_0000 + 0x1000, 0x3000), alias(0x10_0000, 0x1000_0000, 0x2000)];
    assert_eq!(record.steps(), left);
    record.post(Post::Unalias { alias: 0, size: 1 << 40 });
    assert_eq!(record.len(), 0);
}

#[test]
fn an_alias_that_is_cut_is_made_before_what_is_shared_in_it() {
    let mut record = Record::default();
    // Two registrations with a page in common, the first of which ends.
    record.call(Call::Alias { alias: 0x10_0000, addr: 0x1000_0000, size: 0x3000 }, 0);
    record.call(Call::Share { addr: 0x10_0064, size: 0x2710 }, 0);
    record.call(Call::Alias { alias: 0x10_3000, addr: 0x1000_3000, size: 0x5000 }, 0);
    record.call(Call::Share { addr: 0x10_2774, size: 0x4e20 }, 0);
    record.post(Post::Unshare { addr: 0x10_0064, size: 0x2710 });
    record.post(Post::Unalias { alias: 0x10_0000, size: 0x2000 });
    assert_eq!(names(&record), ["Alias", "Alias", "Share"]);
}

#[test]
fn mappings_end_as_a_range() {
    let mut record = Record::default();
    let handle = MemHandleId(1);
    record.call(Call::HandleCreate { handle, device: 0, size: 4 << 20, shareable: false }, 0);
    for addr in [0x20_0000, 0x40_0000, 0x60_0000] {
        record.call(Call::HandleMap { handle, addr, size: 0x20_0000, offset: 0 }, 0);
        for access in [1, 3] {
            let size = 0x20_0000;
            record.call(Call::HandleAccess { addr, size, device: 0, access }, 0);
        }
    }
    assert_eq!(record.len(), 7);
    record.post(Post::HandleUnmap { addr: 0x20_0000, size: 0x40_0000 });
    assert_eq!(names(&record), ["HandleCreate", "HandleMap", "HandleAccess"]);
}

#[test]
fn what_needs_no_repeating_is_not_kept() {
    let mut record = Record::default();
    record.call(Call::Ping {}, 0);
    let image = ModuleImage { addr: 0, len: 0 };
    record.call(Call::ModuleLoad { ctx: CTX, module: ModuleId(1), image }, 0);
    record.call(Call::Grant { device: 0, addr: 2, bytes: 4 }, 0);
    record.call(Call::Return { device: 0, addr: 2, bytes: 4 }, 0);
    assert_eq!(record.len(), 0);
}
