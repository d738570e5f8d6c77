//! The kernels that snapshots on GPUs need, beside the digests that this processor computes.

use super::{Bench, Leaked, Shape};
use crate::code::Program;
use crate::exec::Level;
use crate::lower;
use kedge_device::digest::{BLOCK, Digest, Keys, kernel};
use std::sync::Arc;

/// The kernel `name` of the two, as the first of its program.
fn program(bench: &Bench, name: &str) -> Arc<Program> {
    let module = kedge_ptx::parse(&kernel::text()).unwrap();
    let mut placement = Leaked(bench.spans.clone());
    let mut program = lower::build_at(&module, &mut placement, Level::detect()).unwrap();
    program.kernels.retain(|kernel| &*kernel.name == name);
    assert_eq!(program.kernels.len(), 1);
    assert_eq!(program.kernels[0].unsupported, None);
    Arc::new(program)
}

fn noise(words: usize) -> Vec<u64> {
    let mix = |n: u64| (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left((n % 61) as u32);
    (0..words as u64).map(mix).collect()
}

#[test]
fn digests_are_those_of_the_processor() {
    let bench = Bench::new();
    let keys = Keys::draw().unwrap();
    let mut memory = noise(2 * BLOCK as usize / 8);
    let base = bench.map(&mut memory);
    let lengths = [(0, BLOCK), (16, 16), (BLOCK - 4096, BLOCK), (48, 100_000), (0, BLOCK - 16)];
    let mut spans: Vec<u64> =
        lengths.iter().flat_map(|(at, bytes)| [base + at, bytes / 16 * 16]).collect();
    let mut digests = vec![Digest::default(); lengths.len()];
    let mut powers: Vec<u64> = keys.powers().collect();
    let mut params = vec![bench.map(&mut spans), bench.map(&mut digests), bench.map(&mut powers)];
    params.extend(keys.parameter());
    let shape = Shape::new(lengths.len() as u32, kernel::THREADS);
    bench.run(&program(&bench, kernel::DIGEST), &shape, &params).unwrap();
    let bytes: Vec<u8> = memory.iter().flat_map(|word| word.to_le_bytes()).collect();
    for ((at, length), digest) in lengths.iter().zip(&digests) {
        let bytes = &bytes[*at as usize..][..*length as usize / 16 * 16];
        assert_eq!(*digest, keys.digest(bytes), "{length} bytes at {at}");
    }
}

#[test]
fn blocks_are_gathered() {
    let bench = Bench::new();
    let mut from = noise(2 * BLOCK as usize / 8);
    let mut to = vec![0_u64; from.len()];
    let (source, target) = (bench.map(&mut from), bench.map(&mut to));
    let spans = [(BLOCK, 0, BLOCK), (16, BLOCK, 32), (4096, BLOCK + 64, 5008)];
    let mut moves: Vec<u64> =
        spans.iter().flat_map(|(at, put, bytes)| [source + at, target + put, *bytes]).collect();
    let params = [bench.map(&mut moves)];
    let shape = Shape::new(spans.len() as u32, kernel::THREADS);
    bench.run(&program(&bench, kernel::GATHER), &shape, &params).unwrap();
    let mut expected = vec![0; to.len()];
    for (at, put, bytes) in spans.map(|(at, put, bytes)| (at / 8, put / 8, bytes / 8)) {
        let (at, put, words) = (at as usize, put as usize, bytes as usize);
        expected[put..put + words].copy_from_slice(&from[at..at + words]);
    }
    assert!(to == expected);
}
