//! How long the phases of something took, for the log.

use std::fmt::Write;
use std::time::Instant;

pub(crate) struct Phases {
    begin: Instant,
    last: Instant,
    said: String,
}

impl Phases {
    pub(crate) fn begin() -> Phases {
        let now = Instant::now();
        Phases { begin: now, last: now, said: String::new() }
    }

    /// `what` is over.
    pub(crate) fn over(&mut self, what: &str) {
        let now = Instant::now();
        let separator = if self.said.is_empty() { "" } else { ", " };
        let ms = (now - self.last).as_secs_f64() * 1e3;
        // Writing to a string does not fail.
        let _ = write!(self.said, "{separator}{what} {ms:.1}");
        self.last = now;
    }

    /// In milliseconds, as `12.5 ms (a 2.5, b 10.0)`.
    pub(crate) fn told(&self) -> String {
        let ms = (self.last - self.begin).as_secs_f64() * 1e3;
        format!("{ms:.1} ms ({})", self.said)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_told_in_their_order() {
        let mut phases = Phases::begin();
        phases.over("first");
        phases.over("second");
        let told = phases.told();
        let (first, second) = (told.find("(first "), told.find(", second "));
        assert!(first.is_some() && first < second && told.contains(" ms ("), "{told}");
    }
}
