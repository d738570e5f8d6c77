//! Backs off from asking for leases: each request costs a round trip to the daemon, as a write
//! does.

/// Writes that do not ask after a refusal: at first, and at most. They double at each refusal.
const MIN_WRITES: u32 = 64;
const MAX_WRITES: u32 = 4096;
/// Milliseconds after which a write asks again, for each [`MIN_WRITES`] writes.
const WAIT_MS: u64 = 100;
/// A lease was of little use if less than an eighth of it was used, and less than these bytes.
const USED_PART: u64 = 8;
const USED_BYTES: u64 = 128 << 10;
/// After this many leases of little use in a row …
const MAX_UNUSED: u8 = 3;
/// … this many writes do not ask, for this many milliseconds at most.
const UNUSED_WRITES: u32 = 1000;
const UNUSED_MS: u64 = 1000;

/// How long a descriptor does not ask for a lease.
#[derive(Debug)]
pub(crate) struct Pause {
    /// Writes left that do not ask.
    writes: u32,
    /// When a write asks again all the same, in milliseconds of [`crate::sys::now`].
    until: u64,
    /// How many writes did not ask after the last refusal.
    step: u32,
    /// Leases of little use in a row.
    unused: u8,
}

impl Pause {
    pub(crate) const fn new() -> Pause {
        Pause { writes: 0, until: 0, step: 0, unused: 0 }
    }

    /// Returns whether writes do not ask now.
    pub(crate) fn is_on(&self) -> bool {
        self.writes > 0
    }

    /// Counts a write at `now`, and returns whether it may ask.
    pub(crate) fn passes(&mut self, now: u64) -> bool {
        if self.writes == 0 || now >= self.until {
            self.writes = 0;
            return true;
        }
        self.writes -= 1;
        false
    }

    /// Notes that the daemon has refused a lease.
    pub(crate) fn refused(&mut self, now: u64) {
        self.step = self.step.saturating_mul(2).clamp(MIN_WRITES, MAX_WRITES);
        self.writes = self.step;
        self.until = now.saturating_add(WAIT_MS * u64::from(self.step / MIN_WRITES));
    }

    /// Notes that the daemon has granted a lease.
    pub(crate) fn granted(&mut self) {
        self.step = 0;
    }

    /// Notes the end of a lease of `length` bytes, of which `used` were written.
    pub(crate) fn ended(&mut self, used: u64, length: u64, now: u64) {
        if used >= (length / USED_PART).min(USED_BYTES) {
            self.unused = 0;
            return;
        }
        self.unused += 1;
        if self.unused >= MAX_UNUSED {
            (self.unused, self.writes) = (0, UNUSED_WRITES);
            self.until = now.saturating_add(UNUSED_MS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many writes at `now` do not ask before one does.
    fn writes(pause: &mut Pause, now: u64) -> u32 {
        (0..).take_while(|_| !pause.passes(now)).count() as u32
    }

    #[test]
    fn each_refusal_costs_twice_as_much_until_a_lease_is_given() {
        let mut pause = Pause::new();
        assert!(!pause.is_on() && pause.passes(0));
        for expected in [64, 128, 256, 512, 1024, 2048, 4096, 4096] {
            pause.refused(0);
            assert!(pause.is_on());
            assert_eq!(writes(&mut pause, 0), expected);
        }
        pause.granted();
        pause.refused(0);
        assert_eq!(writes(&mut pause, 0), 64);
    }

    #[test]
    fn time_ends_it_as_well() {
        let mut pause = Pause::new();
        pause.refused(1000);
        assert!(!pause.passes(1099) && pause.passes(1100) && !pause.is_on());
        pause.refused(2000);
        assert!(!pause.passes(2199) && pause.passes(2200));
    }

    #[test]
    fn leases_that_end_early_again_and_again_are_not_asked_for() {
        let mut pause = Pause::new();
        for used in [0, 1, 2, 1, 1] {
            pause.ended(used, 16, 0);
            assert!(!pause.is_on(), "2 of 16 is not early, and none is in a row of three");
        }
        pause.ended(1, 16, 5000);
        assert_eq!(writes(&mut pause, 5999), 1000);
        for used in [0, 0, USED_BYTES, 0, 0, USED_BYTES - 1] {
            pause.ended(used, 16 << 20, 7000);
        }
        assert!(pause.is_on() && !pause.passes(7999) && pause.passes(8000));
    }
}
