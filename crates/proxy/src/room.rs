//! Room on a device that write-back caches have taken: their holders give it back when asked.

use kedge_holder::{Answer, Plea, ROOM_LIMIT, VERSION, room_name, rooms_of};
use kedge_socket::{Channel, SocketError, address};
use std::collections::BTreeSet;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// For a question to be sent, and for an answer to come beyond the time that a holder takes.
const PROMPT: Duration = Duration::from_secs(1);
/// What a process had on a device is free so long after its end.
const ENDING: Duration = Duration::from_millis(100);
/// How often it is asked for more: an allocation may take more than its size.
const TRIES: u32 = 3;

/// Room that an allocation needs.
#[derive(Debug)]
pub(crate) struct Wish {
    device: [u8; 16],
    bytes: u64,
    tries: u32,
    until: Instant,
}

impl Wish {
    /// Begins to wish for so many bytes of a device.
    pub(crate) fn new(device: [u8; 16], bytes: u64) -> Wish {
        Wish { device, bytes, tries: TRIES, until: Instant::now() + ROOM_LIMIT }
    }

    /// Has holders of the device's memory make room. `false` if none can.
    pub(crate) fn make(&mut self) -> bool {
        if self.tries == 0 || Instant::now() >= self.until {
            return false;
        }
        let made = holders(&self.device).iter().any(|path| {
            let left = self.until.saturating_duration_since(Instant::now());
            match ask(path, self.bytes, left + PROMPT) {
                // It has ended, and what it had goes back.
                Err(SocketError::Closed) => {
                    thread::sleep(ENDING);
                    true
                }
                answer => matches!(answer, Ok(Answer::Done {})),
            }
        });
        self.tries -= 1;
        self.bytes = self.bytes.saturating_mul(2);
        made
    }
}

fn ask(path: &Path, bytes: u64, limit: Duration) -> Result<Answer, SocketError> {
    let channel = Channel::new(OwnedFd::from(address::connect(path)?));
    channel.send(&Plea::Room { version: VERSION, bytes }, &[], PROMPT)?;
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
