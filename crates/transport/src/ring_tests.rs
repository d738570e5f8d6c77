//! What a hostile client can do to its ring: errors for the proxy, and nothing else.

use crate::error::RingError;
use crate::layout::{MAX_MESSAGE, NO_SLOT, RING_BYTES, RING_WORDS, SLOTS};
use crate::memory::Segment;
use crate::ring::{Consumer, Producer};
use kedge_protocol::{Call, Message, Post};
use kedge_wire::Writer;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// xorshift64*: enough for tests, and repeats.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

fn ends() -> (Arc<Segment>, Producer, Consumer) {
    let segment = Arc::new(Segment::create().unwrap());
    (segment.clone(), Producer::new(), Consumer::new(segment))
}

fn push(segment: &Segment, producer: &mut Producer, token: u64, slot: Option<u32>) {
    producer.buffer.clear();
    let mut w = Writer::new(&mut producer.buffer);
    match slot {
        None => Message::put_post(&Post::Unshare { addr: token, size: 0 }, &mut w),
        Some(_) => Message::put_call(&Call::Ping {}, &mut w),
    }
    producer.push(segment, slot, || true).unwrap();
}

fn set(segment: &Segment, index: usize, value: u64) {
    segment.ring()[index % RING_WORDS].store(value, Ordering::Relaxed);
}

#[test]
fn each_lie_has_its_error() {
    type Lie = fn(&Segment);
    let tail = |segment: &Segment, value| segment.header().tail.0.store(value, Ordering::Relaxed);
    let lies: [(&str, Lie); 8] = [
        ("tail too far", |s| s.header().tail.0.store(RING_BYTES as u64 + 8, Ordering::Relaxed)),
        ("tail odd", |s| s.header().tail.0.store(27, Ordering::Relaxed)),
        ("tail inside the head", |s| s.header().tail.0.store(8, Ordering::Relaxed)),
        ("length beyond the tail", |s| set(s, 1, 4096 | u64::from(NO_SLOT) << 32)),
        ("length beyond the maximum", |s| {
            s.header().tail.0.store(RING_BYTES as u64, Ordering::Relaxed);
            set(s, 1, (MAX_MESSAGE as u64 + 1) | u64::from(NO_SLOT) << 32);
        }),
        ("sequence skipped", |s| set(s, 0, 2)),
        ("no such slot", |s| set(s, 1, 16 | (SLOTS as u64) << 32)),
        ("post with a slot", |s| set(s, 1, 16)),
    ];
    for (what, lie) in lies {
        let (segment, mut producer, mut consumer) = ends();
        push(&segment, &mut producer, 7, None);
        lie(&segment);
        assert!(consumer.try_next().is_err(), "{what}");
    }
    let (segment, mut producer, mut consumer) = ends();
    push(&segment, &mut producer, 7, None);
    assert!(consumer.try_next().unwrap().is_some());
    tail(&segment, 0);
    assert!(matches!(consumer.try_next(), Err(RingError::Positions { .. })), "tail went back");
}

#[test]
fn random_rings_end_in_an_error_or_in_messages() {
    let mut random = Random(0x6b65_6467_6501);
    for _ in 0..400 {
        let (segment, mut producer, mut consumer) = ends();
        for token in 0..20 {
            push(&segment, &mut producer, token, (token % 3 == 0).then_some(token as u32));
        }
        let words = segment.header().tail.0.load(Ordering::Relaxed) as usize / 8;
        for _ in 0..=random.next() % 4 {
            let index = random.next() as usize % words;
            let value = match random.next() % 3 {
                0 => random.next(),
                1 => segment.ring()[index].load(Ordering::Relaxed) ^ 1 << (random.next() % 64),
                _ => u64::MAX,
            };
            set(&segment, index, value);
        }
        let mut taken = 0;
        while let Ok(Some(_)) = consumer.try_next() {
            taken += 1;
        }
        assert!(taken <= 20);
    }
}

#[test]
fn a_client_that_writes_all_the_time_breaks_nothing() {
    let (segment, _, _) = ends();
    let writing = segment.clone();
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = stop.clone();
    let writer = std::thread::spawn(move || {
        let mut random = Random(99);
        while !stopped.load(Ordering::Relaxed) {
            set(&writing, random.next() as usize % 64, random.next() % 40);
            writing.header().tail.0.store(random.next() % 64 * 8, Ordering::Relaxed);
        }
    });
    let start = std::time::Instant::now();
    while start.elapsed() < std::time::Duration::from_millis(200) {
        let mut consumer = Consumer::new(segment.clone());
        while let Ok(Some(_)) = consumer.try_next() {}
    }
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
}
