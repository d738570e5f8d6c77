//! Order, wrap-around, full rings, long replies, waiting threads.

use kedge_cuda_types::CuError;
use kedge_protocol::{Call, CtxId, Message, Post, Status, StreamId, StreamOp};
use kedge_transport::{Client, RING_BYTES, SLOTS, Server, pair};
use kedge_wire::{Bytes, List};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

const SPIN: Duration = Duration::from_micros(20);

/// Serves until the client is dropped.
fn serve(mut server: Server, mut each: impl FnMut(&Server, Message, u64) -> Option<Vec<u8>>) {
    loop {
        match server.try_next().expect("a well-formed ring") {
            Some(incoming) => {
                let reply = each(&server, incoming.message, incoming.seq);
                if let (Some(to), Some(bytes)) = (incoming.reply_to, reply) {
                    server.outbox().reply(to, &bytes).expect("replies fit");
                }
            }
            None => {
                if server.wait(SPIN).is_err() {
                    return;
                }
            }
        }
    }
}

fn encoded<T: kedge_wire::Wire>(value: &T) -> Vec<u8> {
    let mut out = Vec::new();
    kedge_wire::encode(value, &mut out);
    out
}

fn with_server<T>(
    each: impl FnMut(&Server, Message, u64) -> Option<Vec<u8>> + Send + 'static,
    body: impl FnOnce(Client) -> T,
) -> T {
    let (client, server) = pair().expect("a pair");
    let serving = thread::spawn(move || serve(server, each));
    let value = body(client);
    serving.join().expect("the server");
    value
}

#[test]
fn threads_posts_arrive_in_the_order_in_which_they_were_accepted() {
    const THREADS: u64 = 4;
    const EACH: u64 = 20_000;
    let seen = Arc::new(AtomicU64::new(0));
    let mut last = [0u64; THREADS as usize];
    let mut frontier = 0;
    let count = seen.clone();
    // Each token carries (thread, its counter, a global ticket drawn before the post): a post that
    // had returned when another drew its ticket must not come later.
    let check = move |_: &Server, message: Message, _| {
        match message {
            Message::Post { post: Post::Unshare { addr: token, .. } } => {
                let (thread, n) = ((token >> 48) as usize, token & 0xffff_ffff_ffff);
                assert_eq!(n, last[thread] + 1, "thread {thread} out of order");
                last[thread] = n;
                count.fetch_add(1, Ordering::Relaxed);
                None
            }
            Message::Post { post: Post::MemFree { addr, size } } => {
                // Posted under a lock that hands over from thread to thread: strictly rising.
                assert_eq!((addr, size), (frontier + 1, 0));
                frontier = addr;
                None
            }
            _ => Some(encoded::<Status>(&Ok(()))),
        }
    };
    with_server(check, |client| {
        let baton = std::sync::Mutex::new(0);
        thread::scope(|scope| {
            for t in 0..THREADS {
                let (client, baton) = (&client, &baton);
                scope.spawn(move || {
                    for n in 1..=EACH {
                        client.post(&Post::Unshare { addr: t << 48 | n, size: 0 }).unwrap();
                        if n % 64 == 0 {
                            let mut ticket = baton.lock().unwrap();
                            *ticket += 1;
                            client.post(&Post::MemFree { addr: *ticket, size: 0 }).unwrap();
                        }
                        if n % 1000 == 0 {
                            client.call::<Status>(&Call::Ping {}).unwrap().unwrap();
                        }
                    }
                });
            }
        });
        client.call::<Status>(&Call::Ping {}).unwrap().unwrap();
        assert_eq!(seen.load(Ordering::Relaxed), THREADS * EACH);
    });
}

/// Threads that make more calls in one go than there is room for: each has its own replies.
#[test]
fn calls_in_one_go_are_answered_in_order() {
    let check = |_: &Server, message: Message, _| match message {
        Message::Call { call: Call::StreamSync { stream } } => {
            Some(encoded::<Status>(&Err(stream.0)))
        }
        _ => Some(encoded::<Status>(&Ok(()))),
    };
    with_server(check, |client| {
        thread::scope(|scope| {
            for t in 0..8 {
                let client = &client;
                scope.spawn(move || {
                    let numbers = t * 10_000..t * 10_000 + 1000;
                    let sync = |n| Call::StreamSync { stream: StreamId(n) };
                    let calls: Vec<Call> = numbers.clone().map(sync).collect();
                    let expected: Vec<Status> = numbers.map(Err).collect();
                    assert_eq!(client.call_each::<Status>(&calls), Ok(expected));
                });
            }
        });
        assert_eq!(client.call_each::<Status>(&[]), Ok(Vec::new()));
    });
}

/// Large and odd-sized posts fill the ring many times over while the server lags.
#[test]
fn a_full_ring_waits_and_wraps() {
    let mut expected = 0u64;
    let check = move |_: &Server, message: Message, seq| match message {
        Message::Post { post: Post::Enqueue { op: StreamOp::CopyInline { dst, bytes }, .. } } => {
            assert_eq!(dst, expected);
            assert!(bytes.iter().all(|b| u64::from(*b) == dst % 251), "payload of {dst} torn");
            expected += 1;
            if seq % 300 == 0 {
                thread::sleep(Duration::from_millis(3));
            }
            None
        }
        _ => Some(encoded::<Status>(&Ok(()))),
    };
    with_server(check, |client| {
        let mut sent = 0;
        let mut n = 0u64;
        while sent < 12 * RING_BYTES {
            let len = (n as usize * 7919) % 65_000;
            let bytes = Bytes::new(vec![(n % 251) as u8; len]).unwrap();
            let op = StreamOp::CopyInline { dst: n, bytes };
            client.post(&Post::Enqueue { stream: StreamId(1), op }).unwrap();
            sent += len;
            n += 1;
        }
        client.call::<Status>(&Call::Ping {}).unwrap().unwrap();
    });
}

/// The server sleeps between messages; none may be left lying.
#[test]
fn no_wake_up_is_lost() {
    with_server(
        |_, _, _| Some(encoded::<Status>(&Ok(()))),
        |client| {
            for n in 0..3000u64 {
                // Around the server's spin time, so that falling asleep meets new posts.
                let pause = Duration::from_micros(n % 60);
                let start = std::time::Instant::now();
                while start.elapsed() < pause {
                    std::hint::spin_loop();
                }
                let start = std::time::Instant::now();
                client.call::<Status>(&Call::Ping {}).unwrap().unwrap();
                assert!(start.elapsed() < Duration::from_secs(2), "call {n} hung");
            }
        },
    );
}

#[test]
fn long_replies_come_whole() {
    type Long = List<(u32, i32), 4_000_000>;
    let sizes = [0usize, 1, 125, 126, 127, 1000, 100_000, 3_000_000];
    let mut next = 0;
    let long = |n: usize| Long::new((0..n).map(|i| (i as u32, -(i as i32))).collect()).unwrap();
    with_server(
        move |_, _, _| {
            next += 1;
            Some(encoded(&long(sizes[next - 1])))
        },
        |client| {
            for n in sizes {
                assert_eq!(client.call::<Long>(&Call::Ping {}).unwrap(), long(n), "{n} elements");
            }
        },
    );
}

/// More threads wait than there are slots, and a thread that waits holds nobody up.
#[test]
fn waiting_threads_do_not_block_posts() {
    const WAITERS: usize = SLOTS + 20;
    let (client, mut server) = pair().expect("a pair");
    let (waiting_tx, waiting) = std::sync::mpsc::channel();
    let serving = thread::spawn(move || {
        let mut held = Vec::new();
        loop {
            match server.try_next().unwrap() {
                Some(i) => match i.message {
                    Message::Call { call: Call::StreamSync { .. } } => {
                        held.push(i.reply_to.unwrap());
                        waiting_tx.send(()).unwrap();
                    }
                    // Only this post lets the waiters go.
                    Message::Post { post: Post::Unshare { .. } } => {
                        for to in held.drain(..) {
                            server.outbox().reply(to, &encoded::<Status>(&Err(700))).unwrap();
                        }
                    }
                    other => panic!("unexpected {other:?}"),
                },
                None => {
                    if server.wait(SPIN).is_err() {
                        return;
                    }
                }
            }
        }
    });
    thread::scope(|scope| {
        for _ in 0..WAITERS {
            scope.spawn(|| {
                let stream = StreamId(1);
                assert_eq!(client.call::<Status>(&Call::StreamSync { stream }), Ok(Err(700)));
            });
        }
        for _ in 0..SLOTS {
            waiting.recv_timeout(Duration::from_secs(20)).expect("a waiter");
        }
        client.post(&Post::Unshare { addr: 1, size: 0 }).unwrap();
        for _ in SLOTS..WAITERS {
            waiting.recv_timeout(Duration::from_secs(20)).expect("a late waiter");
        }
        client.post(&Post::Unshare { addr: 2, size: 0 }).unwrap();
    });
    drop(client);
    serving.join().unwrap();
}

#[test]
fn faults_progress_and_host_functions_reach_the_client() {
    let (client, server) = pair().expect("a pair");
    let outbox = server.outbox();
    assert!(client.is_idle() && !client.output_pending());
    client.post(&Post::Unshare { addr: 1, size: 0 }).unwrap();
    assert!(!client.is_idle());
    outbox.set_completed(client.posted());
    assert!(client.is_idle());

    assert_eq!(client.sticky(CtxId(3)), None);
    outbox.set_sticky(CtxId(3), CuError::ILLEGAL_ADDRESS);
    assert_eq!(client.sticky(CtxId(3)), Some(CuError::ILLEGAL_ADDRESS));
    assert_eq!(client.sticky(CtxId(4)), None);
    outbox.clear_sticky(CtxId(3));
    assert_eq!(client.sticky(CtxId(3)), None);

    outbox.set_output_pending(true);
    assert!(client.output_pending());

    thread::scope(|scope| {
        let taker = scope.spawn(|| (0..1000).map(|_| client.next_host_fn().unwrap()).collect());
        for token in 0..1000 {
            while !outbox.try_host_fn(token) {
                thread::yield_now();
            }
        }
        let tokens: Vec<u64> = taker.join().unwrap();
        assert!(tokens.iter().copied().eq(0..1000));
    });
}

#[test]
fn a_nudge_ends_each_wait() {
    let (client, server) = pair().expect("a pair");
    let (nudge, ended) = (server.nudge(), Arc::new(AtomicU64::new(0)));
    let count = ended.clone();
    let waiting = thread::spawn(move || {
        while server.wait(SPIN).is_ok() {
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    for round in 0..20_000 {
        // In all phases of a wait: while it spins, as it goes to sleep, asleep.
        (0..round % 97 * 20).for_each(|_| std::hint::spin_loop());
        let before = ended.load(Ordering::SeqCst);
        nudge.now();
        let begin = std::time::Instant::now();
        while ended.load(Ordering::SeqCst) == before {
            assert!(begin.elapsed() < Duration::from_secs(10), "round {round}");
            thread::yield_now();
        }
    }
    drop(client);
    waiting.join().expect("it ends with its client");
}
