//! Several recoveries at the partner, and daemons that write between them and meanwhile.

use super::*;
use std::os::unix::fs::FileExt;

/// More than clocks may differ here, and than the time between two notes of a recovery.
const CLOCK_MARGIN: Duration = Duration::from_secs(3);
/// Where the parts of the file begin, which are far from each other.
const PARTS: [u64; 3] = [0, 40 << 20, 80 << 20];

/// A recovery that can be stopped on its way, and that fails then.
struct Stops {
    hold: PathBuf,
    eio: PathBuf,
}

impl Stops {
    fn new(scratch: &Scratch) -> Stops {
        Stops { hold: scratch.0.join("hold"), eio: scratch.0.join("eio") }
    }

    /// Recovers until a part is below, and no more; `meanwhile` runs while it stands there.
    fn recover_one(&self, scratch: &Scratch, part: u64, text: &[u8], meanwhile: impl FnOnce()) {
        let _ = fs::remove_file(&self.eio);
        fs::write(&self.hold, "").expect("written");
        let faults = format!("carried={},eio={}", self.hold.display(), self.eio.display());
        let recovered = thread::scope(|scope| {
            let recovers = scope.spawn(|| recover_with(scratch, &faults).expect("looked at"));
            while !is_below(scratch, part, text) {
                assert!(!recovers.is_finished(), "{:?}", recovers.join());
                thread::sleep(Duration::from_millis(5));
            }
            thread::sleep(CLOCK_MARGIN);
            meanwhile();
            fs::write(&self.eio, "").expect("written");
            fs::remove_file(&self.hold).expect("it is there");
            recovers.join().expect("it ends")
        });
        assert_eq!(recovered.files, 0);
        let why = &recovered.stuck[0].why;
        assert!(why.contains("os error 5"), "no other reason: {why}");
    }
}

fn is_below(scratch: &Scratch, part: u64, text: &[u8]) -> bool {
    let mut there = vec![0; text.len()];
    let file = fs::File::open(scratch.below("a")).expect("there");
    file.read_exact_at(&mut there, part).is_ok() && there == text
}

/// Writes all parts, and has them acknowledged.
fn write_all(engine: &Arc<Engine>, handle: &Arc<Handle>, text: &[u8]) {
    PARTS.iter().for_each(|part| write(engine, handle, *part, text));
    fsync(engine, handle);
}

#[test]
fn a_third_recovery_ends_what_two_have_begun() {
    let scratch = Scratch::new("partnerthree");
    let (_partner, address) = partner(&scratch, None);
    let engine = engine(&scratch, &address, "");
    begun(&engine);
    let handle = open(&engine, &scratch.below("a"));
    write_all(&engine, &handle, b"v1");
    assert_eq!(status(&engine).drained, 0);
    drop(handle);
    lose_node(&scratch, engine);
    // What each of them changes below is later than the partner was told of it last.
    let stops = Stops::new(&scratch);
    for part in &PARTS[..2] {
        thread::sleep(CLOCK_MARGIN);
        stops.recover_one(&scratch, *part, b"v1", || {
            let another = recover_partner(&scratch.0.join("below"), &kept(&scratch), None);
            let why = another.expect_err("one is under way").to_string();
            assert!(why.contains("being recovered"), "{why}");
        });
    }
    thread::sleep(CLOCK_MARGIN);
    let recovered = recover(&scratch).expect("recovered");
    assert_eq!((recovered.files, recovered.stuck), (1, vec![]));
    assert!(PARTS.iter().all(|part| is_below(&scratch, *part, b"v1")));
    assert!(!kept(&scratch).exists(), "nothing is left");
}

#[test]
fn what_a_daemon_writes_after_a_recovery_is_newer() {
    let scratch = Scratch::new("partnerafter");
    let (_partner, address) = partner(&scratch, None);
    let first = engine(&scratch, &address, "");
    begun(&first);
    let handle = open(&first, &scratch.below("a"));
    write_all(&first, &handle, b"v1");
    drop(handle);
    lose_node(&scratch, first);
    let stops = Stops::new(&scratch);
    stops.recover_one(&scratch, PARTS[0], b"v1", || ());
    thread::sleep(CLOCK_MARGIN);
    // Without a partner, as another node has it.
    let daemon = scratch.engine(&RAM, Fsync::Drain);
    let handle = open(&daemon, &scratch.below("a"));
    write(&daemon, &handle, PARTS[1], b"v2");
    fsync(&daemon, &handle);
    for _ in 0..2 {
        let recovered = recover(&scratch).expect("looked at");
        assert!(recovered.stuck[0].why.contains("changed below"), "{recovered:?}");
        write(&daemon, &handle, PARTS[2], b"v2");
        fsync(&daemon, &handle);
    }
    let texts: [&[u8]; 3] = [b"v1", b"v2", b"v2"];
    assert!(PARTS.iter().zip(texts).all(|(part, text)| is_below(&scratch, *part, text)));
    let given_up = recover_partner(&scratch.0.join("below"), &kept(&scratch), Some(Discard::All));
    assert_eq!(given_up.expect("given up").discarded.len(), 1);
}

#[test]
fn a_daemon_that_is_there_again_goes_on_between_recoveries() {
    let scratch = Scratch::new("partnerbetween");
    let (_partner, address) = partner(&scratch, None);
    let engine = engine(&scratch, &address, "");
    let link = begun(&engine);
    let handle = open(&engine, &scratch.below("a"));
    write_all(&engine, &handle, b"v1");
    let under = scratch.0.join("below");
    for _ in 0..3 {
        let refused = recover_partner(&under, &kept(&scratch), None).expect_err("connected");
        assert!(refused.to_string().contains("is connected"), "{refused}");
        write_all(&engine, &handle, b"v2");
    }
    // Somebody takes the node for lost, and recovers what it has acknowledged.
    link.lose(&mut link.wire.wait(), &io::Error::other("a test"));
    thread::sleep(CLOCK_MARGIN);
    let stops = Stops::new(&scratch);
    stops.recover_one(&scratch, PARTS[0], b"v2", || {
        // The partner is of no use meanwhile: nothing is acknowledged that it does not have.
        let refused = engine.connect_partner(link).expect_err("it is recovered").to_string();
        assert!(refused.contains("recovery"), "{refused}");
    });
    reconnect(&engine);
    write_all(&engine, &handle, b"v3");
    assert_eq!(status(&engine).drained, 0);
    assert!(!is_below(&scratch, PARTS[1], b"v3"));
    drop(handle);
    lose_node(&scratch, engine);
    thread::sleep(CLOCK_MARGIN);
    stops.recover_one(&scratch, PARTS[0], b"v3", || ());
    thread::sleep(CLOCK_MARGIN);
    assert_eq!(recover(&scratch).expect("recovered").files, 1);
    assert!(PARTS.iter().all(|part| is_below(&scratch, *part, b"v3")));
}
