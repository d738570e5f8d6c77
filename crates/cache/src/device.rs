//! A device's memory, by the process that holds it for the cache.
//!
//! The holder is started here, and outlives the daemon: the next one finds its socket in the
//! cache's home. Orders go by as many connections as there are slots, each with one of its own.

use crate::CacheError;
use crate::control::DeviceStatus;
use crate::spec::DeviceSpec;
use crate::tier::lock;
use kedge_holder::{Answer, Order, PART, SLOTS, UNSHARED, VERSION};
use kedge_socket::{Channel, SocketError, address};
use std::collections::BTreeSet;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// The name of the holder's socket in the folder of the device's tier.
pub(crate) const SOCKET: &str = "holder";
/// An answer that takes longer is not waited for: a copy of a part takes a millisecond.
const LIMIT: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 30 });
/// How long a late answer is looked for.
const GLANCE: Duration = Duration::from_millis(1);
/// A holder that is not ready by then is ended: a device's driver starts within seconds.
const START: Duration = Duration::from_secs(60);
/// Memory that nothing was put into for so long goes back to the device.
const IDLE: Duration = Duration::from_secs(1);
/// The longest word of a holder that does not start.
const WORD: u64 = 4096;

/// A connection, and the slot that its orders use.
#[derive(Debug)]
struct Line {
    channel: Channel,
    slot: u32,
}

/// A connection whose order was not answered in time.
#[derive(Debug)]
struct Late {
    line: Line,
    /// The place that the order changes: it stays taken until that is over.
    place: Option<u32>,
}

#[derive(Debug)]
struct Lines {
    idle: Vec<Line>,
    /// Whose slots the holder may still use.
    late: Vec<Late>,
    /// How many there are, with those at work.
    all: usize,
}

/// Why there is no answer to an order.
#[derive(Debug)]
struct Failure {
    error: io::Error,
    /// Whether the holder may have the order, and do it later.
    asked: bool,
}

/// Places that nothing is in.
#[derive(Debug)]
struct Free {
    /// What may be used of the places: those below.
    most: u32,
    /// Of which the device has the memory for others.
    cold: Vec<u32>,
    /// For which the holder may have memory.
    warm: BTreeSet<u32>,
    last_put: Option<Instant>,
}

/// A device's memory.
#[derive(Debug)]
pub(crate) struct Device {
    socket: PathBuf,
    /// The holder's, which no other one has.
    number: u64,
    /// This daemon's, for the holder.
    daemon: u64,
    /// Bytes of the device that stay free for other programs.
    keep: u64,
    /// Its free bytes, and those that programs wait for, at the last look.
    free_bytes: AtomicU64,
    wanted: AtomicU64,
    /// Bytes that are to go back to the device.
    lack: AtomicU64,
    slots: File,
    lines: Mutex<Lines>,
    idle: Condvar,
    free: Mutex<Free>,
    /// Whether the holder has ended, and with it what it held.
    gone: AtomicBool,
    /// Whether the holder was started just now: it holds nothing of an earlier daemon.
    started: bool,
}

/// A place of a device that has a part of a file. It is free once nobody needs it any more.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) number: u32,
    device: Arc<Device>,
    /// Whether it stays taken: a journal could not be told that it is free, or the holder may
    /// still put something there that it was asked for.
    kept: AtomicBool,
}

impl Place {
    /// Has the place stay taken for good.
    pub(crate) fn keep(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }

    /// Puts a whole part into the place. `false` if the device has no memory for it just now.
    ///
    /// # Errors
    /// If the holder says so; or does not answer, and the place stays taken until it does.
    pub(crate) fn put(&self, part: &[u8]) -> io::Result<bool> {
        match self.device.put(self.number, part) {
            Ok(Answer::Done {}) => Ok(true),
            Ok(Answer::Full {}) => Ok(false),
            Ok(other) => Err(refused(other)),
            Err(failure) => {
                if failure.asked {
                    self.keep();
                }
                Err(failure.error)
            }
        }
    }

    /// Reads bytes of the place from `offset` on; both must be within it.
    pub(crate) fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.device.get(self.number, offset, buffer)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.kept.load(Ordering::Relaxed) {
            lock(&self.device.free).warm.insert(self.number);
        }
    }
}

/// What a holder says of itself.
struct Greeting {
    channel: Channel,
    number: u64,
    places: u32,
    slots: File,
}

fn greet(socket: &Path, daemon: u64, keep: u64) -> Result<Greeting, SocketError> {
    let channel = Channel::new(OwnedFd::from(address::connect(socket)?));
    channel.send(&Order::Hello { version: VERSION, daemon, keep }, &[], LIMIT)?;
    let (answer, mut fds) = channel.receive::<Answer>(LIMIT)?;
    match (answer, fds.pop()) {
        (Answer::Holder { number, places }, Some(slots)) => {
            let slots = File::from(slots);
            if slots.metadata()?.len() < PART * u64::from(SLOTS) {
                return Err(io::Error::other("its slots are too short").into());
            }
            Ok(Greeting { channel, number, places, slots })
        }
        (Answer::Failed { why }, _) => Err(io::Error::other(why.to_string()).into()),
        _ => Err(io::Error::other("it is of another version of kedge").into()),
    }
}

/// Returns whether nobody listens at a socket, or there is none.
fn nobody_listens(error: &SocketError) -> bool {
    let nobody = [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused];
    matches!(error, SocketError::System(error) if nobody.contains(&error.kind()))
}

/// Starts a holder that listens at `socket`, and is ready within `limit`.
fn start(spec: &DeviceSpec, socket: &Path, bytes: u64, limit: Duration) -> Result<(), CacheError> {
    let wrong = |why: String| {
        let why = format!("device memory of {} cannot be a tier: {why}", spec.gpu);
        Err(CacheError::Tier(why))
    };
    let mut command = Command::new(&spec.program);
    command.args(["--gpu", &spec.gpu, "--hold-bytes", &bytes.to_string(), "--hold"]).arg(socket);
    // What it has to say later goes where the daemon's own words do.
    let mut child = match command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(error) => return wrong(format!("{}: {error}", spec.program.display())),
    };
    let (sender, word) = mpsc::channel();
    let said = child.stdout.take();
    let reads = thread::Builder::new().name("ready".into()).spawn(move || {
        let mut line = String::new();
        if let Some(said) = said {
            // No answer ends like one that says nothing.
            let _ = BufReader::new(said.take(WORD)).read_line(&mut line);
        }
        let _ = sender.send(line);
    });
    let line = match (word.recv_timeout(limit), reads) {
        (Ok(line), _) => line,
        (Err(_), reads) => {
            let _ = child.kill();
            let _ = child.wait();
            let late = || format!("its holder is not ready after {} s", limit.as_secs());
            return wrong(reads.map_or_else(|error| error.to_string(), |_| late()));
        }
    };
    if line.trim() != "ready" {
        // It may run all the same, and would have the device's memory.
        let _ = child.kill();
        let _ = child.wait();
        let said = line.trim();
        return wrong(if said.is_empty() { "its holder ended at once" } else { said }.to_owned());
    }
    match thread::Builder::new().name("holder".into()).spawn(move || child.wait()) {
        Ok(_) => Ok(()),
        Err(error) => {
            end(socket);
            wrong(error.to_string())
        }
    }
}

/// Ends the holder that listens at `socket`, if there is one, whatever it has.
fn end(socket: &Path) {
    if let Ok(greeting) = greet(socket, new_number(), 0) {
        // It may end before it has answered.
        let _ = ask(&greeting.channel, &Order::End {});
    }
}

fn new_number() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn ask(channel: &Channel, order: &Order) -> Result<Answer, SocketError> {
    channel.send(order, &[], LIMIT)?;
    Ok(channel.receive::<Answer>(LIMIT)?.0)
}

fn refused(answer: Answer) -> io::Error {
    match answer {
        Answer::Failed { why } => io::Error::other(format!("the device's holder: {}", &*why)),
        other => io::Error::other(format!("the device's holder answered {other:?}")),
    }
}

impl Device {
    /// Finds the holder at `socket`, or starts one for `bytes` of the device. `None` if there is
    /// none, and no device to start one for.
    ///
    /// # Errors
    /// If the device cannot be had, or its holder does not answer.
    pub(crate) fn open(
        spec: Option<&DeviceSpec>,
        socket: &Path,
        bytes: u64,
    ) -> Result<Option<Device>, CacheError> {
        let (daemon, keep) = (new_number(), spec.map_or(0, |spec| spec.keep));
        let failed = |error: SocketError| {
            CacheError::Tier(format!(
                "the holder of device memory at {}: {error}",
                socket.display()
            ))
        };
        let (first, started) = match greet(socket, daemon, keep) {
            Ok(greeting) => (greeting, false),
            Err(error) if nobody_listens(&error) => {
                let Some(spec) = spec.filter(|_| bytes >= PART) else { return Ok(None) };
                start(spec, socket, bytes, START)?;
                (greet(socket, daemon, keep).map_err(failed)?, true)
            }
            Err(error) => return Err(failed(error)),
        };
        let (number, slots) = (first.number, first.slots);
        let mut idle = vec![Line { channel: first.channel, slot: 0 }];
        for slot in 1..SLOTS {
            let channel = greet(socket, daemon, keep).map_err(failed)?.channel;
            idle.push(Line { channel, slot });
        }
        let most = u32::try_from(bytes / PART).unwrap_or(u32::MAX).min(first.places);
        let cold = if started { (0..most).rev().collect() } else { Vec::new() };
        // Of an earlier daemon's, any may have memory.
        let warm = if started { BTreeSet::new() } else { (0..first.places).collect() };
        Ok(Some(Device {
            socket: socket.to_owned(),
            number,
            daemon,
            keep,
            free_bytes: AtomicU64::new(UNSHARED),
            wanted: AtomicU64::new(0),
            lack: AtomicU64::new(0),
            slots,
            lines: Mutex::new(Lines { all: idle.len(), idle, late: Vec::new() }),
            idle: Condvar::new(),
            free: Mutex::new(Free { most, cold, warm, last_put: None }),
            gone: AtomicBool::new(false),
            started,
        }))
    }

    /// Returns the holder's number: no other holder has it.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Returns whether the holder was started by this daemon.
    pub(crate) fn is_new(&self) -> bool {
        self.started
    }

    /// Returns whether the holder has ended, and with it what it had.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    /// Returns the bytes that it may hold.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(lock(&self.free).most) * PART
    }

    /// Takes a place for what an earlier daemon has put there; `None` if it is not there, or is
    /// taken.
    pub(crate) fn adopt(self: &Arc<Device>, number: u32) -> Option<Arc<Place>> {
        let mut free = lock(&self.free);
        free.warm.remove(&number).then(|| self.place(number))
    }

    fn place(self: &Arc<Device>, number: u32) -> Arc<Place> {
        Arc::new(Place { number, device: self.clone(), kept: AtomicBool::new(false) })
    }

    /// Takes a free place.
    pub(crate) fn take(self: &Arc<Device>) -> Option<Arc<Place>> {
        let mut free = lock(&self.free);
        let most = free.most;
        let warm = free.warm.range(..most).next_back().copied();
        let number = match warm {
            Some(number) => {
                free.warm.remove(&number);
                number
            }
            None => free.cold.pop()?,
        };
        Some(self.place(number))
    }

    /// Has a line's slot and channel used by `work`, whose order changes `place`.
    ///
    /// # Errors
    /// What `work` failed with; that the holder answers on no line; or that it is gone.
    fn with_line<R>(
        &self,
        place: Option<u32>,
        work: impl FnOnce(&Line) -> Result<R, SocketError>,
    ) -> Result<R, Failure> {
        let unasked = |error| Err(Failure { error, asked: false });
        let mut lines = lock(&self.lines);
        let line = loop {
            if self.is_gone() {
                return unasked(io::Error::other("the holder of the device's memory has ended"));
            }
            if lines.late.len() == lines.all {
                let why = "the holder of the device's memory does not answer";
                return unasked(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            match lines.idle.pop() {
                Some(line) => break line,
                None => lines = self.idle.wait(lines).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(lines);
        let result = work(&line);
        match &result {
            Ok(_) => self.give_line(line),
            // The holder may still use the slot.
            Err(SocketError::TimedOut { .. }) => self.set_aside(Late { line, place }),
            Err(_) => self.connect_again(line),
        }
        result.map_err(|error| Failure { error: io::Error::other(error), asked: true })
    }

    /// Connects a line anew whose connection has ended. If the holder takes none just now, that is
    /// tried again with late orders.
    fn connect_again(&self, line: Line) {
        match greet(&self.socket, self.daemon, self.keep) {
            Ok(greeting) if greeting.number == self.number => {
                return self.give_line(Line { channel: greeting.channel, ..line });
            }
            Err(error) if !nobody_listens(&error) => {}
            _ => self.gone.store(true, Ordering::SeqCst),
        }
        self.set_aside(Late { line, place: None });
    }

    /// Has a line be used by others.
    fn give_line(&self, line: Line) {
        lock(&self.lines).idle.push(line);
        self.idle.notify_one();
    }

    /// Has a line be used by nobody before it is looked at again.
    fn set_aside(&self, late: Late) {
        lock(&self.lines).late.push(late);
        self.idle.notify_all();
    }

    /// Uses lines again whose orders are over by now.
    pub(crate) fn take_late(&self) {
        // Those that are set aside meanwhile come last.
        let (mut at, count) = (0, lock(&self.lines).late.len());
        for _ in 0..count {
            let mut lines = lock(&self.lines);
            let Some(late) = lines.late.get(at) else { return };
            // An answer that has begun is not left half read: the next one would not be understood.
            if !late.line.channel.has_word(GLANCE) {
                at += 1;
                continue;
            }
            let Late { line, place } = lines.late.remove(at);
            drop(lines);
            match line.channel.receive::<Answer>(LIMIT) {
                Ok(_) => {
                    // Whoever asked has given the place up.
                    lock(&self.free).warm.extend(place);
                    self.give_line(line);
                }
                Err(_) => self.connect_again(line),
            }
        }
    }

    fn put(&self, place: u32, part: &[u8]) -> Result<Answer, Failure> {
        lock(&self.free).last_put = Some(Instant::now());
        self.with_line(Some(place), |Line { channel, slot }| {
            self.slots.write_all_at(part, u64::from(*slot) * PART)?;
            ask(channel, &Order::Put { slot: *slot, place })
        })
    }

    fn get(&self, place: u32, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let answer = self.with_line(None, |Line { channel, slot }| {
            let (offset, length) = (offset as u32, buffer.len() as u32);
            let answer = ask(channel, &Order::Get { place, slot: *slot, offset, length })?;
            if answer == (Answer::Done {}) {
                self.slots.read_exact_at(buffer, u64::from(*slot) * PART)?;
            }
            Ok(answer)
        });
        let answer = answer.map_err(|failure| failure.error)?;
        if answer == (Answer::Done {}) { Ok(()) } else { Err(refused(answer)) }
    }

    /// Gives memory back to the device that nothing has been in for a while.
    pub(crate) fn give_back_idle(&self) {
        if lock(&self.free).last_put.is_none_or(|last| last.elapsed() >= IDLE) {
            self.give_back_free();
        }
    }

    /// Gives memory back to the device that nothing is in.
    pub(crate) fn give_back_free(&self) {
        let mut free = lock(&self.free);
        let warm = std::mem::take(&mut free.warm);
        drop(free);
        for number in warm {
            let free = Order::Free { place: number };
            let answer = self.with_line(Some(number), |line| ask(&line.channel, &free));
            if matches!(answer, Ok(Answer::Done {})) {
                let less = |lack: u64| Some(lack.saturating_sub(PART));
                let _ = self.lack.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            }
            let mut free = lock(&self.free);
            match answer {
                Ok(Answer::Done {}) if number < free.most => free.cold.push(number),
                Ok(Answer::Done {}) => {}
                Ok(_) => {
                    free.warm.insert(number);
                }
                // It may be done later, to whatever is there by then: nothing is put there before.
                Err(Failure { asked: true, .. }) => {}
                Err(_) => {
                    free.warm.insert(number);
                }
            }
        }
    }

    /// Asks the holder how the device stands; its end is known then.
    pub(crate) fn look(&self) {
        let answer = self.with_line(None, |line| ask(&line.channel, &Order::Look {}));
        let Ok(Answer::Stands { free, wanted }) = answer else { return };
        self.free_bytes.store(free, Ordering::Relaxed);
        self.wanted.store(wanted, Ordering::Relaxed);
        self.lack.store(wanted.max(self.keep).saturating_sub(free), Ordering::Relaxed);
    }

    /// Returns how many bytes are to go back to the device, for other programs.
    pub(crate) fn lack(&self) -> u64 {
        self.lack.load(Ordering::Relaxed)
    }

    /// Returns how the device stands.
    pub(crate) fn status(&self) -> DeviceStatus {
        DeviceStatus {
            gone: self.is_gone(),
            free: self.free_bytes(),
            keep: self.keep,
            wanted: self.wanted.load(Ordering::Relaxed),
            late: lock(&self.lines).late.len() as u64,
        }
    }

    /// Returns the device's free bytes; `None` where no other program can have them.
    fn free_bytes(&self) -> Option<u64> {
        let free = self.free_bytes.load(Ordering::Relaxed);
        (free != UNSHARED).then_some(free)
    }

    /// Returns how many bytes it may hold, if it holds `used`, beside what is to stay free.
    pub(crate) fn most_bytes(&self, used: u64) -> u64 {
        let more = self.free_bytes().map_or(u64::MAX, |free| free.saturating_sub(self.keep));
        used.saturating_add(more).min(self.bytes())
    }

    /// Ends the holder, which has nothing that is needed.
    pub(crate) fn end(&self) {
        let _ = self.with_line(None, |line| ask(&line.channel, &Order::End {}));
    }

    /// Returns how many places are free.
    #[cfg(test)]
    pub(crate) fn free_places(&self) -> usize {
        let free = lock(&self.free);
        free.cold.len() + free.warm.range(..free.most).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_holder_that_is_not_ready_in_time_is_ended() {
        let folder = std::env::temp_dir().join(format!("kedge-late-{}", std::process::id()));
        fs::create_dir(&folder).expect("a folder");
        let (program, pid) = (folder.join("holder"), folder.join("pid"));
        let script = format!("#!/bin/sh\necho $$ > {}\nexec sleep 1000\n", pid.display());
        fs::write(&program, script).expect("a file");
        fs::set_permissions(&program, PermissionsExt::from_mode(0o700)).expect("a file");
        let spec = DeviceSpec { gpu: "soft".into(), program, keep: 0 };
        let limit = Duration::from_secs(2);
        let refused = start(&spec, &folder.join("socket"), PART, limit).expect_err("none is ready");
        assert!(refused.to_string().contains("not ready after 2 s"), "{refused}");
        let pid = fs::read_to_string(&pid).expect("it ran");
        assert!(!Path::new("/proc").join(pid.trim()).exists(), "it would have the device");
        fs::remove_dir_all(&folder).expect("a folder");
    }
}
