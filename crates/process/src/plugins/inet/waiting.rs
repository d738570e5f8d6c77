//! Connections that wait to be accepted. Nobody can look at what they hold but by accepting them.

use super::save::{Known, canonical, listens_at};
use super::tcp::{self, State};
use super::wires::Told;
use crate::plugins::Claim;
use crate::plugins::error::{Context, PluginError};
use crate::plugins::job::{Capture, Found, Job};
use crate::plugins::sockets::diagnosis::{Diagnoser, Waiting};
use rustix::fd::OwnedFd;
use rustix::net::getsockname;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Between two looks at what waits.
const TICK: Duration = Duration::from_millis(10);

/// Takes every TCP or UDP socket but one at which bytes wait that cannot be had.
pub(super) fn claim(file: &Found, job: &Job) -> Claim {
    let stream = file.socket.is_some_and(|kind| kind.kind == libc::SOCK_STREAM);
    let Some(fd) = stream.then(|| job.duplicate(file).ok()).flatten() else { return Claim::Yes };
    let begin = Instant::now();
    // What cannot be asked now is asked again when all is stopped.
    while matches!(unheard(&fd, job), Ok(true)) {
        if begin.elapsed() >= job.patience {
            return Claim::Refused(unaccepted());
        }
        std::thread::sleep(TICK);
    }
    Claim::Yes
}

pub(super) fn unaccepted() -> String {
    "a connection of the job's that it has not accepted yet has been written to: try again when it \
     has been accepted"
        .to_owned()
}

/// Whether somebody of the job has written to this socket, which listens, and not been accepted.
fn unheard(fd: &OwnedFd, job: &Job) -> io::Result<bool> {
    let info = tcp::info(fd)?;
    if info.state != State::LISTEN || info.waiting == 0 {
        return Ok(false);
    }
    let local = SocketAddr::try_from(getsockname(fd)?)?;
    let inside = |client| matches!(client, Client::Gone | Client::Inside);
    let all = all_at(local, job)?;
    Ok(all.iter().any(|(waiting, client)| waiting.unread > 0 && inside(*client)))
}

/// Who is at the other end.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Client {
    /// A process of the job.
    Inside,
    Outside,
    /// Nobody any more, on this machine.
    Gone,
}

/// Who waits at the port of `local`.
fn all_at(local: SocketAddr, job: &Job) -> io::Result<Vec<(Waiting, Client)>> {
    let mut kernel = Diagnoser::new()?;
    let mut found = kernel.tcp_without_process(local.port(), local.is_ipv6())?;
    // Others at this port that no process has are closed already, or not yet connected.
    let waits = [State::ESTABLISHED, State::CLOSE_WAIT];
    found.retain(|one| waits.contains(&State::of(one.state)));
    let with_client = |waiting: Waiting| {
        let own = SocketAddr::new(waiting.local, local.port());
        let client = client(waiting, own, job, &mut kernel);
        (waiting, client)
    };
    Ok(found.into_iter().map(with_client).collect())
}

fn client(waiting: Waiting, own: SocketAddr, job: &Job, kernel: &mut Diagnoser) -> Client {
    // Only on this machine have both ends the same address, or both are its own to itself.
    let (here, there) = (own.ip().to_canonical(), waiting.remote.ip().to_canonical());
    if here != there && !(here.is_loopback() && there.is_loopback()) {
        return Client::Outside;
    }
    // An IPv4 socket may have connected to one of IPv6.
    let as_four = (canonical(waiting.remote), canonical(own));
    let told = kernel
        .tcp(waiting.remote, own)
        .or_else(|_| kernel.tcp(as_four.0, as_four.1))
        .map_or(0, |(inode, _)| inode);
    let of_job = |file: &Found| file.socket.is_some() && file.stat.inode == u64::from(told);
    match told {
        0 => Client::Gone,
        _ if job.files.iter().any(of_job) => Client::Inside,
        _ => Client::Outside,
    }
}

/// Those who wait at the port of `local` and whose client no process of this part is.
pub(super) fn outside(local: SocketAddr, job: &Job) -> io::Result<Vec<Waiting>> {
    let all = all_at(local, job)?.into_iter();
    Ok(all.filter(|(_, client)| *client == Client::Outside).map(|(waiting, _)| waiting).collect())
}

/// How many of those who wait at `listener` have closed their ends and sent nothing: a restart
/// makes as many. Who wrote something cannot be saved; who comes from outside is lost.
pub(super) fn gone(
    capture: &mut Capture,
    listener: &Known,
    all: &[Known],
    told: &Told,
) -> Result<u32, PluginError> {
    let some = |one: &Known| one.info.is_some_and(|info| info.waiting > 0);
    let Some(local) = listener.local.filter(|_| some(listener)) else { return Ok(0) };
    // Those of a port that several listen at are the first one's.
    let first = all.iter().find(|one| some(one) && listens_at(one, canonical(local)));
    if first.is_some_and(|first| first.index != listener.index) {
        return Ok(0);
    }
    let what = capture.job.describe(capture.file(listener.index));
    let mut waiting = all_at(local, capture.job).to(|| format!("look at who waits at {what}"))?;
    // They connect again themselves.
    waiting.retain(|(one, _)| {
        let own = canonical(SocketAddr::new(one.local, local.port()));
        !told.clients.contains(&(own, canonical(one.remote)))
    });
    if waiting.iter().any(|(one, client)| one.unread > 0 && *client != Client::Outside) {
        return Err(PluginError::Refused(format!("{what}: {}", unaccepted())));
    }
    let count = |wanted| waiting.iter().filter(|(_, client)| *client == wanted).count();
    if count(Client::Outside) > 0 {
        capture.warnings.push(format!(
            "{} connections from outside of the job wait to be accepted at {what}: a restart has \
             them no more",
            count(Client::Outside)
        ));
    }
    Ok(count(Client::Gone) as u32)
}
