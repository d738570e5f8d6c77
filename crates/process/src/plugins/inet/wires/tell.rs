//! A checkpoint: each part tells of the connections whose other ends it does not have, finds those
//! ends among what the others tell, and lets arrive what is on its way. Nothing is taken out of a
//! connection.

use super::place::{Here, Host};
use super::{Wire, end, flight, heard, meet, refused, say, wire};
use crate::plugins::error::{Context, PluginError};
use crate::plugins::inet::save::{Known, canonical, listens_at};
use crate::plugins::inet::tcp::State;
use crate::plugins::inet::waiting;
use crate::plugins::job::Capture;
use crate::plugins::sockets::diagnosis::{Diagnoser, Waiting};
use crate::plugins::{Rendezvous, Stage};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long what is on its way may take to arrive before more room is made for it.
const ARRIVAL: Duration = Duration::from_millis(20);
/// Between two looks.
pub(super) const TICK: Duration = Duration::from_millis(1);
/// Most closed ends of one host that are told of; they may be anybody's.
const MAX_CLOSED: usize = 1024;

/// What a part tells of one end.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum End {
    /// A process has it.
    Held {
        /// Bytes that have not arrived at the other end, as far as this one knows.
        unsent: u64,
        /// Whether somebody listens at its address.
        listens: bool,
    },
    /// It waits to be accepted, with so many bytes that nobody has read.
    Queued { unread: u32 },
    /// Its process has closed it, and the kernel still sends what was written.
    Closed { unsent: u32 },
}

/// What the parts have told each other.
#[derive(Debug, Default)]
pub(in super::super) struct Told {
    /// The connections to other parts, by the place of their socket among those known.
    pub wires: HashMap<usize, Wire>,
    /// Those that wait to be accepted by another part.
    pub queued: HashSet<usize>,
    /// Those whose other ends were closed, and have sent all.
    pub closed: HashSet<usize>,
    /// The addresses, own and remote, of those who wait to be accepted here and are another part's.
    pub clients: HashSet<(SocketAddr, SocketAddr)>,
    /// This host, if there are other parts.
    here: Option<Here>,
}

impl Told {
    /// Where others reach a socket with the address `local`.
    pub(in super::super) fn host(&self, local: Option<SocketAddr>) -> Option<Host> {
        self.here.as_ref().map(|here| Host::of(here, local))
    }
}

/// An end whose other end is not in this part.
pub(super) struct Loose<'a> {
    at: usize,
    pub(super) socket: &'a Known,
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    here: &'a str,
    listens: bool,
    /// What the other end has told.
    pub(super) told: Option<End>,
}

/// Settles with the other parts what becomes of the connections of `known` that `loose` names.
pub(in super::super) fn settle(
    capture: &mut Capture,
    known: &[Known],
    loose: &[usize],
) -> Result<Told, PluginError> {
    let here = Here::look();
    let mut ends: Vec<Loose> = loose.iter().filter_map(|at| find(*at, known, &here)).collect();
    let Some(others) = capture.others else {
        for (local, remote, unsent) in closed(&ends)? {
            let other = ends.iter_mut().find(|one| (one.remote, one.local) == (local, remote));
            other.into_iter().for_each(|one| one.told = Some(End::Closed { unsent }));
        }
        flight::arrive(None, capture, &ends)?;
        return sorted(capture, &ends);
    };
    let soon = Instant::now();
    while soon.elapsed() < ARRIVAL && flight::unsent(&ends)? > 0 {
        ends.iter().for_each(|one| flight::acknowledge(one.socket));
        sleep(TICK);
    }
    let queued = queued(capture, known)?;
    tell(others, &ends, &queued, &here)?;
    meet(others, Stage::Told)?;
    for one in &mut ends {
        one.told = heard(others, &end(one.remote, one.local, one.here))?;
    }
    let clients = clients(others, &queued, &here)?;
    flight::arrive(Some(others), capture, &ends)?;
    let sorted = sorted(capture, &ends)?;
    Ok(Told { clients, here: Some(here), ..sorted })
}

/// Tells the other parts of all ends here that may be theirs.
fn tell(
    others: &dyn Rendezvous,
    ends: &[Loose],
    queued: &HashSet<(SocketAddr, SocketAddr, u32)>,
    here: &Here,
) -> Result<(), PluginError> {
    for one in ends {
        let (unsent, listens) = (flight::held(one)? as u64, one.listens);
        say(others, &end(one.local, one.remote, one.here), &End::Held { unsent, listens })?;
    }
    let queued = queued
        .iter()
        .map(|(local, remote, unread)| (*local, *remote, End::Queued { unread: *unread }));
    let closed = orphans()?.into_iter();
    let closed = closed.map(|(local, remote, unsent)| (local, remote, End::Closed { unsent }));
    for (local, remote, told) in queued.chain(closed) {
        let told = serde_json::to_vec(&told).to(|| "tell the other parts of a socket")?;
        // Another part on this host may have told the same.
        others.publish(&end(local, remote, here.scope(remote)), &told).map_err(refused)?;
    }
    Ok(())
}

/// What no process has any more and the kernel still sends: both addresses, and how many bytes.
fn orphans() -> Result<Vec<(SocketAddr, SocketAddr, u32)>, PluginError> {
    let found = || -> io::Result<Vec<_>> {
        let mut kernel = Diagnoser::new()?;
        let mut found = kernel.tcp_without_process(0, false)?;
        found.extend(kernel.tcp_without_process(0, true)?);
        Ok(found)
    };
    let found = found().to(|| "ask the kernel about sockets")?;
    let sends = |one: &Waiting| {
        let state = State::of(one.state);
        state.finished() && one.unsent > 0 && state != State::FIN_WAIT_2
    };
    let ends = found.into_iter().filter(sends).take(MAX_CLOSED).map(|one| {
        let local = canonical(SocketAddr::new(one.local, one.port));
        (local, canonical(one.remote), one.unsent)
    });
    Ok(ends.collect())
}

/// The same on this host, if one of `ends` may have such another end.
fn closed(ends: &[Loose]) -> Result<Vec<(SocketAddr, SocketAddr, u32)>, PluginError> {
    let open = |one: &Loose| {
        let state = one.socket.info.map(|info| info.state);
        !one.here.is_empty() && state.is_some_and(|state| !state.peer_finished())
    };
    if ends.iter().any(open) { orphans() } else { Ok(Vec::new()) }
}

fn find<'a>(at: usize, known: &'a [Known], here: &'a Here) -> Option<Loose<'a>> {
    let socket = &known[at];
    let (local, remote) = (canonical(socket.local?), canonical(socket.remote?));
    let listens = known.iter().any(|other| listens_at(other, local));
    Some(Loose { at, socket, local, remote, here: here.scope(remote), listens, told: None })
}

/// Those who wait to be accepted here and may be another part's: both addresses, and the bytes that
/// wait.
fn queued(
    capture: &Capture,
    known: &[Known],
) -> Result<HashSet<(SocketAddr, SocketAddr, u32)>, PluginError> {
    let mut all = HashSet::new();
    for listener in known.iter().filter(|one| one.info.is_some_and(|info| info.waiting > 0)) {
        let state = listener.info.map(|info| info.state);
        let Some(local) = listener.local.filter(|_| state == Some(State::LISTEN)) else { continue };
        let what = || format!("look at who waits at {local}");
        for one in waiting::outside(local, capture.job).to(what)? {
            let own = canonical(SocketAddr::new(one.local, local.port()));
            all.insert((own, canonical(one.remote), one.unread));
        }
    }
    Ok(all)
}

/// Those of `queued` that are another part's.
fn clients(
    others: &dyn Rendezvous,
    queued: &HashSet<(SocketAddr, SocketAddr, u32)>,
    here: &Here,
) -> Result<HashSet<(SocketAddr, SocketAddr)>, PluginError> {
    let mut clients = HashSet::new();
    for (local, remote, unread) in queued {
        let name = end(*remote, *local, here.scope(*remote));
        let Some(End::Held { unsent, .. }) = heard(others, &name)? else { continue };
        if *unread > 0 || unsent > 0 {
            return Err(refused(format!("{local}: {}", waiting::unaccepted())));
        }
        clients.insert((*local, *remote));
    }
    Ok(clients)
}

fn sorted(capture: &Capture, ends: &[Loose]) -> Result<Told, PluginError> {
    let mut told = Told::default();
    for one in ends {
        match one.told {
            None => {}
            Some(End::Held { listens, .. }) => {
                let name = wire(one.local, one.remote, one.here);
                // Both decide alike.
                let accepts = match (one.listens, listens) {
                    (true, false) => true,
                    (false, true) => false,
                    _ => one.local < one.remote,
                };
                told.wires.insert(one.at, Wire { name, accepts });
            }
            Some(End::Closed { .. }) => {
                told.closed.insert(one.at);
            }
            Some(End::Queued { unread: 0 }) => {
                told.queued.insert(one.at);
            }
            Some(End::Queued { .. }) => {
                let what = capture.job.describe(capture.file(one.socket.index));
                return Err(refused(format!("{what}: {}", waiting::unaccepted())));
            }
        }
    }
    Ok(told)
}
