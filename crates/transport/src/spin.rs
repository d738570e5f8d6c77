use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A bounded busy wait. It pauses the processor first and then yields to other threads, so that it
/// does not starve the thread it waits for where cores are few.
#[derive(Debug)]
pub(crate) struct Spin {
    limit: Duration,
    /// When the first yield was.
    started: Option<Instant>,
    rounds: u32,
}

/// Pauses before the first yield where processors are few, of some 50 ns each on current x86: three
/// times a round trip between two processors. More would be lost if both sides share one.
const PAUSES_OF_FEW: u32 = 32;
/// Pauses before the first yield where processors are many: as long as a GPU takes for an empty
/// kernel. A yield takes about half a microsecond, and delays the end of the wait by as much.
const PAUSES_OF_MANY: u32 = 256;
/// Pauses between two yields where processors are many. Yielding all the time halves the speed of
/// the other hardware thread of the core, which may run the thread that is waited for.
const PAUSES_BETWEEN: u32 = 16;
/// From this number on, processors are many: client, proxy and other spinning threads each find
/// one.
const MANY_PROCESSORS: usize = 4;

/// Returns whether this process may use so many processors that one can be spared for spinning.
pub fn processors_to_spare() -> bool {
    static SPARE: OnceLock<bool> = OnceLock::new();
    *SPARE.get_or_init(|| {
        // SAFETY: `cpu_set_t` is plain data, for which zeros are the empty set; the call writes at
        // most the size that it is given.
        let (found, set) = unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            (libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set), set)
        };
        // SAFETY: `set` is initialised, and CPU_COUNT only reads it.
        found == 0 && unsafe { libc::CPU_COUNT(&set) } as usize >= MANY_PROCESSORS
    })
}

impl Spin {
    /// Begins a wait that yields for `limit` at most; with a limit of 0 it ends at once.
    pub(crate) fn new(limit: Duration) -> Spin {
        Spin { limit, started: None, rounds: 0 }
    }

    /// Pauses or yields once; returns false once the limit is over and the caller should sleep.
    #[inline]
    pub(crate) fn again(&mut self) -> bool {
        self.rounds = self.rounds.wrapping_add(1);
        let many = || {
            let yields = self.rounds > PAUSES_OF_MANY && self.rounds.is_multiple_of(PAUSES_BETWEEN);
            !yields && processors_to_spare()
        };
        if self.rounds <= PAUSES_OF_FEW || many() {
            std::hint::spin_loop();
            return !self.limit.is_zero();
        }
        let started = *self.started.get_or_insert_with(Instant::now);
        std::thread::yield_now();
        started.elapsed() < self.limit
    }
}
