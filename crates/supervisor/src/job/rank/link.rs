//! The relay at work: a thread between the program's socket and the daemon's.

use super::{End, Open, RankError, Seat};
use kedge_control::joblog::JobLog;
use kedge_control::warn;
use kedge_pmi::{Rank, Relay, Saved};
use kedge_process::plugins::Rendezvous;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// How long a checkpoint waits for the daemon to answer what the rank has asked.
const ANSWER: Duration = Duration::from_secs(10);
/// What is read at once, in bytes.
const PIECE: usize = 64 << 10;

/// A rank's relay.
#[derive(Debug)]
pub(crate) struct Link {
    state: Mutex<State>,
    changed: Condvar,
    /// The relay's end of the program's socket.
    own: UnixStream,
    /// Device and inode of the other end.
    inode: (u64, u64),
    /// Closed by nobody while the process lives: for its daemon the rank ends with the process.
    daemon: UnixStream,
    /// Makes the thread look at the state again.
    wake: UnixStream,
    woken: UnixStream,
}

#[derive(Debug)]
struct State {
    relay: Relay,
    /// The step does not know yet what the rank has told another one.
    repeats: bool,
    /// Nothing is passed on any more.
    over: bool,
}

impl Link {
    /// Begins to pass on what the program and its daemon say; the program's end is returned.
    ///
    /// # Errors
    /// There are no descriptors or threads left.
    pub(crate) fn start(
        seat: &Seat,
        open: Open,
        log: Arc<JobLog>,
    ) -> Result<(Arc<Link>, End), RankError> {
        let relay = Relay::new(open.rank.clone(), open.step().to_owned());
        let (own, other) = UnixStream::pair().map_err(RankError::Relay)?;
        let link = Link::between(own, &other, relay, open, false, log)?;
        Ok((link, End { socket: OwnedFd::from(other), number: seat.fd }))
    }

    /// Goes on with what another relay has left, once the step knows what the rank has told.
    ///
    /// # Errors
    /// As of [`Link::start`]; or the image holds too much.
    pub(crate) fn resume(
        own: UnixStream,
        other: &impl AsFd,
        saved: Saved,
        open: Open,
        log: Arc<JobLog>,
    ) -> Result<Arc<Link>, RankError> {
        let relay = Relay::restored(open.rank.clone(), saved)?;
        Link::between(own, other, relay, open, true, log)
    }

    /// Of a rank that had closed its session's socket: the others wait for all ranks.
    ///
    /// # Errors
    /// There are no descriptors or threads left.
    pub(crate) fn only_meet(seat: &Seat, rank: Rank, log: Arc<JobLog>) -> Result<(), RankError> {
        let mut open = Open::after(seat, rank)?;
        let meet = move || {
            if let Err(error) = open.fence(None).and_then(|()| open.end()) {
                warn!(log, "the rank's session with its step is over: {error}");
            }
        };
        let thread = thread::Builder::new().name("relay".into()).spawn(meet);
        thread.map(drop).map_err(RankError::Relay)
    }

    fn between(
        own: UnixStream,
        other: &impl AsFd,
        relay: Relay,
        open: Open,
        repeats: bool,
        log: Arc<JobLog>,
    ) -> Result<Arc<Link>, RankError> {
        let status = fstat(other).map_err(|error| RankError::Relay(error.into()))?;
        let (wake, woken) = UnixStream::pair().map_err(RankError::Relay)?;
        let made = || {
            wake.set_nonblocking(true)?;
            open.daemon()
        };
        let daemon = made().map_err(RankError::Relay)?;
        let link = Arc::new(Link {
            state: Mutex::new(State { relay, repeats, over: false }),
            changed: Condvar::new(),
            own,
            inode: (status.st_dev, status.st_ino),
            daemon,
            wake,
            woken,
        });
        let runs = link.clone();
        let run = move || {
            let end = runs.run(open);
            if let Err(error) = &end {
                warn!(log, "the rank's session with its step is over: {error}");
                // The program is told, as by a daemon that has ended.
                let _ = runs.own.shutdown(std::net::Shutdown::Both);
            }
            runs.state().over = true;
            runs.changed.notify_all();
        };
        let thread = thread::Builder::new().name("relay".into()).spawn(run);
        thread.map_err(RankError::Relay)?;
        Ok(link)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // One that is full wakes it all the same.
        let _ = send(&self.wake, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    /// Whether that is the program's end.
    pub(crate) fn is_end(&self, inode: (u64, u64)) -> bool {
        self.inode == inode
    }

    /// Holds back what the rank asks from here on, and waits for the answers to what it has asked,
    /// but for a fence's.
    ///
    /// # Errors
    /// The daemon does not answer in time.
    pub(crate) fn hold(self: &Arc<Link>) -> Result<Held, RankError> {
        let mut state = self.state();
        state.relay.hold(true)?;
        let held = Held(Arc::clone(self));
        self.wait_while(state, |state| state.repeats || state.relay.waits_for().is_some())?;
        Ok(held)
    }

    /// Waits while `busy`, for as long as the daemon may need for an answer.
    fn wait_while(
        &self,
        state: MutexGuard<'_, State>,
        busy: impl Fn(&State) -> bool,
    ) -> Result<(), RankError> {
        let busy = |state: &mut State| !state.over && busy(state);
        let waited = self.changed.wait_timeout_while(state, ANSWER, busy);
        let (state, late) = waited.unwrap_or_else(PoisonError::into_inner);
        if late.timed_out() {
            let request = state.relay.waits_for().unwrap_or("a fence");
            return Err(RankError::Waits(request.to_owned()));
        }
        Ok(())
    }

    /// Returns what an image holds of it, while it is held and the program stands still; `waits`
    /// is what the program has not read.
    ///
    /// # Errors
    /// There is more than an image holds.
    pub(crate) fn save(&self, waits: Vec<u8>) -> Result<Saved, RankError> {
        let mut state = self.state();
        // What the program has sent and nobody has read.
        while !state.over && state.relay.wants_rank() {
            match receive(&self.own)? {
                Received::Bytes(bytes) => state.relay.from_rank(&bytes)?,
                Received::Nothing | Received::End => break,
            }
        }
        let mut saved = state.relay.saved()?;
        saved.to_rank.splice(0..0, waits);
        Ok(saved)
    }

    fn run(&self, open: Open) -> Result<(), RankError> {
        let rest = self.repeat(open)?;
        self.state().relay.from_daemon(&rest)?;
        loop {
            let mut state = self.state();
            flush(&self.own, state.relay.to_rank())?;
            flush(&self.daemon, state.relay.to_daemon())?;
            let wants = |waits: bool| if waits { PollFlags::OUT } else { PollFlags::empty() };
            let mut own = wants(!state.relay.to_rank().is_empty());
            own.set(PollFlags::IN, state.relay.wants_rank());
            let daemon = PollFlags::IN | wants(!state.relay.to_daemon().is_empty());
            drop(state);
            self.changed.notify_all();
            let mut all = [
                PollFd::new(&self.own, own),
                PollFd::new(&self.daemon, daemon),
                PollFd::new(&self.woken, PollFlags::IN),
            ];
            match poll(&mut all, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(RankError::Relay(error.into())),
            }
            let [own, daemon, woken] = all.map(|fd| !fd.revents().is_empty());
            if woken {
                receive(&self.woken)?;
            }
            let mut state = self.state();
            if daemon {
                match receive(&self.daemon)? {
                    Received::Bytes(bytes) => state.relay.from_daemon(&bytes)?,
                    Received::Nothing => {}
                    Received::End if state.relay.has_ended() => return Ok(()),
                    Received::End => return Err(RankError::Ended),
                }
            }
            if own && state.relay.wants_rank() {
                match receive(&self.own)? {
                    Received::Bytes(bytes) => state.relay.from_rank(&bytes)?,
                    Received::Nothing => {}
                    // No process of the job has it any more.
                    Received::End => return Ok(()),
                }
            }
        }
    }

    /// Tells the step what the rank has told another one; returns what the daemon has said besides.
    fn repeat(&self, mut open: Open) -> Result<Vec<u8>, RankError> {
        let mut state = self.state();
        if state.repeats {
            let (all, ended) = (state.relay.repeats()?, state.relay.has_ended());
            drop(state);
            all.iter().try_for_each(|frame| open.repeat(frame))?;
            open.fence(None)?;
            if ended {
                open.end()?;
            }
            state = self.state();
            state.repeats = false;
        }
        drop(state);
        Ok(open.into_rest())
    }
}

/// Nothing that the rank asks is passed on, until this is dropped.
#[derive(Debug)]
pub(crate) struct Held(Arc<Link>);

impl Held {
    /// Tells the other ranks how many fences this one has come to.
    ///
    /// # Errors
    /// They cannot be told.
    pub(crate) fn tell(&self, others: &dyn Rendezvous) -> Result<(), RankError> {
        let fences = self.0.state().relay.fences().to_string();
        let told = others.publish(&fences_of(&others.name()), fences.as_bytes());
        told.map(drop).map_err(RankError::Failed)
    }

    /// Once all ranks are held: waits for the answer to a fence that all have come to. One that
    /// some have not come to is answered when they do, here or after a restart.
    ///
    /// # Errors
    /// The daemon does not answer in time, or the others have not told.
    pub(crate) fn settle(&self, others: &dyn Rendezvous) -> Result<(), RankError> {
        let state = self.0.state();
        if !state.relay.is_in_fence() {
            return Ok(());
        }
        let own = state.relay.fences();
        drop(state);
        let failed = RankError::Failed;
        for part in others.parts().map_err(failed)? {
            let told = others.look(&fences_of(&part)).map_err(failed)?;
            let fences = told.and_then(|told| String::from_utf8(told).ok()?.parse::<u64>().ok());
            match fences {
                Some(fences) if fences < own => return Ok(()),
                Some(_) => {}
                None => return Err(RankError::Failed(format!("{part} does not tell its fences"))),
            }
        }
        self.0.wait_while(self.0.state(), |state| state.relay.is_in_fence())
    }
}

/// By which name a part tells how many fences it has come to.
fn fences_of(part: &str) -> String {
    format!("fences of {part}")
}

impl Drop for Held {
    fn drop(&mut self) {
        // What is wrong in what was held back is found again by the thread.
        let _ = self.0.state().relay.hold(false);
        self.0.wake();
    }
}

enum Received {
    Bytes(Vec<u8>),
    Nothing,
    End,
}

fn receive(socket: &UnixStream) -> Result<Received, RankError> {
    let mut bytes = vec![0; PIECE];
    match recv(socket, bytes.as_mut_slice(), RecvFlags::DONTWAIT) {
        Ok((0, _)) | Err(Errno::CONNRESET) => Ok(Received::End),
        Ok((count, _)) => {
            bytes.truncate(count);
            Ok(Received::Bytes(bytes))
        }
        Err(Errno::AGAIN | Errno::INTR) => Ok(Received::Nothing),
        Err(error) => Err(RankError::Relay(error.into())),
    }
}

/// Sends as much as there is room for.
fn flush(socket: &UnixStream, bytes: &mut Vec<u8>) -> Result<(), RankError> {
    while !bytes.is_empty() {
        match send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(count) => drop(bytes.drain(..count)),
            Err(Errno::AGAIN) => break,
            Err(Errno::INTR) => {}
            // Whoever has closed its end reads nothing any more.
            Err(Errno::PIPE | Errno::CONNRESET) => bytes.clear(),
            Err(error) => return Err(RankError::Relay(error.into())),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_pmi::Session;
    use std::io::{Read, Write};
    use std::thread::JoinHandle;

    fn frame(body: &str) -> Vec<u8> {
        format!("{:6}{body}", body.len()).into_bytes()
    }

    fn rank() -> Rank {
        let answer = b"cmd=fullinit-response;rc=0;rank=0;size=1;appnum=-1;".to_vec();
        Session::begun(answer).unwrap()
    }

    /// A daemon that answers all, fences only if it is to, and tells in the end what it was asked.
    fn daemon(fences: bool) -> (UnixStream, UnixStream, JoinHandle<Vec<String>>) {
        let (near, far) = UnixStream::pair().unwrap();
        let answers = far.try_clone().unwrap();
        let serve = move || {
            let (mut asked, mut buffer, mut far) = (Vec::new(), Vec::new(), far);
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = far.read(&mut bytes) {
                buffer.extend_from_slice(&bytes[..count]);
                while let Some(body) = kedge_pmi::take_frame(&mut buffer).unwrap() {
                    let name = kedge_pmi::Command::parse(&body).unwrap().name().to_owned();
                    if fences || name != "kvs-fence" {
                        far.write_all(&frame(&format!("cmd={name}-response;rc=0;"))).unwrap();
                    }
                    asked.push(name);
                }
            }
            asked
        };
        (near, answers, thread::spawn(serve))
    }

    fn read(socket: &mut UnixStream, length: usize) -> Vec<u8> {
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut bytes = vec![0; length];
        socket.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Waits until the link has seen something.
    fn until(link: &Link, seen: impl Fn(&State) -> bool) {
        let state = link.state();
        let limit = Duration::from_secs(20);
        let waited = link.changed.wait_timeout_while(state, limit, |state| !seen(state));
        assert!(!waited.unwrap().1.timed_out());
    }

    #[test]
    fn a_session_is_held_saved_and_goes_on_with_another_daemon() {
        let log = Arc::new(JobLog::none());
        let (near, mut answers, asked) = daemon(false);
        let (own, mut end) = UnixStream::pair().unwrap();
        let relay = Relay::new(rank(), "7.0".to_owned());
        let open = Open::of(near, "7.0", rank());
        let link = Link::between(own, &end, relay, open, false, log.clone()).unwrap();
        let status = fstat(&end).unwrap();
        assert!(link.is_end((status.st_dev, status.st_ino)));

        end.write_all(&Session::init()).unwrap();
        let begun = b"cmd=response_to_init rc=0 pmi_version=2 pmi_subversion=0\n";
        assert_eq!(read(&mut end, begun.len()), begun);
        end.write_all(&frame("cmd=fullinit;pmirank=0;")).unwrap();
        read(&mut end, 6 + rank().answer.len());
        end.write_all(&frame("cmd=kvs-put;key=a;value=b;")).unwrap();
        let put = frame("cmd=kvs-put-response;rc=0;");
        assert_eq!(read(&mut end, put.len()), put);

        // A fence that others have not come to, and a request behind it.
        end.write_all(&frame("cmd=kvs-fence;")).unwrap();
        until(&link, |state| state.relay.is_in_fence());
        let held = link.hold().unwrap();
        end.write_all(&frame("cmd=kvs-get;key=a;")).unwrap();
        let saved = link.save(b"unread".to_vec()).unwrap();
        assert_eq!(saved.to_rank, b"unread");

        // It goes on.
        answers.write_all(&frame("cmd=kvs-fence-response;rc=0;")).unwrap();
        read(&mut end, frame("cmd=kvs-fence-response;rc=0;").len());
        drop(held);
        let got = frame("cmd=kvs-get-response;rc=0;");
        assert_eq!(read(&mut end, got.len()), got);
        drop(end);
        until(&link, |state| state.over);
        drop(link);
        assert_eq!(asked.join().unwrap(), ["kvs-put", "kvs-fence", "kvs-get"]);

        // And elsewhere, where the step is told first what it does not know.
        let (near, _answers, asked) = daemon(true);
        let (own, mut end) = UnixStream::pair().unwrap();
        let relay = Relay::restored(rank(), saved).unwrap();
        let open = Open::of(near, "8.0", rank());
        let link = Link::between(own, &end, relay, open, true, log).unwrap();
        assert_eq!(read(&mut end, 6), b"unread");
        read(&mut end, frame("cmd=kvs-fence-response;rc=0;").len());
        assert_eq!(read(&mut end, got.len()), got);
        drop(end);
        until(&link, |state| state.over);
        drop(link);
        assert_eq!(asked.join().unwrap(), ["kvs-put", "kvs-fence", "kvs-fence", "kvs-get"]);
    }
}
