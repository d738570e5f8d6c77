//! What the other end of a relay may not have heard: the streams of a job that has moved outlive
//! their connection. Each end counts the bytes of the frames that it has heard as a whole, tells
//! the other one from time to time, and first of all on each connection, which then says again what
//! came after that.

use super::bytes::Bytes;
use super::frame::{Frame, WINDOW};

/// Most bytes of frames that are kept: what is read, and what is said besides.
const MAX_KEPT: usize = 8 * WINDOW;
/// Bytes of kept frames from which on streams are not read any more. A frame may be six times the
/// byte that it carries.
const READ: usize = 2 * WINDOW;
/// After so many bytes of frames the other end is told that they were heard.
const TOLD: u64 = WINDOW as u64 / 4;

/// Frames that may have to be said again.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Those that were sealed, one behind the other.
    said: Bytes,
    /// How many bytes of frames came before those: the other end has heard them.
    heard: u64,
    /// How many bytes of its frames were heard here, and how many of these it was told of.
    own: u64,
    told: u64,
    /// It has had a connection before.
    has_begun: bool,
    /// The other end has said, on this connection, where it goes on.
    goes_on: bool,
    /// It is another than there was: that one has ended.
    is_another: bool,
}

impl Kept {
    /// Begins on a new connection, with what is to be said first. It is no part of what is counted.
    pub(super) fn begin(&mut self) -> Vec<u8> {
        self.goes_on = false;
        self.told = self.own;
        let frame = if self.has_begun { Frame::Resume(self.own) } else { Frame::Begin };
        self.has_begun = true;
        let mut first = Vec::new();
        frame.put(&mut first);
        first
    }

    /// The other end begins; returns whether that can be: not behind one that has said or heard
    /// something, whose words are not for it.
    pub(super) fn begins(&mut self) -> bool {
        self.is_another = self.goes_on || self.own > 0 || self.heard > 0 || !self.said.is_empty();
        self.goes_on = !self.is_another;
        self.goes_on
    }

    /// Returns whether another has begun behind the one that there was.
    pub(super) fn is_another(&self) -> bool {
        self.is_another
    }

    /// Returns whether it is known where the other end goes on.
    pub(super) fn goes_on(&self) -> bool {
        self.goes_on
    }

    /// Returns whether more may be read, to be kept.
    pub(super) fn has_room(&self) -> bool {
        self.said.len() < READ
    }

    /// Keeps frames that were sealed; returns whether there is room for them.
    pub(super) fn seal(&mut self, frames: &[u8]) -> bool {
        self.said.end().extend_from_slice(frames);
        self.said.len() <= MAX_KEPT
    }

    /// Goes on behind the first `heard` bytes: returns the frames to be said again, unless the
    /// other end cannot be there.
    pub(super) fn resume(&mut self, heard: u64) -> Option<Vec<u8>> {
        // Who has heard less than he had forgets, and would hear it twice.
        if self.goes_on || heard < self.heard || !self.hears(heard) {
            return None;
        }
        self.goes_on = true;
        let again = self.said.waiting().to_vec();
        self.said = Bytes::default();
        Some(again)
    }

    /// Drops what the other end has heard; returns whether that can be. It may be an older word
    /// than one that is known: what was lost with a line is said again.
    pub(super) fn hears(&mut self, heard: u64) -> bool {
        let Ok(new) = usize::try_from(heard.saturating_sub(self.heard)) else { return false };
        if new > self.said.len() {
            return false;
        }
        self.said.take(new);
        self.heard = self.heard.max(heard);
        true
    }

    /// Counts a frame that was heard; returns what the other end is to be told, if it is time.
    pub(super) fn count(&mut self, bytes: u64) -> Option<Frame> {
        self.own += bytes;
        (self.own - self.told >= TOLD).then(|| self.tells())
    }

    /// Returns what tells the other end how much was heard.
    pub(super) fn tells(&mut self) -> Frame {
        self.told = self.own;
        Frame::Heard(self.own)
    }

    /// The frames that the other end is not known to have heard.
    pub(super) fn unheard(&self) -> &[u8] {
        self.said.waiting()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_heard_is_said_again() {
        let (mut kept, mut other) = (Kept::default(), Kept::default());
        assert!(!kept.goes_on() && kept.resume(1).is_none(), "nothing was said");
        assert_eq!(kept.resume(0), Some(Vec::new()));
        assert!(kept.resume(0).is_none(), "once on each connection");
        assert!(kept.seal(b"abcdef") && kept.hears(2) && kept.unheard() == b"cdef");
        assert!(!kept.hears(7) && !kept.hears(u64::MAX));
        assert!(kept.hears(1) && kept.unheard() == b"cdef", "an older word");
        kept.begin();
        assert!(kept.resume(1).is_none(), "it had heard more");
        assert_eq!(kept.resume(4), Some(b"ef".to_vec()));
        // It counts anew what is sealed anew.
        assert!(kept.seal(b"ef") && kept.hears(6) && kept.unheard().is_empty());
        assert!(kept.seal(&vec![0; READ - 1]) && kept.has_room());
        assert!(kept.seal(&vec![0; MAX_KEPT - READ + 1]) && !kept.has_room() && !kept.seal(b"x"));
        assert_eq!(other.count(TOLD - 1), None);
        assert_eq!(other.count(1), Some(Frame::Heard(TOLD)));
        assert_eq!(other.count(5), None);
        let first = |frame: Frame| {
            let mut first = Vec::new();
            frame.put(&mut first);
            first
        };
        assert_eq!(other.begin(), first(Frame::Begin));
        assert_eq!(other.begin(), first(Frame::Resume(TOLD + 5)));
        assert!(!other.begins() && other.is_another());
        assert!(Kept::default().begins());
    }
}
