//! `kedge bench cache`: what programs see of the write-back cache, by turns with the same
//! elsewhere.

use super::scratch::Scratch;
use kedge_cache::control::{self, Ask};
use kedge_probe::Series;
use kedge_supervisor::{Parts, kedge_again};
use std::fs::{self, File};
use std::hint::black_box;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::Instant;

/// Repetitions of each comparison.
const PAIRS: usize = 7;
/// Bytes of all writers together, and of the tier, which holds that several times.
const TOTAL: usize = 256 << 20;
const TIER: &str = "ram:1G";
const WRITERS: usize = 8;
/// Most writers at once.
const MAX_WRITERS: usize = 1024;
const LARGE: usize = 4 << 20;

/// Who writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    /// The kernel, as it is asked.
    Kernel,
    /// The program by itself: a process that is given the cache's library.
    Itself,
}

/// A cached folder, one in memory and one of the same file system.
struct Places {
    cached: PathBuf,
    memory: PathBuf,
    plain: PathBuf,
}

impl Places {
    fn new(folder: &Path) -> Result<Places, String> {
        let memory = PathBuf::from(format!("/dev/shm/kedge-bench-{}", std::process::id()));
        let places = Places { cached: folder.join("cached"), memory, plain: folder.join("plain") };
        for dir in [&places.cached, &places.memory, &places.plain] {
            fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        }
        let mut start = kedge_again();
        start
            .args(["cache", "start", "--tier", TIER, "--close", "memory", "--under"])
            .arg(&places.cached);
        start.stdin(Stdio::null()).stdout(Stdio::null());
        match start.status() {
            Ok(status) if status.success() => Ok(places),
            _ => Err("the cache could not be started".into()),
        }
    }

    fn ask(&self, what: Ask) -> Result<(), String> {
        control::ask(&self.cached, what).map(drop).map_err(|error| error.to_string())
    }
}

impl Drop for Places {
    fn drop(&mut self) {
        // What stays is told by `kedge cache status`.
        let _ = self.ask(Ask::Stop);
        let _ = fs::remove_dir_all(&self.memory);
    }
}

/// Measures and hands over each series as it is done.
pub(super) fn run(dir: Option<&Path>, sink: &mut dyn FnMut(Series)) -> Result<(), String> {
    let folder = Scratch::new(dir)?;
    let folder = fs::canonicalize(&folder.0).map_err(|error| error.to_string())?;
    let places = Places::new(&folder)?;
    let said = |error: std::io::Error| error.to_string();
    bursts(&places, sink)?;
    for (what, block) in [("write of 4 KiB", 4 << 10), ("write of 64 KiB", 64 << 10)] {
        let (mut ratios, mut by_themselves) = (Vec::new(), Vec::new());
        for _ in 0..PAIRS {
            let plain = longest(&write(&places.plain, 1, block, By::Kernel).map_err(said)?);
            for (by, into) in [(By::Kernel, &mut ratios), (By::Itself, &mut by_themselves)] {
                into.push(longest(&write(&places.cached, 1, block, by).map_err(said)?) / plain);
                places.ask(Ask::Drain)?;
            }
        }
        let unit = "× page cache";
        sink(Series::lower(format!("cache: {what}"), unit, ratios).target(1.3));
        let name = format!("cache, by themselves: {what}");
        sink(Series::lower(name, unit, by_themselves).target(1.0));
    }
    let mut reads = Vec::new();
    for _ in 0..PAIRS {
        let plain = read(&places.plain).map_err(said)?;
        reads.push(plain / read(&places.cached).map_err(said)?);
    }
    let name = "cache: read of a file that is not cached";
    sink(Series::higher(name, "of a plain read", reads).target(0.95));
    Ok(())
}

/// Has all writers write at once.
fn bursts(places: &Places, sink: &mut dyn FnMut(Series)) -> Result<(), String> {
    let said = |error: io::Error| error.to_string();
    let [mut bursts, mut spreads, mut drains] = <[Vec<f64>; 3]>::default();
    let [mut of_tmpfs, mut of_memcpy, mut own_spreads] = <[Vec<f64>; 3]>::default();
    for _ in 0..PAIRS {
        let memory = longest(&write(&places.memory, WRITERS, LARGE, By::Kernel).map_err(said)?);
        let copied = longest(&copy(WRITERS, LARGE));
        let cached = write(&places.cached, WRITERS, LARGE, By::Kernel).map_err(said)?;
        let start = Instant::now();
        places.ask(Ask::Drain)?;
        let drain = start.elapsed().as_secs_f64();
        let own = write(&places.cached, WRITERS, LARGE, By::Itself).map_err(said)?;
        places.ask(Ask::Drain)?;
        let plain = longest(&write(&places.plain, 1, LARGE, By::Kernel).map_err(said)?);
        let spread = |seconds: &[f64]| {
            longest(seconds) / seconds.iter().copied().fold(f64::INFINITY, f64::min)
        };
        bursts.push(memory / longest(&cached));
        spreads.push(spread(&cached));
        drains.push(plain / drain);
        of_tmpfs.push(memory / longest(&own));
        of_memcpy.push(copied / longest(&own));
        own_spreads.push(spread(&own));
    }
    let (all, slowest) = ("8 writers of 4 MiB", "slowest of 8 writers");
    let (tmpfs, quickest) = ("of tmpfs", "× the quickest");
    sink(Series::higher(format!("cache: {all}"), tmpfs, bursts).target(0.9));
    sink(Series::lower(format!("cache: {slowest}"), quickest, spreads).target(1.1));
    sink(Series::higher("cache: drain", "of a plain write", drains).target(0.95));
    // Programs that write by themselves.
    let own = |what: &str| format!("cache, by themselves: {what}");
    sink(Series::higher(own(all), tmpfs, of_tmpfs).target(0.9));
    sink(Series::higher(own(all), "of memcpy", of_memcpy).target(0.9));
    sink(Series::lower(own(slowest), quickest, own_spreads).target(1.1));
    Ok(())
}

fn longest(seconds: &[f64]) -> f64 {
    seconds.iter().copied().fold(0.0, f64::max)
}

/// Has so many writers write all bytes together in blocks, each its own file anew; seconds of each.
fn write(dir: &Path, writers: usize, block: usize, by: By) -> io::Result<Vec<f64>> {
    match by {
        By::Kernel => write_here(dir, writers, block),
        By::Itself => write_there(dir, writers, block),
    }
}

/// The same by threads of this process.
fn write_here(dir: &Path, writers: usize, block: usize) -> io::Result<Vec<f64>> {
    let data = vec![7; block];
    let each = |index: usize| {
        let path = dir.join(format!("f{index}"));
        let _ = fs::remove_file(&path);
        let start = Instant::now();
        let mut file = File::create(path)?;
        for _ in 0..TOTAL / writers / block {
            file.write_all(&data)?;
        }
        drop(file);
        Ok(start.elapsed().as_secs_f64())
    };
    together(writers, each).into_iter().collect()
}

/// The same by those of a process that has the cache's library: [`writers`].
fn write_there(dir: &Path, writers: usize, block: usize) -> io::Result<Vec<f64>> {
    let library = Parts::preload().map_err(io::Error::other)?;
    let mut command = kedge_again();
    command.args(["bench", "writers", "--dir"]).arg(dir).env("LD_PRELOAD", library);
    command.args(["--size", &block.to_string(), "--size", &writers.to_string()]);
    let output = command.stdin(Stdio::null()).output()?;
    match output.status.success() {
        true => Ok(serde_json::from_slice(&output.stdout)?),
        false => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned())),
    }
}

/// Writes to a folder as [`write_here`] does and prints the seconds: what the bench starts.
pub(super) fn writers(dir: Option<&Path>, sizes: &[u64]) -> Result<(), String> {
    let numbers: Vec<usize> = sizes.iter().filter_map(|size| usize::try_from(*size).ok()).collect();
    let usual = |block: &usize, writers: &usize| *block > 0 && (1..=MAX_WRITERS).contains(writers);
    let (Some(dir), [block, writers]) = (dir, &numbers[..]) else {
        return Err("it takes --dir, and --size twice: of a block, and how many write".into());
    };
    if !usual(block, writers) {
        return Err(format!("{writers} writers of blocks of {block} bytes: not of any use"));
    }
    let (writers, block) = (*writers, *block);
    let seconds = write_here(dir, writers, block).map_err(|error| error.to_string())?;
    let text = serde_json::to_string(&seconds).map_err(|error| error.to_string())?;
    crate::said::tell(&text)
}

/// Has so many threads copy all bytes together in blocks, each to memory of its own that is there;
/// seconds of each.
fn copy(writers: usize, block: usize) -> Vec<f64> {
    let data = vec![7u8; block];
    together(writers, |_| {
        let mut memory = vec![1u8; TOTAL / writers];
        let start = Instant::now();
        memory.chunks_exact_mut(block).for_each(|part| part.copy_from_slice(black_box(&data)));
        let seconds = start.elapsed().as_secs_f64();
        black_box(memory);
        seconds
    })
}

/// Has so many threads work at once.
fn together<R: Send>(threads: usize, work: impl Fn(usize) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|index| {
                let work = &work;
                scope.spawn(move || work(index))
            })
            .collect();
        // One that has panicked has no result, and has told why.
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    })
}

/// Reads a file that is in the page cache of the file system below.
fn read(dir: &Path) -> std::io::Result<f64> {
    let mut buffer = vec![0; 1 << 20];
    let start = Instant::now();
    let mut file = File::open(dir.join("f0"))?;
    while file.read(&mut buffer)? > 0 {}
    Ok(start.elapsed().as_secs_f64())
}
