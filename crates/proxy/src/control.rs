//! Obeys the supervisor's orders ([`kedge_control::proxy`]). If the supervisor goes away, the proxy
//! goes on.

use crate::ending;
use crate::error::CaptureError;
use crate::executor::{Build, Captured, Identity, NearEnd, Nearby, NewFiles, Room, Shares, Stored};
use crate::gate::{Closed, Gate};
use crate::owner::Owner;
use crate::source::Source;
use crate::watch::Watcher;
use kedge_control::joblog::JobLog;
use kedge_control::keeper::{self, Offer};
use kedge_control::proxy::{Answer, Order, Orders, SEND_LIMIT, WrittenFile};
use kedge_control::sharing::MAX_SHARES;
use kedge_control::{note, warn};
use kedge_cuda_types::arena::MAX_DEVICES;
use kedge_device::Drained;
use kedge_image::{Choice, FileEntry, is_file_name};
use kedge_transport::Server;
use kedge_wire::{List, Text};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError};
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
    pub(crate) orders: Orders,
    pub(crate) gate: Arc<Gate>,
    pub(crate) room: Arc<dyn Room>,
    pub(crate) identity: Identity,
    /// The client's process.
    pub(crate) client: u32,
    pub(crate) inodes: Inodes,
    pub(crate) shared: Arc<OwnedFd>,
    /// The client's socket, and the ring.
    pub(crate) ends: [OwnedFd; 2],
    /// What hears the client.
    pub(crate) watcher: Mutex<Option<Watcher>>,
    pub(crate) log: Arc<JobLog>,
}

/// What orders have begun and others will end.
#[derive(Default)]
struct UnderWay<'a> {
    moving: Option<Source>,
    closed: Option<Closed<'a>>,
    captured: Option<Box<dyn Captured>>,
    /// New files of several places, for what was captured.
    beside: Vec<File>,
}

impl Serving {
    pub(crate) fn start(self) -> io::Result<()> {
        std::thread::Builder::new().name("control".into()).spawn(move || self.run()).map(drop)
    }

    /// Obeys until the supervisor has gone.
    fn run(&self) {
        let mut under_way = UnderWay::default();
        while let Ok((order, fds)) = self.orders.next(FOREVER) {
            let departs = order == Order::Depart {};
            let ends = matches!(order, Order::Move {});
            let answer = self.obey(order, fds, &mut under_way);
            let answer = answer.unwrap_or_else(|error| {
                warn!(self.log, "not done: {error}");
                Answer::Failed { why: Text::truncated(error) }
            });
            if under_way.captured.is_some() {
                ending::is_captured(true);
            }
            let over = under_way.moving.as_ref().filter(|source| source.may_be_over());
            if !ending::may_have_moved(over.map(|source| source.owner.clone())) {
                // The supervisor takes an answer for a client that can move.
                break;
            }
            let [socket, ring] = &self.ends;
            let fds = [socket.as_fd(), ring.as_fd(), self.shared.as_fd()];
            let some = if ends { &fds[..] } else { &[] };
            let sent = self.orders.answer(&answer, some, SEND_LIMIT);
            if departs && answer == (Answer::Yes {}) {
                ending::end_moved();
            }
            if sent.is_err() {
                break;
            }
            ending::is_captured(under_way.captured.is_some());
        }
        ending::is_captured(false);
        // Nobody is left to say where the client is: what was written down does, before the gate
        // opens.
        let over = under_way.moving.as_ref().filter(|source| source.may_be_over());
        if over.is_some_and(|source| source.owner.has_moved()) {
            self.end_watcher();
            ending::end_moved();
        }
        ending::may_have_moved(None);
    }

    fn end_watcher(&self) {
        let watcher = self.watcher.lock().unwrap_or_else(PoisonError::into_inner).take();
        watcher.into_iter().for_each(Watcher::end);
    }

    /// What a move has this proxy do; `None` of an order that is none of its.
    fn move_on(
        &self,
        order: &Order,
        fds: &mut Vec<OwnedFd>,
        under_way: &mut UnderWay<'_>,
    ) -> Option<Result<Answer, String>> {
        let said = |error: &dyn std::fmt::Display| error.to_string();
        let moving = &mut under_way.moving;
        Some(match order {
            Order::Move {} => {
                let owner = fds.pop().and_then(Owner::new);
                let line = fds.pop().zip(owner).ok_or("no way to the other proxy".to_owned());
                let source =
                    line.and_then(|(line, owner)| Source::new(line, owner).map_err(|e| said(&e)));
                source.map(|source| {
                    *moving = Some(source);
                    Answer::Ends { pid: self.client }
                })
            }
            Order::Show { last } => match (moving, &under_way.closed) {
                (Some(source), Some(gate)) => self.show(source, gate, *last),
                _ => Err("it does not move, or its gate is open".into()),
            },
            Order::Cross { rate } => match moving {
                Some(source) => crossed(source.cross(*rate), &self.log),
                None => Err("it does not move".into()),
            },
            Order::PrepareRound {} => {
                let known = moving.as_ref().map(Source::known).transpose();
                let made = known.and_then(|known| match known.flatten() {
                    Some(known) => self.room.prepare_round(&known),
                    None => Ok(()),
                });
                if let Err(error) = made {
                    warn!(self.log, "cannot make room for a round as yet: {error}");
                }
                Ok(Answer::Yes {})
            }
            Order::Stay {} => {
                *moving = None;
                Ok(Answer::Yes {})
            }
            Order::Depart {} => match moving.as_ref().is_some_and(Source::may_be_over) {
                true => {
                    self.end_watcher();
                    Ok(Answer::Yes {})
                }
                false => Err("nobody has its client".into()),
            },
            Order::Arrive { .. } => Err("it serves already".into()),
            _ => return None,
        })
    }

    fn show(&self, source: &mut Source, gate: &Closed<'_>, last: bool) -> Result<Answer, String> {
        let follows = source.follows();
        let (identity, shared) = (self.identity.clone(), self.shared.clone());
        let taken = gate.ask(CAPTURE_LIMIT, move |parked| {
            let (shared, position) = (shared.as_fd(), parked.server.position());
            let near = NearEnd { identity: &identity, shared, position };
            parked.executor.show(&near, follows)
        });
        let taken = taken.ok_or(BUSY)?.map_err(|error| error.to_string())?;
        Ok(Answer::Captured { bytes: source.take(taken, last) })
    }

    /// What was stored, or summed, once the log has how fast it left the devices.
    fn stored(&self, stored: Result<Stored, CaptureError>) -> Result<Stored, String> {
        let stored = stored.map_err(|error| error.to_string())?;
        if stored.drained.bytes > 0 {
            note!(self.log, "{}", told(stored.drained));
        }
        Ok(stored)
    }

    fn obey<'a>(
        &'a self,
        order: Order,
        mut fds: Vec<OwnedFd>,
        under_way: &mut UnderWay<'a>,
    ) -> Result<Answer, String> {
        if let Some(done) = self.move_on(&order, &mut fds, under_way) {
            return done;
        }
        let UnderWay { closed, captured, beside, .. } = under_way;
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
                    warn!(self.log, "cannot make room for a checkpoint as yet: {error}");
                }
                yes(true)
            }
            (Order::Open {}, _) => {
                *closed = None;
                yes(true)
            }
            (Order::Places {}, _) => {
                let capture = captured.as_ref().ok_or("nothing was captured")?;
                beside.clear();
                Ok(Answer::Places { count: capture.beside() as u32 })
            }
            (Order::Beside {}, _) => {
                if beside.len() + fds.len() > MAX_DEVICES as usize {
                    return Err("there are more files than there can be places".into());
                }
                beside.extend(fds.into_iter().map(File::from));
                yes(true)
            }
            (Order::Write { name, codec }, _) => {
                let capture = captured.take().ok_or("nothing was captured")?;
                let to = new_files(name.into_inner(), fds, std::mem::take(beside))?;
                self.stored(capture.write(to, choice(&codec)?)).and_then(written)
            }
            (Order::Measure { codec }, _) => {
                let capture = captured.take().ok_or("nothing was captured")?;
                let FileEntry { bytes, checksum, .. } =
                    self.stored(capture.measure(choice(&codec)?))?.entry;
                Ok(Answer::Measured { bytes, checksum })
            }
            (Order::Hold {}, _) => {
                let capture = captured.as_ref().ok_or("nothing was captured")?;
                let keeper = fds.pop().ok_or("nobody holds anything here")?;
                hold(capture.nearby()?, keeper)?;
                yes(true)
            }
            (Order::Forget {}, _) => {
                *captured = None;
                beside.clear();
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
                Order::Restore { .. }
                | Order::Begin { .. }
                | Order::Files { .. }
                | Order::Parts {}
                | Order::Serve { .. }
                | Order::Arrive { .. }
                | Order::PrepareRound {}
                | Order::Move {}
                | Order::Show { .. }
                | Order::Cross { .. }
                | Order::Stay {}
                | Order::Depart {},
                _,
            ) => Err("it serves already".into()),
        }
    }
}

/// Hands over to `keeper` what outlives this process of a capture.
fn hold(nearby: &dyn Nearby, keeper: OwnedFd) -> Result<(), String> {
    let holding = nearby.hold().map_err(|error| error.to_string())?;
    let parts: Vec<BorrowedFd<'_>> = holding.parts.iter().map(|part| part.fd.as_fd()).collect();
    let offer = Offer {
        entry: &holding.entry,
        on_devices: holding.on_devices,
        memory: holding.file.as_fd(),
        parts: &parts,
    };
    keeper::hand_over(keeper, &offer).map_err(|error| error.to_string())
}

/// The files that an order to write came with.
fn new_files(name: String, fds: Vec<OwnedFd>, beside: Vec<File>) -> Result<NewFiles, String> {
    if !is_file_name(&name) {
        return Err(format!("`{}` is no name of a file", name.escape_debug()));
    }
    let [own] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| "it got no file to write to")?;
    Ok(NewFiles { name, own: own.into(), beside })
}

fn choice(codec: &str) -> Result<Choice, String> {
    codec.parse().map_err(|_| "no such codec".to_owned())
}

/// What became of a move's round, as an answer.
fn crossed(crossed: Result<(u64, bool), CaptureError>, log: &JobLog) -> Result<Answer, String> {
    match crossed {
        Ok((bytes, fits)) => Ok(Answer::Crossed { bytes, fits }),
        Err(error @ CaptureError::Other(_)) => {
            warn!(log, "not done: {error}");
            Ok(Answer::Parted { why: Text::truncated(error.to_string()) })
        }
        Err(error) => Err(error.to_string()),
    }
}

/// What was written, as an answer.
fn written(stored: Stored) -> Result<Answer, String> {
    let Stored { entry, beside, builds, .. } = stored;
    if beside.is_empty() {
        return Ok(Answer::Written { bytes: entry.bytes, checksum: entry.checksum, builds });
    }
    let file = |FileEntry { name, bytes, checksum }| {
        let name = Text::new(name).map_err(|error| error.to_string())?;
        Ok(WrittenFile { name, bytes, checksum })
    };
    let files = std::iter::once(entry).chain(beside).map(file);
    let files = List::new(files.collect::<Result<Vec<_>, String>>()?);
    Ok(Answer::WrittenAll { files: files.map_err(|error| error.to_string())?, builds })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::LineError;
    use kedge_cuda_types::CuError;
    use kedge_device::SnapshotError;

    #[test]
    fn a_device_that_fails_is_no_broken_way_to_the_other_proxy() {
        let log = JobLog::none();
        let fault = SnapshotError::from(CuError::ILLEGAL_ADDRESS);
        let why = crossed(Err(fault.into()), &log).unwrap_err();
        assert!(why.contains("ILLEGAL_ADDRESS"), "{why}");
        let broken = LineError::from(io::Error::from(io::ErrorKind::BrokenPipe));
        let answer = crossed(Err(broken.into()), &log).unwrap();
        assert!(matches!(answer, Answer::Parted { .. }), "{answer:?}");
        let answer = crossed(Ok((7, false)), &log).unwrap();
        assert_eq!(answer, Answer::Crossed { bytes: 7, fits: false });
    }
    #[test]
    fn a_file_to_write_is_one_and_its_name_leads_nowhere() {
        let file = || OwnedFd::from(File::open("/dev/null").unwrap());
        for bad in ["", ".", "..", "../gpu-7.kimg", "/images/gpu-7.kimg", "a/b", "a\0b"] {
            let why = new_files(bad.to_owned(), vec![file()], Vec::new()).unwrap_err();
            assert!(why.contains("is no name of a file"), "{bad}: {why}");
        }
        let fine = |fds| new_files("gpu-7.kimg".to_owned(), fds, Vec::new());
        assert_eq!(fine(vec![file()]).unwrap().name, "gpu-7.kimg");
        for fds in [vec![], vec![file(), file()]] {
            assert!(fine(fds).unwrap_err().contains("no file to write to"));
        }
    }
}
