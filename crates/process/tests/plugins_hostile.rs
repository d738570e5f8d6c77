//! Images are not to be trusted: whatever numbers they hold, nothing panics or hangs.

mod plugins_support;

use kedge_process::plugins::{RecreateOptions, Saved};
use plugins_support::Scenario;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::Value;
use std::time::{Duration, Instant};

const SCENARIOS: [(&str, &str); 16] = [
    ("plugins_files.c", "offsets"),
    ("plugins_files.c", "unlinked"),
    ("plugins_files.c", "pipes"),
    ("plugins_files.c", "fifos"),
    ("plugins_files.c", "locks"),
    ("plugins_anonymous.c", "memfd"),
    ("plugins_anonymous.c", "timerfd"),
    ("plugins_anonymous.c", "pidfd"),
    ("plugins_anonymous.c", "inotify"),
    ("plugins_anonymous.c", "epoll"),
    ("plugins_anonymous.c", "pty"),
    ("plugins_sockets.c", "pairs"),
    ("plugins_sockets.c", "server"),
    ("plugins_inet.c", "four"),
    ("plugins_under_way.c", "kinds"),
    ("plugins_under_way.c", "nested"),
];

struct Sample {
    scenario: Scenario,
    form: Value,
}

/// Real jobs, saved.
fn samples() -> Vec<Sample> {
    let sample = |&(source, name): &(&str, &'static str)| {
        let mut scenario = Scenario::start(source, name);
        let bytes = scenario.save().to_bytes().unwrap();
        scenario.kill();
        Sample { scenario, form: serde_json::from_slice(&bytes).unwrap() }
    };
    SCENARIOS.iter().map(sample).collect()
}

/// What is done to one place of an image.
#[derive(Debug, Clone)]
enum Damage {
    Number(u64),
    Negative(i64),
    Drop,
    Twice,
    Null,
}

fn damage() -> impl Strategy<Value = Damage> {
    let odd =
        prop::sample::select(vec![0, 1, 2, 3, 255, 4096, 1 << 20, 1 << 31, 1 << 32, u64::MAX]);
    prop_oneof![
        odd.prop_map(Damage::Number),
        any::<u64>().prop_map(Damage::Number),
        any::<i64>().prop_map(Damage::Negative),
        Just(Damage::Drop),
        Just(Damage::Twice),
        Just(Damage::Null),
    ]
}

/// Counts numbers and lists, and damages the one that is `left` away. Texts stay: they are paths,
/// and a restart writes where the image says.
fn apply(value: &mut Value, left: &mut usize, damage: &Damage) -> bool {
    let place = matches!(value, Value::Number(_) | Value::Array(_) | Value::Bool(_));
    if place && *left == 0 {
        match (damage, &mut *value) {
            (Damage::Drop, Value::Array(list)) => drop(list.pop()),
            (Damage::Twice, Value::Array(list)) => list.extend(list.last().cloned()),
            (Damage::Number(number), _) => *value = Value::from(*number),
            (Damage::Negative(number), _) => *value = Value::from(*number),
            _ => *value = Value::Null,
        }
        return true;
    }
    *left -= usize::from(place);
    match value {
        Value::Array(list) => list.iter_mut().any(|value| apply(value, left, damage)),
        Value::Object(map) => map.values_mut().any(|value| apply(value, left, damage)),
        _ => false,
    }
}

/// Makes the descriptors of `form`, if it is one; whether that worked.
fn recreate(sample: &Sample, form: &Value) -> bool {
    let Ok(saved) = Saved::from_bytes(form.to_string().as_bytes()) else { return false };
    let folder = sample.scenario.image();
    let options = RecreateOptions { folder, ..RecreateOptions::default() };
    let Ok(mut made) = saved.recreate(&options) else { return false };
    assert_eq!(made.descriptors.len(), saved.descriptions());
    let _ = made.settle();
    true
}

#[test]
fn nonsense_is_an_error() {
    let samples = samples();
    for sample in &samples {
        assert!(recreate(sample, &sample.form), "{}", sample.scenario.name);
    }
    let config = ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() };
    let places = prop::collection::vec((0usize..400, damage()), 1..3);
    let damaged = |(which, places): (usize, Vec<(usize, Damage)>)| {
        let mut form = samples[which].form.clone();
        for (mut place, damage) in places {
            apply(&mut form, &mut place, &damage);
        }
        let begin = Instant::now();
        recreate(&samples[which], &form);
        prop_assert!(begin.elapsed() < Duration::from_secs(20), "it took {:?}", begin.elapsed());
        Ok(())
    };
    TestRunner::new(config.clone()).run(&(0..samples.len(), places), damaged).unwrap();

    let changed = |(which, at, byte): (usize, prop::sample::Index, u8)| {
        let mut bytes = samples[which].form.to_string().into_bytes();
        let at = at.index(bytes.len());
        let _ = Saved::from_bytes(&bytes[..at]);
        bytes[at] = byte;
        let _ = Saved::from_bytes(&bytes);
        Ok(())
    };
    let places = (0..samples.len(), any::<prop::sample::Index>(), any::<u8>());
    TestRunner::new(config).run(&places, changed).unwrap();
}
