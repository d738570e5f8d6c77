//! What a supervisor asks of a proxy: to stand still, to take what its devices hold and to write
//! it; and, of a proxy that takes another's place, to bring that back.
//!
//! One order at a time, each with one answer, which has its number: an answer that nobody waited
//! for is none to a later order. If the supervisor goes away, the proxy goes on.

use crate::sharing::{Bond, MAX_SHARES, Share, What};
use kedge_protocol::PeerName;
use kedge_socket::{Channel, SocketError, frame};
use kedge_wire::{List, Text, wire};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use thiserror::Error;

/// What a proxy exits with that has found a bug in itself.
pub const EXIT_BUG: i32 = 70;
/// What a proxy exits with whose devices are on another machine and gone.
pub const EXIT_LOST: i32 = 71;
/// All that the file says by which a move is decided, once it is.
pub const MOVED: u8 = b'm';
/// For an order or an answer to be sent.
pub const SEND_LIMIT: Duration = Duration::from_secs(10);

wire! {
    #[derive(Debug, Clone, PartialEq)]
    pub enum Order {
        /// Dispatch nothing from now on → `Gated` once nothing is, `No` after `within_ms`: then it
        /// goes on.
        Gate = 1 { within_ms: u32 },
        /// → `Yes` once everything that was dispatched is over, `No` after `within_ms`. Gated.
        Rest = 2 { within_ms: u32 },
        /// Dispatch one message, for another process may wait for it → `Yes` once one is, `No` if
        /// none came within `within_ms`. Gated.
        Step = 9 { within_ms: u32 },
        /// Take what the devices hold → `Captured`. Gated, at rest, and the client stands still.
        /// `track`: find out what has changed; what is as in the file with the checksum `parent`
        /// need not be taken.
        Capture = 3 { track: bool, parent: Option<u64> },
        /// Make room for a capture, while the client goes on → `Yes`, also where there is none: the
        /// capture will tell. `full`: it will build on none.
        Prepare = 10 { track: bool, full: bool },
        /// The same for the next round, of a client that moves; others need nothing → `Yes`.
        PrepareRound = 24 {},
        /// Go on → `Yes`.
        Open = 4 {},
        /// Of how many places is what was captured, where they are several? → `Places`.
        Places = 26 {},
        /// Before `Write`: the files of several places, in their order, empty and as many of them
        /// as there is room for → `Yes`.
        Beside = 27 {},
        /// Write what was captured to the empty file that comes with this, and forget it →
        /// `Written` or `WrittenAll`. `name` is what the file is called in its folder, where
        /// nothing is looked for.
        Write = 5 { name: Text<256>, codec: Text<16> },
        /// Read, encode and sum what was captured as `Write` does, keep none of it, and forget it →
        /// `Measured`. No image comes of it.
        Measure = 25 { codec: Text<16> },
        /// Forget what was captured → `Yes`.
        Forget = 6 {},
        /// What other processes may have, too → `Shares`. Gated, as are the next two.
        Shares = 14 {},
        /// Makes this client the owner of memory or of an event that it had opened from another
        /// process, which has given it up → `Adopted`.
        Adopt = 15 { what: What },
        /// Where a restart finds what is another's → `Yes`. For the next capture.
        Bind = 16 { borrows: List<Bond, MAX_SHARES> },
        /// Before `Restore`: the files to read, each with its descriptor, in their order. No
        /// answer.
        Files = 28 { files: List<StoredFile, 4> },
        /// Before `Restore`: descriptors of the devices' memory that is held for the client. No
        /// answer.
        Parts = 11 {},
        /// In another proxy's place: build the devices and all that was on them from those files,
        /// with the descriptors of the ring and the shared arena → `Yes`. `held`: the one file is
        /// what is held in memory, and `Parts` has the rest.
        Restore = 7 { held: bool },
        /// The client is there, as process `pid`: go on with it → `Yes`. With its process
        /// descriptor, for a proxy of another namespace.
        Begin = 8 { pid: u32 },
        /// Take the devices' memory off them, until the client goes on → `Captured`, with its
        /// bytes. Gated, at rest.
        Leave = 13 {},
        /// To a proxy that waits for a client: serve the one behind the first descriptor, started
        /// as these arguments say; the second is to be told how it ends, a byte → `Yes`.
        Serve = 17 { arguments: List<Text<4096>, 64> },
        /// Hand over to the keeper what is to be held of what was captured, by the connection that
        /// comes with this ([`crate::keeper::connection`]) → `Yes`. Before `Write`.
        Hold = 12 {},
        /// Its client is to move: the first descriptor leads to the proxy that will have it; the
        /// second is a file that is empty until that one has, and then says [`MOVED`] → `Ends`.
        Move = 18 {},
        /// Take what the devices hold for one round of a move → `Captured`. Gated, at rest. After
        /// the `last` one the gate stays closed whatever becomes of the supervisor, unless the
        /// client has not moved.
        Show = 19 { last: bool },
        /// Send what was taken, but for what the other proxy has → `Crossed`. At most so many bytes
        /// a second, if that is not 0.
        Cross = 20 { rate: u64 },
        /// The client does not move → `Yes`.
        Stay = 21 {},
        /// The client has moved: hear it no more → `Yes`, then end without a word to it.
        Depart = 22 {},
        /// To a new proxy: take a client over from the one behind the third descriptor; the first
        /// two are the ring and the shared arena → `Yes` when the last round has arrived. It is the
        /// owner when the file behind the fourth says [`MOVED`].
        Arrive = 23 { client: u32 },
    }

    /// A file of an image that a proxy reads by its descriptor.
    #[derive(Debug, Clone, PartialEq)]
    pub struct StoredFile {
        /// Whose it is: 0 for the client's own, else one more than the place's number. Behind each
        /// of them are those of its name that it builds on, the newest first.
        pub of: u32,
        /// What errors call it: the image, and its name there. Nothing is looked for by them.
        pub image: Text<256>,
        pub name: Text<256>,
        pub bytes: u64,
        pub checksum: u64,
    }

    /// A file of an image.
    #[derive(Debug, Clone, PartialEq)]
    pub struct WrittenFile {
        pub name: Text<256>,
        pub bytes: u64,
        pub checksum: u64,
    }

    #[derive(Debug, Clone, PartialEq)]
    pub enum Answer {
        /// The client's process, and the inodes of the connection: the proxy's socket, the ring,
        /// the shared arena.
        Gated = 6 { pid: u32, socket: u64, ring: u64, arena: u64 },
        Yes = 1 {},
        No = 2 {},
        Captured = 3 { bytes: u64 },
        /// It takes so many files beside the client's own: none for devices of one place.
        Places = 14 { count: u32 },
        /// `builds`: the file refers to the one that it could.
        Written = 4 { bytes: u64, checksum: u64, builds: bool },
        /// The same of a client whose devices are of several places: its file, and behind it one
        /// for each place, beside it.
        WrittenAll = 12 { files: List<WrittenFile, 17>, builds: bool },
        /// The length and checksum of the file that there would be.
        Measured = 13 { bytes: u64, checksum: u64 },
        /// `pid`: the proxy's, whose descriptors some are known by. `released`: files of memory
        /// that it had.
        Shares = 7 { pid: u32, shares: List<Share, MAX_SHARES>, released: List<(u64, u64), 4096> },
        Adopted = 8 { name: PeerName },
        /// With the descriptors of a client's connection: the proxy's socket, the ring, the shared
        /// arena. And the client's process.
        Ends = 9 { pid: u32 },
        /// So much has crossed. Not `fits`: what the other proxy has made is not what there is any
        /// more, and another one has to take its place.
        Crossed = 10 { bytes: u64, fits: bool },
        /// Instead of that: the way to the other proxy of the move is broken, and the other may
        /// know why. What went wrong with the devices themselves is `Failed`.
        Parted = 11 { why: Text<4096> },
        Failed = 5 { why: Text<4096> },
    }
}

/// Why a proxy did not do what it was asked.
#[derive(Debug, Error)]
pub enum ControlError {
    #[error("its proxy does not answer: {0}")]
    Channel(#[from] SocketError),
    #[error("{0}")]
    Failed(String),
    #[error("its proxy answers nonsense")]
    Nonsense,
}

/// The number of the newest order of this process, whichever proxy it was for: a proxy may be
/// handed on, with an answer that is still to come.
static NEWEST: AtomicU64 = AtomicU64::new(0);

/// The supervisor's end.
#[derive(Debug)]
pub struct Control {
    channel: Channel,
    /// The number of the order that was given last; 0 before the first, as what a proxy says
    /// unasked.
    last: AtomicU64,
}

impl Control {
    /// Makes a channel and the proxy's end of it.
    pub fn pair() -> io::Result<(Control, OwnedFd)> {
        let (channel, far) = Channel::pair()?;
        Ok((Control::of(channel), far))
    }

    fn of(channel: Channel) -> Control {
        Control { channel, last: AtomicU64::new(0) }
    }

    /// Makes a channel to a proxy that another process has started.
    pub fn to(socket: OwnedFd) -> Control {
        Control::of(Channel::new(socket))
    }

    /// Returns the socket, for another process.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.channel.socket()
    }

    /// Gives an order and waits for its answer, for `limit` at most.
    pub fn ask(
        &self,
        order: &Order,
        fds: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<Answer, ControlError> {
        self.give(order, fds)?;
        self.answer(limit)
    }

    /// Gives an order.
    pub fn give(&self, order: &Order, fds: &[BorrowedFd<'_>]) -> Result<(), ControlError> {
        let count = NEWEST.fetch_add(1, Ordering::Relaxed) + 1;
        // By process: whoever gave orders before this one has had numbers of its own.
        let number = u64::from(std::process::id()) << 32 | count & u64::from(u32::MAX);
        self.last.store(number, Ordering::Relaxed);
        Ok(self.channel.send(&(number, order.clone()), fds, SEND_LIMIT)?)
    }

    /// Gives a proxy that takes another's place what is held of the devices' memory.
    pub fn give_parts(&self, parts: &[OwnedFd]) -> Result<(), ControlError> {
        parts.chunks(frame::MAX_FDS).try_for_each(|some| {
            let fds: Vec<BorrowedFd<'_>> = some.iter().map(AsFd::as_fd).collect();
            self.give(&Order::Parts {}, &fds)
        })
    }

    /// Gives a proxy that takes another's place the files of an image that it is to read.
    pub fn give_files(&self, files: &[(StoredFile, BorrowedFd<'_>)]) -> Result<(), ControlError> {
        files.chunks(frame::MAX_FDS).try_for_each(|some| {
            let (named, fds): (Vec<StoredFile>, Vec<_>) = some.iter().cloned().unzip();
            let files = List::new(named).map_err(|_| ControlError::Nonsense)?;
            self.give(&Order::Files { files }, &fds)
        })
    }

    /// Takes the answer to the order that was given last. Those to orders before it are dropped.
    pub fn answer(&self, limit: Duration) -> Result<Answer, ControlError> {
        self.answer_with(limit).map(|(answer, _)| answer)
    }

    /// Takes the same, with the descriptors that came with it.
    pub fn answer_with(&self, limit: Duration) -> Result<(Answer, Vec<OwnedFd>), ControlError> {
        let until = Instant::now() + limit;
        let last = self.last.load(Ordering::Relaxed);
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.channel.receive::<(u64, Answer)>(left)? {
                ((number, _), _) if number != last => {}
                ((_, Answer::Failed { why }), _) => {
                    return Err(ControlError::Failed(why.into_inner()));
                }
                ((_, answer), fds) => return Ok((answer, fds)),
            }
        }
    }

    /// Gives an order that is answered with yes or no.
    pub fn does(&self, order: &Order, limit: Duration) -> Result<bool, ControlError> {
        match self.ask(order, &[], limit)? {
            Answer::Yes {} => Ok(true),
            Answer::No {} => Ok(false),
            _ => Err(ControlError::Nonsense),
        }
    }
}

/// The proxy's end.
#[derive(Debug)]
pub struct Orders {
    channel: Channel,
    /// The number of the order that came last; 0 before the first.
    last: AtomicU64,
}

impl Orders {
    /// Hears orders on a socket.
    pub fn on(socket: OwnedFd) -> Orders {
        Orders { channel: Channel::new(socket), last: AtomicU64::new(0) }
    }

    /// Returns the socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.channel.socket()
    }

    /// Returns the next order, with its descriptors, if it comes within `limit`.
    ///
    /// # Errors
    /// None comes, or what is none.
    pub fn next(&self, limit: Duration) -> Result<(Order, Vec<OwnedFd>), SocketError> {
        let ((number, order), fds) = self.channel.receive(limit)?;
        self.last.store(number, Ordering::Relaxed);
        Ok((order, fds))
    }

    /// Answers the order that came last; before the first one, says something unasked.
    ///
    /// # Errors
    /// The supervisor has gone, or does not take it within `limit`.
    pub fn answer(
        &self,
        answer: &Answer,
        fds: &[BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<(), SocketError> {
        self.channel.send(&(self.last.load(Ordering::Relaxed), answer.clone()), fds, limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    /// A supervisor that has waited long enough goes on without an answer, and asks something else.
    #[test]
    fn a_late_answer_is_none_to_a_later_order() {
        let (control, far) = Control::pair().unwrap();
        let orders = Orders::on(far);
        let answer = |order, answer| {
            assert_eq!(orders.next(LIMIT).unwrap().0, order);
            orders.answer(&answer, &[], LIMIT).unwrap();
        };
        // What it says unasked.
        orders.answer(&Answer::Yes {}, &[], LIMIT).unwrap();
        assert_eq!(control.answer(LIMIT).unwrap(), Answer::Yes {});
        let prepare = Order::Prepare { track: false, full: true };
        let late = control.ask(&prepare, &[], Duration::from_millis(10));
        assert!(matches!(late, Err(ControlError::Channel(_))), "{late:?}");
        let rest = Order::Rest { within_ms: 1 };
        control.give(&rest, &[]).unwrap();
        answer(prepare, Answer::Yes {});
        answer(rest.clone(), Answer::No {});
        assert_eq!(control.answer(LIMIT).unwrap(), Answer::No {});
        // Whoever takes the proxy over does not take the answer to another's order, either.
        control.give(&rest, &[]).unwrap();
        answer(rest, Answer::Yes {});
        let next = Control::to(control.channel.into_inner());
        next.give(&Order::Open {}, &[]).unwrap();
        answer(Order::Open {}, Answer::Failed { why: Text::truncated("no".into()) });
        assert!(matches!(next.answer(LIMIT), Err(ControlError::Failed(why)) if why == "no"));
    }
}
