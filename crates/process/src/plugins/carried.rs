//! Descriptions that no process of the job holds, because they are under way: with messages that
//! wait in its Unix sockets (SCM_RIGHTS).
//!
//! A peek hands this process descriptors of its own for them. They are kept while the job is looked
//! at, and closed with the survey; the queue keeps its own. docs/design/0018-bytes-in-flight.md has
//! the reasons.

use super::job::{Found, Job, UnderWay, Waiting};
use super::procfs;
use super::sockets::{self, queue};
use super::{Plugin, Refusal, recreate, sys};
use rustix::fd::{AsRawFd, OwnedFd};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Most descriptions that are under way, and that no process holds.
const MAX_DESCRIPTIONS: usize = 4096;

/// Adds the descriptions that are under way in the job's sockets, and in those that are under way
/// themselves, to its files.
///
/// While the processes run, only what leaves no trace is looked at: the message that would be
/// received next. All else is found when they stand still.
pub(super) fn find(job: &mut Job, still: bool) -> Result<(), Refusal> {
    let mut sockets: VecDeque<usize> =
        (0..job.files.len()).filter(|index| carries(&job.files[*index], still)).collect();
    let (before, mut buffer) = (job.files.len(), Vec::new());
    if !sockets.is_empty() {
        // Each is one of this process's for a while, and the program may have more than that may.
        recreate::raise_limit();
    }
    while let Some(index) = sockets.pop_front() {
        let added = job.files.len();
        let looked = look_into(job, index, still, &mut buffer);
        looked.map_err(|error| refusal(job, &job.files[index], &error.to_string()))?;
        if job.files.len() - before > MAX_DESCRIPTIONS {
            let why = format!(
                "more than {MAX_DESCRIPTIONS} descriptors are under way in the job's sockets"
            );
            return Err(refusal(job, &job.files[index], &why));
        }
        sockets.extend((added..job.files.len()).filter(|new| carries(&job.files[*new], still)));
    }
    Ok(())
}

/// Whether descriptors wait in this socket, or may, where the kernel (before 5.6) does not tell.
fn carries(file: &Found, still: bool) -> bool {
    file.socket.is_some_and(|kind| kind.domain == libc::AF_UNIX)
        && told(file).map_or(still, |count| count > 0)
}

/// Whether descriptors may be under way in sockets of the running job that a look at it has not
/// found: not all that waits is shown before the job is stopped.
pub(super) fn may_be_unseen(job: &Job) -> bool {
    let is_local = |file: &&Found| file.socket.is_some_and(|kind| kind.domain == libc::AF_UNIX);
    job.files.iter().filter(is_local).any(|file| told(file) != Some(0))
}

/// How many descriptors wait in this socket.
fn told(file: &Found) -> Option<usize> {
    file.info.value("scm_fds")?.parse().ok()
}

/// Adds the descriptions that wait in the socket of index `index`, and keeps all that waits there
/// for its plugin: a second look might not show it all.
fn look_into(job: &mut Job, index: usize, still: bool, buffer: &mut Vec<u8>) -> io::Result<()> {
    let file = &job.files[index];
    let fd = job.duplicate(file).map_err(io::Error::other)?;
    // What waits there are connections, which have their own refusal.
    if sys::socket_number(&fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN)? != 0 {
        return Ok(());
    }
    if !still {
        return queue::peek_descriptors(&fd)?
            .into_iter()
            .try_for_each(|fd| place(job, index, fd).map(drop));
    }
    let pieces = queue::peek(&fd, buffer)?;
    let seen: usize = pieces.iter().map(|piece| piece.passed.len()).sum();
    if told(file).is_some_and(|count| seen < count) {
        return Err(io::Error::other(
            "the kernel does not show all descriptors that are under way in it: those with a \
             message without data that has been looked at before",
        ));
    }
    let mut waiting = Vec::new();
    for queue::Piece { data, from, passed } in pieces {
        let passed = passed.into_iter().map(|fd| place(job, index, fd));
        waiting.push(Waiting { data, from, passed: passed.collect::<Result<_, _>>()? });
    }
    job.files[index].waiting = Some(Arc::new(waiting));
    Ok(())
}

/// Where the description is that `fd`, a descriptor of our own, stands for, and that waits in the
/// socket of index `socket`. One that is unknown is added.
fn place(job: &mut Job, socket: usize, fd: OwnedFd) -> io::Result<(i32, i32)> {
    let index = match job.known(&fd) {
        Some(index) => index,
        None => {
            let file = look(job, socket, fd)?;
            job.add(file);
            job.files.len() - 1
        }
    };
    Ok(job.place(&job.files[index]))
}

/// The description that `fd` stands for, which waits in the socket of index `socket`.
fn look(job: &Job, socket: usize, fd: OwnedFd) -> io::Result<Found> {
    let (socket, me) = (&job.files[socket], std::process::id() as i32);
    let seen = procfs::descriptor(me, fd.as_raw_fd()).map_err(io::Error::other)?;
    let seen =
        seen.ok_or_else(|| io::Error::other("a descriptor that is under way cannot be looked at"))?;
    let (within, name) = match &socket.under_way {
        Some(outer) => (outer.within, outer.socket.clone()),
        None => (socket.holders[0], socket.link.clone()),
    };
    let locks = seen.info.values("lock").map(|line| (within.process, line.to_owned())).collect();
    let mut file = Found::new(Vec::new(), seen, locks);
    file.under_way = Some(UnderWay { own: Arc::new(fd), within, socket: name });
    file.socket = sockets::kind(&file, job);
    Ok(file)
}

/// Why this one, which `plugin` takes, cannot be saved where no process holds it.
pub(super) fn hindrance(file: &Found, job: &Job, plugin: &dyn Plugin) -> Option<String> {
    if !plugin.saves_under_way(file) {
        let name = plugin.name();
        return Some(format!(
            "only a process that holds one of its kind ({name}) can open it again: try again when it \
             has been received"
        ));
    }
    if file.is_path_only() {
        return None;
    }
    let told = job.duplicate(file).map_err(io::Error::other);
    match told.and_then(|fd| Ok((sys::owner(&fd)?.id, sys::owner_signal(&fd)?))) {
        Ok((0, 0)) => None,
        Ok(_) => Some(
            "it has an owner or a signal (F_SETOWN, F_SETSIG), which only a process that holds it \
             can set: try again when it has been received"
                .to_owned(),
        ),
        Err(error) => Some(format!("it cannot be looked at: {error}")),
    }
}

/// The refusal of `file`: under way, it is named by the socket in which it waits.
pub(super) fn refusal(job: &Job, file: &Found, why: &str) -> Refusal {
    let (pid, fd) = job.holder(file);
    let (what, remedy) = match &file.under_way {
        Some(under_way) => {
            let what = under_way.socket.to_string_lossy().into_owned();
            (what, format!("{} is under way in it: {why}", file.what()))
        }
        None => (file.what(), why.to_owned()),
    };
    Refusal { pid, fd: Some(fd), what, remedy }
}
