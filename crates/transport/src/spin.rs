use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A bounded busy wait: first the processor's pause, then giving way to other threads, so that on a
/// machine with few cores a spinning waiter does not starve whoever it waits for.
#[derive(Debug)]
pub(crate) struct Spin {
    limit: Duration,
    started: Option<Instant>,
    rounds: u32,
}

/// Pauses before the first yield (some 50 ns each on current x86) where processors are few: three
/// times a round trip between two of them, and no longer, for the case that both sides share one.
const PAUSES_OF_FEW: u32 = 32;
/// Where there are many: as long as a GPU takes for a kernel that does nothing. To give way costs
/// about half a microsecond each time, which is how late the end of a wait is then seen.
const PAUSES_OF_MANY: u32 = 256;
/// Pauses from one yield to the next there. Who yields all the time takes half of the speed of what
/// shares a core with it, which where processors are threads of cores may be the one that is waited
/// for.
const PAUSES_BETWEEN: u32 = 16;
/// Processors that are many: client, proxy and what else spins each find one.
const MANY: usize = 4;

/// Whether this process may use so many processors that one of them can well spin.
pub fn processors_to_spare() -> bool {
    static SPARE: OnceLock<bool> = OnceLock::new();
    *SPARE.get_or_init(|| {
        // SAFETY: an empty set of that type is all zeros; the call fills it.
        let (found, set) = unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            (libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set), set)
        };
        // SAFETY: only counts the bits of a live set.
        found == 0 && unsafe { libc::CPU_COUNT(&set) } as usize >= MANY
    })
}

impl Spin {
    pub(crate) fn new(limit: Duration) -> Spin {
        Spin { limit, started: None, rounds: 0 }
    }

    /// Waits a moment; false once the limit is over and the caller should sleep.
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
