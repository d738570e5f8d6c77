use super::*;
use kedge_cuda_types::arena::{SHARED_BASE, device_base};
use kedge_protocol::{Copy3d, KernelRef, Launch, MemHandleId, Shape};
use kedge_wire::List;

const CTX: [CtxId; 3] = [CtxId(1), CtxId(2), CtxId(3)];

/// Two places, with devices 0 and 2, and 1; a context on each device, in this order.
fn table() -> Table {
    let mut table = Table::new(vec![Windows::of(&[0, 2]).unwrap(), Windows::of(&[1]).unwrap()]);
    for (ctx, device) in CTX.into_iter().zip(0..) {
        let call = Call::CtxCreate { ctx, device, legacy: StreamId(ctx.0) };
        let at = usize::from(device == 1);
        assert_eq!(table.route(&Message::Call { call }), Route::To(at));
    }
    table
}

fn post(table: &mut Table, post: Post) -> Route {
    table.route(&Message::Post { post })
}

fn call(table: &mut Table, call: Call) -> Route {
    table.route(&Message::Call { call })
}

#[test]
fn what_is_made_of_a_thing_is_where_that_is() {
    let mut table = table();
    for (ctx, at) in CTX.into_iter().zip([0, 1, 0]) {
        let (stream, event, exec) = (StreamId(10 + ctx.0), EventId(ctx.0), GraphExecId(ctx.0));
        let (module, array) = (ModuleId(ctx.0), ArrayId(ctx.0));
        let made = [
            Post::StreamCreate { stream, ctx, blocking: true, priority: 0 },
            Post::EventCreate { event, ctx, timing: true, interprocess: false },
            Post::GraphExecBegin { exec, ctx },
        ];
        for one in made {
            assert_eq!(post(&mut table, one), Route::To(at));
        }
        let image = kedge_protocol::ModuleImage { addr: 0, len: 0 };
        assert_eq!(call(&mut table, Call::ModuleLoad { ctx, module, image }), Route::To(at));
        let desc = kedge_protocol::ArrayDesc {
            device: ctx.0 - 1,
            width: 1,
            height: 0,
            depth: 0,
            format: 32,
            channels: 1,
            flags: 0,
        };
        assert_eq!(call(&mut table, Call::ArrayCreate { ctx, array, desc }), Route::To(at));
        let kernel = KernelRef { module, index: 0 };
        for asked in [
            Call::StreamSync { stream },
            Call::StreamSync { stream: StreamId(ctx.0) },
            Call::EventQuery { event },
            Call::Global { module, name: Default::default() },
            Call::Grant { device: ctx.0 - 1, addr: device_base(ctx.0 - 1), bytes: 2 << 20 },
            Call::Limit { ctx, limit: 0 },
        ] {
            assert_eq!(call(&mut table, asked), Route::To(at));
        }
        let ended = [
            Post::KernelAttribute { kernel, attribute: 0, value: 0 },
            Post::ArrayDestroy { array },
        ];
        for one in ended {
            assert_eq!(post(&mut table, one), Route::To(at));
        }
        let enqueued = Post::Enqueue { stream, op: StreamOp::Empty {} };
        assert_eq!(post(&mut table, enqueued), Route::Stream(at));
    }
    assert_eq!(post(&mut table, Post::CtxDestroy { ctx: CTX[1] }), Route::To(1));
    // What went with it is nobody's: the first says what is wrong.
    assert_eq!(call(&mut table, Call::StreamSync { stream: StreamId(12) }), Route::To(FIRST));
    assert_eq!(call(&mut table, Call::CtxSync { ctx: CTX[1] }), Route::To(FIRST));
    assert!(table.events.len() == 2 && table.arrays.is_empty() && table.graphs.len() == 2);
}

#[test]
fn host_memory_is_all_places() {
    let mut table = table();
    let (addr, size) = (SHARED_BASE, 4096);
    let undone_by = |post| Route::All { undo: Some(Box::new(post)) };
    let unshared = undone_by(Post::Unshare { addr, size });
    assert_eq!(call(&mut table, Call::Share { addr, size }), unshared);
    let unaliased = undone_by(Post::Unalias { alias: 1 << 40, size });
    assert_eq!(call(&mut table, Call::Alias { alias: 1 << 40, addr, size }), unaliased);
    assert_eq!(post(&mut table, Post::Unshare { addr, size }), Route::All { undo: None });
    assert_eq!(call(&mut table, Call::TakeOutput {}), Route::Output);
}

#[test]
fn what_an_operation_is_about_is_found_by_names_and_addresses() {
    let mut table = table();
    post(
        &mut table,
        Post::EventCreate { event: EventId(9), ctx: CTX[1], timing: false, interprocess: false },
    );
    let side = |addr| Side::Mapped { addr, pitch: 0, slice: 0 };
    let copy =
        |src, dst| StreamOp::Copy { copy: Copy3d::new(side(src), side(dst), Shape::line(4)) };
    let [zero, one, two] = [0, 1, 2].map(device_base);
    let kernel = KernelRef { module: ModuleId(77), index: 0 };
    let launch = Launch {
        kernel,
        grid: Default::default(),
        block: Default::default(),
        cluster: Default::default(),
        shared_bytes: 0,
        cooperative: false,
        params: Default::default(),
        hints: List::default(),
    };
    for (op, about) in [
        (copy(zero, one), [Some(0), Some(1)]),
        (copy(zero, two), [Some(0), Some(0)]),
        (copy(SHARED_BASE, one), [None, Some(1)]),
        (copy(0x7000_0000, SHARED_BASE), [None, None]),
        (StreamOp::EventWait { event: EventId(9) }, [Some(1), None]),
        (StreamOp::MemFree { addr: two, size: 1 }, [Some(0), None]),
        (StreamOp::Launch { launch }, [None, None]),
        (StreamOp::HostFn { token: 1 }, [None, None]),
    ] {
        assert_eq!(table.about(&op), about, "{op:?}");
        assert_eq!(table.is_of(&op, 0), !about.contains(&Some(1)), "{op:?}");
    }
    assert_eq!(table.context_for(&copy(zero, one), 1), Some(CTX[1]));
    assert_eq!(table.context_for(&copy(two, one), 0), Some(CTX[2]));
    assert_eq!(table.context_for(&StreamOp::EventWait { event: EventId(9) }, 1), Some(CTX[1]));
}

#[test]
fn what_two_places_cannot_share_is_refused() {
    let mut table = table();
    let exec = GraphExecId(5);
    post(&mut table, Post::GraphExecBegin { exec, ctx: CTX[0] });
    let fill = |addr| StreamOp::WriteValue { addr, value: 0, wide: false };
    let node = |addr| Post::GraphExecNode { exec, op: fill(addr) };
    assert_eq!(post(&mut table, node(device_base(2))), Route::To(0));
    assert_eq!(post(&mut table, node(device_base(1))), Route::Refused(GRAPH));
    assert_eq!(table.of_graph_post(&node(0)), (0, Some(CTX[0])));

    let handle = MemHandleId(3);
    let size = 2 << 20;
    let create = Call::HandleCreate { handle, device: 1, size, shareable: false };
    assert_eq!(call(&mut table, create), Route::To(1));
    let map = |device| Call::HandleMap { handle, addr: device_base(device), size, offset: 0 };
    assert_eq!(call(&mut table, map(1)), Route::To(1));
    assert_eq!(call(&mut table, map(0)), Route::Refused(MAPPED));
    let access = |device, access| Call::HandleAccess { addr: device_base(1), size, device, access };
    assert_eq!(call(&mut table, access(1, 3)), Route::To(1));
    assert_eq!(call(&mut table, access(0, 3)), Route::Refused(ACCESS));
    assert_eq!(call(&mut table, access(0, 0)), Route::Answered(Ok(())));
    assert_eq!(call(&mut table, Call::SlabShare { addr: device_base(0) }), Route::Refused(SHARED));

    for (event, ctx) in [(EventId(1), CTX[0]), (EventId(2), CTX[1]), (EventId(3), CTX[2])] {
        post(&mut table, Post::EventCreate { event, ctx, timing: true, interprocess: false });
    }
    let elapsed = |start, end| Call::EventElapsed { start: EventId(start), end: EventId(end) };
    assert_eq!(call(&mut table, elapsed(1, 3)), Route::To(0));
    let unrelated = Route::Answered(Err(CuError::INVALID_HANDLE));
    assert_eq!(call(&mut table, elapsed(1, 2)), unrelated);
}

/// What the record of a place makes is known as when it was made.
#[test]
fn what_an_image_records_is_where_it_was() {
    let mut before = Table::new(vec![Windows::of(&[0, 2]).unwrap(), Windows::of(&[1]).unwrap()]);
    let mut after = Table::new(vec![Windows::of(&[0, 2]).unwrap(), Windows::of(&[1]).unwrap()]);
    let mut records = [Vec::new(), Vec::new()];
    for (ctx, device) in CTX.into_iter().zip(0..) {
        let (stream, event, exec) = (StreamId(10 + ctx.0), EventId(ctx.0), GraphExecId(ctx.0));
        let (handle, array) = (MemHandleId(ctx.0), ArrayId(ctx.0));
        let desc = kedge_protocol::ArrayDesc {
            device,
            width: 1,
            height: 0,
            depth: 0,
            format: 32,
            channels: 1,
            flags: 0,
        };
        let levels = List::new(vec![ArrayId(100 + ctx.0)]).unwrap();
        for message in [
            Message::Call { call: Call::CtxCreate { ctx, device, legacy: StreamId(ctx.0) } },
            Message::Post { post: Post::StreamCreate { stream, ctx, blocking: true, priority: 0 } },
            Message::Post {
                post: Post::EventCreate { event, ctx, timing: true, interprocess: false },
            },
            Message::Post { post: Post::GraphExecBegin { exec, ctx } },
            Message::Call { call: Call::ArrayCreate { ctx, array, desc } },
            Message::Call { call: Call::MipmapCreate { ctx, levels, desc } },
            Message::Call {
                call: Call::HandleCreate { handle, device, size: 2 << 20, shareable: false },
            },
        ] {
            let Route::To(at) = before.route(&message) else { panic!("{message:?}") };
            records[at].push(SavedStep::Message { message, result: 0 });
        }
        let module = ModuleId(ctx.0);
        let image = || kedge_protocol::ModuleImage { addr: 0, len: 0 };
        call(&mut before, Call::ModuleLoad { ctx, module, image: image() });
        let linked = ModuleId(20 + ctx.0);
        call(&mut before, Call::ModuleLoad { ctx, module: linked, image: image() });
        let images = List::new(vec![1, 1]).unwrap();
        records[usize::from(device == 1)].extend([
            SavedStep::Module { ctx, module, image: 1 },
            SavedStep::Linked { ctx, module: linked, images },
        ]);
    }
    records.iter().flatten().for_each(|step| after.remember(step));
    assert_eq!(before, after);
}
