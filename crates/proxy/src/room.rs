//! Room on a device that write-back caches have taken: their holders give it back when asked.

use kedge_holder::{Answer, Plea, ROOM_LIMIT, VERSION, room_name, rooms_of};
use kedge_socket::{Channel, SocketError, address};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// For a question to be sent, and for an answer to come beyond the time that a holder takes.
const PROMPT: Duration = Duration::from_secs(1);
/// How long after a holder's end what it had on a device may take to be free.
const ENDING: Duration = Duration::from_secs(5);
/// Time between two tries meanwhile.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// So long after a wait in vain nobody is asked for as much, nor for more: managed memory asks for
/// block after block.
const VAIN: Duration = Duration::from_secs(10);
/// One that was refused sooner has not waited.
const SOON: Duration = Duration::from_secs(1);
/// How often it is asked for more: an allocation may take more than its size.
const TRIES: u32 = 3;

/// What was waited for in vain.
#[derive(Debug, Default)]
pub(crate) struct Vain(BTreeMap<[u8; 16], (Instant, u64)>);

impl Vain {
    /// Returns whether so many bytes of a device are not to be asked for again yet.
    pub(crate) fn has(&self, device: &[u8; 16], bytes: u64) -> bool {
        let in_vain = |(since, least): &(Instant, u64)| bytes >= *least && since.elapsed() < VAIN;
        self.0.get(device).is_some_and(in_vain)
    }

    /// Notes that what was wished for did not come.
    pub(crate) fn note(&mut self, wish: &Wish) {
        if wish.since.elapsed() >= SOON {
            self.0.insert(wish.device, (Instant::now(), wish.least));
        }
    }
}

/// Room that an allocation needs.
#[derive(Debug)]
pub(crate) struct Wish {
    device: [u8; 16],
    /// What it takes at least, and what is asked for.
    least: u64,
    bytes: u64,
    tries: u32,
    since: Instant,
    /// When a holder has ended that was asked: what it had goes back.
    ended: Option<Instant>,
}

impl Wish {
    /// Begins to wish for so many bytes of a device.
    pub(crate) fn new(device: [u8; 16], bytes: u64) -> Wish {
        Wish { device, least: bytes, bytes, tries: TRIES, since: Instant::now(), ended: None }
    }

    /// Has holders of the device's memory make room. `false` if none can.
    pub(crate) fn make(&mut self) -> bool {
        if self.tries > 0 && self.since.elapsed() < ROOM_LIMIT {
            self.tries -= 1;
            let bytes = self.bytes;
            self.bytes = self.bytes.saturating_mul(2);
            for path in holders(&self.device) {
                let left = ROOM_LIMIT.saturating_sub(self.since.elapsed());
                match ask(&path, bytes, left + PROMPT) {
                    Ok(Answer::Done {}) => return true,
                    Err(SocketError::Closed) => self.ended = Some(Instant::now()),
                    _ => {}
                }
            }
        }
        // A driver takes a while for it.
        let goes_back = self.ended.is_some_and(|ended| ended.elapsed() < ENDING);
        if goes_back {
            thread::sleep(RETRY_INTERVAL);
        }
        goes_back
    }
}

fn ask(path: &Path, bytes: u64, limit: Duration) -> Result<Answer, SocketError> {
    let channel = Channel::new(OwnedFd::from(address::connect(path)?));
    match channel.send(&Plea::Room { version: VERSION, bytes }, &[], PROMPT) {
        // Where too many ask, it answers before it is asked.
        Ok(()) | Err(SocketError::Closed) => {}
        Err(error) => return Err(error),
    }
    Ok(channel.receive::<Answer>(limit)?.0)
}

/// Returns where the holders of a device's memory are asked: root's and this user's own. Others
/// could have a program wait in vain.
fn holders(device: &[u8; 16]) -> Vec<PathBuf> {
    let users = BTreeSet::from([0, rustix::process::geteuid().as_raw()]);
    let name = room_name(device);
    let mut found = Vec::new();
    for user in users {
        let folder = rooms_of(user);
        let own =
            |meta: fs::Metadata| meta.is_dir() && meta.uid() == user && meta.mode() & 0o022 == 0;
        if !fs::symlink_metadata(&folder).is_ok_and(own) {
            continue;
        }
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&name));
        found.extend(named.map(|entry| entry.path()));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_waited_for_in_vain_is_not_asked_for_again_at_once() {
        let (one, other) = ([1; 16], [2; 16]);
        let mut vain = Vain::default();
        let mut wish = Wish::new(one, 100);
        vain.note(&wish);
        assert!(!vain.has(&one, 100), "it was refused at once");
        wish.since -= ROOM_LIMIT;
        wish.bytes *= 2;
        vain.note(&wish);
        assert!(vain.has(&one, 100) && vain.has(&one, 200));
        assert!(!vain.has(&one, 99) && !vain.has(&other, 100));
        vain.0.entry(one).and_modify(|(since, _)| *since -= VAIN);
        assert!(!vain.has(&one, 100));
    }
}
