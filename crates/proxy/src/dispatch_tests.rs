//! A client and a dispatcher over a real ring, with a backend that is none.

use crate::client_memory::ClientMemory;
use crate::dispatch::Dispatcher;
use crate::fake::Fake;
use crate::gate::Gate;
use crate::host::ProxyHost;
use crate::local::Local;
use crate::record::Step;
use crate::serve::execute_all;
use crate::watch;
use kedge_control::joblog::JobLog;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::SHARED_BASE;
use kedge_device::{Backend, Maker};
use kedge_device_nvidia::CacheLimits;
use kedge_protocol::*;
use kedge_transport::{Client, Server};
use kedge_wire::Text;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const CTX: CtxId = CtxId(1);
const STREAM: StreamId = StreamId(2);

/// A proxy's host with a device that does nothing, and the counter of operations that have run.
fn faked(server: &Server) -> (Arc<ProxyHost>, Arc<dyn Backend>, Arc<AtomicU64>) {
    let memory = ClientMemory::new(std::process::id());
    let log = Arc::new(JobLog::none());
    let host = Arc::new(ProxyHost::new(server.outbox().clone(), memory, log, None));
    let fake = Fake::new(host.clone());
    let ran = fake.ran.clone();
    let backend: Arc<dyn Backend> = fake;
    host.set_backend(&backend);
    (host, backend, ran)
}

/// A connected client with one context and one stream; the counter of operations that have run.
fn connected() -> (Client, Arc<AtomicU64>) {
    let (client, server) = kedge_transport::pair().unwrap();
    let (host, backend, ran) = faked(&server);
    let (pidfd, socket) =
        (watch::pidfd(std::process::id()).unwrap(), server.socket().try_clone_to_owned().unwrap());
    let hears = host.clone();
    let (never, stop) = std::io::pipe().unwrap();
    thread::spawn(move || {
        let _stop = stop;
        watch::wait(&pidfd, &socket, &never.into(), |said| hears.heard(said))
    });
    thread::spawn(move || {
        let socket = server.socket().try_clone_to_owned().unwrap();
        let dispatcher = Dispatcher::new(backend, host.clone(), socket);
        let gate = Gate::new(server.nudge());
        let executor = Box::new(Local::new(dispatcher, host.clone(), CacheLimits::default()));
        execute_all(server, executor, &host, &gate, Duration::from_micros(20))
    });
    create(&client, CTX, StreamId(1));
    let stream = Post::StreamCreate { stream: STREAM, ctx: CTX, blocking: true, priority: 0 };
    client.post(&stream).unwrap();
    (client, ran)
}

fn create(client: &Client, ctx: CtxId, legacy: StreamId) {
    let call = Call::CtxCreate { ctx, device: 0, legacy };
    client.call::<Status>(&call).unwrap().unwrap();
}

fn enqueue(client: &Client, op: StreamOp) {
    client.post(&Post::Enqueue { stream: STREAM, op }).unwrap();
}

fn fault(client: &Client, code: u32) {
    let (dst, pitch, element, width, height) = (0, 0, 1, 1, 1);
    enqueue(client, StreamOp::Memset { dst, pitch, value: code, element, width, height });
}

fn sync(client: &Client) -> Status {
    client.call(&Call::StreamSync { stream: STREAM }).unwrap()
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(10), "never {what}");
        thread::yield_now();
    }
}

/// The promise behind local synchronisation: a client that sees itself idle has no work left. The
/// rounds sweep the moment at which a post meets the device falling idle.
#[test]
fn an_idle_client_has_nothing_unfinished() {
    let (client, ran) = connected();
    let mut posted = 0;
    for round in 0..20_000u32 {
        for _ in 0..=round % 3 {
            enqueue(&client, StreamOp::Empty {});
            posted += 1;
        }
        for _ in 0..round % 400 {
            std::hint::spin_loop();
        }
        if client.is_idle() {
            assert_eq!(ran.load(Ordering::SeqCst), posted, "round {round}");
        }
    }
    // And it becomes idle without being asked to.
    until("idle", || client.is_idle());
    assert_eq!(ran.load(Ordering::SeqCst), posted);
    client.post(&Post::EventDestroy { event: EventId(1) }).unwrap();
    until("idle after a post that enqueues nothing", || client.is_idle());
}

#[test]
fn a_synchronised_client_is_idle() {
    let (client, _) = connected();
    for _ in 0..1000 {
        enqueue(&client, StreamOp::Empty {});
        assert_eq!(sync(&client), Ok(()));
    }
    until("idle", || client.is_idle());
}

#[test]
fn the_first_fault_sticks_to_its_context() {
    let (client, _) = connected();
    let other = CtxId(5);
    create(&client, other, StreamId(9));
    assert_eq!(sync(&client), Ok(()));
    fault(&client, 700);
    fault(&client, 719);
    assert_eq!(sync(&client), Err(700));
    assert_eq!(client.sticky(CTX), Some(CuError::ILLEGAL_ADDRESS));
    assert_eq!(client.call::<Status>(&Call::CtxSync { ctx: CTX }), Ok(Err(700)));
    assert_eq!(client.call::<Status>(&Call::StreamQuery { stream: STREAM }), Ok(Err(700)));
    assert_eq!(client.sticky(other), None);
    assert_eq!(client.call::<Status>(&Call::CtxSync { ctx: other }), Ok(Ok(())));
    client.post(&Post::CtxDestroy { ctx: CTX }).unwrap();
    assert_eq!(client.call::<Status>(&Call::Ping {}), Ok(Ok(())));
    assert_eq!(client.sticky(CTX), None);
}

#[test]
fn a_failed_post_breaks_its_context() {
    let (client, _) = connected();
    let exec = GraphExecId(3);
    client.post(&Post::GraphExecBegin { exec, ctx: CTX }).unwrap();
    client.post(&Post::GraphExecNode { exec, op: StreamOp::Empty {} }).unwrap();
    assert_eq!(sync(&client), Err(CuError::INVALID_PTX.0));
    assert_eq!(client.sticky(CTX), Some(CuError::INVALID_PTX));
}

#[test]
fn calls_that_fail_do_not_stick() {
    let (client, _) = connected();
    let status = |call| client.call::<Status>(&call).unwrap();
    let absent = Call::CtxCreate { ctx: CtxId(7), device: 9, legacy: StreamId(70) };
    assert_eq!(status(absent), Err(CuError::DEVICE_UNAVAILABLE.0));
    let grant = |bytes| status(Call::Grant { device: 0, addr: 0, bytes });
    assert_eq!(grant(1000), Err(CuError::OUT_OF_MEMORY.0));
    assert_eq!(grant(10), Ok(()));
    let share = |addr, size| status(Call::Share { addr, size });
    assert_eq!(share(SHARED_BASE, 1 << 30), Err(CuError::OUT_OF_MEMORY.0));
    assert_eq!(share(SHARED_BASE, 1), Ok(()));
    assert_eq!(share(0, 1), Err(CuError::INVALID_VALUE.0));
    let name = Text::new("k".to_owned()).unwrap();
    let global = Call::Global { module: ModuleId(1), name: name.clone() };
    let global = client.call::<Result<GlobalInfo, u32>>(&global).unwrap();
    assert_eq!(global, Err(CuError::NOT_FOUND.0));
    let kernel = Call::Kernel { module: ModuleId(1), index: 0, name };
    let kernel = client.call::<Result<KernelInfo, u32>>(&kernel).unwrap();
    assert_eq!(kernel.map(|info| info.name.into_inner()), Ok("k".to_owned()));
    let image = [7u8; 100];
    let image = |len| ModuleImage { addr: image.as_ptr() as u64, len };
    let load = |image| {
        let call = Call::ModuleLoad { ctx: CTX, module: ModuleId(1), image };
        client.call::<Result<(), LoadError>>(&call).unwrap().unwrap_err()
    };
    assert_eq!(&*load(image(100)).message, "[100]");
    assert_eq!(load(image(u64::MAX)).code, CuError::INVALID_IMAGE.0);
    assert_eq!(load(ModuleImage { addr: 16, len: 8 }).code, CuError::INVALID_IMAGE.0);
    let elapsed = Call::EventElapsed { start: EventId(1), end: EventId(2) };
    let elapsed = client.call::<Result<Elapsed, u32>>(&elapsed).unwrap();
    assert_eq!(elapsed, Ok(Elapsed { milliseconds: 1.5 }));
    assert_eq!(client.sticky(CTX), None);
}

#[test]
fn kernel_names_come_in_pages() {
    let (client, _) = connected();
    let page = |module, first| {
        let call = Call::KernelNames { module: ModuleId(module), first };
        client.call::<Result<KernelNames, u32>>(&call).unwrap().unwrap()
    };
    for (module, count, pages) in [(1, 10_000, 3), (2, 40, 3)] {
        let mut names: Vec<String> = Vec::new();
        for at in 1.. {
            let next = page(module, names.len() as u32);
            names.extend(next.names.iter().map(|name| name.to_string()));
            if !next.more {
                assert_eq!(at, pages);
                break;
            }
        }
        names.dedup();
        assert_eq!(names.len(), count, "each name once, but for one that is too long");
    }
    let behind = page(1, u32::MAX);
    assert!(behind.names.is_empty() && !behind.more);
}

#[test]
fn host_functions_run_in_the_client_and_the_stream_waits() {
    let (client, ran) = connected();
    enqueue(&client, StreamOp::HostFn { token: 42 });
    enqueue(&client, StreamOp::Empty {});
    assert_eq!(client.next_host_fn(), Ok(42));
    assert_eq!(ran.load(Ordering::SeqCst), 0);
    assert!(!client.is_idle());
    // A thread that waits for the stream does not keep this one from ending the function.
    thread::scope(|scope| {
        let waiter = scope.spawn(|| sync(&client));
        thread::sleep(Duration::from_millis(20));
        assert!(!waiter.is_finished());
        client.host_fn_done(42).unwrap();
        assert_eq!(waiter.join().unwrap(), Ok(()));
    });
    assert_eq!(ran.load(Ordering::SeqCst), 2);
}

#[test]
fn device_output_waits_for_the_client() {
    let (client, _) = connected();
    assert!(!client.output_pending());
    enqueue(&client, StreamOp::WriteValue { addr: 0, value: 10, wide: false });
    assert_eq!(sync(&client), Ok(()));
    assert!(client.output_pending());
    let output = client.call::<Output>(&Call::TakeOutput {}).unwrap();
    assert_eq!(output.parts.iter().map(|(_, bytes)| bytes.len()).sum::<usize>(), 10);
    assert!(!output.more && !client.output_pending());
}

/// Host functions' ends use the same socket meanwhile.
#[test]
fn descriptors_travel_with_their_calls() {
    let (client, ran) = connected();
    let (threads, rounds) = (8, 50);
    thread::scope(|scope| {
        for number in 0..threads {
            let client = &client;
            scope.spawn(move || {
                for round in 0..rounds {
                    let handle = MemHandleId(number * rounds + round);
                    let fd = client.call_for_descriptor(&Call::HandleExport { handle });
                    let ticket = kedge_transport::TICKET | u64::from(handle.0);
                    client.send_descriptor(ticket, fd.unwrap().unwrap().as_fd()).unwrap();
                    let call = Call::HandleImport { handle, ticket };
                    let imported: Result<Imported, u32> = client.call(&call).unwrap();
                    assert_eq!(imported, Ok(Imported { device: Some(0), size: Some(0) }));
                }
            });
        }
        for token in 0..100 {
            enqueue(&client, StreamOp::HostFn { token });
            assert_eq!(client.next_host_fn(), Ok(token));
            client.host_fn_done(token).unwrap();
        }
    });
    assert_eq!(sync(&client), Ok(()));
    assert_eq!(ran.load(Ordering::SeqCst), 100);
}

/// What is on its way to the client is lost with the proxy, so a checkpoint waits for it.
#[test]
fn devices_rest_when_the_client_has_read_its_welcome() {
    let (_client, server) = kedge_transport::pair().unwrap();
    let memory = ClientMemory::new(std::process::id());
    let log = Arc::new(JobLog::none());
    let host = Arc::new(ProxyHost::new(server.outbox().clone(), memory, log, None));
    let backend: Arc<dyn Backend> = Fake::new(host.clone());
    host.set_backend(&backend);
    let (mut proxys, mut clients) = UnixStream::pair().unwrap();
    let dispatcher = Dispatcher::new(backend, host, proxys.try_clone().unwrap().into());
    assert!(dispatcher.at_rest());
    proxys.write_all(b"welcome").unwrap();
    assert!(!dispatcher.at_rest());
    clients.read_exact(&mut [0; 7]).unwrap();
    assert!(dispatcher.at_rest());
}

/// An image may say anything.
#[test]
fn work_is_no_step_of_a_restart() {
    let (_client, server) = kedge_transport::pair().unwrap();
    let (host, backend, ran) = faked(&server);
    let socket = server.socket().try_clone_to_owned().unwrap();
    let mut dispatcher = Dispatcher::new(backend, host, socket);
    let mut make = |post| {
        let message = Message::Post { post };
        Maker::make(&mut dispatcher, Step::Message { message, result: 0 })
    };
    let stream = Post::StreamCreate { stream: STREAM, ctx: CTX, blocking: true, priority: 0 };
    assert_eq!(make(stream), Ok(()));
    let op = StreamOp::WriteValue { addr: 0, value: 10, wide: false };
    assert_eq!(make(Post::Enqueue { stream: STREAM, op }), Err(CuError::NOT_SUPPORTED));
    assert_eq!(ran.load(Ordering::SeqCst), 0);
}
