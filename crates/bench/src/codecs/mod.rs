//! `kedge bench codecs`: CRUM's Tables II and III, checkpoint time and size by how memory is
//! stored.

mod data;
mod forked;
mod published;

use super::scratch::Scratch;
use data::{Data, Set};
use forked::Holder;
pub use forked::hold;
use kedge_image::{Choice, ImageError, ImageWriter, MAX_EXTENT, encode};
use kedge_probe::Series;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

/// Each is measured so often.
const ROUNDS: usize = 3;

/// A way to store memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Naive,
    Gzip,
    ParallelGzip,
    Lz4,
    ParallelLz4,
    Zstd,
    ParallelZstd,
    Automatic,
    Forked,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Naive => "naive",
            Way::Gzip => "gzip",
            Way::ParallelGzip => "parallel gzip",
            Way::Lz4 => "LZ4",
            Way::ParallelLz4 => "parallel LZ4",
            Way::Zstd => "Zstd",
            Way::ParallelZstd => "parallel Zstd",
            Way::Automatic => "automatic",
            Way::Forked => "forked",
        }
    }
}

/// By which codec memory is stored, and whether on every core; the forked way, which takes a job,
/// comes last.
const STORES: [(Way, Choice, bool); 8] = [
    (Way::Naive, Choice::Raw, false),
    (Way::Gzip, Choice::Gzip, false),
    (Way::ParallelGzip, Choice::Gzip, true),
    (Way::Lz4, Choice::Lz4, false),
    (Way::ParallelLz4, Choice::Lz4, true),
    (Way::Zstd, Choice::Zstd, false),
    (Way::ParallelZstd, Choice::Zstd, true),
    (Way::Automatic, Choice::Auto, true),
];

/// Measures and hands over each series as it is done.
pub(super) fn run(
    size: u64,
    dir: Option<&Path>,
    sink: &mut dyn FnMut(Series),
) -> Result<(), String> {
    let size = usize::try_from(size).map_err(|_| "--size is more than memory has")?;
    let folder = Scratch::new(dir)?;
    let mut all = Set::ALL.into_iter();
    all.try_for_each(|set| table(&Data::new(set, size), size, &folder, sink))
}

/// One data set by every way: absolute as in Table II, or relative to the naive one as in III.
fn table(
    data: &Data,
    size: usize,
    folder: &Scratch,
    sink: &mut dyn FnMut(Series),
) -> Result<(), String> {
    let bytes = data.bytes.len() as f64;
    let mut naive = None;
    let mut give = |way: Way, runs: Vec<(f64, u64)>| {
        let naive = *naive.get_or_insert_with(|| median(&runs));
        let name = format!("{}, {}", way.name(), data.set.name());
        let (time, size) = published::of(data.set, way).map(|it| (it.time, it.size)).unzip();
        let seconds = runs.iter().map(|(seconds, _)| seconds);
        let row = match data.set.is_relative() {
            true => Series::lower(&name, "× naive's time", seconds.map(|s| s / naive).collect()),
            false => Series::higher(&name, "GB/s", seconds.map(|s| bytes / 1e9 / s).collect()),
        };
        sink(row.reference(time));
        let samples = runs.iter().map(|(_, stored)| *stored as f64 / bytes).collect();
        sink(Series::lower(name + ": size", "× memory", samples).reference(size));
    };
    for (way, codec, parallel) in STORES {
        let runs: Result<Vec<_>, ImageError> =
            (0..ROUNDS).map(|_| store(&data.bytes, codec, parallel, &folder.0)).collect();
        give(way, runs.map_err(|error| error.to_string())?);
    }
    let holder = Holder::start(data, size)?;
    let runs: Result<Vec<_>, String> = (0..ROUNDS).map(|_| holder.checkpoint(&folder.0)).collect();
    give(Way::Forked, runs?);
    Ok(())
}

/// Seconds.
fn median(runs: &[(f64, u64)]) -> f64 {
    let mut times: Vec<f64> = runs.iter().map(|(seconds, _)| *seconds).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Makes `bytes` durable: seconds that it took, and bytes in the file.
fn store(
    bytes: &[u8],
    codec: Choice,
    parallel: bool,
    folder: &Path,
) -> Result<(f64, u64), ImageError> {
    let path = folder.join("memory.kimg");
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let begin = Instant::now();
    let writer = ImageWriter::create(&path)?;
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    let one = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = bytes.chunks(MAX_EXTENT as usize).nth(at) else { return };
            let encoded = encode(chunk, codec);
            let address = at as u64 * MAX_EXTENT;
            if let Err(error) = writer.memory(0, address, chunk.len() as u64, &encoded) {
                failed.lock().unwrap_or_else(|poison| poison.into_inner()).get_or_insert(error);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..if parallel { cores } else { 1 } {
            scope.spawn(one);
        }
        one();
    });
    if let Some(error) = failed.into_inner().unwrap_or_else(|poison| poison.into_inner()) {
        return Err(error);
    }
    let entry = writer.finish()?;
    let taken = begin.elapsed().as_secs_f64();
    // The next round's file is a new one, as the next checkpoint's is.
    let _ = fs::remove_file(&path);
    Ok((taken, entry.bytes))
}
