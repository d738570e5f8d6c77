//! The fuzz target's property on messages of every shape, and on what a bit or a length makes of them.

use kedge_coordinator::*;
use kedge_wire::{List, encode};
use proptest::prelude::*;

fn name(text: &str) -> Name {
    Name::truncated(text.to_owned())
}

fn samples() -> Vec<Vec<u8>> {
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
    fn bytes(value: &impl kedge_wire::Wire) -> Vec<u8> {
        let mut out = Vec::new();
        encode(value, &mut out);
        out
    }
    requests.iter().map(bytes).chain(replies.iter().map(bytes)).collect()
}

#[test]
fn every_bit_of_every_message() {
    for sample in samples() {
        check_bytes(&sample);
        for at in 0..sample.len() * 8 {
            let mut bytes = sample.clone();
            bytes[at / 8] ^= 1 << (at % 8);
            check_bytes(&bytes);
            check_bytes(&sample[..at / 8]);
        }
    }
}

proptest! {
    #[test]
    fn any_bytes(tag in 0u32..14, rest in prop::collection::vec(any::<u8>(), 0..300)) {
        check_bytes(&[&tag.to_le_bytes()[..], &rest].concat());
    }
}
