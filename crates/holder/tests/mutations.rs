//! Messages that were changed on their way are refused, or have one encoding.
#![forbid(unsafe_code)]

use kedge_holder::{Answer, Order, PART, Plea, SLOTS, check_bytes};
use kedge_test_corpus::Corpus;
use kedge_wire::{Text, Wire, decode_canonical, encode};

fn encoded(message: &impl Wire) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(message, &mut bytes);
    bytes
}

fn samples() -> Vec<Vec<u8>> {
    vec![
        encoded(&Order::Hello { version: 3, daemon: 7, keep: 1 << 30 }),
        encoded(&Order::Put { slot: 7, place: 300 }),
        encoded(&Order::Get { place: 5, slot: 0, offset: 4096, length: 1 << 20 }),
        encoded(&Order::Free { place: 1 }),
        encoded(&Order::End {}),
        encoded(&Order::Look {}),
        encoded(&Plea::Room { version: 3, bytes: 80 << 20 }),
        encoded(&Answer::Stands { free: 5 << 30, wanted: 0 }),
        encoded(&Answer::Holder { number: u64::MAX - 1, places: 256 }),
        encoded(&Answer::Done {}),
        encoded(&Answer::Full {}),
        encoded(&Answer::Failed { why: Text::truncated("no device".into()) }),
    ]
}

/// What the fuzz target begins with.
#[test]
fn the_corpus_is_what_the_messages_encode_to() {
    let named = samples().into_iter().zip(1..);
    let named = named.map(|(bytes, number)| (format!("message-{number}"), bytes));
    Corpus::of("holder", check_bytes).has(named);
}

#[test]
fn changed_messages_are_refused_or_have_one_encoding() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as usize % below
    };
    let (mut orders, mut answers, mut pleas) = (0, 0, 0);
    for sample in samples() {
        for round in 0..4000 {
            let mut bytes = sample.clone();
            // The first time as it was sent.
            for _ in 0..random(4).min(round) {
                let at = random(bytes.len().max(1));
                match random(4) {
                    0 if !bytes.is_empty() => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random(5)],
                    1 if !bytes.is_empty() => bytes[at] ^= 1 << random(8),
                    2 => bytes.truncate(at),
                    _ => bytes.insert(at.min(bytes.len()), random(256) as u8),
                }
            }
            check_bytes(&bytes);
            if let Some(order) = decode_canonical::<Order>(&bytes) {
                // Whatever is asked fits or does not.
                let _ = order.fits(300);
                orders += 1;
            }
            answers += u32::from(decode_canonical::<Answer>(&bytes).is_some());
            pleas += u32::from(decode_canonical::<Plea>(&bytes).is_some());
        }
    }
    let least = orders.min(answers).min(pleas);
    assert!(least > 100, "hardly any were decoded: {orders}, {answers}, {pleas}");
}

#[test]
fn orders_name_what_a_holder_has() {
    let (part, half) = (PART as u32, PART as u32 / 2);
    for (order, fits) in [
        (Order::Put { slot: SLOTS - 1, place: 9 }, true),
        (Order::Put { slot: SLOTS, place: 9 }, false),
        (Order::Put { slot: 0, place: 10 }, false),
        (Order::Get { place: 9, slot: 0, offset: half, length: half }, true),
        (Order::Get { place: 9, slot: 0, offset: half, length: half + 1 }, false),
        (Order::Get { place: 9, slot: 0, offset: u32::MAX, length: u32::MAX }, false),
        (Order::Get { place: 9, slot: SLOTS, offset: 0, length: part }, false),
        (Order::Get { place: 10, slot: 0, offset: 0, length: part }, false),
        (Order::Free { place: 10 }, false),
        (Order::End {}, true),
        (Order::Look {}, true),
    ] {
        assert_eq!(order.fits(10), fits, "{order:?}");
    }
}
