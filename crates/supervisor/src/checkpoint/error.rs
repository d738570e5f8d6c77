//! Why a checkpoint was not taken, devices have not moved, or a job has not left.

use crate::checkpoint::verify::Unverified;
use crate::devices::gpu;
use crate::devices::quiesce::QuiesceError;
use crate::devices::sharing::SharingError;
use crate::job::policy::NoStateFolder;
use crate::job::rank::RankError;
use kedge_control::gpu::BadGpuSpec;
use kedge_control::job::FailureKind;
use kedge_control::proxy::ControlError;
use kedge_coordinator::ClientError;
use kedge_image::ImageError;
use kedge_process::EngineError;
use kedge_process::plugins::PluginError;
use rustix::process::{Resource, getrlimit};
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// So often it is tried where something cannot be saved: a process that is at its end holds half of
/// what it held, for a moment.
const ENDING: u32 = 4;

#[derive(Debug, Error)]
pub(crate) enum CheckpointError {
    #[error("a checkpoint or a move of this job is under way: try again when that is over")]
    Busy,
    #[error("the job has been saved, and ends with that image")]
    Over,
    #[error(transparent)]
    Move(#[from] MoveError),
    #[error(transparent)]
    Depart(#[from] DepartError),
    /// What the job's devices cannot, and what mends it.
    #[error("{0}")]
    Several(String),
    #[error(transparent)]
    Quiesce(#[from] QuiesceError),
    #[error(transparent)]
    Rank(#[from] RankError),
    #[error("cannot look at the connections to its devices: {0}")]
    Connections(io::Error),
    #[error(transparent)]
    Sharing(#[from] SharingError),
    #[error("{0} (`--dir`)")]
    NoFolder(NoStateFolder),
    #[error("`{0}` is no codec: auto, raw, lz4, zstd or gzip")]
    Codec(String),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Conduct(#[from] ConductError),
    #[error("the image could not be read back and was removed; the job goes on: {0}")]
    Unverified(#[from] Unverified),
    /// In the words of another part of the job.
    #[error("{0}")]
    Part(String),
    #[error("cannot start a thread for it")]
    Thread,
    #[error("a remote shell of the job is still being started (ssh): try again")]
    Launching,
    /// It has become a part of a job of several while it was asked for.
    #[error("the job has got a part on another host: try again")]
    Joined,
    /// A file of the image would have been too long.
    #[error("{why}; files are limited to {most} bytes: start the job under `ulimit -f unlimited`")]
    FileLimit { why: String, most: u64 },
}

impl CheckpointError {
    /// Whether it may be over in a moment: a process gets its devices, or is at its end and has let
    /// go of some of what it held.
    pub(crate) fn passes(&self, tries: u32) -> bool {
        let CheckpointError::Engine(error) = self else { return false };
        let refused = matches!(error, EngineError::Descriptors(PluginError::Survey(_)));
        gpu::was_connecting(error) || refused && tries < ENDING
    }

    /// The same, by the name of the limit that is its cause, whoever has told it.
    pub(crate) fn by_limit(self) -> CheckpointError {
        let limit = getrlimit(Resource::Fsize).current;
        let (why, too_long) = (self.to_string(), io::Error::from_raw_os_error(libc::EFBIG));
        match limit {
            Some(most) if why.contains(&too_long.to_string()) => {
                CheckpointError::FileLimit { why, most }
            }
            _ => self,
        }
    }
}

#[derive(Debug, Error)]
pub(crate) enum DepartError {
    #[error("jobs of several parts do not move to another host as a whole yet")]
    Parts,
    #[error("the move was given up: the job goes on here")]
    Stays,
    #[error("the job is being ended here, or goes back to an image: it does not move")]
    Ends,
    #[error("the program's first process has ended: what it has left behind does not move")]
    Over,
    #[error("process {0} of the job has ended while it stood still: it does not move")]
    Dead(i32),
    #[error("the job was sent signal {0} while it stood still: it goes on here, try again")]
    Signalled(u32),
    #[error("whoever moves the job is gone ({0}): the job goes on here")]
    Alone(io::Error),
    #[error("{path}: {source}: the job goes on here")]
    Undecided { path: PathBuf, source: io::Error },
}

#[derive(Debug, Error)]
pub(crate) enum ConductError {
    #[error("the parts of the job cannot be reached: {0}")]
    Coordinator(#[from] ClientError),
    #[error(
        "the supervisor of {0} was killed, so that part cannot be saved: end the job (`kedge kill`) and restart its last image"
    )]
    Lost(String),
    #[error("{0}")]
    Failed(String),
    #[error("a part has joined or left the job meanwhile: try again")]
    Changed,
    #[error("{there} of the step's {all} ranks take part: what has ended cannot be saved")]
    Ranks { there: usize, all: u32 },
}

/// Why devices have not moved. The job goes on where it was, unless it says otherwise.
#[derive(Debug, Error)]
pub(crate) enum MoveError {
    #[error("--to {to}: {source}")]
    Target { to: String, source: BadGpuSpec },
    #[error("the job has no devices: there is nothing to move")]
    NoDevices,
    #[error("no process of the job has devices now: there is nothing to move")]
    NoClients,
    #[error(
        "a job on {from} cannot move to {to} as yet: only to as many devices of this machine, or from \
         software devices to those of a server and back"
    )]
    Unsupported { from: String, to: String },
    #[error("the devices of a moving job are to come to rest: {0}")]
    Quiesce(#[from] QuiesceError),
    #[error("its process {pid} stays where it is: {source}")]
    Source { pid: u32, source: ControlError },
    #[error("its process {pid} stays where it is: the new proxy: {source}")]
    Arriving { pid: u32, source: ControlError },
    #[error(
        "its process {pid} makes and ends what it has on its devices faster than that can be followed \
         ({tries} tries): try again when it does not"
    )]
    Restless { pid: u32, tries: u32 },
    #[error(
        "the job stays where it is: in {rounds} rounds, processes of it began to use devices, or did \
         with them what cannot be followed, again and again: try again when they do not{or}"
    )]
    Endless { rounds: u32, or: &'static str },
    #[error(
        "its process {pid} stays where it is: it changes what it has on its devices faster than that \
         crosses, {kib} KiB in the last round, for which it would stand still for some {pause} ms and \
         may for {most}: allow more (--max-pause), or as much as it takes (--stop-and-copy)"
    )]
    TooFast { pid: u32, kib: u64, pause: u64, most: u64 },
    #[error(
        "nothing has moved: process {pid}, or what drives its devices, has ended meanwhile{said}"
    )]
    Gone { pid: u32, said: String },
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: io::Error },
    /// After the new proxy had the client.
    #[error(
        "process {pid} had moved already when its new proxy was lost ({source}): `kedge run --recover` \
         brings it back from its last image"
    )]
    Lost { pid: u32, source: ControlError },
}

impl MoveError {
    /// What a script is told of it.
    pub(crate) fn kind(&self) -> FailureKind {
        match self {
            MoveError::Target { .. } | MoveError::NoDevices | MoveError::Unsupported { .. } => {
                FailureKind::Refused
            }
            MoveError::Lost { .. } => FailureKind::Lost,
            _ => FailureKind::Failed,
        }
    }
}
