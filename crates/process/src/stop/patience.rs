//! How long the threads of a job may take to stop, and what is done for those that take longer.

use std::fmt;
use std::time::{Duration, Instant};

/// How long threads may take to stop.
///
/// A thread that waits in the kernel for a page does not stop before it has it. Who brings the page
/// must not stand still by then: it may be a thread of the same program, which is stopped last
/// ([`Options::servants`](crate::Options)), or something outside of the job ([`Patience::let_on`]).
pub struct Patience<'a> {
    time: Duration,
    pub(crate) until: Instant,
    more: Duration,
    let_on: Option<Box<dyn FnOnce() + 'a>>,
    pub(crate) servants: Option<&'static str>,
}

impl<'a> Patience<'a> {
    pub fn new(time: Duration) -> Patience<'a> {
        let (until, more) = (Instant::now() + time, Duration::ZERO);
        Patience { time, until, more, let_on: None, servants: None }
    }

    /// The time begins now.
    pub(crate) fn begin(&mut self) {
        self.until = Instant::now() + self.time;
    }

    /// Threads of this name serve the faults of their process's others, and stop after them.
    pub(crate) fn servants(self, servants: Option<&'static str>) -> Patience<'a> {
        Patience { servants, ..self }
    }

    /// Calls `let_on` where a thread has not stopped in time, and gives it `more`.
    pub fn let_on(self, more: Duration, let_on: impl FnOnce() + 'a) -> Patience<'a> {
        Patience { more, let_on: Some(Box::new(let_on)), ..self }
    }

    /// A thread has not stopped in time. Returns whether there is more time now.
    pub(crate) fn goes_on(&mut self) -> bool {
        let Some(let_on) = self.let_on.take() else { return false };
        let_on();
        self.until = Instant::now() + self.more;
        !self.more.is_zero()
    }
}

impl fmt::Debug for Patience<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Patience").field("until", &self.until).finish_non_exhaustive()
    }
}
