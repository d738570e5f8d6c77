use super::*;
use proptest::prelude::*;

fn identity(path: &str) -> Identity {
    Identity { device: 7, inode: 8, user: 9, birth: 10, path: path.into() }
}

fn journal(records: &[(u64, Record)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (number, record) in records {
        record.encode(*number, &mut bytes);
    }
    bytes
}

fn read(bytes: &[u8], rebooted: bool) -> Replay {
    replay(bytes, rebooted, &HashMap::new()).expect("all kinds are known")
}

fn parts(replay: &Replay, file: u64) -> Vec<(std::ops::Range<u64>, u64)> {
    replay.files.get(&file).map_or(Vec::new(), |found| found.parts.iter().collect())
}

#[test]
fn what_is_clean_cut_or_dropped_is_not_held() {
    let bytes = journal(&[
        (1, Record::File(1, identity("a"))),
        (2, Record::Write(1, 0, 100)),
        (3, Record::Write(1, 200, 100)),
        (4, Record::Clean(1, 10, 20)),
        (5, Record::Cut(1, 250)),
        (6, Record::File(2, identity("b"))),
        (7, Record::Write(2, 0, 1)),
        (8, Record::Drop(2)),
    ]);
    let replay = read(&bytes, false);
    assert_eq!(parts(&replay, 1), [(0..10, 2), (30..100, 2), (200..250, 3)]);
    assert_eq!((replay.files.len(), replay.last), (1, 8));
}

#[test]
fn what_a_device_has_lost_is_lost_until_it_is_told_or_written_again() {
    let first = journal(&[
        (1, Record::File(1, identity("a"))),
        (2, Record::Lost(1, 0, 1000)),
        (3, Record::Write(1, 0, 100)),
        // What is below by now stays written.
        (4, Record::Clean(1, 0, 100)),
        (6, Record::Told(1, 300, 100)),
        (7, Record::Cut(1, 900)),
        (8, Record::File(2, identity("b"))),
        (9, Record::Lost(2, 0, 10)),
        (10, Record::Drop(2)),
        (11, Record::File(3, identity("c"))),
        (12, Record::Lost(3, 0, 10)),
        (13, Record::Told(3, 0, 10)),
    ]);
    let second = journal(&[
        (1, Record::File(1, identity("a"))),
        (1, Record::Write(1, 100, 100)),
        (5, Record::Write(1, 500, 50)),
    ]);
    let held = merge(vec![read(&first, false), read(&second, false)]);
    assert_eq!(held.len(), 1, "{held:?}");
    let lost: Vec<_> = held[0].lost.iter().map(|(range, ())| range).collect();
    assert_eq!(lost, [100..300, 400..500, 550..900], "an earlier write is none again");
}

#[test]
fn after_a_power_cut_only_committed_writes_count() {
    let bytes = journal(&[
        (1, Record::File(1, identity("a"))),
        (2, Record::Write(1, 0, 100)),
        // Written while the disk was brought to have what was before: it may lack this.
        (3, Record::Write(1, 100, 100)),
        (4, Record::Commit(1, 2)),
        (5, Record::Clean(1, 0, 50)),
        (6, Record::Write(2, 0, 1)),
    ]);
    assert_eq!(parts(&read(&bytes, true), 1), [(50..100, 2)]);
    assert_eq!(parts(&read(&bytes, false), 1), [(50..100, 2), (100..200, 3)]);
}

#[test]
fn the_later_of_two_tiers_writes_counts() {
    let first = journal(&[
        (1, Record::File(5, identity("old"))),
        (2, Record::Write(5, 0, 100)),
        (9, Record::Write(5, 90, 20)),
    ]);
    let second = journal(&[(3, Record::File(5, identity("old"))), (4, Record::Write(5, 50, 50))]);
    let held = merge(vec![read(&first, false), read(&second, false)]);
    assert_eq!(held.len(), 1);
    let parts: Vec<_> = held[0].parts.iter().collect();
    assert_eq!(parts, [(0..50, 0), (50..90, 1), (90..110, 0)]);
}

proptest! {
    #[test]
    fn a_torn_record_hides_no_other(cut in 0usize..400, flip in 0usize..400) {
        let records: Vec<_> = (1..=8).map(|n| (n, Record::Write(1, n * 10, 10))).collect();
        let whole = journal(&records);
        let length = whole.len() / 8;
        let mut torn = whole[..cut.min(whole.len())].to_vec();
        let complete = torn.len() / length;
        prop_assert_eq!(read(&torn, false).last, complete as u64);
        // What is appended behind the tear is read.
        Record::Write(1, 500, 1).encode(99, &mut torn);
        let mut expected: Vec<_> = (1..=complete as u64).map(|n| (n * 10..n * 10 + 10, n)).collect();
        expected.push((500..501, 99));
        prop_assert_eq!(parts(&read(&torn, false), 1), expected);
        let mut damaged = whole.clone();
        let at = flip % whole.len();
        damaged[at] ^= 1;
        let lost = (at / length) as u64 + 1;
        let expected = (1..=8).filter(|n| *n != lost).map(|n| (n * 10..n * 10 + 10, n));
        // A kind that is not known is not damage, if the checksum is right; here it is not.
        prop_assert_eq!(parts(&read(&damaged, false), 1), expected.collect::<Vec<_>>());
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = replay(&bytes, true, &HashMap::new());
    }
}

#[test]
fn a_journal_of_another_version_is_not_taken_for_a_damaged_one() {
    let mut bytes = journal(&[(1, Record::Write(1, 0, 10))]);
    bytes[6] = 200;
    let sum = (xxh3_64(&bytes[4..]) as u32).to_le_bytes();
    bytes[..4].copy_from_slice(&sum);
    assert_eq!(replay(&bytes, false, &HashMap::new()).map(|_| ()), Err(Unknown));
}

#[test]
fn of_a_lease_what_its_slot_says_was_written() {
    let bytes = journal(&[
        (1, Record::File(1, identity("a"))),
        (2, Record::Write(1, 0, 10)),
        (3, Record::Lease(1, 10, 100, 0)),
        (4, Record::Lease(1, 200, 100, 1)),
        (5, Record::Write(1, 20, 5)),
    ]);
    let held = |rebooted, leased: &[(u64, u64)]| {
        let leased = leased.iter().copied().collect();
        parts(&replay(&bytes, rebooted, &leased).expect("all kinds are known"), 1)
    };
    let now = [(0..10, 2), (10..20, 3), (20..25, 5), (25..40, 3)];
    assert_eq!(held(false, &[(3, 30), (4, 0)]), now);
    assert_eq!(held(false, &[(3, 30), (4, u64::MAX)])[4], (200..300, 4), "no more than it has");
    assert_eq!(held(false, &[]), [(0..10, 2), (20..25, 5)], "it was at its end");
    assert_eq!(held(true, &[(3, 30)]), []);
}

#[test]
fn bytes_whose_name_was_lost_are_still_held_but_not_those_of_removed_files() {
    let bytes = journal(&[
        (1, Record::Write(1, 0, 10)),
        (2, Record::File(2, identity("removed"))),
        (3, Record::Drop(2)),
        (4, Record::Write(2, 0, 10)),
    ]);
    let held = merge(vec![read(&bytes, false)]);
    assert_eq!(held.len(), 1);
    assert_eq!((held[0].file, &held[0].identity), (1, &Identity::default()));
}

#[test]
fn what_was_removed_counts_again_only_after_a_power_cut() {
    let bytes = journal(&[
        (1, Record::File(1, identity("removed"))),
        (2, Record::Write(1, 0, 10)),
        (3, Record::Commit(1, 2)),
        (4, Record::Gone(1)),
        (5, Record::Write(1, 10, 10)),
    ]);
    assert!(read(&bytes, false).files.is_empty());
    assert_eq!(parts(&read(&bytes, true), 1), [(0..10, 2)]);
}

#[test]
fn a_number_that_two_journals_give_to_two_files_is_nobodys() {
    let of = |number, inode| {
        let identity = Identity { inode, ..identity("a") };
        journal(&[(number, Record::File(5, identity)), (number + 1, Record::Write(5, 0, 10))])
    };
    let held = merge(vec![read(&of(1, 8), false), read(&of(3, 9), false)]);
    assert_eq!((held.len(), &held[0].identity), (1, &Identity::default()));
}

#[test]
fn a_place_has_what_was_put_there_last() {
    let part = PART;
    let bytes = journal(&[
        (1, Record::File(1, identity("a"))),
        (2, Record::Place(1, part, part, 7)),
        (3, Record::Clean(1, part, 100)),
        (4, Record::Place(1, 2 * part + 10, 90, 8)),
        // The record that freed place 9 from this file was damaged.
        (5, Record::Place(1, 3 * part, part, 9)),
        (6, Record::File(2, Identity { inode: 9, ..identity("b") })),
        (7, Record::Place(2, 0, part, 9)),
        // The same part, put anew into another place.
        (8, Record::Place(2, part, 10, 10)),
        (9, Record::Place(2, part, part, 11)),
    ]);
    let replay = read(&bytes, false);
    let held = [(part + 100..2 * part, 2), (2 * part + 10..2 * part + 100, 4)];
    assert_eq!(parts(&replay, 1), held);
    assert_eq!(parts(&replay, 2), [(0..part, 7), (part..2 * part, 9)]);
    let held = merge(vec![Replay::default(), replay]);
    let places = |index: usize| held[index].places.clone().into_iter().collect::<Vec<_>>();
    assert_eq!(places(0), [(part, 7), (2 * part, 8)]);
    assert_eq!(places(1), [(0, 9), (part, 11)]);
}

#[test]
fn a_place_is_within_one_part() {
    for (offset, length) in [(0, PART + 1), (PART - 1, 2), (5, 0), (u64::MAX, u64::MAX)] {
        let bytes = journal(&[(1, Record::Place(1, offset, length, 0))]);
        assert_eq!(Record::decode(&bytes), None, "{offset} {length}");
    }
}
