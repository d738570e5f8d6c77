//! The fuzz target's property on its corpus, which has a message of every shape, and on what
//! mutations make of it.

use kedge_coordinator::*;
use kedge_wire::{List, encode};
use proptest::prelude::*;
use std::path::PathBuf;

fn name(text: &str) -> Name {
    Name::truncated(text.to_owned())
}

/// A message of every shape, with a name for its file.
fn samples() -> Vec<(String, Vec<u8>)> {
    let series = Series::of_job("s");
    let at = Notice::of_job("net", b"key").unwrap();
    let (by, why) = (name("sim.1"), Why::truncated("no room".into()));
    let hello = Hello {
        version: 1,
        job: name("sim"),
        member: name("sim.0"),
        node: name("here"),
        part: true,
        passed: List::new(vec![Passed { series: series.clone(), step: 7 }]).unwrap(),
        broken: List::new(vec![Broken {
            series: series.clone(),
            by: by.clone(),
            why: why.clone(),
        }])
        .unwrap(),
    };
    let value = Value::new(vec![1, 2, 3]).unwrap();
    let requests = [
        Request::Hello { hello },
        Request::Arrive { series: series.clone(), step: 1, who: Who::All {}, wait_ms: 5 },
        Request::Break { series: series.clone(), why: why.clone() },
        Request::End { series },
        Request::Publish { at: at.clone(), value: value.clone(), alone: true },
        Request::Withdraw { at: at.clone() },
        Request::Look { at, after: 3, wait_ms: 9 },
        Request::Members {},
        Request::Meet { series: Series::of_node("s"), members: 256 },
    ];
    let replies = [
        Reply::Broken { by: by.clone(), why },
        Reply::Found { by: by.clone(), revision: 4, value },
        Reply::Members { names: List::new(vec![by]).unwrap() },
        Reply::Page {},
    ];
    fn named(kind: &str, index: usize, value: &impl kedge_wire::Wire) -> (String, Vec<u8>) {
        let mut out = Vec::new();
        encode(value, &mut out);
        (format!("{kind}-{}", index + 1), out)
    }
    let requests = requests.iter().enumerate().map(|(at, value)| named("request", at, value));
    let replies = replies.iter().enumerate().map(|(at, value)| named("reply", at, value));
    requests.chain(replies).collect()
}

fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/coordinator")
}

#[test]
fn the_corpus_is_what_the_messages_encode_to() {
    let bless = std::env::var_os("KEDGE_BLESS").is_some();
    for (name, bytes) in samples() {
        let path = corpus().join(&name);
        if bless {
            std::fs::write(&path, &bytes).unwrap();
        }
        let kept = std::fs::read(&path).unwrap_or_default();
        assert_eq!(kept, bytes, "{name}: the encoding changed; KEDGE_BLESS=1 accepts it");
    }
}

/// What is in the corpus, samples and whatever a fuzzer has found.
fn seeds() -> Vec<Vec<u8>> {
    let files = std::fs::read_dir(corpus()).unwrap();
    let seeds: Vec<_> = files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
    assert!(seeds.len() >= samples().len());
    seeds
}

#[test]
fn every_bit_of_every_message() {
    for seed in seeds() {
        check_bytes(&seed);
        for at in 0..seed.len() * 8 {
            let mut bytes = seed.clone();
            bytes[at / 8] ^= 1 << (at % 8);
            check_bytes(&bytes);
            check_bytes(&seed[..at / 8]);
        }
    }
}

/// Lengths at their extremes, bytes that are inserted, taken out or doubled: the same each time.
#[test]
fn seeds_that_are_mangled() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) as usize % below.max(1)
    };
    for seed in seeds() {
        for _ in 0..4000 {
            let mut bytes = seed.clone();
            for _ in 0..=random(4) {
                let at = random(bytes.len());
                let end = (at + 4).min(bytes.len());
                match random(5) {
                    0 => bytes[at..end].fill(0xff),
                    1 => bytes.insert(at, random(256) as u8),
                    2 => drop(bytes.drain(at..end)),
                    3 => bytes.extend_from_within(at..end),
                    _ => bytes[at..end].fill(random(256) as u8),
                }
            }
            check_bytes(&bytes);
        }
    }
}

proptest! {
    #[test]
    fn any_bytes(tag in 0u32..14, rest in prop::collection::vec(any::<u8>(), 0..300)) {
        check_bytes(&[&tag.to_le_bytes()[..], &rest].concat());
    }
}
