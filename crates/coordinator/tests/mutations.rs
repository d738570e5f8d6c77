//! The fuzz target's property on its corpus, which has a message of every shape, and on what
//! mutations make of it.

use kedge_coordinator::*;
use kedge_test_corpus::Corpus;
use kedge_wire::{List, encode};
use proptest::prelude::*;

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

fn corpus() -> Corpus {
    Corpus::of("coordinator", check_bytes)
}

#[test]
fn the_corpus_is_what_the_messages_encode_to() {
    corpus().has(samples());
}

#[test]
fn every_bit_of_every_message() {
    corpus().each_bit(usize::MAX);
}

#[test]
fn seeds_that_are_mangled() {
    corpus().mutated(4000);
}

proptest! {
    #[test]
    fn any_bytes(tag in 0u32..14, rest in prop::collection::vec(any::<u8>(), 0..300)) {
        check_bytes(&[&tag.to_le_bytes()[..], &rest].concat());
    }
}
