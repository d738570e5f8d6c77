//! Connections that wait to be accepted. Nobody can look at what they hold but by accepting them.

use crate::plugins::job::{Found, Job};
use crate::plugins::sockets::diagnosis::Diagnoser;
use crate::plugins::{Claim, sys};
use std::io;
use std::time::{Duration, Instant};

/// Between two looks at what waits.
const TICK: Duration = Duration::from_millis(10);

/// Takes every Unix socket but one at which bytes wait that cannot be had.
pub(super) fn claim(file: &Found, job: &Job) -> Claim {
    if file.socket.is_none_or(|kind| kind.kind == libc::SOCK_DGRAM) {
        return Claim::Yes;
    }
    let begin = Instant::now();
    // What cannot be asked now is asked again when all is stopped.
    while matches!(unheard(file, job), Ok(true)) {
        if begin.elapsed() >= job.patience {
            return Claim::Refused(unaccepted());
        }
        std::thread::sleep(TICK);
    }
    Claim::Yes
}

pub(super) fn unaccepted() -> String {
    "a connection that it has not accepted yet has been written to, or its other end is gone: try \
     again when it has been accepted"
        .to_owned()
}

/// Whether somebody has written to this socket, which listens, and not been accepted. Nobody knows
/// what those have written who are gone.
fn unheard(file: &Found, job: &Job) -> io::Result<bool> {
    let fd = job.duplicate(file).map_err(io::Error::other)?;
    if sys::socket_number(&fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN)? == 0 {
        return Ok(false);
    }
    let waiting = Diagnoser::new()?.unix(file.stat.inode)?.waiting;
    let of_job = |inode: &u32| {
        job.files.iter().find(|file| file.socket.is_some() && file.stat.inode == u64::from(*inode))
    };
    let wrote = |client: &Found| {
        job.duplicate(client).is_ok_and(|client| sys::unsent(&client).is_ok_and(|count| count > 0))
    };
    Ok(waiting.contains(&0) || waiting.iter().filter_map(of_job).any(wrote))
}
