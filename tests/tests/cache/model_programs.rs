//! Several programs do to a cached folder what their twins do to a plain one, and all say the same:
//! tests/hosts/cache_ops.c, through the mount and by themselves.
//!
//! `KEDGE_CACHE_STEPS` sets how many calls, and `KEDGE_CACHE_SEED` which.
use crate::model::{NAMES, done, steps_or};
use kedge_tests::cached::Cached;
use kedge_tests::random::Dice;
use kedge_tests::{host, kedge};
use std::cell::Cell;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const STEPS: u64 = 1000;
/// Programs on each side.
const PROGRAMS: u64 = 3;
/// Files that each has open at most.
const SLOTS: u64 = 6;
/// Where the last write of a file begins at most.
const LONGEST: u64 = 3 << 20;
/// The same where whole parts are to move to a device.
const DEVICE_LONGEST: u64 = 12 << 20;
/// Flags of open(2).
const RDONLY: u64 = 0;
const WRONLY: u64 = 0o1;
const RDWR: u64 = 0o2;
const CREAT: u64 = 0o100;
const EXCL: u64 = 0o200;
const TRUNC: u64 = 0o1000;
const APPEND: u64 = 0o2000;
const DIRECT: u64 = 0o40000;
/// Modes of fallocate(2): plain, beyond the end, a hole, zeros.
const FALLOCATE: [u64; 5] = [0, 1, 3, 16, 17];

/// A program that does calls as it is told.
struct Program {
    child: Child,
    calls: ChildStdin,
    said: BufReader<ChildStdout>,
}

impl Program {
    fn start(folder: &Path, longest: u64, mixed: bool, by_itself: bool) -> Program {
        let mut command = Command::new(host("cache_ops.c", "cache_ops", &["-O1"]));
        command.arg(folder).arg(longest.to_string());
        if mixed {
            command.arg("mixed");
        }
        if by_itself {
            command.env("LD_PRELOAD", kedge().with_file_name("libkedge_cache_preload.so"));
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it runs");
        let calls = child.stdin.take().expect("a pipe");
        let said = BufReader::new(child.stdout.take().expect("a pipe"));
        Program { child, calls, said }
    }

    fn call(&mut self, call: &str) -> String {
        writeln!(self.calls, "{call}").expect("it runs");
        let mut line = String::new();
        self.said.read_line(&mut line).expect("text");
        assert!(line.ends_with('\n'), "{call}: it has ended: {:?}", self.child.try_wait());
        line.trim_end().to_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program on the cached folder, its twin on the plain one, and how each slot is open.
struct Twins {
    cached: Program,
    plain: Program,
    slots: Vec<Option<u64>>,
}

impl Twins {
    /// Has both do a call, and returns what they said.
    fn call(&mut self, call: &str, log: &mut Vec<String>) -> String {
        log.push(call.to_owned());
        let (cached, plain) = (self.cached.call(call), self.plain.call(call));
        if cached != plain {
            let from = log.len().saturating_sub(40);
            panic!("{call}: {cached}, not {plain}; after\n{}", log[from..].join("\n"));
        }
        plain
    }
}

struct Model<'a> {
    cached: &'a Cached,
    plain: PathBuf,
    twins: Vec<Twins>,
    dice: Dice,
    longest: u64,
    log: Vec<String>,
}

impl Model<'_> {
    fn name(&mut self) -> &'static str {
        // Links lead to some of the others.
        const MORE: [&str; 2] = ["s", "x/s"];
        match self.dice.below(10) {
            0 => MORE[self.dice.below(2) as usize],
            _ => NAMES[self.dice.below(NAMES.len() as u64) as usize],
        }
    }

    fn length(&mut self) -> u64 {
        1 + match self.dice.below(6) {
            0 => self.dice.below(self.longest * 3 / 10),
            1 | 2 => self.dice.below(70_000),
            _ => self.dice.below(5000),
        }
    }

    fn open(&mut self, who: usize) {
        let (slot, name) = (self.dice.below(SLOTS), self.name());
        let flags = match self.dice.below(9) {
            0 => RDONLY,
            1 | 2 => RDWR | CREAT,
            3 | 4 => WRONLY | CREAT | TRUNC,
            5 => WRONLY | CREAT | APPEND,
            6 => RDWR | CREAT | APPEND,
            7 => RDWR | CREAT | DIRECT,
            _ => WRONLY | CREAT | EXCL,
        };
        let twins = &mut self.twins[who];
        let said = twins.call(&format!("open {slot} {name} {flags}"), &mut self.log);
        twins.slots[slot as usize] = (said == "0").then_some(flags);
    }

    fn by_name(&mut self, who: usize) {
        let (one, two) = (self.name(), self.name());
        let (length, mode) = (self.dice.below(self.longest), self.dice.below(3));
        let mode = [0o644, 0o600, 0o6755][mode as usize];
        let call = match self.dice.below(20) {
            0 | 1 => format!("name unlink {one} - 0"),
            2 | 3 => format!("name rename {one} {two} 0"),
            4 => format!("name exchange {one} {two} 0"),
            5 => format!("name link {one} {two} 0"),
            6 => {
                format!("name symlink {} {} 0", NAMES[0], if length % 2 == 0 { "s" } else { "x/s" })
            }
            7 => format!("name readlink {one} - 0"),
            8 => format!("name chmod {one} - {mode}"),
            9 | 10 => format!("name truncate {one} - {length}"),
            11 => "name list x - 0".to_owned(),
            12 => "name exchange x y 0".to_owned(),
            13..16 => format!("name digest {one} - 0"),
            _ => format!("name stat {one} - 0"),
        };
        self.twins[who].call(&call, &mut self.log);
    }

    fn by_slot(&mut self, who: usize) {
        let slot = self.dice.below(SLOTS);
        let Some(flags) = self.twins[who].slots[slot as usize] else { return self.open(who) };
        let (mut offset, mut length) = (self.dice.below(self.longest), self.length());
        let (seed, other) = (self.dice.below(1 << 30), self.dice.below(SLOTS));
        let aligned = |number: u64| number / 4096 * 4096;
        if flags & DIRECT != 0 {
            (offset, length) = (aligned(offset), aligned(length) + 4096);
        }
        let call = match self.dice.below(40) {
            0..6 if flags & DIRECT == 0 => format!("write {slot} 0 {length} {seed}"),
            6 | 7 if flags & DIRECT == 0 => format!("writev {slot} 0 {length} {seed}"),
            8..13 if flags & DIRECT == 0 => {
                format!("burst {slot} {} {} {seed}", 2 + offset % 20, length.min(100_000))
            }
            13 if flags & DIRECT == 0 => format!("child {slot} 0 {length} {seed}"),
            0..18 => format!("pwrite {slot} {offset} {length} {seed}"),
            18..20 if flags & DIRECT == 0 => format!("seek {slot} 0 2"),
            20 if flags & DIRECT == 0 => format!("seek {slot} {offset} 0"),
            21 | 22 => format!("ftruncate {slot} {offset}"),
            23 => format!("fsync {slot} {seed}"),
            24 | 25 => {
                let mode = FALLOCATE[(seed % 5) as usize];
                format!("fallocate {slot} {offset} {length} {mode}")
            }
            26 | 27 => format!("maps {slot} {offset} {length} {seed}"),
            28 => format!("mapp {slot} {offset} {length} {seed}"),
            29 | 30 => format!("mapr {slot} {offset} {length} {seed}"),
            31 | 32 if flags & DIRECT == 0 && self.is_plain(who, other) => {
                format!("copy {slot} {offset} {length} {other} {}", seed % self.longest)
            }
            33 if flags & DIRECT == 0 && self.is_plain(who, other) => {
                format!("sendfile {slot} {offset} {length} {other} {}", seed % self.longest)
            }
            34 => {
                self.twins[who].slots[slot as usize] = None;
                format!("close {slot} 0")
            }
            _ => format!("pread {slot} {offset} {length}"),
        };
        self.twins[who].call(&call, &mut self.log);
    }

    /// Returns whether a slot may take what is copied inside the kernel. On some file systems
    /// O_DIRECT wants that aligned, on either side.
    fn is_plain(&self, who: usize, slot: u64) -> bool {
        self.twins[who].slots[slot as usize].is_some_and(|flags| flags & (DIRECT | APPEND) == 0)
    }

    fn step(&mut self) {
        let who = self.dice.below(PROGRAMS) as usize;
        match self.dice.below(40) {
            0..4 => self.open(who),
            4..10 => self.by_name(who),
            _ => self.by_slot(who),
        }
    }

    fn close_all(&mut self) {
        for twins in &mut self.twins {
            for slot in 0..SLOTS {
                // Of a daemon that was killed, a descriptor says so.
                twins.cached.call(&format!("close {slot} 0"));
                twins.plain.call(&format!("close {slot} 0"));
            }
            twins.slots.fill(None);
        }
    }

    fn compare(&self, folder: &Path) {
        for name in NAMES {
            let (cached, plain) = (fs::read(folder.join(name)), fs::read(self.plain.join(name)));
            match (cached, plain) {
                (Ok(a), Ok(b)) => {
                    let differs = a.iter().zip(&b).position(|(a, b)| a != b);
                    let from = self.log.len().saturating_sub(200);
                    let log = || self.log[from..].join("\n");
                    assert_eq!((differs, a.len()), (None, b.len()), "{name}; after\n{}", log());
                }
                (a, b) => assert_eq!(a.is_ok(), b.is_ok(), "{name}"),
            }
        }
    }
}

/// Runs the steps by programs of which `by_itself` says whether they write by themselves; every so
/// many, `pause` is called.
fn run(
    cached: &Cached,
    (steps, longest): (u64, u64),
    by_itself: impl Fn(u64) -> bool,
    every: u64,
    pause: impl Fn(&Cached),
) {
    let dice = Dice::of_environment("KEDGE_CACHE_SEED");
    let plain = cached.world.0.join("plain");
    for dir in [&plain, &cached.under] {
        fs::create_dir_all(dir.join("x")).expect("a folder");
        fs::create_dir_all(dir.join("y")).expect("a folder");
    }
    let mixed = (1..PROGRAMS).any(|index| by_itself(index) != by_itself(0));
    let twins = |index| Twins {
        cached: Program::start(&cached.under, longest, mixed, by_itself(index)),
        plain: Program::start(&plain, longest, mixed, false),
        slots: vec![None; SLOTS as usize],
    };
    let twins = (0..PROGRAMS).map(twins).collect();
    let mut model = Model { cached, plain, twins, dice, longest, log: Vec::new() };
    for step in 1..=steps {
        model.step();
        if step % every == 0 {
            // A daemon may end under files that are open.
            pause(cached);
            model.close_all();
            model.compare(&model.cached.under);
        }
    }
    model.close_all();
    model.compare(&cached.under);
    cached.drain();
    model.compare(&cached.below());
    drop(model.twins.drain(..));
    cached.stop();
    model.compare(&cached.under);
    done(steps);
}

fn steps() -> u64 {
    steps_or(STEPS)
}

#[test]
fn programs_do_what_they_do_elsewhere() {
    let Some(cached) = Cached::start("pmodel", &["--tier", "ram:64M"]) else { return };
    run(&cached, (steps(), LONGEST), |_| false, 300, Cached::drain);
}

#[test]
fn so_do_those_that_write_by_themselves() {
    let options = ["--tier", "ram:64M", "--host-free", "64M"];
    let Some(cached) = Cached::start("pmodel2", &options) else { return };
    let leased = Cell::new(0);
    run(
        &cached,
        (steps(), LONGEST),
        |_| true,
        300,
        |cached| {
            cached.drain();
            leased.set(cached.count("leased"));
        },
    );
    assert!(leased.get() > 0 || steps() < 300, "nothing was written so");
}

#[test]
fn so_do_both_beside_each_other_in_small_tiers() {
    let disk = format!("/var/tmp/kedge-pmodel3-{}", std::process::id());
    fs::create_dir(&disk).expect("a folder");
    let tier = format!("nvme:{disk}:8M");
    let options = ["--tier", "ram:8M", "--tier", &tier, "--fsync", "nvme", "--host-free", "64M"];
    let Some(cached) = Cached::start("pmodel3", &options) else { return };
    run(&cached, (steps(), LONGEST), |index| index % 2 == 0, 300, |_| {});
    let _ = fs::remove_dir_all(&disk);
}

#[test]
fn so_do_those_whose_writes_the_kernel_gathers() {
    let Some(cached) = Cached::start("pmodel6", &["--tier", "ram:64M", "--gather"]) else { return };
    run(&cached, (steps(), LONGEST), |_| false, 300, Cached::drain);
}

#[test]
fn daemons_that_are_killed_under_them_lose_nothing() {
    let options = ["--tier", "ram:64M", "--fsync", "memory", "--host-free", "64M"];
    let Some(cached) = Cached::start("pmodel4", &options) else { return };
    run(
        &cached,
        (steps(), LONGEST),
        |index| index % 2 == 0,
        60,
        |cached| {
            cached.kill();
            cached.begin();
        },
    );
}

#[test]
fn nor_do_those_whose_parts_move_to_a_device() {
    let options = ["--tier", "ram:24M", "--tier", "gpu:64M", "--gpu", "soft", "--host-free", "64M"];
    let Some(cached) = Cached::start("pmodel5", &options) else { return };
    run(
        &cached,
        (steps().min(400), DEVICE_LONGEST),
        |_| true,
        80,
        |cached| {
            cached.kill();
            cached.begin();
        },
    );
}
