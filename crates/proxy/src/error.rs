//! Why devices were not captured, brought back or moved, or a session not opened.

use crate::backend::BuildError;
use crate::crossing::CrossingError;
use kedge_cuda_types::CuError;
use kedge_device::SnapshotError;
use kedge_gpu_image::StateError;
use kedge_image::ImageError;
use kedge_remote::{ConnectError as NoServer, ImageLineError};
use kedge_socket::SocketError;
use kedge_transport::{ConnectError, SegmentError};
use kedge_wire::{TooLong, WireError};
use std::io;
use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum CaptureError {
    #[error("{0}")]
    Snapshot(#[from] SnapshotError),
    #[error("there is more of it than an image holds: {0}")]
    TooMuch(#[from] TooLong),
    #[error("this image builds on another: only one that holds all (--full) is held")]
    Part,
    #[error("it needs {needs} files beside its own, and has got {got}")]
    Files { needs: usize, got: usize },
    #[error("only devices of one place, on this machine, are measured")]
    Unmeasured,
    #[error("cannot draw random keys: {0}")]
    Keys(io::Error),
    #[error("cannot look at pinned memory: {0}")]
    Arena(io::Error),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(
        "{needs} MiB are more than the {limit} MiB of host memory that may be taken: raise --cache-host"
    )]
    NoRoom { needs: u64, limit: u64 },
    #[error("the proxy that it is to move to: {0}")]
    Other(#[from] LineError),
    #[error("its devices, on another machine: {0}")]
    Far(#[from] ImageLineError),
}

#[derive(Debug, Error)]
pub(crate) enum RestoreError {
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("the image's GPU state is damaged: {0}")]
    Damaged(&'static str),
    #[error("cannot read what was swapped out: {0}")]
    Memory(io::Error),
    #[error("`{0}` is no name of a file")]
    NoName(String),
    #[error("descriptors of its files are missing: its proxy may have too many open (`ulimit -n`)")]
    Descriptors,
    #[error(transparent)]
    State(#[from] StateError),
    #[error("the ring or the shared arena of the image is none: {0}")]
    Segment(#[from] SegmentError),
    #[error("cannot use the client's socket: {0}")]
    Socket(io::Error),
    #[error(transparent)]
    Arena(#[from] ConnectError),
    #[error("no device: {0}")]
    NoDevice(#[from] BuildError),
    #[error(
        "the program cannot go on with {here} in the place of {was}: {why}; choose others by --gpu"
    )]
    OtherDevices { was: String, here: String, why: String },
    #[error("{what} cannot be made again: {source}{remedy}")]
    Step { what: &'static str, source: CuError, remedy: String },
    #[error("{0}")]
    Device(#[from] SnapshotError),
    #[error(transparent)]
    Crossing(#[from] CrossingError),
    #[error(transparent)]
    NoSession(#[from] SessionError),
    #[error("its devices, on another machine: {0}")]
    Line(#[from] ImageLineError),
    #[error("its devices, on another machine: {0}")]
    Far(String),
    #[error(
        "devices of another machine move to and from software devices alone as yet, and it is on {from}"
    )]
    GpusStay { from: String },
    #[error("the proxy that it comes from: {0}")]
    Moving(#[from] LineError),
    #[error(
        "what is held of it lies on devices of this machine: restart it here, or from its image"
    )]
    HeldHere,
    #[error("cannot begin with devices of several places: {0}")]
    Places(io::Error),
    #[error("its devices at {gpu}: {why}")]
    AtPlace { gpu: String, why: Box<RestoreError> },
    #[error(
        "a restart of devices of several places with a GPU among them, as {gpu}, is not supported \
         as yet: give --gpu software devices"
    )]
    GpuAmongPlaces { gpu: String },
    #[error(
        "its devices were of one place, and --gpu {gpu} names several: give --gpu devices of one"
    )]
    OfOnePlace { gpu: String },
}

/// Why a round has failed.
#[derive(Debug, Error)]
pub(crate) enum LineError {
    #[error("the connection between the two is broken: {0}")]
    Broken(#[from] io::Error),
    #[error("{len} bytes are more than the {max} that there can be")]
    TooLong { len: u64, max: u64 },
    #[error("a message is nonsense: {0}")]
    Nonsense(#[from] WireError),
    #[error("descriptors of memory do not cross: {0}")]
    Socket(#[from] SocketError),
    #[error("a message at the wrong time")]
    Order,
    /// In the words of the other.
    #[error("{0}")]
    Refused(String),
}

/// Why a client has no devices on another machine.
#[derive(Debug, Error)]
pub enum SessionError {
    #[error(transparent)]
    Connect(#[from] NoServer),
    #[error("cannot go on with the session: {0}")]
    System(#[from] io::Error),
}

impl SessionError {
    /// What cuInit answers.
    pub(crate) fn code(&self) -> CuError {
        match self {
            SessionError::Connect(NoServer::NoDevice { refusal, .. }) => CuError(refusal.code),
            _ => CuError::NO_DEVICE,
        }
    }
}
