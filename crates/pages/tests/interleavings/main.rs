//! Any interleaving of what programs do with managed memory gives what one memory would.
//!
//! `KEDGE_PAGES_ATTACK=3600` goes on with new interleavings for that many seconds.

mod choice;
mod world;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use std::time::{Duration, Instant};
use world::{Setup, World};

/// What the program does next, and choices of whatever that needs.
type Op = (u8, u8, u8, u16);

fn ops(most: usize) -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec((0..world::KINDS, any::<u8>(), any::<u8>(), any::<u16>()), 1..most)
}

fn setup() -> impl Strategy<Value = Setup> {
    let node = (any::<bool>(), any::<bool>(), prop::option::of(0u64..2500));
    let nodes = prop::collection::vec(node, 1..4);
    let again = prop::sample::select(vec![0, 1, 7, 300]);
    (nodes, any::<bool>(), 0u32..8, again).prop_map(|(nodes, all_map, ahead, again)| {
        // Most interesting are worlds where blocks may lie in host memory.
        let nodes = nodes.into_iter().map(|(maps, peers, quota)| (maps || all_map, peers, quota));
        Setup { nodes: nodes.collect(), read_ahead: 1 << ahead, again }
    })
}

fn attack(runner: &mut TestRunner, most: usize) {
    let outcome = runner.run(&(setup(), ops(most)), |(setup, ops)| {
        let mut world = World::new(&setup);
        for op in ops {
            world.step(op);
        }
        world.end();
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

fn config(cases: u32) -> Config {
    Config { cases, failure_persistence: None, max_shrink_iters: 20_000, ..Config::default() }
}

#[test]
fn one_memory_whatever_happens() {
    attack(&mut TestRunner::new(config(4000)), 60);
}

#[test]
fn one_memory_in_long_lives() {
    attack(&mut TestRunner::new(config(100)), 1500);
}

/// Runs for as long as `KEDGE_PAGES_ATTACK` says, with seeds that are told.
#[test]
fn one_memory_for_as_long_as_is_asked() {
    let seconds = std::env::var("KEDGE_PAGES_ATTACK").ok().and_then(|text| text.parse().ok());
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(0));
    let first = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let (mut seed, mut cases) = (first.as_nanos() as u64, 0);
    while Instant::now() < end {
        let bytes: Vec<u8> = (0..4).flat_map(|part| (seed ^ part).to_le_bytes()).collect();
        println!("seed {seed}, {cases} cases so far");
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        attack(&mut TestRunner::new_with_rng(config(1000), rng), 250);
        (seed, cases) = (seed.wrapping_add(4), cases + 1000);
    }
}
