//! The power of a node is cut while programs write to a cached folder: nothing that the policy
//! promised is lost. Its disks are the test's own, and lose of what was not synced what a disk may.
//!
//! `KEDGE_CACHE_CUTS` sets how often, and `KEDGE_CACHE_SEED` with which chances.
use kedge_left_out::left_out;
use kedge_tests::cached::Cached;
use kedge_tests::disk::Disks;
use kedge_tests::random::Dice;
use kedge_tests::world::stderr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

const CUTS: u64 = 6;
/// Cuts of one run of the programs: the state of the disks is kept each time, and they go on.
const OF_ONE: u64 = 3;
const DISK: &str = "48M";
const MAX_OFFSET: u64 = 256 << 10;
const WRITERS: u64 = 3;
/// So many of the last operations are told where something is lost.
const SHOWN: usize = 24;

/// What a program has asked for of a file.
#[derive(Debug, Clone)]
enum Op {
    Write {
        start: u64,
        end: u64,
        byte: u8,
    },
    Cut(u64),
    /// It has been done.
    Fsync,
}

/// A file that is written in place: what fsync has promised, and all that was asked for.
#[derive(Debug, Clone, Default)]
struct Known {
    promised: Vec<u8>,
    asked: Vec<Op>,
    /// So many of them came before the promise.
    promised_at: usize,
    /// Another file, which is replaced by whole ones: so many were begun.
    replacements: u64,
}

impl Known {
    /// With what was asked for until a later moment, at which this promise held as well.
    fn and_until(self, later: &Known) -> Known {
        Known { asked: later.asked.clone(), replacements: later.replacements, ..self }
    }

    /// Returns whether a byte may be what was found there.
    fn allows(&self, at: usize, found: Option<u8>) -> bool {
        let promised = self.promised.get(at).copied();
        let later = &self.asked[self.promised_at..];
        let cut = || later.iter().any(|op| matches!(op, Op::Cut(size) if *size <= at as u64));
        let written = |byte| {
            later.iter().any(|op| {
                matches!(op, Op::Write { start, end, byte: of } if *of == byte
                    && (*start..*end).contains(&(at as u64)))
            })
        };
        match found {
            None => promised.is_none() || cut(),
            Some(byte) if promised == Some(byte) || written(byte) => true,
            // A hole, behind the promised end or where it was cut before it became longer.
            Some(byte) => byte == 0 && (promised.is_none() || cut()),
        }
    }

    fn check(&self, found: &[u8]) -> Result<(), String> {
        let wrong = (0..found.len().max(self.promised.len()))
            .find(|at| !self.allows(*at, found.get(*at).copied()));
        wrong.map_or(Ok(()), |at| {
            Err(format!(
                "at {at} is {:?}, and {:?} was promised; {} bytes of {}",
                found.get(at),
                self.promised.get(at),
                found.len(),
                self.promised.len()
            ))
        })
    }
}

/// All of a replacement: one number says what it is.
fn replacement(version: u64) -> Vec<u8> {
    vec![(version % 251) as u8 + 1; (4096 * (1 + version % 8) + version % 100) as usize]
}

type Ledger = Arc<Mutex<Vec<Known>>>;

fn with<R>(ledger: &Ledger, index: usize, work: impl FnOnce(&mut Known) -> R) -> R {
    work(&mut ledger.lock().unwrap_or_else(PoisonError::into_inner)[index])
}

/// A program that writes its files until the cache is gone.
struct Writer {
    under: PathBuf,
    index: usize,
    ledger: Ledger,
    dice: Dice,
    rests: Arc<AtomicBool>,
    /// What its file has by now.
    now: Vec<u8>,
}

impl Writer {
    fn path(&self, name: &str) -> PathBuf {
        self.under.join(format!("{name}{}", self.index))
    }

    fn run(mut self) {
        // It ends with the first error: the cache is gone.
        while self.life().is_ok() {}
    }

    /// Opens its file, works with it, and closes it.
    fn life(&mut self) -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(self.path("file"))?;
        for _ in 0..self.dice.below(40) {
            while self.rests.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(2));
            }
            match self.dice.below(12) {
                0 => self.cut(&file)?,
                1 | 2 => self.fsync(&file)?,
                3 => self.replace()?,
                _ => self.write(&file)?,
            }
        }
        Ok(())
    }

    fn write(&mut self, file: &File) -> io::Result<()> {
        let start = self.dice.below(MAX_OFFSET);
        let most = if self.dice.below(3) == 0 { 100_000 } else { 6000 };
        let (end, byte) = (start + 1 + self.dice.below(most), 1 + self.dice.below(255) as u8);
        self.intend(Op::Write { start, end, byte });
        file.write_all_at(&vec![byte; (end - start) as usize], start)?;
        self.now.resize(self.now.len().max(end as usize), 0);
        self.now[start as usize..end as usize].fill(byte);
        Ok(())
    }

    fn cut(&mut self, file: &File) -> io::Result<()> {
        let size = self.dice.below(MAX_OFFSET);
        self.intend(Op::Cut(size));
        file.set_len(size)?;
        self.now.resize(size as usize, 0);
        Ok(())
    }

    fn fsync(&mut self, file: &File) -> io::Result<()> {
        file.sync_all()?;
        let now = self.now.clone();
        with(&self.ledger, self.index, |known| {
            known.promised = now;
            known.asked.push(Op::Fsync);
            known.promised_at = known.asked.len();
        });
        Ok(())
    }

    /// Replaces the other file as programs do that do not think of fsync.
    fn replace(&mut self) -> io::Result<()> {
        let version = with(&self.ledger, self.index, |known| {
            known.replacements += 1;
            known.replacements
        });
        fs::write(self.path("new"), replacement(version))?;
        fs::rename(self.path("new"), self.path("whole"))
    }

    fn intend(&self, op: Op) {
        with(&self.ledger, self.index, |known| known.asked.push(op));
    }
}

/// What was known, and what the disks had, when the power was cut.
struct Cut {
    known: Vec<Known>,
    disks: Vec<Vec<u8>>,
}

/// An empty file system's image; `None` where that cannot be made.
fn image(folder: &Path) -> Option<Vec<u8>> {
    let path = folder.join("empty");
    let mut make = Command::new("mkfs.ext4");
    make.args(["-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"]);
    let made = make.arg(&path).arg(DISK).output().is_ok_and(|output| output.status.success());
    let image = if made { fs::read(&path).ok() } else { None };
    // It is in memory from now on.
    let _ = fs::remove_file(path);
    image
}

fn mount(image: &Path, at: &Path) -> bool {
    fs::create_dir_all(at).expect("a folder");
    let mount = Command::new("mount").args(["-o", "loop"]).arg(image).arg(at).output();
    mount.is_ok_and(|output| output.status.success())
}

fn unmount(at: &Path) {
    // Also what is over it.
    while Command::new("umount").arg("-l").arg(at).output().is_ok_and(|it| it.status.success()) {}
}

struct Node {
    cached: Cached,
    empty: Vec<u8>,
    dice: Dice,
    checked: u64,
}

impl Node {
    fn new(name: &str, policy: &str) -> Option<Node> {
        let options = ["--tier", "ram:8M", "--tier", "nvme:local:16M", "--fsync", policy];
        let cached = Cached::new(name, &options)?;
        let dice = Dice::of_environment("KEDGE_CACHE_SEED");
        let empty = image(&cached.world.0).filter(|_| Path::new("/dev/loop-control").exists());
        if empty.is_none() {
            left_out("cuts of power", "they take mkfs.ext4 and loop devices");
        }
        Some(Node { cached, empty: empty?, dice, checked: 0 })
    }

    fn local(&self) -> PathBuf {
        self.cached.world.0.join("local")
    }

    /// Mounts images over the folder that is cached, and at the local disk's.
    fn mount(&mut self, images: &Path) {
        assert!(mount(&images.join("below"), &self.cached.under), "a loop device");
        assert!(mount(&images.join("local"), &self.local()), "a loop device");
        self.cached.mounted_below();
    }

    fn unmount(&mut self) {
        unmount(&self.cached.under);
        unmount(&self.local());
        // What is open there would keep it mounted, and be written at its end.
        self.cached.mounted_below();
    }

    /// Has programs write for a while, and returns what there was at some moments.
    fn cuts(&mut self, count: u64) -> Vec<Cut> {
        let folder = self.cached.world.0.join("disks");
        fs::create_dir_all(&folder).expect("a folder");
        let images = [("below", &self.empty[..]), ("local", &self.empty[..])];
        let disks = Disks::new(&folder, &images);
        self.mount(&folder);
        self.cached.begin();
        let ledger: Ledger = Arc::new(Mutex::new(vec![Known::default(); WRITERS as usize]));
        let rests = Arc::new(AtomicBool::new(false));
        for index in 0..WRITERS {
            // So that there is something to replace, and to find.
            let whole = self.cached.under.join(format!("whole{index}"));
            let mut file = File::create(whole).expect("a file");
            file.write_all(&replacement(0)).and_then(|()| file.sync_all()).expect("a file");
        }
        File::open(&self.cached.under).and_then(|folder| folder.sync_all()).expect("the folder");
        let writers: Vec<_> = (0..WRITERS as usize)
            .map(|index| {
                let (ledger, rests) = (ledger.clone(), rests.clone());
                let (under, dice) =
                    (self.cached.under.clone(), Dice::new(self.dice.below(u64::MAX >> 12) + 1));
                let writer = Writer { under, index, ledger, dice, rests, now: Vec::new() };
                thread::spawn(move || writer.run())
            })
            .collect();
        let mut cuts = Vec::new();
        while (cuts.len() as u64) < count {
            thread::sleep(Duration::from_millis(20 + self.dice.below(400)));
            // Drains go on while nobody writes.
            let resting = self.dice.below(2) == 0;
            rests.store(resting, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(self.dice.below(300)));
            // What was promised by then, the disks a moment later, and what was asked for until
            // then: programs go on meanwhile.
            let known = || ledger.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let promised = known();
            let disks = disks.cut(|most| self.dice.below(most));
            let asked = known();
            let known = promised.into_iter().zip(&asked).map(|(it, later)| it.and_until(later));
            cuts.push(Cut { known: known.collect(), disks });
            rests.store(false, Ordering::Relaxed);
        }
        let memory = self.memory();
        self.cached.kill();
        for writer in writers {
            writer.join().expect("a writer");
        }
        self.unmount();
        fs::remove_dir_all(memory).expect("what was in memory");
        cuts
    }

    /// The folder of what the cache has in memory.
    fn memory(&self) -> PathBuf {
        let tier = self.cached.status()["tiers"][0]["folder"].as_str().map(PathBuf::from);
        tier.as_deref().and_then(Path::parent).expect("a folder of this cache's").to_owned()
    }

    /// Starts the node after a cut, and looks at what it has.
    fn check(&mut self, cut: &Cut) {
        self.checked += 1;
        let images = self.cached.world.0.join(format!("cut{}", self.checked));
        fs::create_dir(&images).expect("a folder");
        for (name, image) in ["below", "local"].iter().zip(&cut.disks) {
            fs::write(images.join(name), image).expect("an image");
        }
        self.mount(&images);
        // This machine has not been started anew.
        let homes = self.local().join("kedge-cache-0");
        for home in fs::read_dir(homes).into_iter().flatten().flatten() {
            fs::write(home.path().join("tier/boot"), "another").expect("a tier");
        }
        let (under, local) = (self.cached.under.display().to_string(), self.local());
        let local = local.display().to_string();
        // Of a file that was replaced, the local disk may still have bytes; and loop devices have
        // other numbers, so that it is not sure that it is gone.
        let words =
            ["cache", "recover", "--discard=all", "--json", "--under", &under, "--disk", &local];
        let recovered = self.cached.world.output(&words);
        let told = format!("{}{}", String::from_utf8_lossy(&recovered.stdout), stderr(&recovered));
        assert!(recovered.status.success(), "{told}");
        for (index, known) in cut.known.iter().enumerate() {
            let found = fs::read(self.cached.under.join(format!("file{index}")));
            let found = found.unwrap_or_default();
            known.check(&found).unwrap_or_else(|why| {
                let shown = known.asked.len().saturating_sub(SHOWN);
                panic!("file{index}: {why}; it was asked for {:?}; {told}", &known.asked[shown..])
            });
            let whole = fs::read(self.cached.under.join(format!("whole{index}"))).expect("there");
            assert!(
                (0..=known.replacements).any(|version| whole == replacement(version)),
                "whole{index}: {} bytes are none of {} replacements; {told}",
                whole.len(),
                known.replacements
            );
        }
        self.unmount();
        fs::remove_dir_all(images).expect("images");
    }
}

fn run(name: &str, policy: &str) {
    let Some(mut node) = Node::new(name, policy) else { return };
    let cuts = std::env::var("KEDGE_CACHE_CUTS").map_or(CUTS, |cuts| cuts.parse().expect("cuts"));
    for done in (0..cuts).step_by(OF_ONE as usize) {
        for cut in node.cuts(OF_ONE.min(cuts - done)) {
            node.check(&cut);
        }
    }
}

#[test]
fn what_fsync_had_below_outlives_a_power_cut() {
    run("cpowerd", "drain");
}

#[test]
fn what_fsync_had_on_a_local_disk_outlives_a_power_cut() {
    run("cpowern", "nvme");
}

#[test]
fn the_check_finds_what_is_lost() {
    let write = |start, end, byte| Op::Write { start, end, byte };
    let asked = vec![write(5, 6, 3), Op::Fsync, write(2, 4, 2)];
    let mut known = Known { promised: vec![1; 8], asked, promised_at: 2, replacements: 0 };
    let allowed: [&[u8]; 3] = [&[1; 8], &[1, 1, 2, 1, 1, 1, 1, 1], &[1, 1, 1, 1, 1, 1, 1, 1, 0]];
    assert!(allowed.iter().all(|found| known.check(found).is_ok()));
    let other = [1, 1, 1, 1, 1, 3, 1, 1];
    let lost: [&[u8]; 4] = [&[1; 7], &[1, 1, 0, 1, 1, 1, 1, 1], &[1, 2, 1, 1, 1, 1, 1, 1], &other];
    assert!(lost.iter().all(|found| known.check(found).is_err()));
    let mut later = known.clone();
    later.asked.push(Op::Cut(5));
    known = known.and_until(&later);
    assert!(known.check(&[1; 5]).is_ok() && known.check(&[1; 4]).is_err());
    assert!(known.check(&[1, 1, 1, 1, 1, 0, 0, 0]).is_ok());
}
