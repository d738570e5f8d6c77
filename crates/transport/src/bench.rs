//! What a post and a call cost: the functions behind `kedge bench calls`.

use crate::{Dead, pair};
use kedge_protocol::{
    Call, Dim3, KernelRef, Launch, Message, ModuleId, Post, Status, StreamId, StreamOp,
};
use kedge_wire::{Bytes, List};
use std::time::{Duration, Instant};

/// Plays a proxy that answers at once and does nothing else, for as long as its client lives.
fn echo(mut server: crate::Server) {
    let mut reply = Vec::new();
    kedge_wire::encode::<Status>(&Ok(()), &mut reply);
    loop {
        match server.try_next() {
            Ok(Some(incoming)) => {
                if let (Message::Call { .. }, Some(to)) = (incoming.message, incoming.reply_to)
                    && server.outbox().reply(to, &reply).is_err()
                {
                    return;
                }
            }
            Ok(None) if server.wait(Duration::from_micros(50)).is_ok() => {}
            _ => return,
        }
    }
}

/// Returns a launch with 32 bytes of parameters, as a vector addition posts it.
fn launch() -> Post {
    let one = Dim3 { x: 1, y: 1, z: 1 };
    Post::Enqueue {
        stream: StreamId(1),
        op: StreamOp::Launch {
            launch: Launch {
                kernel: KernelRef { module: ModuleId(1), index: 0 },
                grid: one,
                block: one,
                cluster: Dim3::default(),
                shared_bytes: 0,
                cooperative: false,
                params: Bytes::new(vec![0; 32]).unwrap_or_default(),
                hints: List::default(),
            },
        },
    }
}

/// Seconds that posting a launch takes, `rounds` samples; each is the mean of 64 posts into a ring
/// that is not full.
pub fn post_cost(rounds: usize) -> Result<Vec<f64>, Dead> {
    const BATCH: u32 = 64;
    let (client, server) = pair().map_err(|_| Dead)?;
    let echo = std::thread::spawn(move || echo(server));
    let post = launch();
    let samples = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..BATCH {
                client.post(&post)?;
            }
            let cost = start.elapsed().as_secs_f64() / f64::from(BATCH);
            client.call::<Status>(&Call::Ping {})?.map_err(|_| Dead)?;
            Ok(cost)
        })
        .collect();
    drop(client);
    let _ = echo.join();
    samples
}

/// Seconds of a call and its reply, `rounds` samples, while both sides spin.
pub fn round_trip(rounds: usize) -> Result<Vec<f64>, Dead> {
    let (client, server) = pair().map_err(|_| Dead)?;
    let echo = std::thread::spawn(move || echo(server));
    let samples = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            client.call::<Status>(&Call::Ping {})?.map_err(|_| Dead)?;
            Ok(start.elapsed().as_secs_f64())
        })
        .collect();
    drop(client);
    let _ = echo.join();
    samples
}
