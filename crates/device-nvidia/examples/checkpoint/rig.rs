//! A backend without a proxy, a pattern for its memory, and what prints.

use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::device_base;
use kedge_device::{Backend, Done, Host};
use kedge_device_nvidia::{CacheLimits, DrainRate, DrainWays, Gpus, NvidiaBackend};
use kedge_protocol::{CtxId, OutputTarget, StreamId};
use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

pub(crate) type Outcome = Result<(), Box<dyn Error>>;

pub(crate) const GIB: u64 = 1 << 30;
pub(crate) const SLAB: u64 = GIB / 2;
pub(crate) const CTX: CtxId = CtxId(1);
pub(crate) const STREAM: StreamId = StreamId(1);
pub(crate) const BASE: u64 = device_base(0);
/// Threads that read and restore.
pub(crate) const THREADS: usize = 16;
/// Bytes of one read, and of one restored piece.
pub(crate) const CHUNK: usize = 8 << 20;

/// Prints one line, also after the backend has taken standard output for what kernels print.
pub(crate) fn say(line: &str) {
    static OUT: OnceLock<Option<File>> = OnceLock::new();
    let own = || std::io::stdout().as_fd().try_clone_to_owned().ok().map(File::from);
    if let Some(mut out) = OUT.get_or_init(own).as_ref()
        && !line.is_empty()
    {
        let _ = writeln!(out, "{line}");
    }
}

struct Alone;

impl Host for Alone {
    fn read_client(&self, _: u64, _: &mut [u8]) -> Result<(), CuError> {
        Err(CuError::INVALID_VALUE)
    }
    fn write_client(&self, _: u64, _: &[u8]) -> Result<(), CuError> {
        Err(CuError::INVALID_VALUE)
    }
    fn host_function(&self, _: u64, done: Done) {
        done(Ok(()));
    }
    fn output(&self, _: OutputTarget, _: &[u8]) {}
    fn fault(&self, _: CtxId, error: CuError) {
        say(&format!("{{\"fault\": \"{error}\"}}"));
    }
    fn idle(&self) {}
    fn log(&self, line: &str) {
        say(&format!("{{\"log\": \"{line}\"}}"));
    }
}

/// What snapshots may take and how they leave, by the environment: `KEDGE_CACHE_GPU`,
/// `KEDGE_CACHE_HOST`, `KEDGE_DRAIN` (bytes a second; unset: no limit; 0: by the program's
/// activity), and `KEDGE_WAYS`: words of `piece=BYTES`, `at-once=N`, `apart`, `ask`.
pub(crate) fn limits() -> CacheLimits {
    let bytes = |name: &str| std::env::var(name).ok()?.parse().ok();
    let drain = match bytes("KEDGE_DRAIN").unwrap_or(u64::MAX) {
        0 => DrainRate::Adaptive,
        rate => DrainRate::Limit(rate),
    };
    let mut ways = DrainWays::default();
    for word in std::env::var("KEDGE_WAYS").unwrap_or_default().split_whitespace() {
        match word.split_once('=').map_or((word, None), |(name, n)| (name, n.parse().ok())) {
            ("piece", Some(piece)) => ways.piece = piece,
            ("at-once", Some(n)) => ways.at_once = n,
            ("apart", None) => ways.apart = true,
            ("ask", None) => ways.ask = true,
            _ => say(&format!("{{\"error\": \"KEDGE_WAYS: {word}?\"}}")),
        }
    }
    let all = |name| bytes(name).unwrap_or(u64::MAX);
    let (gpu, host) = (all("KEDGE_CACHE_GPU"), all("KEDGE_CACHE_HOST"));
    CacheLimits { gpu, host, drain, ways }
}

/// How many threads drain: `KEDGE_THREADS`.
pub(crate) fn drainers() -> usize {
    std::env::var("KEDGE_THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or(THREADS)
}

/// The first GPU, with one context.
pub(crate) fn backend() -> Result<Arc<NvidiaBackend>, Box<dyn Error>> {
    backend_with(limits())
}

pub(crate) fn backend_with(limits: CacheLimits) -> Result<Arc<NvidiaBackend>, Box<dyn Error>> {
    say("");
    let backend = NvidiaBackend::with_cache(Gpus::open(&[0])?, &[0], Arc::new(Alone), limits)?;
    backend.create_context(CTX, 0, STREAM)?;
    Ok(backend)
}

pub(crate) fn grant(backend: &NvidiaBackend, bytes: u64) -> Result<(), CuError> {
    (0..bytes).step_by(SLAB as usize).try_for_each(|at| backend.grant(0, BASE + at, SLAB))
}

pub(crate) fn rest(backend: &NvidiaBackend) -> Outcome {
    let end = Instant::now() + Duration::from_secs(20);
    while !backend.at_rest() {
        if Instant::now() > end {
            return Err("the GPU does not come to rest".into());
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

/// Waits for a stream.
pub(crate) fn finish(backend: &NvidiaBackend, stream: StreamId) -> Outcome {
    let (done, over) = mpsc::channel();
    backend.when_stream_idle(
        stream,
        Box::new(move |result| {
            let _ = done.send(result);
        }),
    );
    Ok(over.recv_timeout(Duration::from_secs(60))??)
}

/// What memory holds: noise, each GiB from another place of it.
pub(crate) struct Pattern(Vec<u8>);

impl Pattern {
    pub(crate) fn new() -> Pattern {
        let mut noise = vec![0; GIB as usize + CHUNK];
        let part = noise.len().div_ceil(THREADS).next_multiple_of(8);
        std::thread::scope(|scope| {
            for (index, part) in noise.chunks_mut(part).enumerate() {
                scope.spawn(move || {
                    let mut state = 0x2545_f491_4f6c_dd1d ^ ((index as u64 + 1) << 40);
                    for word in part.chunks_exact_mut(8) {
                        state ^= state << 13;
                        state ^= state >> 7;
                        state ^= state << 17;
                        word.copy_from_slice(&state.to_le_bytes());
                    }
                });
            }
        });
        let (begin, end) = noise.split_at_mut(GIB as usize);
        end.copy_from_slice(&begin[..end.len()]);
        Pattern(noise)
    }

    pub(crate) fn all(&self) -> &[u8] {
        &self.0
    }

    /// The bytes from `at` on, at most [`CHUNK`].
    pub(crate) fn at(&self, at: u64, bytes: usize) -> &[u8] {
        let start = ((at % GIB + at / GIB * 4096) % GIB) as usize;
        &self.0[start..start + bytes]
    }
}

/// Does `work` for each chunk of `bytes` on all threads; returns the seconds.
pub(crate) fn spread(
    bytes: u64,
    work: impl Fn(u64, usize, &mut Vec<u8>) -> Result<(), Box<dyn Error>> + Sync,
) -> Result<f64, Box<dyn Error>> {
    spread_over(THREADS, bytes, work)
}

/// The same on so many threads.
pub(crate) fn spread_over(
    threads: usize,
    bytes: u64,
    work: impl Fn(u64, usize, &mut Vec<u8>) -> Result<(), Box<dyn Error>> + Sync,
) -> Result<f64, Box<dyn Error>> {
    let begin = Instant::now();
    let next = AtomicUsize::new(0);
    let thread = || -> Result<(), String> {
        let mut buffer = vec![0; CHUNK];
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed) as u64 * CHUNK as u64;
            if at >= bytes {
                return Ok(());
            }
            let len = (bytes - at).min(CHUNK as u64) as usize;
            work(at, len, &mut buffer).map_err(|error| error.to_string())?;
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(thread)).collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().map_err(|_| "a panic")?.map_err(Box::<dyn Error>::from)
        })
    })?;
    Ok(begin.elapsed().as_secs_f64())
}
