//! Obeys the supervisor's orders ([`kedge_control::proxy`]). If the supervisor goes away, the proxy goes on.

use crate::executor::{Build, Captured, Identity, NearEnd, Room, Shares, Stored};
use crate::gate::{Closed, Gate};
use kedge_control::joblog::JobLog;
use kedge_control::keeper::{self, Offer};
use kedge_control::proxy::{Answer, Order, SEND_LIMIT};
use kedge_control::sharing::MAX_SHARES;
use kedge_device::Drained;
use kedge_image::{Choice, FileEntry};
use kedge_socket::Channel;
use kedge_transport::Server;
use kedge_wire::{List, Text};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A proxy waits for orders as long as it lives.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);
/// A capture may have to move all of a device's memory over its bus.
const CAPTURE_LIMIT: Duration = Duration::from_secs(60);
/// Swapping out packs it as well.
const SWAP_LIMIT: Duration = Duration::from_secs(1200);
/// Why a gated dispatcher does not answer.
const BUSY: &str = "its dispatcher does not come to it";

/// What a connection is known by from outside.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inodes {
    socket: u64,
    ring: u64,
    arena: u64,
}

impl Inodes {
    pub(crate) fn of(server: &Server, shared: &OwnedFd) -> io::Result<Inodes> {
        let inode = |fd: BorrowedFd<'_>| {
            let file = File::from(fd.try_clone_to_owned()?);
            Ok::<u64, io::Error>(file.metadata()?.ino())
        };
        let (socket, ring) = (inode(server.socket())?, inode(server.ring())?);
        Ok(Inodes { socket, ring, arena: inode(shared.as_fd())? })
    }
}

/// The proxy's side, on a thread of its own.
pub(crate) struct Serving {
    pub(crate) channel: Channel,
    pub(crate) gate: Arc<Gate>,
    pub(crate) room: Arc<dyn Room>,
    pub(crate) identity: Identity,
    /// The client's process.
    pub(crate) client: u32,
    pub(crate) inodes: Inodes,
    pub(crate) shared: Arc<OwnedFd>,
    pub(crate) log: Arc<JobLog>,
    /// Where the job's keeper answers.
    pub(crate) keeper: Option<PathBuf>,
}

impl Serving {
    pub(crate) fn start(self) -> io::Result<()> {
        std::thread::Builder::new().name("control".into()).spawn(move || self.run()).map(drop)
    }

    /// Obeys until the supervisor has gone.
    fn run(&self) {
        let (mut closed, mut captured) = (None, None);
        while let Ok((order, _)) = self.channel.receive::<Order>(FOREVER) {
            let answer = self.obey(order, &mut closed, &mut captured);
            let answer = answer.unwrap_or_else(|error| {
                self.log.line(&format!("checkpoint: {error}"));
                Answer::Failed { why: Text::truncated(error) }
            });
            if self.channel.send(&answer, &[], SEND_LIMIT).is_err() {
                return;
            }
        }
    }

    fn obey<'a>(
        &'a self,
        order: Order,
        closed: &mut Option<Closed<'a>>,
        captured: &mut Option<Box<dyn Captured>>,
    ) -> Result<Answer, String> {
        let yes = |yes| Ok(if yes { Answer::Yes {} } else { Answer::No {} });
        match (order, &closed) {
            (Order::Gate { within_ms }, _) => {
                *closed = None;
                let gate = self.gate.close();
                let parked = gate.ask(milliseconds(within_ms), |_| ()).is_some();
                if !parked {
                    return yes(false);
                }
                *closed = Some(gate);
                let Inodes { socket, ring, arena } = self.inodes;
                Ok(Answer::Gated { pid: self.client, socket, ring, arena })
            }
            (Order::Rest { within_ms }, Some(gate)) => {
                let limit = milliseconds(within_ms);
                let rests =
                    gate.ask(2 * limit + CAPTURE_LIMIT, move |parked| parked.executor.rest(limit));
                yes(rests == Some(true))
            }
            (Order::Step { within_ms }, Some(gate)) => {
                let limit = milliseconds(within_ms);
                let stepped =
                    gate.ask(limit + CAPTURE_LIMIT, move |parked| parked.step_within(limit));
                yes(stepped == Some(true))
            }
            (Order::Capture { track, parent }, Some(gate)) => {
                let (identity, shared) = (self.identity.clone(), self.shared.clone());
                let taken = gate.ask(CAPTURE_LIMIT, move |parked| {
                    let (shared, position) = (shared.as_fd(), parked.server.position());
                    let near = NearEnd { identity: &identity, shared, position };
                    parked.executor.capture(&near, Build { track, parent })
                });
                let taken = taken.ok_or("it takes too long to copy its memory")?;
                let taken = taken.map_err(|error| error.to_string())?;
                let bytes = taken.bytes();
                *captured = Some(taken);
                Ok(Answer::Captured { bytes })
            }
            (Order::Shares {}, Some(gate)) => {
                let told = gate.ask(CAPTURE_LIMIT, |parked| parked.executor.shares());
                shares(told.ok_or(BUSY)?.map_err(|error| error.to_string())?)
            }
            (Order::Adopt { what }, Some(gate)) => {
                let adopted = gate.ask(CAPTURE_LIMIT, move |parked| parked.executor.adopt(what));
                let name = adopted.ok_or(BUSY)?.map_err(|error| error.to_string())?;
                Ok(Answer::Adopted { name })
            }
            (Order::Bind { borrows }, Some(gate)) => {
                let bound = gate.ask(CAPTURE_LIMIT, move |parked| {
                    parked.executor.bind(borrows.into_inner());
                });
                bound.ok_or(BUSY)?;
                yes(true)
            }
            (Order::Leave {}, Some(gate)) => {
                let gone = gate.ask(SWAP_LIMIT, |parked| parked.executor.swap_out());
                let gone = gone.ok_or("it takes too long to copy its memory")?;
                let bytes = gone.map_err(|error| error.to_string())?;
                Ok(Answer::Captured { bytes })
            }
            (Order::Prepare { track, full }, _) => {
                if let Err(error) = self.room.prepare(track, full) {
                    self.log.line(&format!("cannot make room for a checkpoint as yet: {error}"));
                }
                yes(true)
            }
            (Order::Open {}, _) => {
                *closed = None;
                yes(true)
            }
            (Order::Write { path, codec }, _) => {
                let capture = captured.take().ok_or("nothing was captured")?;
                let codec: Choice = codec.parse().map_err(|_| "no such codec")?;
                let path = PathBuf::from(path.into_inner());
                let stored = capture.write(&path, codec).map_err(|error| error.to_string())?;
                let Stored { entry: FileEntry { bytes, checksum, .. }, builds, drained } = stored;
                if drained.bytes > 0 {
                    self.log.note(&told(drained));
                }
                Ok(Answer::Written { bytes, checksum, builds })
            }
            (Order::Hold { image, file }, _) => {
                let capture = captured.as_ref().ok_or("nothing was captured")?;
                let nearby = capture.nearby().ok_or("its devices are on another host")?;
                let keeper = self.keeper.as_ref().ok_or("nobody holds anything here")?;
                let holding = nearby.hold().map_err(|error| error.to_string())?;
                let image = PathBuf::from(image.into_inner());
                let parts: Vec<BorrowedFd<'_>> =
                    holding.parts.iter().map(|part| part.fd.as_fd()).collect();
                let offer = Offer {
                    entry: &holding.entry,
                    on_devices: holding.on_devices,
                    memory: holding.file.as_fd(),
                    parts: &parts,
                };
                let handed = keeper::hand_over(keeper, &image, &file, &offer);
                handed.map_err(|error| error.to_string())?;
                yes(true)
            }
            (Order::Forget {}, _) => {
                *captured = None;
                yes(true)
            }
            (
                Order::Rest { .. }
                | Order::Step { .. }
                | Order::Capture { .. }
                | Order::Leave {}
                | Order::Shares {}
                | Order::Adopt { .. }
                | Order::Bind { .. },
                None,
            ) => Err("its gate is open".into()),
            (
                Order::Restore { .. } | Order::Begin { .. } | Order::Parts {} | Order::Serve { .. },
                _,
            ) => Err("it serves already".into()),
        }
    }
}

/// What is shared, as an answer.
fn shares(Shares { shares, released }: Shares) -> Result<Answer, String> {
    let count = shares.len();
    let shares = List::new(shares).map_err(|_| {
        format!("it shares {count} pieces of memory and events with others: {MAX_SHARES} at most are kept")
    })?;
    let released = List::new(released).unwrap_or_default();
    Ok(Answer::Shares { pid: std::process::id(), shares, released })
}

/// Says what left the devices' memory for an image; `kedge bench checkpoint` reads it.
fn told(drained: Drained) -> String {
    let (mib, ms) = (drained.bytes >> 20, drained.time.as_secs_f64() * 1e3);
    format!("drained {mib} MiB of the devices' memory within {ms:.1} ms")
}

fn milliseconds(number: u32) -> Duration {
    Duration::from_millis(number.into())
}

/// The file of an image that an order names.
pub(crate) fn entry(path: &Path, bytes: u64, checksum: u64) -> FileEntry {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    FileEntry { name, bytes, checksum }
}
