//! What stands between a client's ring and its devices: the contract that the ring's loop, the gate
//! and the control thread know. [`crate::local`] carries messages out in this process.
//!
//! An executor belongs to the dispatcher's thread. Replies, output, faults and progress go the
//! other way, by [`crate::host::ProxyHost`]. All that goes in and comes out can be bytes, but for
//! what
//! [`Nearby`] has.

use crate::error::CaptureError;
use crate::moving::{Follows, Shown};
use kedge_control::sharing::{Bond, Share, What};
use kedge_device::{Drained, HeldPart, Known, SnapshotError};
use kedge_image::{Choice, FileEntry};
use kedge_protocol::PeerName;
use kedge_transport::Incoming;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

pub(crate) trait Executor: Send {
    /// Carries out a message, after all those before it. The reply to a call may come later.
    fn execute(&mut self, incoming: Incoming);

    /// Hears that the ring is empty: whatever was collected may leave. Returns for how long to look
    /// for more before this is called again; zero where nothing is left.
    fn flush(&mut self) -> Duration;

    /// Returns how long the thread looks for a message before it sleeps, where `spin` is usual.
    fn spin(&self, spin: Duration) -> Duration;

    /// Waits until all that was executed is over and told, for `limit` at most: whether it is.
    fn rest(&mut self, limit: Duration) -> bool;

    /// Returns what makes room for captures while messages are carried out.
    fn room(&self) -> Arc<dyn Room>;

    /// Takes what the devices hold. All rests, and the client stands still.
    fn capture(&mut self, near: &NearEnd<'_>, on: Build)
    -> Result<Box<dyn Captured>, CaptureError>;

    /// Takes what the devices hold for a round of a move. All rests.
    fn show(
        &mut self,
        near: &NearEnd<'_>,
        follows: Follows,
    ) -> Result<Box<dyn Shown>, CaptureError>;

    /// Returns what other processes may have too; what is this client's has a name from now on.
    fn shares(&mut self) -> Result<Shares, SnapshotError>;

    /// Makes this client the owner of memory or of an event that it had opened from another
    /// process, which has given it up, and returns its name.
    fn adopt(&mut self, what: What) -> Result<PeerName, SnapshotError>;

    /// Takes where a restart will find what is another's, for the next capture.
    fn bind(&mut self, borrows: Vec<Bond>);

    /// Takes the devices' memory off them until the next message: how many bytes. All rests.
    fn swap_out(&mut self) -> Result<u64, CaptureError>;
}

/// What can be done on any thread while messages are carried out.
pub(crate) trait Room: Send + Sync {
    /// Makes room for the next capture, so that its pause need not. May take seconds.
    fn prepare(&self, track: bool, full: bool) -> Result<(), CaptureError>;

    /// Makes room for the next round of a move, which is told of what has crossed. By default there
    /// is nothing to make.
    fn prepare_round(&self, _known: &Known) -> Result<(), CaptureError> {
        Ok(())
    }

    /// Returns the bytes of a device that the client has; `None` where that cannot be told without
    /// holding anything up.
    fn used(&self, _device: u32) -> Option<u64> {
        None
    }
}

/// What the end of a client's ring alone knows of it.
pub(crate) struct NearEnd<'a> {
    pub(crate) identity: &'a Identity,
    /// The arena that it shares with this process.
    pub(crate) shared: BorrowedFd<'a>,
    /// The newest message that was taken from its ring.
    pub(crate) position: u64,
}

/// What of a client does not change.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) gpu: String,
    pub(crate) hello: kedge_protocol::Hello,
    pub(crate) client_memory: bool,
    /// As it was told of them, wherever it is by now.
    pub(crate) devices: Vec<kedge_protocol::DeviceInfo>,
}

/// What a capture may leave out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Build {
    /// Whether to find out what has changed.
    pub(crate) track: bool,
    /// The checksum of the file that has what has not.
    pub(crate) parent: Option<u64>,
}

/// What the devices held at one moment. It is written while the client goes on.
pub(crate) trait Captured: Send {
    fn bytes(&self) -> u64;

    /// Returns how many files it needs beside its own. By default none.
    fn beside(&self) -> usize {
        0
    }

    /// Writes it to new files.
    fn write(self: Box<Self>, to: NewFiles, codec: Choice) -> Result<Stored, CaptureError>;

    /// Does all that [`Captured::write`] does, and keeps none of the bytes: nobody can restart what
    /// it returns. By default it cannot be.
    fn measure(self: Box<Self>, _codec: Choice) -> Result<Stored, CaptureError> {
        Err(CaptureError::Unmeasured)
    }

    /// Returns what it can do on this host; or why it cannot.
    fn nearby(&self) -> Result<&dyn Nearby, &'static str>;
}

/// What has no meaning on another host: descriptors of devices' memory.
pub(crate) trait Nearby {
    /// Returns what outlives this process of a capture.
    fn hold(&self) -> Result<Holding, CaptureError>;
}

/// New files, empty, that others have made for a capture.
#[derive(Debug)]
pub(crate) struct NewFiles {
    /// What the image calls the client's own.
    pub(crate) name: String,
    pub(crate) own: File,
    /// One for each of several places.
    pub(crate) beside: Vec<File>,
}

/// What was written.
pub(crate) struct Stored {
    pub(crate) entry: FileEntry,
    /// The files beside it that belong to it: one for each of several places.
    pub(crate) beside: Vec<FileEntry>,
    /// Whether any of them refers to the file before it.
    pub(crate) builds: bool,
    /// What left the devices for it.
    pub(crate) drained: Drained,
}

/// What a client shares with others.
pub(crate) struct Shares {
    pub(crate) shares: Vec<Share>,
    /// Files of memory that were this client's.
    pub(crate) released: Vec<(u64, u64)>,
}

/// What outlives this process of a capture, to be handed over.
#[derive(Debug)]
pub(crate) struct Holding {
    pub(crate) file: File,
    pub(crate) entry: FileEntry,
    pub(crate) parts: Vec<HeldPart>,
    pub(crate) on_devices: u64,
}
