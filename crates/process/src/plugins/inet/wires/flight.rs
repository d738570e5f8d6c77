//! What is on its way between two ends that no part has together: it is let arrive, and stays
//! there.

use super::tell::{End, Loose, TICK};
use super::{LOOK, refused};
use crate::plugins::error::{Context, PluginError};
use crate::plugins::inet::fill;
use crate::plugins::inet::room::Room;
use crate::plugins::inet::save::Known;
use crate::plugins::inet::tcp;
use crate::plugins::job::Capture;
use crate::plugins::{Rendezvous, Stage, sys};
use rustix::fd::AsFd;
use rustix::io::ioctl_fionread;
use std::io;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long nothing may arrive, with room for all of it, before it is given up. A lost segment is
/// sent again after 200 ms, and after twice that the next time.
const STILL: Duration = Duration::from_secs(3);
/// How long one waits for the others before it looks again at what arrives here.
const TURN: Duration = Duration::from_millis(2);

/// Has the kernel acknowledge at once what has arrived.
pub(super) fn acknowledge(socket: &Known) {
    let on = 1i32.to_ne_bytes();
    // It only makes the end of this come sooner.
    let _ = sys::set_socket_option(&socket.fd, libc::IPPROTO_TCP, libc::TCP_QUICKACK, &on);
}

/// Returns the bytes that this end has sent and the other one has not acknowledged.
pub(super) fn held(one: &Loose) -> Result<usize, PluginError> {
    fill::held(one.socket).to(|| format!("look at {}>{}", one.local, one.remote))
}

pub(super) fn unsent(ends: &[Loose]) -> Result<usize, PluginError> {
    ends.iter().try_fold(0usize, |all, one| Ok(all.saturating_add(held(one)?)))
}

/// One end whose other end is the job's.
struct Flight<'a> {
    end: &'a Loose<'a>,
    /// The bytes that wait here and come still, where room is made for them.
    bytes: usize,
    room: Option<Room<'a>>,
}

impl<'a> Flight<'a> {
    /// `None`: nobody of the job is at the other end, or it waits to be accepted.
    fn of(end: &'a Loose<'a>) -> Result<Option<Flight<'a>>, PluginError> {
        let coming = match end.told {
            Some(End::Held { unsent, .. }) => unsent,
            Some(End::Closed { unsent }) => unsent.into(),
            Some(End::Queued { .. }) | None => return Ok(None),
        };
        let unread = ioctl_fionread(&end.socket.fd).to(|| "look at a connection")?;
        let bytes = usize::try_from(coming.saturating_add(unread)).unwrap_or(usize::MAX);
        if bytes > fill::MAX_WAITING {
            return Err(refused(format!("{}: more waits than any connection holds", end.local)));
        }
        let room = (coming > 0).then(|| Room::for_all(end.socket.fd.as_fd(), bytes));
        Ok(Some(Flight { end, bytes, room }))
    }

    fn announce(&self) {
        acknowledge(self.end.socket);
        self.room.iter().for_each(Room::announce);
    }

    /// Tells how much has not arrived: of what this end has sent, or of what comes from one that
    /// was closed, its end among it.
    fn left(&self) -> Result<usize, PluginError> {
        if !matches!(self.end.told, Some(End::Closed { .. })) {
            return held(self.end);
        }
        let what = || "look at a connection";
        if tcp::info(&self.end.socket.fd).to(what)?.state.peer_finished() {
            return Ok(0);
        }
        let unread = ioctl_fionread(&self.end.socket.fd).to(what)?;
        Ok(self.bytes.saturating_sub(usize::try_from(unread).unwrap_or(usize::MAX)).max(1))
    }
}

/// Returns when all that was on its way has arrived, at every part.
pub(super) fn arrive(
    others: Option<&dyn Rendezvous>,
    capture: &Capture,
    ends: &[Loose],
) -> Result<(), PluginError> {
    let flights = ends.iter().map(Flight::of).collect::<Result<Vec<_>, _>>()?;
    let flights: Vec<Flight> = flights.into_iter().flatten().collect();
    let still = || others.map_or(Ok(()), |others| others.still().map_err(refused));
    let (mut last, mut least) = (Instant::now(), usize::MAX);
    loop {
        flights.iter().for_each(Flight::announce);
        let mut left = 0usize;
        for flight in &flights {
            left = left.saturating_add(flight.left()?);
        }
        if left == 0 {
            break;
        }
        if left < least {
            (least, last) = (left, Instant::now());
        }
        if last.elapsed() > STILL {
            return Err(stuck(capture, &flights));
        }
        still()?;
        sleep(TICK);
    }
    let Some(others) = others else { return Ok(()) };
    let wait = if flights.iter().any(|flight| flight.room.is_some()) { TURN } else { LOOK };
    while !others.meet(Stage::Arrived, wait).map_err(refused)? {
        flights.iter().for_each(Flight::announce);
    }
    Ok(())
}

fn stuck(capture: &Capture, flights: &[Flight]) -> PluginError {
    let slow = flights.iter().find_map(|flight| {
        let left = flight.left().ok().filter(|left| *left > 0)?;
        let name = capture.job.describe(capture.file(flight.end.socket.index));
        let (local, remote) = (flight.end.local, flight.end.remote);
        Some(format!("let {left} bytes of {name}, {local}>{remote}, arrive"))
    });
    let what = format!(
        "{}: try again when it has been read from, see whether the network is up, or raise \
         net.core.rmem_max",
        slow.unwrap_or_else(|| "let what is on its way arrive".to_owned())
    );
    PluginError::System { what, source: io::Error::from(io::ErrorKind::TimedOut) }
}
