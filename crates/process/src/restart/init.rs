//! The first process of a restarted job's namespace. It makes the others, and is then the parent of
//! their orphans.

use super::files::Inherited;
use super::kernel::Detour;
use super::process::{Filled, Rebuilding, Writing};
use super::standby::Standby;
use super::tree::{Made, Tree};
use super::{Plan, ids, lazy, memory, notices, standby, threads, undo};
use crate::plugins::{Argument, InjectedCall, Recreated, RestoredFiles};
use crate::proc::{self, Stat};
use crate::state::ProcessState;
use crate::thread::come_home;
use crate::{EngineError, Thread, reap, translate};
use libc::pid_t;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// So many processes get their memory and state side by side: they make calls while others are
/// waited for.
const TOGETHER: usize = 8;
/// Longest report of a failure that is read.
const MAX_REPORT: u64 = 64 << 10;
/// What begins a report: the job runs, or it does not.
const RUNS: u8 = b'+';
const FAILED: u8 = b'-';

/// The restarted job, as its init sees it.
#[derive(Debug)]
pub struct Rebuilt {
    root: pid_t,
    report: UnixStream,
    reported: bool,
    pub(super) restored: RestoredFiles,
}

/// Closes every descriptor but the standard ones and those of `kept`.
pub(super) fn close_all_but(kept: &[RawFd]) -> Result<(), EngineError> {
    let mut kept: Vec<u32> = kept.iter().map(|fd| *fd as u32).collect();
    kept.sort_unstable();
    let mut from = 3;
    for next in kept.into_iter().chain([u32::MAX]) {
        if next > from {
            let last = if next == u32::MAX { next } else { next - 1 };
            // SAFETY: these descriptors belong to objects of the process that this is a copy of,
            // which are never used or dropped here.
            let result = unsafe { libc::syscall(libc::SYS_close_range, from, last, 0) };
            if result < 0 {
                return Err(EngineError::last(0, "close descriptors"));
            }
        }
        from = next.saturating_add(1);
    }
    Ok(())
}

/// Rebuilds the job, lets it go, and serves it.
pub(super) fn run(
    plan: &Plan,
    report: &mut UnixStream,
    serve: impl FnOnce(&mut Rebuilt),
) -> Result<(), EngineError> {
    // Their descriptors are about to be closed.
    plan.opened.clear();
    let folders = plan.chain.iter().map(|(folder, _)| folder.as_fd().as_raw_fd());
    let kept = plan.inherits.iter().copied().chain([report.as_raw_fd()]).chain(folders);
    close_all_but(&kept.collect::<Vec<RawFd>>())?;
    ids::keep_clear(plan);
    let Some(arrivals) = &plan.arrivals else { return run_all(plan, None, report, serve) };
    let (last, standby) = standby::make(plan, &**arrivals)?;
    ids::keep_clear(&last);
    run_all(&last, Some(standby), report, serve)
}

/// The same, of the last image, where some of the job may be there already.
fn run_all(
    plan: &Plan,
    standby: Option<Standby>,
    report: &mut UnixStream,
    serve: impl FnOnce(&mut Rebuilt),
) -> Result<(), EngineError> {
    // Where processes have ended for want of memory, that is what is to be told.
    let why = |error| lazy::failure().map_or(error, EngineError::Init);
    let (mut threads, mut descriptors, listeners) = rebuild(plan, standby).map_err(why)?;
    plan.opened.clear();
    descriptors.plugins.iter().try_for_each(|plugin| plugin.rebuilt())?;
    let root = plan.job.processes[0];
    let pidfd = pidfd(root)?;
    let what = "report that the job runs";
    let kept = report.try_clone().map_err(|source| EngineError::System { pid: 0, what, source })?;
    translate::serve(listeners, std::mem::take(&mut descriptors.addresses))?;
    // A job that has moved is decided to run here by that: what can fail should have failed, and
    // files are the job's where it was until then.
    descriptors.plugins.iter().try_for_each(|plugin| plugin.may_run())?;
    // Until here no file of the user's has been changed; from here on, little can fail.
    descriptors.change_files()?;
    descriptors.plugins.iter().try_for_each(|plugin| plugin.agreed())?;
    is_waited_for(report)?;
    // From here on nothing fails any more.
    descriptors.commit()?;
    let notes = descriptors.notes.join("\n");
    let restored = RestoredFiles::new(std::mem::take(&mut descriptors.restored));
    // The processes hold what they hold: an end of a pipe that is held here is one that never
    // closes.
    drop(descriptors);
    come_home(&mut threads);
    // They take it before anything else.
    stop_again(plan);
    drop(threads);
    // Those that others of the job have killed before they were let go: their parents would never
    // hear of them.
    reap::settle(Instant::now() + reap::END_TIMEOUT, |tid| tid == root);
    see_that_they_stop(plan);
    let tell = || {
        let mut report = &kept;
        report.write_all(&[RUNS])?;
        send(report, &pidfd)?;
        let notes = &notes.as_bytes()[..notes.len().min(MAX_REPORT as usize)];
        let image = plan.folder.as_os_str().as_bytes();
        for told in [notes, image] {
            report.write_all(&(told.len() as u32).to_le_bytes())?;
            report.write_all(told)?;
        }
        Ok::<_, io::Error>(())
    };
    // Whoever has been killed a moment ago leaves the job running, as one that is killed later.
    let _ = tell();
    serve(&mut Rebuilt { root, report: kept, reported: false, restored });
    Ok(())
}

/// Sends each process the signal that had stopped it.
fn stop_again(plan: &Plan) {
    for process in &plan.processes {
        if let Some(signal) = process.stopped_by() {
            // SAFETY: it is a process that this one has made and not waited for.
            unsafe { libc::kill(process.ids.pid, signal) };
        }
    }
}

/// Stops those by SIGSTOP that do not stop by the signal that had stopped them: in a process group
/// that is orphaned here none other does.
fn see_that_they_stop(plan: &Plan) {
    const STOP_TIMEOUT: Duration = Duration::from_millis(200);
    let begin = Instant::now();
    for process in plan.processes.iter().filter(|process| process.stopped) {
        let pid = process.ids.pid;
        while Stat::of(proc::reach(pid)).is_ok_and(|stat| stat.state != 'T') {
            if begin.elapsed() > STOP_TIMEOUT {
                // SAFETY: as in stop_again().
                unsafe { libc::kill(pid, libc::SIGSTOP) };
                break;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// All processes with all of their state, stopped; what has come back with their descriptors; and
/// where their calls with addresses are heard.
fn rebuild(
    plan: &Plan,
    standby: Option<Standby>,
) -> Result<(Vec<Thread>, Recreated, Vec<OwnedFd>), EngineError> {
    let inherited = Inherited::open(plan)?;
    memory::fill_objects(plan, &inherited)?;
    let mut tree = match standby {
        None => Tree::make(plan, &inherited)?,
        Some(standby) => standby.finish(plan)?,
    };
    let mut made = tree.take();
    let detours = give_memory(plan, &mut tree, &inherited, &mut made)?;
    let notes = inherited.take_notes();
    let mut descriptors = inherited.descriptors;
    descriptors.notes.extend(notes);
    for (state, made) in plan.processes.iter().zip(&mut made) {
        undo::promise(state, made)?;
    }
    inject(&descriptors.calls, plan, &mut made)?;
    for (state, made) in plan.processes.iter().zip(&mut made) {
        notices::ask(state, &mut made.thread, &made.parasite)?;
    }
    descriptors.settle()?;
    let mut listeners = Vec::new();
    if !descriptors.addresses.is_idle() {
        for made in &mut made {
            listeners.push(translate::install(&mut made.thread, made.parasite)?);
        }
    }
    let mut threads = Vec::new();
    let mut each = plan.processes.iter().zip(made).zip(detours).peekable();
    while each.peek().is_some() {
        let mut begun = Vec::new();
        for ((state, made), detour) in each.by_ref().take(TOGETHER) {
            begun.push((state, threads::begin(state, made)?, detour));
        }
        for (state, begun, detour) in begun {
            threads.extend(threads::end(state, begun, detour.as_ref())?);
        }
    }
    Ok((threads, descriptors, listeners))
}

/// Gives the processes that were `made` their memory and all else but their threads: where threads
/// are to go on, by process.
fn give_memory(
    plan: &Plan,
    tree: &mut Tree,
    inherited: &Inherited,
    made: &mut [Made],
) -> Result<Vec<Option<Detour>>, EngineError> {
    thread::scope(|scope| {
        let (mut detours, mut before) = (Vec::new(), None);
        for (states, made) in plan.processes.chunks(TOGETHER).zip(made.chunks_mut(TOGETHER)) {
            let filling = Group::begin(plan, tree, (states, made), inherited, scope)?;
            // Their memory is written while these map theirs.
            if let Some(group) = before.replace(filling) {
                Group::finish(group, &mut detours)?;
            }
        }
        before.map_or(Ok(()), |last| Group::finish(last, &mut detours))?;
        Ok(detours)
    })
}

/// Processes that get their memory side by side.
struct Group<'scope, 'a, 'm> {
    rebuilding: Vec<Rebuilding<'a>>,
    made: &'m mut [Made],
    /// Those that had it already, by their indices; the others in order.
    filled: BTreeMap<usize, Filled>,
    written: Written<'scope>,
}

impl<'scope, 'a: 'scope, 'm> Group<'scope, 'a, 'm> {
    /// Has them map their memory, and begins to write it.
    fn begin(
        plan: &'a Plan,
        tree: &mut Tree,
        (states, made): (&'a [ProcessState], &'m mut [Made]),
        inherited: &'a Inherited,
        scope: &'scope Scope<'scope, '_>,
    ) -> Result<Group<'scope, 'a, 'm>, EngineError> {
        let rebuilding = states.iter().map(|s| Rebuilding::of(plan, s, tree.area, inherited));
        let rebuilding: Vec<Rebuilding<'a>> = rebuilding.collect();
        let (mut filled, mut filling) = (BTreeMap::new(), Vec::new());
        for (index, (one, made)) in rebuilding.iter().zip(made.iter_mut()).enumerate() {
            let pid = states[index].ids.pid;
            match tree.filled.remove(&pid) {
                Some(already) => drop(filled.insert(index, already)),
                None => filling.push((index, one.begin_filling(made, &tree.kept(pid))?)),
            }
        }
        let mut writing = Vec::new();
        for (index, filling) in filling {
            writing.push(rebuilding[index].end_mapping(&mut made[index], filling)?);
        }
        let written = Written::begin(writing, scope);
        Ok(Group { rebuilding, made, filled, written })
    }

    /// Gives them the rest, when their memory is there.
    fn finish(self, detours: &mut Vec<Option<Detour>>) -> Result<(), EngineError> {
        let Group { rebuilding, made, mut filled, written } = self;
        let mut written = written.end().into_iter();
        let mut finishing = Vec::new();
        for (index, (one, made)) in rebuilding.iter().zip(made.iter_mut()).enumerate() {
            let filled = match filled.remove(&index) {
                Some(already) => already,
                None => written.next().ok_or(EngineError::Nonsense("memory of no process"))??,
            };
            finishing.push(one.begin_finishing(made, filled)?);
        }
        for ((one, finishing), made) in rebuilding.iter().zip(finishing).zip(made) {
            detours.push(one.end_finishing(made, finishing)?);
        }
        Ok(())
    }
}

type Results = Vec<Result<Filled, EngineError>>;

/// Memory that is being written beside the thread that traces.
enum Written<'scope> {
    ByAnother(ScopedJoinHandle<'scope, Results>),
    Already(Results),
}

impl<'scope> Written<'scope> {
    fn begin<'a: 'scope>(
        writing: Vec<Writing<'a>>,
        scope: &'scope Scope<'scope, '_>,
    ) -> Written<'scope> {
        let (gives, takes) = mpsc::channel();
        let write = |writing: Vec<Writing<'_>>| writing.into_iter().map(Writing::write).collect();
        // A single one is not waited for by others.
        if writing.len() > 1 {
            let by_another = move || takes.recv().map_or_else(|_| Vec::new(), write);
            // Where there may be no more threads, this one writes.
            if let Ok(other) = thread::Builder::new().spawn_scoped(scope, by_another) {
                // It waits for that, and for nothing else.
                let _ = gives.send(writing);
                return Written::ByAnother(other);
            }
        }
        Written::Already(write(writing))
    }

    fn end(self) -> Results {
        match self {
            // As if this thread had done it.
            Written::ByAnother(other) => other.join().unwrap_or_else(|panic| resume_unwind(panic)),
            Written::Already(results) => results,
        }
    }
}

/// The calls by which processes do themselves what is to be done with their descriptors.
fn inject(calls: &[InjectedCall], plan: &Plan, made: &mut [Made]) -> Result<(), EngineError> {
    let mut results: BTreeMap<pid_t, Vec<i64>> = BTreeMap::new();
    for call in calls {
        let index = plan.job.processes.iter().position(|pid| *pid == call.pid);
        let Made { thread, parasite } =
            &mut made[index.ok_or(EngineError::Nonsense("a call by no process"))?];
        let earlier = results.entry(call.pid).or_default();
        let mut data = Vec::new();
        let mut arguments = Vec::new();
        for argument in &call.arguments {
            arguments.push(match argument {
                Argument::Number(number) => *number,
                Argument::Bytes(bytes) => {
                    let at = parasite.data() + data.len() as u64;
                    data.extend(bytes);
                    data.resize(data.len().next_multiple_of(8), 0);
                    at
                }
                Argument::Earlier(back) => {
                    let index = earlier.len().checked_sub(*back).filter(|_| *back > 0);
                    let index = index.ok_or(EngineError::Nonsense("a call before the first"))?;
                    earlier[index] as u64
                }
            });
        }
        earlier.push(parasite.call_with(thread, &call.what, call.number, &arguments, &data)?);
    }
    Ok(())
}

/// Whoever has asked for the restart may have been killed: then nobody wants it.
fn is_waited_for(report: &UnixStream) -> Result<(), EngineError> {
    let mut asked = libc::pollfd { fd: report.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: one structure, which lives as long as the call.
    let ended =
        unsafe { libc::poll(&raw mut asked, 1, 0) } == 1 && asked.revents & libc::POLLHUP != 0;
    if ended { Err(EngineError::GivenUp) } else { Ok(()) }
}

fn pidfd(pid: pid_t) -> Result<OwnedFd, EngineError> {
    // SAFETY: a plain call; what it returns is a new descriptor.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        if fd < 0 {
            return Err(EngineError::last(pid, "open its process descriptor"));
        }
        Ok(OwnedFd::from_raw_fd(fd as RawFd))
    }
}

/// Room for one descriptor's control message.
const CONTROL: usize = 64;

#[repr(align(8))]
struct Control([u8; CONTROL]);

/// Sends a descriptor.
fn send(socket: &UnixStream, fd: &OwnedFd) -> io::Result<()> {
    let mut byte = [0u8; 1];
    let mut control = Control([0; CONTROL]);
    let mut vector = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: the message is made of buffers that live through the call; the control buffer is
    // aligned and long enough for the one descriptor that is put in.
    let result = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut vector, 1);
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as usize;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd.as_raw_fd());
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn receive(socket: &UnixStream) -> io::Result<OwnedFd> {
    let mut byte = [0u8; 1];
    let mut control = Control([0; CONTROL]);
    let mut vector = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: as in send(); a descriptor is taken only out of a message that says it is one, and
    // belongs to nobody else.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut vector, 1);
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL;
        if libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) < 0 {
            return Err(io::Error::last_os_error());
        }
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if header.is_null() || (*header).cmsg_type != libc::SCM_RIGHTS {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        Ok(OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()))
    }
}

/// Tells the caller why there is no job.
pub(super) fn report_failure(report: &mut UnixStream, error: &EngineError) {
    // A caller that has gone needs no report.
    let _ =
        report.write_all(&[FAILED]).and_then(|()| report.write_all(error.to_string().as_bytes()));
}

/// What the init reports: the root's process descriptor, or why there is none.
pub(super) fn outcome(report: &mut UnixStream) -> Result<Outcome, EngineError> {
    let lost = |_| EngineError::Init("the restarted job's init was killed".into());
    let mut first = [0; 1];
    report.read_exact(&mut first).map_err(lost)?;
    if first[0] == RUNS {
        let root = receive(report).map_err(lost)?;
        let [notes, image] = [told(report).map_err(lost)?, told(report).map_err(lost)?];
        let notes = String::from_utf8_lossy(&notes).lines().map(str::to_owned).collect();
        return Ok(Outcome { root, notes, image: OsString::from_vec(image).into() });
    }
    let mut text = Vec::new();
    report.take(MAX_REPORT).read_to_end(&mut text).map_err(lost)?;
    Err(EngineError::Init(String::from_utf8_lossy(&text).into_owned()))
}

/// A text, behind its length.
fn told(report: &mut UnixStream) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    report.read_exact(&mut length)?;
    let length = u64::from(u32::from_le_bytes(length)).min(MAX_REPORT);
    let mut text = Vec::new();
    report.take(length).read_to_end(&mut text)?;
    Ok(text)
}

/// A job that runs.
pub(super) struct Outcome {
    /// The process descriptor of its first process.
    pub(super) root: OwnedFd,
    /// What the user should know.
    pub(super) notes: Vec<String>,
    /// The image that it is from.
    pub(super) image: PathBuf,
}

impl Rebuilt {
    /// The program's first process.
    pub fn root(&self) -> pid_t {
        self.root
    }

    /// Collects a child that has ended and tells the restarter when it is the program's first
    /// process; false if none is left. Blocks if `block`. Only of the calling thread's children, so
    /// that another thread can trace.
    pub fn reap(&mut self, block: bool) -> bool {
        let mut status = 0;
        let flags = libc::__WNOTHREAD | if block { 0 } else { libc::WNOHANG };
        // SAFETY: waitpid stores the status.
        let pid = unsafe { libc::waitpid(-1, &mut status, flags) };
        if pid == self.root && !self.reported {
            self.reported = true;
            // A restarter that has gone does not ask.
            let _ = self.report.write_all(&status.to_le_bytes());
        }
        pid >= 0 || io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    }

    /// Collects all children that have ended, also while another thread traces, and shows them to
    /// `look`: ids and statuses. If it agrees, tells the restarter when the program's first process
    /// is among them. False if no child is left.
    pub fn collect(&mut self, look: impl FnOnce(&[(pid_t, i32)]) -> bool) -> bool {
        let reaped = crate::reap(&[self.root]);
        let root = reaped.ended.iter().find(|(pid, _)| *pid == self.root);
        if let (true, Some((_, status))) = (look(&reaped.ended), root) {
            self.reported = true;
            // A restarter that has gone does not ask.
            let _ = self.report.write_all(&status.to_le_bytes());
        }
        reaped.more
    }

    /// Serves the job until nothing of it is left.
    pub fn reap_all(&mut self) {
        while self.reap(true) {}
    }
}
