use super::*;
use proptest::prelude::*;

const SPACE: u64 = 8 * BLOCK;

#[test]
fn what_is_written_while_it_flies_is_drained_again() {
    let mut extents = Extents::default();
    extents.write(0..100, 0);
    let flight = extents.take(0, 1 << 20, BLOCK).expect("dirty");
    extents.write(50..60, 0);
    assert_eq!(extents.take(0, 1 << 20, BLOCK), None, "it must land first");
    assert_eq!(extents.landed(&flight), [], "its block is needed");
    assert_eq!(extents.pieces(0..100)[1], Piece { range: 50..60, tier: Some(0) });
    let again = extents.take(0, 1 << 20, BLOCK).expect("dirty");
    assert_eq!(again.range, 50..60);
    assert_eq!(extents.landed(&again), [Freed { tier: 0, range: 0..BLOCK }]);
    assert!(extents.is_clean());
}

#[test]
fn long_parts_are_taken_in_aligned_pieces() {
    let mut extents = Extents::default();
    extents.write(10..10 * BLOCK, 0);
    let ends: Vec<u64> = std::iter::from_fn(|| extents.take(0, 4 * BLOCK, 2 * BLOCK))
        .map(|flight| flight.range.end)
        .collect();
    assert_eq!(ends, [4 * BLOCK, 8 * BLOCK, 10 * BLOCK]);
}

#[test]
fn a_write_into_another_tier_frees_the_first() {
    let mut extents = Extents::default();
    assert_eq!(extents.write(0..2 * BLOCK, 0).taken, 2 * BLOCK);
    let written = extents.write(0..BLOCK + 1, 1);
    assert_eq!(written.taken, 2 * BLOCK);
    assert_eq!(written.superseded, [Flight { range: 0..BLOCK + 1, tier: 0 }]);
    assert_eq!(written.freed, [Freed { tier: 0, range: 0..BLOCK }]);
}

/// What the model knows of one byte: the number of the write below, and in the cache.
#[derive(Clone, Copy, Default)]
struct Byte {
    newest: u32,
    below: u32,
}

/// The same by bytes: `tiers` has what each shadow holds.
struct Model {
    extents: Extents,
    bytes: Vec<Byte>,
    tiers: [Vec<u32>; 2],
    flights: Vec<(Flight, Vec<u32>)>,
    used: [u64; 2],
}

impl Model {
    fn new() -> Model {
        Model {
            extents: Extents::default(),
            bytes: vec![Byte::default(); SPACE as usize],
            tiers: [vec![0; SPACE as usize], vec![0; SPACE as usize]],
            flights: Vec::new(),
            used: [0; 2],
        }
    }

    fn free(&mut self, freed: Vec<Freed>) {
        for Freed { tier, range } in freed {
            self.used[tier] -= range.end - range.start;
            self.tiers[tier][range.start as usize..range.end as usize].fill(0);
        }
    }

    fn write(&mut self, range: Range<u64>, tier: usize, number: u32) {
        for at in range.clone() {
            self.tiers[tier][at as usize] = number;
            self.bytes[at as usize].newest = number;
        }
        let written = self.extents.write(range, tier);
        self.used[tier] += written.taken;
        self.free(written.freed);
    }

    fn depart(&mut self, from: u64) {
        if let Some(flight) = self.extents.take(from, 3 * BLOCK, BLOCK) {
            let bytes = &self.tiers[flight.tier];
            let bytes = bytes[flight.range.start as usize..flight.range.end as usize].to_vec();
            self.flights.push((flight, bytes));
        }
    }

    fn arrive(&mut self, index: usize, well: bool) {
        if self.flights.is_empty() {
            return;
        }
        let (flight, bytes) = self.flights.remove(index % self.flights.len());
        if !well {
            let (_, freed) = self.extents.failed(&flight);
            return self.free(freed);
        }
        for (at, number) in flight.range.clone().zip(bytes) {
            self.bytes[at as usize].below = number;
        }
        let freed = self.extents.landed(&flight);
        self.free(freed);
    }

    fn check(&self) {
        let mut end = 0;
        for piece in self.extents.pieces(0..SPACE) {
            assert_eq!(piece.range.start, end, "no gaps");
            end = piece.range.end;
            for at in piece.range.clone() {
                let byte = self.bytes[at as usize];
                let found = piece.tier.map_or(byte.below, |tier| self.tiers[tier][at as usize]);
                assert_eq!(found, byte.newest, "byte {at} in {:?}", piece.tier);
            }
        }
        assert_eq!(end, SPACE);
        assert_eq!([0, 1].map(|tier| self.extents.held_by(tier)), self.used);
        if self.extents.is_clean() {
            assert_eq!(self.used, [0, 0]);
        }
    }
}

proptest! {
    #[test]
    fn the_newest_bytes_are_always_found(
        steps in prop::collection::vec((0u8..5, 0..SPACE, 0..SPACE, 0usize..2), 0..80)
    ) {
        let mut model = Model::new();
        for (number, (kind, a, b, tier)) in steps.into_iter().enumerate() {
            match kind {
                0 | 1 => model.write(a.min(b)..a.max(b) + 1, tier, number as u32 + 1),
                2 => model.depart(a),
                3 => model.arrive(a as usize, true),
                _ => model.arrive(a as usize, tier == 0),
            }
            model.check();
        }
        while model.extents.is_dirty() || !model.flights.is_empty() {
            model.depart(0);
            model.arrive(0, true);
        }
        model.check();
    }
}

#[test]
fn the_last_whole_part_of_a_tier_is_found() {
    let mut extents = Extents::default();
    let part = 4 * BLOCK;
    extents.write(1..3 * part, 0);
    extents.write(3 * part..4 * part, 1);
    extents.write(4 * part..5 * part + 1, 0);
    let last = |extents: &Extents, not: u64| extents.last_whole_part(0, part, |at| at != not);
    assert_eq!(last(&extents, 0), Some(4 * part));
    assert_eq!(last(&extents, 4 * part), Some(2 * part), "the third is another tier's");
    let flight = extents.take(4 * part, 1, 1).expect("dirty");
    assert_eq!(last(&extents, 0), Some(2 * part), "it is on its way below");
    extents.landed(&flight);
    extents.write(2 * part..2 * part + 1, 1);
    assert_eq!(last(&extents, 0), Some(part));
    assert_eq!(last(&extents, part), None, "the first byte is not dirty");
    assert!(extents.is_dirty_in(&(part..2 * part), 0));
    assert!(!extents.is_dirty_in(&(part..2 * part + 1), 0));
}

#[test]
fn a_tier_that_is_gone_is_forgotten_alone() {
    let mut extents = Extents::default();
    extents.write(0..2 * BLOCK, 0);
    extents.write(2 * BLOCK..4 * BLOCK, 1);
    extents.write(9 * BLOCK..9 * BLOCK + 5, 1);
    let (parts, freed) = extents.forget_tier(1);
    assert_eq!(parts.len(), 2);
    assert_eq!(
        freed.iter().map(|freed| freed.range.end - freed.range.start).sum::<u64>(),
        3 * BLOCK
    );
    assert_eq!((extents.unwritten(), extents.held_by(0)), (2 * BLOCK, 2 * BLOCK));
    assert!(!extents.holds(1, 0..u64::MAX) && extents.holds(0, BLOCK..BLOCK + 1));
}
