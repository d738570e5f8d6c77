//! Where the proxies of a job that was restarted are asked for what they share.
//!
//! The program has handles that name the proxy which made them, and keeps them over a restart. The
//! proxy in its place listens at an address of its own, for the old one may still be there, and
//! leaves a link from the old name to it in the job's folder. So copies of a job that run side by
//! side find each their own.

use crate::peer::{PeerKey, Shared, ask_peer};
use kedge_protocol::PeerName;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Begins the names of the links.
const PREFIX: &str = "peer-";
/// How long a restart waits for what another proxy has to make first.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

fn path(folder: &Path, name: &PeerKey) -> PathBuf {
    folder.join(format!("{PREFIX}{}", hex(name)))
}

fn hex(key: &PeerKey) -> String {
    key.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a name as text, for an image's manifest.
pub fn text(name: &PeerName) -> String {
    hex(&name.proxy) + &hex(&name.key)
}

/// Reads what [`text`] has written.
pub fn parse(text: &str) -> Option<PeerName> {
    let (proxy, key) = text.split_at_checked(32)?;
    Some(PeerName { proxy: key_of(proxy)?, key: key_of(key)? })
}

fn key_of(text: &str) -> Option<PeerKey> {
    let sound = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let mut key = PeerKey::default();
    for (at, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2).filter(|_| sound)?, 16).ok()?;
    }
    Some(key)
}

/// Notes that whoever asks for `name` finds `address`.
pub fn note(folder: &Path, name: &PeerKey, address: &PeerKey) -> io::Result<()> {
    let fresh = folder.join(format!("{PREFIX}{}.new", hex(name)));
    let _ = std::fs::remove_file(&fresh);
    symlink(hex(address), &fresh)?;
    std::fs::rename(fresh, path(folder, name))
}

/// Returns where the proxy of that name listens, if it is one in another's place.
pub fn find(folder: &Path, name: &PeerKey) -> Option<PeerKey> {
    key_of(std::fs::read_link(path(folder, name)).ok()?.to_str()?)
}

/// Removes what an earlier life of the job has left.
pub fn clear(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with(PREFIX) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Returns what a proxy that is being restored has under that name, once it is there, unless
/// `fails` says that it will never be.
fn wait_for_it(
    folder: &Path,
    name: &PeerName,
    limit: Duration,
    fails: impl Fn() -> bool,
) -> io::Result<Shared> {
    let end = Instant::now() + limit;
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(address) = find(folder, &name.proxy)
            && let Some(shared) = ask_peer(&address, &name.key).map_err(io::Error::other)?
        {
            return Ok(shared);
        }
        if Instant::now() >= end || fails() {
            let what = "the process that has made what is shared is not restored in time";
            return Err(io::Error::new(io::ErrorKind::TimedOut, what));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Waits on behalf of a proxy that is being restored itself, and is ended if another fails.
pub fn wait_for(folder: &Path, name: &PeerName, limit: Duration) -> io::Result<Shared> {
    wait_for_it(folder, name, limit, || false)
}

/// Returns a descriptor of memory that a proxy which is being restored has under that name, once it
/// is there, unless `fails` says that it will never be.
pub fn descriptor(folder: &Path, name: &PeerName, fails: impl Fn() -> bool) -> io::Result<OwnedFd> {
    let none = || io::Error::other("what is shared under that name is no memory");
    wait_for_it(folder, name, WAIT_TIMEOUT, fails)?.fd.ok_or_else(none)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_leads_to_who_has_come_in_anothers_place() {
        let folder = std::env::temp_dir().join(format!("kedge-aliases-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (name, first, second) = ([1; 16], [2; 16], [3; 16]);
        assert_eq!(find(&folder, &name), None);
        note(&folder, &name, &first).unwrap();
        note(&folder, &name, &second).unwrap();
        assert_eq!(find(&folder, &name), Some(second));
        let wanted = PeerName { proxy: name, key: [4; 16] };
        assert!(wait_for(&folder, &wanted, Duration::ZERO).is_err(), "nobody listens there");
        clear(&folder);
        assert_eq!(find(&folder, &name), None);
        let none = wait_for(&folder, &wanted, Duration::from_millis(5)).err().map(|e| e.kind());
        assert_eq!(none, Some(io::ErrorKind::TimedOut));
        std::fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn names_are_written_and_read() {
        let name = PeerName { proxy: [0xab; 16], key: [7; 16] };
        assert_eq!(parse(&text(&name)), Some(name));
        let short = &text(&name)[1..];
        for bad in ["", "ab", short, &format!("{short}x"), &"é".repeat(32)] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
