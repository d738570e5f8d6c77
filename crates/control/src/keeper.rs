//! The keeper holds what brings a client's devices back when its proxy, and the client, are gone:
//! descriptors, no more. It is a part of the job's supervisor, asked on a socket in the job's
//! folder. What is held counts once it is there of all clients of an image, and lasts until its
//! time is over, it is asked back, or the supervisor ends, however that ends.

use crate::service::Asker;
use kedge_image::{FileEntry, is_file_name};
use kedge_socket::frame::MAX_FDS;
use kedge_socket::{Channel, SocketError};
use kedge_wire::{Text, wire};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;
use thiserror::Error;

/// How long a reply may take: what is let go of is many GiB.
const REPLY_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a proxy may take to make what it hands over.
const HOLD_TIMEOUT: Duration = Duration::from_secs(3600);
/// Descriptors of one client's device memory, at most.
pub const MAX_PARTS: usize = 256;

wire! {
    #[derive(Debug, Clone, PartialEq)]
    pub enum Ask {
        /// What follows is for this file of this image, which is being made. Whoever makes it says
        /// so, and hands the connection on to the proxy of the file's client. No reply.
        For = 6 { image: Text<4096>, file: Text<256> },
        /// Hold this, behind `For`; a file's descriptor comes with it, and those of `parts` in the
        /// messages that follow. → `Yes`, `No`
        Hold = 1 { bytes: u64, checksum: u64, on_devices: u64, parts: u32 },
        Parts = 2 {},
        /// The image is durable, and so many clients have something held for it: in place of what
        /// was held before. → `Yes`, `No`
        Commit = 3 { image: Text<4096>, clients: u32, ttl_ms: u64 },
        /// There will be no such image. → `Yes`
        Discard = 4 { image: Text<4096> },
        /// Let go of all. → `Released`
        Release = 5 {},
    }

    #[derive(Debug, Clone, PartialEq)]
    pub enum Reply {
        Yes = 1 {},
        No = 2 { why: Text<4096> },
        /// Bytes on devices, and in host memory.
        Released = 3 { on_devices: u64, in_memory: u64 },
    }
}

/// Why nothing is held.
#[derive(Debug, Error)]
pub enum KeeperError {
    #[error("the job's supervisor does not answer: {0}")]
    Socket(#[from] SocketError),
    #[error("the job's supervisor cannot be reached: {0}")]
    Connect(#[from] io::Error),
    #[error("{0}")]
    No(String),
    #[error("the job's supervisor answers nonsense")]
    Nonsense,
}

/// What one client's devices need, in somebody's hands.
#[derive(Debug)]
pub struct Handed {
    /// The image and the name of the client's file in it.
    pub image: String,
    pub file: FileEntry,
    pub on_devices: u64,
    /// The file that is held, as long and with the checksum that `file` says.
    pub memory: OwnedFd,
    /// Memory of the devices.
    pub parts: Vec<OwnedFd>,
}

/// What a proxy hands over for one client.
#[derive(Debug)]
pub struct Offer<'a> {
    /// The file that is held.
    pub entry: &'a FileEntry,
    pub memory: BorrowedFd<'a>,
    pub on_devices: u64,
    /// Memory of the devices, at most [`MAX_PARTS`].
    pub parts: &'a [BorrowedFd<'a>],
}

fn ask(path: &Path, ask: &Ask) -> Result<Reply, KeeperError> {
    let channel = connect(path)?;
    channel.send(ask, &[], REPLY_TIMEOUT)?;
    Ok(channel.receive(REPLY_TIMEOUT)?.0)
}

fn connect(path: &Path) -> io::Result<Channel> {
    Ok(Channel::new(kedge_socket::address::connect(path)?.into()))
}

fn agreed(reply: Reply) -> Result<(), KeeperError> {
    match reply {
        Reply::Yes {} => Ok(()),
        Reply::No { why } => Err(KeeperError::No(why.into_inner())),
        Reply::Released { .. } => Err(KeeperError::Nonsense),
    }
}

fn text<const MAX: usize>(path: &Path) -> Text<MAX> {
    Text::truncated(path.to_string_lossy().into_owned())
}

/// Returns a connection by which a proxy hands over what is to be held for `file` of `image`: it
/// can hand over nothing for another one, and need not know where the keeper answers.
///
/// # Errors
/// Nobody answers.
pub fn connection(keeper: &Path, image: &Path, file: &str) -> Result<OwnedFd, KeeperError> {
    let channel = connect(keeper)?;
    let file = Text::truncated(file.to_owned());
    channel.send(&Ask::For { image: text(image), file }, &[], REPLY_TIMEOUT)?;
    Ok(channel.into_inner())
}

/// Hands over by a [`connection`] what a client has that is to be held.
///
/// # Errors
/// The keeper does not answer, or refuses.
pub fn hand_over(connection: OwnedFd, offer: &Offer<'_>) -> Result<(), KeeperError> {
    let channel = Channel::new(connection);
    let order = Ask::Hold {
        bytes: offer.entry.bytes,
        checksum: offer.entry.checksum,
        on_devices: offer.on_devices,
        parts: offer.parts.len() as u32,
    };
    channel.send(&order, &[offer.memory], REPLY_TIMEOUT)?;
    for parts in offer.parts.chunks(MAX_FDS) {
        channel.send(&Ask::Parts {}, parts, REPLY_TIMEOUT)?;
    }
    agreed(channel.receive(REPLY_TIMEOUT)?.0)
}

/// Takes what follows the first word of a [`connection`] for `file` of `image`.
///
/// # Errors
/// Nothing is handed over, or nonsense.
pub fn take_over(asker: &Asker, image: Text<4096>, file: Text<256>) -> Result<Handed, KeeperError> {
    if !is_file_name(&file) {
        return Err(KeeperError::Nonsense);
    }
    let (order, fds) = asker.request_within(HOLD_TIMEOUT)?;
    let Ask::Hold { bytes, checksum, on_devices, parts: count } = order else {
        return Err(KeeperError::Nonsense);
    };
    let count = usize::try_from(count).ok().filter(|count| *count <= MAX_PARTS);
    let count = count.ok_or(KeeperError::Nonsense)?;
    let no_room = || KeeperError::No("it has no room for another descriptor".to_owned());
    let memory = fds.into_iter().next().ok_or_else(no_room)?;
    let mut parts = Vec::with_capacity(count);
    while parts.len() < count {
        let (Ask::Parts {}, fds) = asker.request()? else {
            return Err(KeeperError::Nonsense);
        };
        if fds.len() != MAX_FDS.min(count - parts.len()) {
            return Err(no_room());
        }
        parts.extend(fds);
    }
    let file = FileEntry { name: file.into_inner(), bytes, checksum };
    Ok(Handed { image: image.into_inner(), file, on_devices, memory, parts })
}

/// Tells the keeper that the image is durable: what was handed over for its `clients` is held for
/// `ttl`.
pub fn commit(keeper: &Path, image: &Path, clients: u32, ttl: Duration) -> Result<(), KeeperError> {
    let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
    agreed(ask(keeper, &Ask::Commit { image: text(image), clients, ttl_ms })?)
}

/// Tells the keeper that there will be no such image.
pub fn discard(keeper: &Path, image: &Path) -> Result<(), KeeperError> {
    agreed(ask(keeper, &Ask::Discard { image: text(image) })?)
}

/// Lets go of what is held: how many bytes that was on devices, and in host memory.
pub fn release(keeper: &Path) -> Result<(u64, u64), KeeperError> {
    match ask(keeper, &Ask::Release {})? {
        Reply::Released { on_devices, in_memory } => Ok((on_devices, in_memory)),
        _ => Err(KeeperError::Nonsense),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::{Limits, Service};
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::sync::mpsc;
    use std::thread;

    /// What a keeper takes of one connection, to which `talk` says something.
    fn taken(name: &str, talk: impl FnOnce(&Path)) -> Result<Handed, KeeperError> {
        let path = std::env::temp_dir().join(format!("kkeeper-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = kedge_socket::address::listen(&path).unwrap();
        let limits =
            Limits { connections: 1, request: REPLY_TIMEOUT, reply: Duration::from_secs(20) };
        let (told, heard) = mpsc::channel();
        let answers = thread::spawn(move || {
            Service::new("keeper", limits).serve_next(&listener, move |asker| {
                let taken = match asker.request::<Ask>() {
                    Ok((Ask::For { image, file }, _)) => take_over(asker, image, file),
                    _ => Err(KeeperError::Nonsense),
                };
                // Who says nonsense may not wait for it.
                let _ = asker.reply(&Reply::Yes {}, &[]);
                told.send(taken).unwrap();
            });
        });
        talk(&path);
        answers.join().unwrap();
        std::fs::remove_file(&path).unwrap();
        heard.recv().unwrap()
    }

    #[test]
    fn what_is_held_is_for_the_file_that_the_connection_was_made_for() {
        let image = Path::new("/images/j-1");
        let (reading, writing) = io::pipe().unwrap();
        let entry = FileEntry { name: "other.kimg".into(), bytes: 5, checksum: 6 };
        let handed = taken("for", |keeper| {
            let connection = connection(keeper, image, "gpu-7.kimg").unwrap();
            let parts = [writing.as_fd(); 6];
            let memory = reading.as_fd();
            let offer = Offer { entry: &entry, memory, on_devices: 9, parts: &parts };
            hand_over(connection, &offer).unwrap();
        });
        let handed = handed.unwrap();
        assert_eq!((&*handed.image, &*handed.file.name), ("/images/j-1", "gpu-7.kimg"));
        assert_eq!((handed.file.bytes, handed.file.checksum, handed.on_devices), (5, 6, 9));
        assert_eq!(handed.parts.len(), 6);
        drop((handed.parts, writing));
        assert_eq!(io::PipeReader::from(handed.memory).read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn nothing_is_held_for_a_name_that_leads_elsewhere_or_for_none() {
        for bad in ["", "..", "../x.kimg", "a/b"] {
            let taken = taken("names", |keeper| {
                connection(keeper, Path::new("/images/j-1"), bad).unwrap();
            });
            assert!(matches!(taken, Err(KeeperError::Nonsense)), "{bad}");
        }
        let hold = Ask::Hold { bytes: 1, checksum: 2, on_devices: 3, parts: 0 };
        let without = taken("none", |keeper| drop(ask(keeper, &hold)));
        assert!(matches!(without, Err(KeeperError::Nonsense)));
    }
}
