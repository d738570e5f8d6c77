//! A restart: connections between parts are made anew, at their old addresses where those are
//! there.
//!
//! Whoever accepted listens and says where; all others connect; then what waited is put back, by
//! all parts in the order of the connections' names, so that no two wait for each other.

use super::greet::{self, HALF, Token};
use super::place::{Here, Offer, for_family};
use super::{Wire, heard, meet, refused, say};
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::inet::save::canonical;
use crate::plugins::inet::{Role, Socket, connect, fill};
use crate::plugins::world::World;
use crate::plugins::{Rendezvous, Stage};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::retry_on_intr;
use rustix::net::{SocketFlags, accept_with, getpeername, getsockname};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

/// How long somebody who has begun to say who it is may take.
const HELLO: Duration = Duration::from_millis(500);
/// Most connections at a time whose other ends have said nothing.
const MAX_SILENT: usize = 1024;
/// How long one that was found may take to answer, where it has other addresses as well.
const ANSWER: Duration = Duration::from_secs(5);
/// How long the other ends may take in all once every part has said where it is.
const ALL: Duration = Duration::from_secs(60);

/// What is published of the end that listens.
#[derive(Debug, Serialize, Deserialize)]
struct Door {
    offer: Offer,
    token: Token,
}

/// One connection, as this part has it.
struct End<'a> {
    wire: &'a Wire,
    socket: &'a Socket,
    remote: SocketAddr,
    /// What waited here.
    data: Vec<u8>,
    token: Token,
    /// Made anew, and how much waited at the other end.
    made: Option<(OwnedFd, usize)>,
}

/// Makes the connections to other parts among `sockets`; nothing else has their ports meanwhile.
pub(in super::super) fn tie(
    sockets: &BTreeMap<u32, Socket>,
    others: &dyn Rendezvous,
    here: &Here,
    world: &mut World,
) -> Result<(), PluginError> {
    let mut ends = ends(sockets, world)?;
    let doors = Doors::open(&mut ends, others, here, world)?;
    meet(others, Stage::Offered)?;
    let mut calls = Vec::new();
    for (at, end) in ends.iter().enumerate().filter(|(_, end)| !end.wire.accepts) {
        calls.push((at, Call::begin(end, others, here)?));
    }
    doors.admit(&mut ends, others)?;
    for (at, call) in calls {
        let made = call.answered(&ends[at], others)?;
        ends[at].made = Some(made);
    }
    drop(doors);
    for end in ends {
        let name = &end.wire.name;
        let Some((fd, waited)) = end.made else { return Err(damaged(format!("{name} twice"))) };
        greet::carry(&fd, &end.data, waited).to(|| {
            format!("put back what waited in {name} (see net.core.wmem_max, net.core.rmem_max)")
        })?;
        notice(&fd, &end.socket.local.zip(Some(end.remote)), world);
        super::super::make::finish(&fd, end.socket)?;
        world.made(end.socket.description, fd)?;
    }
    Ok(())
}

/// In the order of their names, each of which is there once.
fn ends<'a>(
    sockets: &'a BTreeMap<u32, Socket>,
    world: &World,
) -> Result<Vec<End<'a>>, PluginError> {
    let mut ends = BTreeMap::new();
    for socket in sockets.values() {
        let Role::Wire { wire, remote } = &socket.role else { continue };
        let mut data = Vec::new();
        for message in &socket.queue {
            data.extend(world.blob(&message.data)?);
        }
        if data.len() > fill::MAX_WAITING {
            return Err(damaged("more waits than any connection holds"));
        }
        let token = [[0; HALF]; 2];
        let end = End { wire, socket, remote: *remote, data, token, made: None };
        if ends.insert(&*wire.name, end).is_some() {
            return Err(damaged(format!("{} twice", wire.name)));
        }
    }
    Ok(ends.into_values().collect())
}

/// Says so where a connection has other addresses than it had.
fn notice(fd: &OwnedFd, before: &Option<(SocketAddr, SocketAddr)>, world: &mut World) {
    let own = getsockname(fd).ok().and_then(|any| SocketAddr::try_from(any).ok());
    let peer = getpeername(fd).ok().flatten().and_then(|any| SocketAddr::try_from(any).ok());
    let (Some((local, remote)), Some((own, peer))) = (before, own.zip(peer)) else { return };
    if canonical(*local) != canonical(own) || canonical(*remote) != canonical(peer) {
        world.note(format!("the connection {local}>{remote} is {own}>{peer} now"));
    }
}

/// Who listens for the connections that this part accepts.
struct Doors(Vec<(bool, SocketAddr, OwnedFd)>);

impl Doors {
    /// Listens, and says where.
    fn open(
        ends: &mut [End],
        others: &dyn Rendezvous,
        here: &Here,
        world: &mut World,
    ) -> Result<Doors, PluginError> {
        let mut doors = Doors(Vec::new());
        for end in ends.iter_mut().filter(|end| end.wire.accepts) {
            let name = &end.wire.name;
            let local =
                end.socket.local.ok_or_else(|| damaged(format!("{name} has no address")))?;
            let at = doors.at(end.socket.six, local, world)?;
            let mut bytes = [0; 2 * HALF];
            let what = || "draw a random number";
            let got = retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty())).to(what)?;
            if got != bytes.len() {
                return Err(refused("the kernel has no random numbers".to_owned()));
            }
            end.token[0].copy_from_slice(&bytes[..HALF]);
            end.token[1].copy_from_slice(&bytes[HALF..]);
            say(others, name, &Door { offer: here.offer(at), token: end.token })?;
        }
        Ok(doors)
    }

    /// Listens at every address, and at the port of `local` if that can be had.
    fn at(
        &mut self,
        six: bool,
        local: SocketAddr,
        world: &mut World,
    ) -> Result<SocketAddr, PluginError> {
        let local = canonical(local);
        let known = |door: &&(bool, SocketAddr, OwnedFd)| {
            door.0 == six && door.1.is_ipv4() == local.is_ipv4() && door.1.port() == local.port()
        };
        if let Some((_, _, fd)) = self.0.iter().find(known) {
            return bound(fd).to(|| "look at a socket");
        }
        let any: SocketAddr = match local.is_ipv4() {
            true => for_family(SocketAddr::from(([0; 4], local.port())), six),
            false => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), local.port()),
        };
        let made = connect::door(six, any, world).or_else(|error| {
            world
                .note(format!("the port of {local} cannot be had ({error}): another one is taken"));
            connect::door(six, SocketAddr::new(any.ip(), 0), world)
        });
        let fd = made.to(|| format!("listen for the connections of {local}"))?;
        let at = bound(&fd).to(|| "look at a socket")?;
        self.0.push((six, local, fd));
        Ok(at)
    }

    /// Accepts what connects until each of `ends` that this part accepts has its other end.
    fn admit(&self, ends: &mut [End], others: &dyn Rendezvous) -> Result<(), PluginError> {
        let (begin, mut silent) = (Instant::now(), Vec::new());
        loop {
            let waits = |end: &&End| end.wire.accepts && end.made.is_none();
            let Some(missing) = ends.iter().find(waits).map(|end| end.wire.name.clone()) else {
                return Ok(());
            };
            others.still().map_err(refused)?;
            if begin.elapsed() > ALL {
                return Err(refused(format!(
                    "nobody has connected for {missing}: let the hosts reach each other"
                )));
            }
            for fd in self.knocked(&mut silent).to(|| "wait for connections")? {
                // A stranger, or one that has lost patience, is no reason to fail.
                if let Ok((name, half, waited)) = greet::called(&fd, HELLO)
                    && let Some(end) = ends.iter_mut().find(|end| end.wire.name == name)
                    && end.wire.accepts
                    && greet::is_right(&half, &end.token)
                    && greet::answer(&fd, &end.token, end.data.len()).is_ok()
                {
                    // It may have tried another address before.
                    end.made = Some((fd, waited));
                }
            }
        }
    }

    /// Those who have connected and said something, after a moment at most. Whoever says nothing
    /// stays in `silent` and holds up nobody; of too many of them the first goes.
    fn knocked(&self, silent: &mut Vec<OwnedFd>) -> io::Result<Vec<OwnedFd>> {
        let fds = self.0.iter().map(|(_, _, fd)| fd).chain(&*silent);
        let mut fds: Vec<PollFd> = fds.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let wait = Timespec { tv_sec: 0, tv_nsec: super::LOOK.subsec_nanos().into() };
        retry_on_intr(|| poll(&mut fds, Some(&wait)))?;
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let (doors, said) = ready.split_at(self.0.len());
        let mut said = said.iter();
        let speak = |_: &mut OwnedFd| said.next().copied().unwrap_or(false);
        let found = silent.extract_if(.., speak).collect();
        for ((_, _, door), _) in self.0.iter().zip(doors).filter(|(_, ready)| **ready) {
            // Whoever has hung up again is gone.
            silent.extend(accept_with(door, SocketFlags::CLOEXEC));
        }
        silent.drain(..silent.len().saturating_sub(MAX_SILENT));
        Ok(found)
    }
}

fn bound(fd: &OwnedFd) -> io::Result<SocketAddr> {
    Ok(canonical(SocketAddr::try_from(getsockname(fd)?)?))
}

/// A connection that has begun.
struct Call {
    fd: OwnedFd,
    token: Token,
    /// Where else the other end may be.
    left: VecDeque<SocketAddr>,
    here: Here,
}

impl Call {
    fn begin(end: &End, others: &dyn Rendezvous, here: &Here) -> Result<Call, PluginError> {
        let name = &end.wire.name;
        let door: Option<Door> = heard(others, name)?;
        let Some(Door { offer, token }) = door else {
            return Err(refused(format!("no part has the other end of {name}")));
        };
        let mut left: VecDeque<SocketAddr> = here.choose(&offer, end.remote).into();
        let what = || format!("connect {name} again: let the hosts reach each other");
        let fd = dial(end, &mut left, &token, here).to(what)?;
        Ok(Call { fd, token, left, here: here.clone() })
    }

    /// Waits for the answer; tries its other addresses where the first that answers is another's.
    fn answered(
        mut self,
        end: &End,
        others: &dyn Rendezvous,
    ) -> Result<(OwnedFd, usize), PluginError> {
        let what = || format!("connect {} again", end.wire.name);
        loop {
            others.still().map_err(refused)?;
            let wait = if self.left.is_empty() { ALL } else { ANSWER };
            match greet::answered(&self.fd, &self.token, wait) {
                Ok(waited) => return Ok((self.fd, waited)),
                Err(error) if self.left.is_empty() => return Err(error).to(what),
                Err(_) => self.fd = dial(end, &mut self.left, &self.token, &self.here).to(what)?,
            }
        }
    }
}

/// Connects to the first of `left` where somebody listens, and says who it is.
fn dial(
    end: &End,
    left: &mut VecDeque<SocketAddr>,
    token: &Token,
    here: &Here,
) -> io::Result<OwnedFd> {
    let mut failed = io::Error::new(ErrorKind::AddrNotAvailable, "it has no address of that kind");
    while let Some(to) = left.pop_front() {
        let six = end.socket.six;
        // Loopback reaches itself alone.
        let fits = |ip: IpAddr| here.has(ip) && ip.is_loopback() == to.ip().is_loopback();
        let own = end.socket.local.map(canonical).map(|local| match fits(local.ip()) {
            true => local,
            false if local.is_ipv4() => SocketAddr::from(([0; 4], local.port())),
            false => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), local.port()),
        });
        let own = own.map(|own| for_family(own, six));
        match connect::dial(six, own, for_family(to, six)) {
            Ok(fd) => {
                greet::call(&fd, &end.wire.name, token, end.data.len())?;
                return Ok(fd);
            }
            Err(error) => failed = error,
        }
    }
    Err(failed)
}
