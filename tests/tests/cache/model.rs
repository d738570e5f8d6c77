//! Random operations on a cached folder do what they do on a plain one.
//!
//! `KEDGE_CACHE_STEPS` sets how many, and `KEDGE_CACHE_SEED` which.
use kedge_tests::cached::Cached;
use kedge_tests::random::Dice;
use std::cell::Cell;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const STEPS: u64 = 1500;
pub(crate) const NAMES: [&str; 8] = ["a", "b", "c", "d", "x/a", "x/b", "y/a", "y/b"];
/// Longest file, in bytes.
const MAX_FILE_LEN: u64 = 1 << 20;
/// Longest file, in bytes, where whole parts are to move to a device.
const MAX_DEVICE_FILE_LEN: u64 = 12 << 20;

fn name(dice: &mut Dice) -> &'static str {
    NAMES[dice.below(NAMES.len() as u64) as usize]
}

fn bytes(dice: &mut Dice, length: u64) -> Vec<u8> {
    let first = dice.below(251);
    (0..length).map(|at| ((first + at) % 251) as u8).collect()
}

/// The same file, open in the cached folder and in the plain one.
struct Pair {
    cached: File,
    plain: File,
    writes: bool,
}

struct Twins<'a> {
    cached: &'a Cached,
    plain: PathBuf,
    open: Vec<Pair>,
    dice: Dice,
    longest: u64,
}

/// The results are the same; of errors, the kernel's number.
fn same<T: PartialEq + std::fmt::Debug>(what: &str, cached: io::Result<T>, plain: io::Result<T>) {
    let number = |result: io::Result<T>| result.map_err(|error| error.raw_os_error());
    assert_eq!(number(cached), number(plain), "{what}");
}

/// A file's size and a sum of its bytes.
fn digest(path: &Path) -> io::Result<(usize, u64)> {
    let bytes = fs::read(path)?;
    let sum = bytes.iter().fold(7u64, |sum, &byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    Ok((bytes.len(), sum))
}

impl Twins<'_> {
    fn both<T: PartialEq + std::fmt::Debug>(
        &self,
        what: &str,
        op: impl Fn(&Path) -> io::Result<T>,
    ) {
        same(what, op(&self.cached.under), op(&self.plain));
    }

    fn open(&mut self) {
        let (name, how) = (name(&mut self.dice), self.dice.below(5));
        let mut options = OpenOptions::new();
        match how {
            0 => options.read(true),
            1 => options.read(true).write(true).create(true).truncate(false),
            2 => options.write(true).create(true).truncate(true),
            3 => options.append(true).create(true),
            _ => options.write(true).create_new(true),
        };
        let cached = options.open(self.cached.under.join(name));
        let plain = options.open(self.plain.join(name));
        match (cached, plain) {
            (Ok(cached), Ok(plain)) => {
                if self.open.len() > 5 {
                    self.open.remove(0);
                }
                self.open.push(Pair { cached, plain, writes: how > 0 });
            }
            (cached, plain) => same(name, cached.map(|_| ()), plain.map(|_| ())),
        }
    }

    fn on_an_open_file(&mut self) {
        if self.open.is_empty() {
            return self.open();
        }
        let kind = self.dice.below(8);
        let index = self.dice.below(self.open.len() as u64) as usize;
        let offset = self.dice.below(self.longest);
        let longest = if self.dice.below(4) == 0 { self.longest * 3 / 10 } else { 5000 };
        let length = self.dice.below(longest) + 1;
        let bytes = bytes(&mut self.dice, length);
        let pair = &mut self.open[index];
        match kind {
            0..4 if pair.writes => {
                let (cached, plain) = (&mut pair.cached, &mut pair.plain);
                if kind == 0 && plain.metadata().expect("open").len() < self.longest {
                    same("write", cached.write_all(&bytes), plain.write_all(&bytes));
                } else {
                    let (a, b) =
                        (cached.write_all_at(&bytes, offset), plain.write_all_at(&bytes, offset));
                    same("pwrite", a, b);
                }
            }
            4 if pair.writes => {
                same("truncate", pair.cached.set_len(offset), pair.plain.set_len(offset));
            }
            5 if pair.writes => same("fsync", pair.cached.sync_data(), pair.plain.sync_data()),
            6 => {
                self.open.remove(index);
            }
            _ => {
                let (mut a, mut b) = (vec![0; length as usize], vec![0; length as usize]);
                let read =
                    (pair.cached.read_at(&mut a, offset), pair.plain.read_at(&mut b, offset));
                same("read", read.0, read.1);
                assert!(a == b, "other bytes were read at {offset}");
            }
        }
    }

    fn step(&mut self) {
        let (one, two) = (name(&mut self.dice), name(&mut self.dice));
        match self.dice.below(40) {
            0..4 => self.open(),
            4 => self.both("unlink", |dir| fs::remove_file(dir.join(one))),
            5 => self.both("rename", |dir| fs::rename(dir.join(one), dir.join(two))),
            6 => self.both("link", |dir| fs::hard_link(dir.join(one), dir.join(two))),
            7 | 8 => self.both("stat", |dir| {
                let meta = fs::metadata(dir.join(one))?;
                Ok((meta.len(), meta.permissions(), meta.file_type().is_dir()))
            }),
            9 => {
                let pass = self.dice.below(self.longest);
                self.both("truncate", |dir| {
                    OpenOptions::new().write(true).open(dir.join(one))?.set_len(pass)
                });
            }
            10 => self.both("read", |dir| digest(&dir.join(one))),
            11 => self.both("copy", |dir| fs::copy(dir.join(one), dir.join("copy"))),
            12 => self.both("exchange folders", |dir| {
                fs::rename(dir.join("x"), dir.join("z"))?;
                fs::rename(dir.join("y"), dir.join("x"))?;
                fs::rename(dir.join("z"), dir.join("y"))
            }),
            13 => self.both("list", |dir| {
                let mut names: Vec<_> = fs::read_dir(dir.join("x"))?
                    .map(|entry| entry.map(|entry| entry.file_name()))
                    .collect::<io::Result<_>>()?;
                names.sort();
                Ok(names)
            }),
            _ => self.on_an_open_file(),
        }
    }

    fn compare(&self, dir: &Path) {
        for name in NAMES {
            let (cached, plain) = (dir.join(name), self.plain.join(name));
            if let (Ok(a), Ok(b)) = (fs::read(&cached), fs::read(&plain)) {
                let differs = a.iter().zip(&b).position(|(a, b)| a != b);
                assert_eq!((differs, a.len()), (None, b.len()), "{name}: where bytes differ");
            }
            same(name, digest(&cached), digest(&plain));
        }
    }
}

fn steps() -> u64 {
    steps_or(STEPS)
}

/// Returns how many steps the environment asks for, else so many.
pub(crate) fn steps_or(steps: u64) -> u64 {
    std::env::var("KEDGE_CACHE_STEPS").map_or(steps, |steps| steps.parse().expect("a number"))
}

/// Says that so many steps were done: scripts/soak-cache counts them.
pub(crate) fn done(steps: u64) {
    eprintln!("KEDGE_CACHE_DONE={steps}");
}

/// Runs the steps; every so many, `pause` is called with all files closed.
fn run(name: &str, options: &[&str], every: u64, pause: impl Fn(&Cached)) {
    let Some(cached) = Cached::start(name, options) else { return };
    run_in(&cached, (steps(), MAX_FILE_LEN), every, pause);
}

fn run_in(cached: &Cached, (steps, longest): (u64, u64), every: u64, pause: impl Fn(&Cached)) {
    let dice = Dice::of_environment("KEDGE_CACHE_SEED");
    let plain = cached.world.0.join("plain");
    for dir in [&plain, &cached.under] {
        fs::create_dir_all(dir.join("x")).expect("a folder");
        fs::create_dir_all(dir.join("y")).expect("a folder");
    }
    let mut twins = Twins { cached, plain, open: Vec::new(), dice, longest };
    for step in 1..=steps {
        twins.step();
        if step % every == 0 {
            twins.open.clear();
            twins.compare(&cached.under);
            pause(cached);
            twins.compare(&cached.under);
        }
    }
    twins.open.clear();
    twins.compare(&cached.under);
    cached.drain();
    twins.compare(&cached.below());
    cached.stop();
    twins.compare(&cached.under);
    done(steps);
}

#[test]
fn a_cached_folder_is_a_folder() {
    run("cmodel", &["--tier", "ram:64M"], 500, Cached::drain);
}

#[test]
fn two_small_tiers_are_a_folder_as_well() {
    let disk = format!("/var/tmp/kedge-cmodel2-{}", std::process::id());
    fs::create_dir(&disk).expect("a folder");
    let tier = format!("nvme:{disk}:8M");
    run("cmodel2", &["--tier", "ram:8M", "--tier", &tier, "--fsync", "nvme"], 500, Cached::drain);
    let _ = fs::remove_dir_all(&disk);
}

#[test]
fn what_the_kernel_gathers_is_the_same() {
    run("cmodel3", &["--tier", "ram:64M", "--gather"], 500, Cached::drain);
}

#[test]
fn killed_daemons_lose_nothing() {
    run("cmodel4", &["--tier", "ram:64M", "--fsync", "memory"], 100, |cached| {
        cached.kill();
        cached.begin();
    });
}

#[test]
fn what_moves_to_a_device_is_the_same_also_after_kills() {
    let options = ["--tier", "ram:24M", "--tier", "gpu:64M", "--gpu", "soft", "--host-free", "64M"];
    let Some(mut cached) = Cached::new("cmodel5", &options) else { return };
    // What is held is not drained at once, and so moves.
    cached.fault = Some(format!("slow={}", 32 << 20));
    cached.begin();
    let moved = Cell::new(0);
    run_in(&cached, (steps().min(300), MAX_DEVICE_FILE_LEN), 50, |cached| {
        moved.set(moved.get() + cached.count("moved"));
        cached.kill();
        cached.begin();
    });
    assert!(moved.get() > 0, "nothing moved");
}
