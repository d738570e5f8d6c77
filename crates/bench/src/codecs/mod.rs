//! `kedge bench codecs`: CRUM's Tables II and III, checkpoint time and size by how memory is
//! stored.

mod data;
mod forked;
pub(super) mod published;

use super::scratch::Scratch;
use data::Data;
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
struct Strategy {
    name: &'static str,
    codec: Choice,
    /// On every core, or on one.
    parallel: bool,
}

const STRATEGIES: [Strategy; 8] = [
    Strategy { name: "naive", codec: Choice::Raw, parallel: false },
    Strategy { name: "gzip", codec: Choice::Gzip, parallel: false },
    Strategy { name: "parallel gzip", codec: Choice::Gzip, parallel: true },
    Strategy { name: "LZ4", codec: Choice::Lz4, parallel: false },
    Strategy { name: "parallel LZ4", codec: Choice::Lz4, parallel: true },
    Strategy { name: "Zstd", codec: Choice::Zstd, parallel: false },
    Strategy { name: "parallel Zstd", codec: Choice::Zstd, parallel: true },
    Strategy { name: "automatic", codec: Choice::Auto, parallel: true },
];

/// Measures and hands over each series as it is done.
pub(super) fn run(
    size: u64,
    dir: Option<&Path>,
    sink: &mut dyn FnMut(Series),
) -> Result<(), String> {
    let size = usize::try_from(size).map_err(|_| "--size is more than memory has")?;
    let folder = Scratch::new(dir)?;
    for (name, relative) in [
        (data::RANDOM, false),
        (data::HALF_RANDOM, false),
        (data::MULTIGRID, true),
        (data::SPARSE, true),
    ] {
        let data = data::by_name(name, size).ok_or("no such data")?;
        table(&data, size, &folder, relative, sink)?;
    }
    Ok(())
}

/// One data set by every strategy: absolute as in Table II, or relative to the naive one as in III.
fn table(
    data: &Data,
    size: usize,
    folder: &Scratch,
    relative: bool,
    sink: &mut dyn FnMut(Series),
) -> Result<(), String> {
    let bytes = data.bytes.len() as f64;
    let mut naive = None;
    let mut give = |strategy: &str, runs: Vec<(f64, u64)>| {
        let naive = *naive.get_or_insert_with(|| median(&runs));
        let time = |(seconds, _): &(f64, u64)| match relative {
            true => seconds / naive,
            false => bytes / 1e9 / seconds,
        };
        let name = format!("{strategy}, {}", data.name);
        let unit = if relative { "× naive's time" } else { "GB/s" }.to_owned();
        sink(Series { name: name.clone(), unit, samples: runs.iter().map(time).collect() });
        let samples = runs.iter().map(|(_, stored)| *stored as f64 / bytes).collect();
        sink(Series { name: name + ": size", unit: "× memory".into(), samples });
    };
    for strategy in &STRATEGIES {
        let runs: Result<Vec<_>, ImageError> =
            (0..ROUNDS).map(|_| store(&data.bytes, strategy, &folder.0)).collect();
        give(strategy.name, runs.map_err(|error| error.to_string())?);
    }
    let holder = Holder::start(data, size)?;
    let runs: Result<Vec<_>, String> = (0..ROUNDS).map(|_| holder.checkpoint(&folder.0)).collect();
    give("forked", runs?);
    Ok(())
}

/// Seconds.
fn median(runs: &[(f64, u64)]) -> f64 {
    let mut times: Vec<f64> = runs.iter().map(|(seconds, _)| *seconds).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Makes `bytes` durable: seconds that it took, and bytes in the file.
fn store(bytes: &[u8], strategy: &Strategy, folder: &Path) -> Result<(f64, u64), ImageError> {
    let path = folder.join("memory.kimg");
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let begin = Instant::now();
    let writer = ImageWriter::create(&path)?;
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    let one = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(chunk) = bytes.chunks(MAX_EXTENT as usize).nth(at) else { return };
            let encoded = encode(chunk, strategy.codec);
            let address = at as u64 * MAX_EXTENT;
            if let Err(error) = writer.memory(0, address, chunk.len() as u64, &encoded) {
                failed.lock().unwrap_or_else(|poison| poison.into_inner()).get_or_insert(error);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..if strategy.parallel { cores } else { 1 } {
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
