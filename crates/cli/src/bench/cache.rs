//! `kedge bench cache`: what programs see of the write-back cache, by turns with the same
//! elsewhere.

use super::scratch::Scratch;
use kedge_cache::control::{self, Ask};
use kedge_probe::Series;
use kedge_supervisor::kedge_again;
use std::fs::{self, File};
use std::io::{Read, Write};
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
const LARGE: usize = 4 << 20;

pub(super) const BURST: &str = "cache: 8 writers of 4 MiB";
pub(super) const FAIR: &str = "cache: slowest of 8 writers";
pub(super) const SMALL: &str = "cache: write of 4 KiB";
pub(super) const MIDDLE: &str = "cache: write of 64 KiB";
pub(super) const DRAIN: &str = "cache: drain";
pub(super) const READ: &str = "cache: read of a file that is not cached";

/// Returns what a figure should be.
pub(super) fn target(name: &str) -> Option<f64> {
    Some(match name {
        BURST => 0.9,
        FAIR => 1.1,
        SMALL | MIDDLE => 1.3,
        DRAIN | READ => 0.95,
        _ => return None,
    })
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
    let (mut bursts, mut fair, mut drains) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..PAIRS {
        let memory = write(&places.memory, WRITERS, LARGE).map_err(said)?;
        let cached = write(&places.cached, WRITERS, LARGE).map_err(said)?;
        bursts.push(longest(&memory) / longest(&cached));
        fair.push(longest(&cached) / cached.iter().copied().fold(f64::INFINITY, f64::min));
        let start = Instant::now();
        places.ask(Ask::Drain)?;
        let drain = start.elapsed().as_secs_f64();
        let plain = write(&places.plain, 1, LARGE).map_err(said)?;
        drains.push(longest(&plain) / drain);
    }
    sink(Series { name: BURST.into(), unit: "of tmpfs".into(), samples: bursts });
    sink(Series { name: FAIR.into(), unit: "× the quickest".into(), samples: fair });
    sink(Series { name: DRAIN.into(), unit: "of a plain write".into(), samples: drains });
    for (name, block) in [(SMALL, 4 << 10), (MIDDLE, 64 << 10)] {
        let mut ratios = Vec::new();
        for _ in 0..PAIRS {
            let plain = write(&places.plain, 1, block).map_err(said)?;
            let cached = write(&places.cached, 1, block).map_err(said)?;
            ratios.push(longest(&cached) / longest(&plain));
            places.ask(Ask::Drain)?;
        }
        sink(Series { name: name.into(), unit: "× page cache".into(), samples: ratios });
    }
    let mut reads = Vec::new();
    for _ in 0..PAIRS {
        let plain = read(&places.plain).map_err(said)?;
        reads.push(plain / read(&places.cached).map_err(said)?);
    }
    sink(Series { name: READ.into(), unit: "of a plain read".into(), samples: reads });
    Ok(())
}

fn longest(seconds: &[f64]) -> f64 {
    seconds.iter().copied().fold(0.0, f64::max)
}

/// Has so many writers write all bytes together in blocks, each its own file anew; seconds of each.
fn write(dir: &Path, writers: usize, block: usize) -> std::io::Result<Vec<f64>> {
    let data = vec![7; block];
    thread::scope(|scope| {
        let threads: Vec<_> = (0..writers)
            .map(|index| {
                let (path, data) = (dir.join(format!("f{index}")), &data);
                scope.spawn(move || {
                    let _ = fs::remove_file(&path);
                    let start = Instant::now();
                    let mut file = File::create(path)?;
                    for _ in 0..TOTAL / writers / block {
                        file.write_all(data)?;
                    }
                    drop(file);
                    Ok(start.elapsed().as_secs_f64())
                })
            })
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .map(|result| result.unwrap_or_else(|_| Err(std::io::ErrorKind::Other.into())))
            .collect()
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
