//! Measures what the engine itself costs: `cargo run --release -p kedge-pages --example
//! engine_costs`. No page is mapped and no byte is moved.

use kedge_pages::{Access, Attach, Engine, NodeConfig, NodeId, Step, StreamId};
use std::time::Instant;

const GPU: NodeId = NodeId(0);
const STREAM: StreamId = StreamId(1);
/// Pages of 4 GiB.
const PAGES: u64 = 1 << 20;
const START: u64 = 0x3_0000_0000;
const ROUNDS: u32 = 2000;

fn main() {
    let config = NodeConfig { maps_host: true, ..NodeConfig::default() };
    for regions in [1, 100_000] {
        let mut engine = Engine::new([(GPU, config.clone())], 512);
        let each = PAGES / regions;
        let begin = Instant::now();
        for index in 0..regions {
            let start = START + index * each;
            engine.alloc(start..start + each, Attach::Global, GPU).expect("room");
        }
        let made = begin.elapsed().as_secs_f64() * 1e3;
        println!("4 GiB in {regions} regions: made in {made:.2} ms");
        let nothing = timed(ROUNDS, || launch(&mut engine));
        println!("  a launch, nothing touched: {nothing:.3} µs");
        // One page of each hundred, so no two follow each other: the worst case.
        let mut touches = 0.0;
        let launches: f64 = (0..20)
            .map(|_| {
                touches += timed(1, || {
                    for page in (0..regions * each).step_by(100) {
                        let _ = engine.touch(START + page, Access::Write, None);
                    }
                });
                timed(1, || launch(&mut engine))
            })
            .sum();
        let count = f64::from((regions * each).div_ceil(100) as u32);
        println!("  a touch of one page: {:.3} µs", touches / 20.0 / count);
        println!("  a launch, 1 % touched, {count} runs of pages: {:.3} ms", launches / 20e3);
    }
}

fn launch(engine: &mut Engine) {
    let step = engine.launch(GPU, STREAM, &[]).expect("a node");
    assert!(matches!(step, Step::Do(_)));
    let ticket = engine.ticket();
    engine.over(GPU, STREAM, ticket);
}

/// Microseconds a round.
fn timed(rounds: u32, mut what: impl FnMut()) -> f64 {
    let begin = Instant::now();
    (0..rounds).for_each(|_| what());
    begin.elapsed().as_secs_f64() * 1e6 / f64::from(rounds)
}
