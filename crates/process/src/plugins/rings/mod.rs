//! io_uring: rings that have nothing under way, with what lies in them: requests that were not
//! submitted as yet, and completions that were not read. docs/design/0040-io-rings.md tells what
//! the kernel lets be known of a ring, and what is refused.

mod kernel;
mod turn;

use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::procfs::{self, FdInfo};
use crate::plugins::world::World;
use crate::plugins::{Blob, Claim, Plugin, survey};
use kernel::{Layout, MAX_COMPLETIONS, MAX_ENTRIES, SQE, Shared};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};
use turn::Contents;

/// How often a ring is asked that is at work, and tells nothing meanwhile.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(1);
/// Groups of buffers that are looked for, those that programs number first: fewer while the job
/// stands still.
const GROUPS: u16 = 4095;
const FIRST_GROUPS: u16 = 255;
/// Requests above which the user is told: so many take some seconds to be submitted.
const NOTICE_THRESHOLD: u64 = 1 << 23;
const PAGE: u64 = 4096;

#[derive(Debug)]
pub(crate) struct Rings;

/// A ring: its counters, which only grow, and what it holds.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Saved {
    description: u32,
    entries: u32,
    completions: u32,
    layout: Layout,
    sq_head: u32,
    sq_tail: u32,
    cq_head: u32,
    cq_tail: u32,
    /// Requests that were none, and completions that found no room.
    dropped: u32,
    overflow: u32,
    cq_flags: u32,
    contents: Blob,
}

impl Plugin for Rings {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn claim(&self, file: &Found, job: &Job) -> Claim {
        if !is_one(file) {
            return Claim::No;
        }
        match refusal(file, job) {
            Ok(None) => Claim::Yes,
            Ok(Some(why)) => Claim::Refused(why),
            Err(error) => Claim::Refused(format!("it cannot be looked at: {error}")),
        }
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        state(mine.iter().map(|index| save(capture, *index)))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        world.parse::<Vec<Saved>>(state)?.iter().try_for_each(|saved| make(saved, world))
    }
}

pub(crate) fn is_one(file: &Found) -> bool {
    file.anonymous() == Some("io_uring")
}

/// What fdinfo tells of a ring.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    /// The kernel's thread that submits (IORING_SETUP_SQPOLL).
    thread: bool,
    files: bool,
    buffers: bool,
    personalities: bool,
    /// Requests that wait for something that may never come.
    waiting: bool,
    /// Completions for which there is no room.
    overflown: bool,
}

impl Told {
    /// `None` of a ring at whose counters something is at work: the kernel then tells nothing.
    fn parse(info: &FdInfo) -> Option<Told> {
        let some = |name| info.value(name).map(|value| value != "0");
        let below = |start: &str| info.more.iter().any(|line| line.starts_with(start));
        Some(Told {
            thread: info.value("SqThread")? != "-1",
            files: some("UserFiles")?,
            buffers: some("UserBufs")?,
            personalities: below("Personalities"),
            waiting: below("  op="),
            overflown: below("  user_data="),
        })
    }

    /// Why such a ring cannot be saved.
    fn refusal(&self) -> Option<&'static str> {
        [
            (self.thread, "it has a thread of the kernel's (IORING_SETUP_SQPOLL)"),
            (self.files, "it has registered files (IORING_REGISTER_FILES)"),
            (self.buffers, "it has registered buffers (IORING_REGISTER_BUFFERS)"),
            (self.personalities, "it has registered credentials (IORING_REGISTER_PERSONALITY)"),
        ]
        .into_iter()
        .find_map(|(has, what)| has.then_some(what))
    }
}

fn told(file: &Found, job: &Job) -> io::Result<Told> {
    let (pid, fd) = job.place(file);
    for _ in 0..TRIES {
        let seen =
            procfs::descriptor(pid, fd).map_err(|error| io::Error::other(error.to_string()))?;
        if let Some(told) = seen.and_then(|seen| Told::parse(&seen.info)) {
            return Ok(told);
        }
        thread::sleep(PAUSE);
    }
    Err(io::Error::other("the kernel does not tell what it has registered"))
}

/// What lets programs with libuv do without.
const WITHOUT: &str = "programs with libuv do without io_uring if they are started with UV_USE_IO_URING=0 \
                       (Node.js) or USE_LIBUV=0 (PyTorch)";

/// Why the ring cannot be saved, whatever it does at the moment.
fn refusal(file: &Found, job: &Job) -> io::Result<Option<String>> {
    let refused = |what: &str| Ok(Some(format!("{what}, which kedge cannot save yet; {WITHOUT}")));
    if let Some(what) = told(file, job)?.refusal() {
        return refused(what);
    }
    // Its mappings are known by its inode.
    if job.same(file).count() > 1 {
        return refused("this kernel gives it no inode of its own");
    }
    let ring = job.duplicate(file).map_err(|error| io::Error::other(error.to_string()))?;
    let ring = ring.as_fd();
    let (entries, completions) = match size(ring) {
        Ok(size) => size,
        Err(_) => return refused("its memory is the program's own (IORING_SETUP_NO_MMAP)"),
    };
    if let Some(what) = registered(ring) {
        return refused(what);
    }
    let groups = if job.patience.is_zero() { FIRST_GROUPS } else { GROUPS };
    if (0..=groups).any(|group| kernel::has_buffers(ring, group)) {
        return refused("it has buffers to choose from (IORING_REGISTER_PBUF_RING)");
    }
    if let Some(what) = polls(ring, completions)? {
        return refused(what);
    }
    match has_large_entries(ring, entries, completions)? {
        true => refused("its entries are large ones (IORING_SETUP_SQE128, IORING_SETUP_CQE32)"),
        false if job.patience.is_zero() => Ok(None),
        false => lasting(file, job),
    }
}

/// Why a ring of the running job cannot be saved for what it has under way, where that lasts: what
/// ends by itself is waited for when the job stands still.
fn lasting(file: &Found, job: &Job) -> io::Result<Option<String>> {
    /// As long as the stopped job would be waited for.
    const STUCK: Duration = Duration::from_secs(1);
    let ring = job.duplicate(file).map_err(|error| io::Error::other(error.to_string()))?;
    let (begin, mut first) = (Instant::now(), None);
    loop {
        let told = told(file, job)?;
        let (saved, contents) = read(&ring, 0)?;
        let Some(hindrance) = hindrance(&told, &saved, &contents) else { return Ok(None) };
        let counters = (saved.sq_head, saved.cq_tail);
        let (was, since) = *first.get_or_insert((hindrance, counters));
        // It comes and goes, or the ring is at work.
        if was != hindrance || hindrance.ends() && since != counters {
            return Ok(None);
        }
        if begin.elapsed() >= if hindrance.ends() { STUCK } else { job.patience } {
            return Ok(Some(format!("{hindrance}; {WITHOUT}")));
        }
        thread::sleep(PAUSE);
    }
}

/// What of a ring's work cannot be saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hindrance {
    Waiting,
    Overflown,
    UnderWay(i32),
    Several,
    Credentials,
}

impl Hindrance {
    /// Whether it may end by itself, as what works on files does.
    fn ends(self) -> bool {
        matches!(self, Hindrance::UnderWay(_))
    }
}

impl std::fmt::Display for Hindrance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Hindrance::Waiting => f.write_str("it has requests under way that wait for something"),
            Hindrance::Overflown => {
                f.write_str("it has more completions than there is room for: read them")
            }
            Hindrance::UnderWay(count) => write!(f, "{count} of its requests are under way"),
            Hindrance::Several => f.write_str("it has had several completions of one request"),
            Hindrance::Credentials => {
                f.write_str("its requests name credentials (IORING_REGISTER_PERSONALITY)")
            }
        }
    }
}

fn hindrance(told: &Told, saved: &Saved, contents: &Contents) -> Option<Hindrance> {
    if told.waiting {
        return Some(Hindrance::Waiting);
    }
    if told.overflown {
        return Some(Hindrance::Overflown);
    }
    match i32::try_from(saved.under_way()) {
        Ok(0) if !contents.have_several() => {
            contents.name_credentials().then_some(Hindrance::Credentials)
        }
        Ok(count @ 1..) => Some(Hindrance::UnderWay(count)),
        _ => Some(Hindrance::Several),
    }
}

/// What the ring has registered that fdinfo does not tell, or why that is not known.
fn registered(ring: BorrowedFd<'_>) -> Option<&'static str> {
    match kernel::ask_for_eventfd(ring) {
        Some(libc::EBADF) => None,
        Some(libc::EBUSY) => Some("it has a registered eventfd (IORING_REGISTER_EVENTFD)"),
        Some(libc::EEXIST) => Some(
            "it is one thread's alone (IORING_SETUP_SINGLE_ISSUER, IORING_SETUP_DEFER_TASKRUN)",
        ),
        Some(libc::EACCES) => Some("it is restricted (IORING_REGISTER_RESTRICTIONS)"),
        _ => Some("the kernel does not tell what it has registered"),
    }
}

/// Whether completions are polled for, or none are made at all.
fn polls(ring: BorrowedFd<'_>, completions: u32) -> io::Result<Option<&'static str>> {
    const POLLED: &str = "it is polled (IORING_SETUP_IOPOLL)";
    let ordinary = kernel::set_up(1, 2)?;
    let knows = kernel::ask_for_busy_polls(ordinary.fd.as_fd()) == Some(libc::EFAULT);
    if knows && kernel::ask_for_busy_polls(ring) != Some(libc::EFAULT) {
        return Ok(Some(POLLED));
    }
    let queues = Shared::queues(ring, PAGE)?;
    let Layout { cq_head, cq_tail, .. } = ordinary.layout;
    let (head, tail) = (queues.get(cq_head)?, queues.get(cq_tail)?);
    match kernel::waits(ring, completions) {
        Ok(true) => Ok(None),
        // Where there was a completion, or one has come, nobody waits: that tells nothing.
        Ok(false) => {
            let empty = head == tail && tail == queues.get(cq_tail)?;
            Ok((empty && !knows).then_some(POLLED))
        }
        Err(error) => match error.raw_os_error() {
            Some(libc::EBADFD) => Ok(Some("it is not enabled (IORING_SETUP_R_DISABLED)")),
            Some(libc::EEXIST) => Ok(Some("it is one thread's alone (IORING_SETUP_DEFER_TASKRUN)")),
            _ => Err(error),
        },
    }
}

/// Where this kernel puts what, as a ring that is made for it once tells.
fn layout() -> io::Result<Layout> {
    static LAYOUT: OnceLock<Layout> = OnceLock::new();
    match LAYOUT.get() {
        Some(layout) => Ok(*layout),
        None => kernel::set_up(1, 2).map(|made| *LAYOUT.get_or_init(|| made.layout)),
    }
}

/// The entries of both queues.
fn size(ring: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    let (layout, queues) = (layout()?, Shared::queues(ring, PAGE)?);
    let (entries, completions) = (queues.get(layout.sq_entries)?, queues.get(layout.cq_entries)?);
    match are_possible(entries, completions) {
        true => Ok((entries, completions)),
        false => Err(io::Error::other("its queues have an impossible size")),
    }
}

fn are_possible(entries: u32, completions: u32) -> bool {
    let is = |count: u32, most: u32| count.is_power_of_two() && count <= most;
    is(entries, MAX_ENTRIES) && is(completions, MAX_COMPLETIONS) && entries <= completions
}

/// Whether its entries are other than those of an ordinary ring: then its memory is longer.
fn has_large_entries(ring: BorrowedFd<'_>, entries: u32, completions: u32) -> io::Result<bool> {
    let made = kernel::set_up(entries, completions)?;
    let queues = (made.array + u64::from(entries) * 4).next_multiple_of(PAGE);
    let requests = (u64::from(entries) * SQE).next_multiple_of(PAGE);
    // How much memory there is, up to one page more than there should be.
    let there = |ring: BorrowedFd<'_>| {
        let length = |shared: io::Result<Shared>, bytes: u64| {
            shared.and_then(|shared| shared.read(0, bytes)).map_or(0, |bytes| bytes.len())
        };
        let more = |bytes: u64| bytes + PAGE;
        (
            length(Shared::queues(ring, more(queues)), more(queues)),
            length(Shared::requests(ring, requests), requests),
            length(Shared::requests(ring, more(requests)), more(requests)),
        )
    };
    let (its, usual) = (there(ring), there(made.fd.as_fd()));
    // One without an array (IORING_SETUP_NO_SQARRAY) is shorter.
    Ok(its.0 > usual.0 || (its.1, its.2) != (usual.1, usual.2))
}

fn save(capture: &mut Capture, index: usize) -> Result<Saved, PluginError> {
    let what = capture.job.describe(capture.file(index));
    let told = told(capture.file(index), capture.job).to(|| format!("look at {what}"))?;
    let ring = capture.duplicate(index)?;
    let (mut saved, contents) = read(&ring, index).to(|| format!("read {what}"))?;
    let refused = |why: String| Err(PluginError::Refused(format!("{what} cannot be saved: {why}")));
    if let Some(hindrance) = hindrance(&told, &saved, &contents) {
        return refused(hindrance.to_string());
    }
    saved.contents = capture.blob(&contents.joined())?;
    Ok(saved)
}

/// Whether a ring of the process `pid` has requests under way that may end by themselves.
pub(crate) fn are_at_work(pid: i32) -> bool {
    let Ok(process) = survey::process(pid) else { return false };
    let at_work = |fd: i32| -> Option<bool> {
        let seen = procfs::descriptor(process.at, fd).ok()??;
        if seen.link.to_str()? != "anon_inode:[io_uring]" {
            return None;
        }
        let ring = pidfd_getfd(&process.pidfd, fd, PidfdGetfdFlags::empty()).ok()?;
        let saved = counters(ring.as_fd(), 0).ok()?;
        let waits = Told::parse(&seen.info).is_some_and(|told| told.waiting);
        Some(!waits && saved.under_way() as i32 > 0)
    };
    let all = procfs::descriptors(process.at).unwrap_or_default();
    all.into_iter().any(|fd| at_work(fd) == Some(true))
}

fn counters(ring: BorrowedFd<'_>, index: usize) -> io::Result<Saved> {
    let (entries, completions) = size(ring)?;
    let (layout, queues) = (layout()?, Shared::queues(ring, PAGE)?);
    let get = |at| queues.get(at);
    Ok(Saved {
        description: index as u32,
        entries,
        completions,
        layout,
        sq_head: get(layout.sq_head)?,
        sq_tail: get(layout.sq_tail)?,
        cq_head: get(layout.cq_head)?,
        cq_tail: get(layout.cq_tail)?,
        dropped: get(layout.sq_dropped)?,
        overflow: get(layout.cq_overflow)?,
        cq_flags: get(layout.cq_flags)?,
        contents: Blob::default(),
    })
}

fn read(ring: &OwnedFd, index: usize) -> io::Result<(Saved, Contents)> {
    let saved = counters(ring.as_fd(), index)?;
    let (array_bytes, cqe_bytes, sqe_bytes) = Contents::lengths(&saved);
    let array = saved.layout.array(saved.completions);
    let queues = Shared::queues(ring.as_fd(), array + array_bytes)?;
    let requests = Shared::requests(ring.as_fd(), sqe_bytes)?;
    // One without an array may be shorter.
    let mut array = queues.read(array, array_bytes)?;
    array.resize(array_bytes as usize, 0);
    let contents = Contents {
        array,
        completions: queues.read(saved.layout.cqes.into(), cqe_bytes)?,
        requests: requests.read(0, sqe_bytes)?,
    };
    let lengths = (contents.completions.len() as u64, contents.requests.len() as u64);
    if lengths != (cqe_bytes, sqe_bytes) {
        return Err(io::Error::other("its memory is shorter than its queues"));
    }
    Ok((saved, contents))
}

fn make(saved: &Saved, world: &mut World) -> Result<(), PluginError> {
    if !saved.is_possible() {
        return Err(damaged("a ring of io_uring that is impossible"));
    }
    let contents = Contents::of(saved, world.blob(&saved.contents)?);
    let contents = contents.ok_or_else(|| damaged("the contents of a ring of io_uring"))?;
    let (silent, read, unread) = saved.steps();
    let requests = silent + read + unread;
    if requests > NOTICE_THRESHOLD {
        world.tell(&format!(
            "turning a ring of io_uring to where it was, by {requests} requests that do nothing"
        ));
    }
    // By a thread that ends: the kernel notes who has submitted to a ring.
    let made = thread::scope(|scope| scope.spawn(|| turn::make(saved, &contents)).join());
    let made = made.unwrap_or_else(|_| Err(io::Error::other("its thread has ended")));
    world.made(saved.description, made.to(|| "make a ring of io_uring again")?)
}

impl Saved {
    /// How many requests have no completion as yet, if each has one.
    fn under_way(&self) -> u32 {
        let submitted = self.sq_head.wrapping_sub(self.dropped);
        submitted.wrapping_sub(self.cq_tail.wrapping_add(self.overflow))
    }

    fn is_possible(&self) -> bool {
        let unsubmitted = self.sq_tail.wrapping_sub(self.sq_head);
        let unread = self.cq_tail.wrapping_sub(self.cq_head);
        are_possible(self.entries, self.completions)
            && unsubmitted <= self.entries
            && unread <= self.completions
    }

    /// How many requests turn a new ring to where this one was: ones without a completion, ones
    /// whose completion was read, and ones whose completion was not.
    fn steps(&self) -> (u64, u64, u64) {
        const ROUND: u64 = 1 << 32;
        let unread = u64::from(self.cq_tail.wrapping_sub(self.cq_head));
        let mut completed = u64::from(self.cq_tail);
        if completed < unread {
            completed += ROUND;
        }
        let mut submitted = u64::from(self.sq_head);
        while submitted < completed {
            submitted += ROUND;
        }
        (submitted - completed, completed - unread, unread)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(more: &str) -> FdInfo {
        FdInfo { more: more.lines().map(str::to_owned).collect(), ..FdInfo::default() }
    }

    const IDLE: &str = "SqMask:\t0x3\nSqHead:\t7\nSQEs:\t1\n    0: opcode:NOP, fd:0\nCQEs:\t1\n    \
                        0: user_data:5, res:0, flags:0\nSqThread:\t-1\nUserFiles:\t0\nUserBufs:\t0\nPollList:\n\
                        CqOverflowList:\nNAPI:\tdisabled";

    #[test]
    fn what_the_kernel_tells_is_read() {
        let idle = Told::parse(&info(IDLE)).unwrap();
        assert!(idle.refusal().is_none() && !idle.waiting && !idle.overflown);
        let with = |from: &str, to: &str| Told::parse(&info(&IDLE.replace(from, to))).unwrap();
        assert!(with("UserFiles:\t0", "UserFiles:\t2\n    0: /tmp/a").files);
        assert!(with("UserBufs:\t0", "UserBufs:\t1").buffers);
        assert!(with("SqThread:\t-1", "SqThread:\t77").thread);
        assert!(with("PollList:", "PollList:\n  op=6, task_works=0").waiting);
        assert!(with("List:\nNAPI", "List:\n  user_data=1, res=0, flags=0\nNAPI").overflown);
        assert!(with("PollList:", "Personalities:\n    1\n\tuid=0\nPollList:").personalities);
        assert_eq!(Told::parse(&info("SqMask:\t0x3")), None);
    }

    fn saved(sq: (u32, u32), cq: (u32, u32)) -> Saved {
        let layout = layout().unwrap_or(Layout {
            sq_head: 0,
            sq_tail: 4,
            sq_entries: 24,
            sq_dropped: 32,
            cq_head: 8,
            cq_tail: 12,
            cq_entries: 28,
            cq_overflow: 44,
            cq_flags: 40,
            cqes: 64,
        });
        Saved {
            description: 0,
            entries: 8,
            completions: 16,
            layout,
            sq_head: sq.0,
            sq_tail: sq.1,
            cq_head: cq.0,
            cq_tail: cq.1,
            dropped: 0,
            overflow: 0,
            cq_flags: 0,
            contents: Blob::default(),
        }
    }

    #[test]
    fn a_ring_is_turned_by_the_fewest_requests() {
        assert_eq!(saved((5, 5), (5, 5)).steps(), (0, 5, 0));
        assert_eq!(saved((9, 9), (3, 7)).steps(), (2, 3, 4));
        // Counters that have just begun anew.
        assert_eq!(saved((2, 2), (u32::MAX, 2)).steps(), (0, (1 << 32) - 1, 3));
        assert_eq!(saved((1, 1), (u32::MAX, u32::MAX)).steps(), (2, (1 << 32) - 1, 0));
    }

    #[test]
    fn impossible_rings_are_refused() {
        assert!(saved((5, 13), (0, 5)).is_possible() && saved((0, 0), (0, 0)).is_possible());
        assert!(!saved((5, 14), (5, 5)).is_possible());
        assert!(!saved((20, 20), (3, 20)).is_possible());
        assert!(!Saved { entries: 6, ..saved((0, 0), (0, 0)) }.is_possible());
        assert!(!Saved { completions: 4, ..saved((0, 0), (0, 0)) }.is_possible());
        assert_eq!(saved((9, 9), (3, 7)).under_way(), 2);
        assert_eq!(Saved { dropped: 2, ..saved((9, 9), (3, 7)) }.under_way(), 0);
        assert_eq!(saved((1, 1), (0, 3)).under_way() as i32, -2);
    }

    /// What a ring is turned to is what is read of it.
    #[test]
    fn a_ring_that_is_made_again_is_the_same() {
        if layout().is_err() {
            kedge_left_out::left_out("io_uring", "this kernel lets nobody make a ring");
            return;
        }
        for (sq, cq) in [((0, 0), (0, 0)), ((5, 9), (2, 5)), ((1003, 1011), (987, 1003))] {
            let saved = saved(sq, cq);
            let (array, completions, requests) = Contents::lengths(&saved);
            let bytes = |count: u64, by: u8| (0..count).map(|at| at as u8 ^ by).collect();
            let contents = Contents {
                array: bytes(array, 3),
                completions: bytes(completions, 5),
                requests: bytes(requests, 7),
            };
            let made = turn::make(&saved, &contents).unwrap();
            let (again, found) = read(&made, 0).unwrap();
            assert_eq!(found, contents);
            let counters = |s: &Saved| (s.sq_head, s.sq_tail, s.cq_head, s.cq_tail);
            assert_eq!(counters(&again), counters(&saved));
            assert!(Contents::of(&saved, found.joined()).is_some_and(|found| found == contents));
            assert_eq!(kernel::CQE * 16, completions);
        }
    }
}
