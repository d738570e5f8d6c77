//! A holder of device memory does what a cache asks, on a software device.

use kedge_holder::{Answer, Order, PART, Plea, SLOTS, UNSHARED, VERSION, room_name, rooms_of};
use kedge_socket::{Channel, SocketError};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const PLACES: u32 = 6;

/// A holder, ended with the test.
struct Held {
    child: Child,
    folder: PathBuf,
}

impl Held {
    fn start(name: &str, bytes: u64) -> Held {
        Held::start_on(name, bytes, None)
    }

    /// The same, on a device of so much memory that others share.
    fn start_on(name: &str, bytes: u64, shared: Option<u64>) -> Held {
        let folder = std::env::temp_dir().join(format!("kedge-{name}-{}", std::process::id()));
        fs::create_dir(&folder).expect("a folder");
        let mut command = Command::new(env!("CARGO_BIN_EXE_kedge-proxy"));
        command.args(["--gpu", "soft", "--hold-bytes", &bytes.to_string(), "--hold"]);
        if let Some(shared) = shared {
            let ledger = folder.join("ledger");
            fs::create_dir(&ledger).expect("a folder");
            fs::write(ledger.join("bytes"), shared.to_string()).expect("a file");
            command.env("KEDGE_SOFT_LEDGER", ledger);
        }
        command.arg(folder.join("socket")).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a holder");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        let held = Held { child, folder };
        assert_eq!(line, "ready\n");
        held
    }

    /// Where it is asked for room.
    fn doors(&self) -> Vec<PathBuf> {
        let ledger = fs::metadata(self.folder.join("ledger")).expect("a folder");
        let mut device = [0; 16];
        device[..8].copy_from_slice(&ledger.dev().to_le_bytes());
        device[8..].copy_from_slice(&ledger.ino().to_le_bytes());
        let name = room_name(&device);
        let entries = fs::read_dir(rooms_of(rustix::process::geteuid().as_raw()));
        let entries = entries.expect("the folder").flatten();
        let own = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&name));
        own.map(|entry| entry.path()).collect()
    }

    /// Asks for room as a program's proxy does.
    fn plead(&self, bytes: u64) -> Channel {
        let [door] = &self.doors()[..] else { panic!("it has one door") };
        let channel = Channel::new(OwnedFd::from(UnixStream::connect(door).expect("it is open")));
        channel.send(&Plea::Room { version: VERSION, bytes }, &[], LIMIT).expect("sent");
        channel
    }

    fn connect(&self) -> Channel {
        let stream = UnixStream::connect(self.folder.join("socket")).expect("it listens");
        Channel::new(OwnedFd::from(stream))
    }

    /// Connects as a cache does: its number, its places and its slots.
    fn greet(&self) -> (Channel, u64, File) {
        self.greet_as(1)
    }

    fn greet_as(&self, daemon: u64) -> (Channel, u64, File) {
        self.greet_keeping(daemon, 0)
    }

    fn greet_keeping(&self, daemon: u64, keep: u64) -> (Channel, u64, File) {
        let channel = self.connect();
        channel.send(&Order::Hello { version: VERSION, daemon, keep }, &[], LIMIT).expect("sent");
        let (answer, mut fds) = channel.receive::<Answer>(LIMIT).expect("an answer");
        let Answer::Holder { number, places: PLACES } = answer else { panic!("{answer:?}") };
        (channel, number, File::from(fds.pop().expect("the slots")))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if self.folder.join("ledger").exists() {
            // A holder that is killed leaves it to the next one.
            self.doors().iter().for_each(|door| drop(fs::remove_file(door)));
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn ask(channel: &Channel, order: Order) -> Answer {
    channel.send(&order, &[], LIMIT).expect("sent");
    channel.receive(LIMIT).expect("an answer").0
}

/// A part whose bytes differ from part to part and from word to word.
fn part(seed: u64) -> Vec<u8> {
    let word = |at: u64| (seed << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..PART / 8).flat_map(word).collect()
}

fn put(channel: &Channel, slots: &File, slot: u32, place: u32, bytes: &[u8]) {
    slots.write_all_at(bytes, u64::from(slot) * PART).expect("a slot");
    assert_eq!(ask(channel, Order::Put { slot, place }), Answer::Done {});
}

fn get(channel: &Channel, slots: &File, slot: u32, place: u32, range: (u32, u32)) -> Vec<u8> {
    let (offset, length) = range;
    let (from, mut bytes) = (u64::from(slot) * PART, vec![0; length as usize]);
    // Of what was there before, nothing is taken for what comes.
    slots.write_all_at(&bytes, from).expect("a slot");
    let answer = ask(channel, Order::Get { place, slot, offset, length });
    assert_eq!(answer, Answer::Done {});
    slots.read_exact_at(&mut bytes, from).expect("a slot");
    bytes
}

#[test]
fn what_was_put_is_got_by_whoever_comes_later() {
    let held = Held::start("held", u64::from(PLACES) * PART + 1);
    let whole = (0, PART as u32);
    let (first, number, slots) = held.greet();
    assert!(slots.set_len(0).is_err(), "whoever shortens the slots ends the holder");
    for place in 0..PLACES {
        put(&first, &slots, place % SLOTS, place, &part(place.into()));
    }
    put(&first, &slots, 0, 3, &part(33));
    // The daemon is killed, and another one comes.
    drop((first, slots));
    let (second, same, slots) = held.greet_as(2);
    assert_eq!(same, number, "its journal is another holder's");
    let expected = |place: u32| part(if place == 3 { 33 } else { place.into() });
    for place in (0..PLACES).rev() {
        assert!(get(&second, &slots, 7, place, whole) == expected(place), "place {place}");
    }
    let some = get(&second, &slots, 1, 3, (4096, 12345));
    assert!(some == part(33)[4096..4096 + 12345], "other bytes of the place");
    // What was given back comes anew, and nothing of its neighbours is gone.
    assert_eq!(ask(&second, Order::Free { place: 2 }), Answer::Done {});
    assert_eq!(ask(&second, Order::Free { place: 2 }), Answer::Done {});
    let gone = ask(&second, Order::Get { place: 2, slot: 0, offset: 0, length: 1 });
    assert!(matches!(gone, Answer::Failed { .. }), "{gone:?}");
    assert!(get(&second, &slots, 0, 1, whole) == part(1), "a failed order took more with it");
    put(&second, &slots, 5, 2, &part(22));
    assert!(get(&second, &slots, 0, 2, whole) == part(22), "a place that was given back");
}

#[test]
fn several_connections_do_not_mix_what_they_carry() {
    let held = Held::start("several", u64::from(PLACES) * PART);
    thread::scope(|scope| {
        for place in 0..PLACES {
            let held = &held;
            scope.spawn(move || {
                let (channel, _, slots) = held.greet();
                for round in 0..4 {
                    let bytes = part(u64::from(place) << 8 | round);
                    put(&channel, &slots, place, place, &bytes);
                    assert!(get(&channel, &slots, place, place, (0, PART as u32)) == bytes);
                }
            });
        }
    });
}

#[test]
fn a_daemon_uses_slots_once_nothing_of_the_one_before_does() {
    let held = Held::start("before", u64::from(PLACES) * PART);
    let (first, ..) = held.greet_as(1);
    let second = held.connect();
    second.send(&Order::Hello { version: VERSION, daemon: 2, keep: 0 }, &[], LIMIT).expect("sent");
    let early = second.receive::<Answer>(Duration::from_millis(200));
    assert!(matches!(early, Err(SocketError::TimedOut { .. })), "{early:?}");
    assert_eq!(ask(&first, Order::Free { place: 0 }), Answer::Done {});
    drop(first);
    let (answer, _) = second.receive::<Answer>(LIMIT).expect("an answer");
    assert!(matches!(answer, Answer::Holder { .. }), "{answer:?}");
}

#[test]
fn what_is_no_order_is_refused_and_harms_nobody() {
    let held = Held::start("refused", u64::from(PLACES) * PART);
    let (good, _, slots) = held.greet();
    put(&good, &slots, 0, 0, &part(1));
    let stranger = held.connect();
    let refused = |answer: Answer| assert!(matches!(answer, Answer::Failed { .. }), "{answer:?}");
    // Neither without a greeting, nor in another version, nor of what is not there.
    refused(ask(&stranger, Order::End {}));
    refused(ask(&stranger, Order::Put { slot: 0, place: 0 }));
    refused(ask(&stranger, Order::Hello { version: VERSION + 1, daemon: 1, keep: 0 }));
    refused(ask(&good, Order::Put { slot: SLOTS, place: 0 }));
    refused(ask(&good, Order::Put { slot: 0, place: PLACES }));
    refused(ask(&good, Order::Get { place: 0, slot: 0, offset: 1, length: PART as u32 }));
    // Nonsense ends its own connection alone.
    stranger.send(&[0xff_u8; 20], &[], LIMIT).expect("sent");
    let ended = stranger.receive::<Answer>(LIMIT).expect_err("nonsense was answered");
    assert!(matches!(ended, SocketError::Closed), "{ended}");
    assert!(get(&good, &slots, 1, 0, (0, PART as u32)) == part(1));
}

#[test]
fn a_holder_ends_when_its_cache_says_so() {
    let mut held = Held::start("ends", u64::from(PLACES) * PART);
    let (channel, ..) = held.greet();
    assert_eq!(ask(&channel, Order::End {}), Answer::Done {});
    assert!(held.child.wait().expect("its child").success());
    assert!(!held.folder.join("socket").exists(), "a later cache would look for it");
}

#[test]
fn what_cannot_be_held_is_told_to_who_started_it() {
    for (gpu, bytes, why) in
        [("soft", "4194303", "--hold-bytes"), ("soft:2", "8388608", "one device")]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kedge-proxy"));
        command.args(["--gpu", gpu, "--hold-bytes", bytes, "--hold", "/nowhere/socket"]);
        let output = command.output().expect("a holder");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!output.status.success() && said.contains(why), "{said}");
    }
}

#[test]
fn a_second_holder_leaves_the_first_its_socket() {
    let held = Held::start("second", u64::from(PLACES) * PART);
    let (_, number, _) = held.greet();
    let second = Command::new(env!("CARGO_BIN_EXE_kedge-proxy"))
        .args(["--gpu", "soft", "--hold-bytes", &PART.to_string(), "--hold"])
        .arg(held.folder.join("socket"))
        .output()
        .expect("a holder");
    let said = String::from_utf8(second.stdout).expect("text");
    assert!(!second.status.success() && said.contains("another holder"), "{said}");
    assert_eq!(held.greet().1, number, "what the first one has could be reached no more");
}

#[test]
fn a_holder_that_nobody_waits_for_ends() {
    let folder = std::env::temp_dir().join(format!("kedge-nobody-{}", std::process::id()));
    fs::create_dir(&folder).expect("a folder");
    let socket = folder.join("socket");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kedge-proxy"));
    command.args(["--gpu", "soft", "--hold-bytes", &PART.to_string(), "--hold"]).arg(&socket);
    // It may be ready before this process goes on.
    let (reads, said) = std::io::pipe().expect("a pipe");
    drop(reads);
    let mut child = command.stdout(said).spawn().expect("a holder");
    assert!(!child.wait().expect("its end").success());
    assert!(!socket.exists(), "it would be looked for there");
    fs::remove_dir_all(&folder).expect("a folder");
}

#[test]
fn no_holder_has_another_one_s_number() {
    let (one, other) = (Held::start("one", PART * 6), Held::start("other", PART * 6));
    assert_ne!(one.greet().1, other.greet().1, "a journal would find another one's places");
}

#[test]
fn it_keeps_free_what_is_to_stay_so() {
    let held = Held::start_on("keeps", u64::from(PLACES) * PART, Some(6 * PART));
    let (channel, _, slots) = held.greet_keeping(1, 2 * PART + 1);
    for place in 0..3 {
        put(&channel, &slots, 0, place, &part(place.into()));
    }
    assert_eq!(ask(&channel, Order::Put { slot: 0, place: 3 }), Answer::Full {});
    assert_eq!(ask(&channel, Order::Put { slot: 0, place: 0 }), Answer::Done {}, "it has memory");
    let stands = ask(&channel, Order::Look {});
    assert_eq!(stands, Answer::Stands { free: 3 * PART, wanted: 0 });
    // A later daemon may be told to keep less.
    drop(channel);
    let (channel, _, slots) = held.greet_keeping(2, 0);
    put(&channel, &slots, 0, 3, &part(3));
    // Where nobody else has the device's memory, nothing is kept.
    let alone = Held::start("keepsnone", u64::from(PLACES) * PART);
    let (channel, _, slots) = alone.greet_keeping(1, 1 << 50);
    put(&channel, &slots, 0, 0, &part(0));
    let stands = ask(&channel, Order::Look {});
    assert_eq!(stands, Answer::Stands { free: UNSHARED, wanted: 0 });
}

#[test]
fn room_is_made_for_one_that_asks() {
    let held = Held::start_on("room", u64::from(PLACES) * PART, Some(6 * PART));
    let (channel, _, slots) = held.greet();
    for place in 0..4 {
        put(&channel, &slots, 0, place, &part(place.into()));
    }
    let told = |plea: &Channel| plea.receive::<Answer>(LIMIT).expect("an answer").0;
    assert_eq!(told(&held.plead(2 * PART)), Answer::Done {}, "there is room");
    assert_eq!(told(&held.plead(7 * PART)), Answer::Full {}, "the device has not so much");
    let plea = held.plead(4 * PART);
    wait(|| ask(&channel, Order::Look {}) == Answer::Stands { free: 2 * PART, wanted: 4 * PART });
    assert_eq!(ask(&channel, Order::Put { slot: 0, place: 4 }), Answer::Full {}, "others need it");
    for place in [1, 3] {
        assert_eq!(ask(&channel, Order::Free { place }), Answer::Done {});
    }
    assert_eq!(told(&plea), Answer::Done {});
    let answer = ask(&channel, Order::Put { slot: 0, place: 1 });
    assert_eq!(answer, Answer::Full {}, "whoever asked has not taken it yet");
    assert!(get(&channel, &slots, 0, 2, (0, PART as u32)) == part(2));
    // One that has gone waits for nothing.
    drop(held.plead(6 * PART));
    wait(|| ask(&channel, Order::Look {}) == Answer::Stands { free: 4 * PART, wanted: 0 });
    wait(|| ask(&channel, Order::Put { slot: 0, place: 1 }) == (Answer::Done {}));
    // Without a daemon nobody makes room.
    drop(channel);
    assert_eq!(told(&held.plead(6 * PART)), Answer::Full {});
    let (channel, ..) = held.greet_as(2);
    assert_eq!(ask(&channel, Order::End {}), Answer::Done {});
    assert!(held.doors().is_empty(), "programs would ask there");
}

fn wait(done: impl Fn() -> bool) {
    for _ in 0..2000 {
        if done() {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("it did not come");
}
