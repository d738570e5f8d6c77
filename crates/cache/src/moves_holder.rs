//! A holder of a test's own, which keeps its places in this process.

use crate::device::SOCKET;
use crate::engine::tests::Scratch;
use crate::home;
use crate::spec::home_in;
use crate::tier::{lock, make_home, private_folder};
use kedge_holder::{Answer, Order, PART, SLOTS, UNSHARED};
use kedge_socket::{Channel, address};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// How many places it has.
pub(super) const PLACES: u32 = 6;

/// A holder that keeps its places in this process.
pub(super) struct Holder {
    socket: PathBuf,
    lines: Arc<Mutex<Vec<UnixStream>>>,
    pub(super) places: Arc<Mutex<HashMap<u32, Vec<u8>>>>,
    /// Whether the next Put or Free gets no answer.
    pub(super) silent: Arc<AtomicBool>,
    /// Whether all orders wait.
    pub(super) stuck: Arc<AtomicBool>,
    /// Whether connections end at once.
    pub(super) deaf: Arc<AtomicBool>,
    /// The device's free bytes, and those that programs wait for.
    pub(super) stands: Arc<Mutex<(u64, u64)>>,
}

impl Holder {
    pub(super) fn start(scratch: &Scratch) -> Holder {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        fs::create_dir_all(scratch.0.join("ram")).expect("a folder");
        let at = home_in(&scratch.0.join("ram"), &scratch.0.join("below"));
        make_home(&at).expect("a home");
        let folder = at.join(home::DEVICE);
        private_folder(&folder).expect("a folder");
        let socket = folder.join(SOCKET);
        let _ = fs::remove_file(&socket);
        let listener = address::listen(&socket).expect("a socket");
        let slots = rustix::fs::memfd_create("slots", rustix::fs::MemfdFlags::CLOEXEC);
        let slots = Arc::new(File::from(slots.expect("a file")));
        slots.set_len(PART * u64::from(SLOTS)).expect("a file");
        let (lines, places) = (Arc::default(), Arc::default());
        let (silent, stuck) = (Arc::default(), Arc::default());
        let (deaf, stands) = (Arc::default(), Arc::new(Mutex::new((UNSHARED, 0))));
        let holder = Holder { socket, lines, places, silent, stuck, deaf, stands };
        let (lines, places) = (holder.lines.clone(), holder.places.clone());
        let (silent, stuck) = (holder.silent.clone(), holder.stuck.clone());
        let (deaf, stands) = (holder.deaf.clone(), holder.stands.clone());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if deaf.load(Ordering::SeqCst) {
                    continue;
                }
                lock(&lines).push(stream.try_clone().expect("a stream"));
                let (slots, places) = (slots.clone(), places.clone());
                let (silent, stuck, stands) = (silent.clone(), stuck.clone(), stands.clone());
                thread::spawn(move || {
                    attend(stream, number, &slots, &places, &silent, &stuck, &stands);
                });
            }
        });
        holder
    }

    /// Ends it as a kill does: nobody answers any more, and what it had is gone.
    pub(super) fn kill(self) {
        fs::remove_file(&self.socket).expect("its socket");
        self.hang_up();
    }

    /// Ends all connections.
    pub(super) fn hang_up(&self) {
        for line in lock(&self.lines).drain(..) {
            let _ = line.shutdown(Shutdown::Both);
        }
    }

    pub(super) fn used(&self) -> usize {
        lock(&self.places).len()
    }
}

fn attend(
    stream: UnixStream,
    number: u64,
    slots: &File,
    places: &Mutex<HashMap<u32, Vec<u8>>>,
    silent: &AtomicBool,
    stuck: &AtomicBool,
    stands: &Mutex<(u64, u64)>,
) {
    let line = stream.try_clone().expect("a stream");
    let channel = Channel::new(OwnedFd::from(stream));
    while let Ok((order, _)) = channel.receive::<Order>(Duration::from_secs(600)) {
        let from = |slot: u32| u64::from(slot) * PART;
        let late = stuck.load(Ordering::SeqCst);
        while stuck.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(5));
        }
        if matches!(order, Order::Put { .. } | Order::Free { .. })
            && silent.swap(false, Ordering::SeqCst)
        {
            let _ = line.shutdown(Shutdown::Both);
            return;
        }
        let answer = match order {
            Order::Hello { .. } => {
                let answer = Answer::Holder { number, places: PLACES };
                let _ = channel.send(&answer, &[slots.as_fd()], Duration::from_secs(10));
                continue;
            }
            Order::Put { slot, place } => {
                let mut part = vec![0; PART as usize];
                slots.read_exact_at(&mut part, from(slot)).expect("a slot");
                lock(places).insert(place, part);
                Answer::Done {}
            }
            Order::Get { place, slot, offset, length } => {
                let places = lock(places);
                let part = places.get(&place).expect("something was put there");
                let part = &part[offset as usize..(offset + length) as usize];
                slots.write_all_at(part, from(slot)).expect("a slot");
                Answer::Done {}
            }
            Order::Free { place } => {
                lock(places).remove(&place);
                Answer::Done {}
            }
            Order::End {} => Answer::Done {},
            Order::Look {} => {
                let (free, wanted) = *lock(stands);
                Answer::Stands { free, wanted }
            }
        };
        let _ = match late {
            true => say_in_halves(&line, &answer),
            false => channel.send(&answer, &[], Duration::from_secs(10)).map_err(io::Error::other),
        };
    }
}

/// As an answer may come to somebody who looks for it a moment at a time.
fn say_in_halves(mut line: &UnixStream, answer: &Answer) -> io::Result<()> {
    let (near, far) = Channel::pair()?;
    near.send(answer, &[], Duration::from_secs(10)).map_err(io::Error::other)?;
    drop(near);
    let mut bytes = Vec::new();
    UnixStream::from(far).read_to_end(&mut bytes)?;
    let (first, second) = bytes.split_at(bytes.len() / 2);
    line.write_all(first)?;
    thread::sleep(Duration::from_millis(30));
    line.write_all(second)
}
