//! The keeper holds what brings a client's devices back when its proxy, and the client, are gone:
//! descriptors, no more. It is a part of the job's supervisor, asked on a socket in the job's
//! folder. What is held counts once it is there of all clients of an image, and lasts until its
//! time is over, it is asked back, or the supervisor ends, however that ends.

use crate::service::Asker;
use kedge_image::FileEntry;
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
/// Descriptors of one client's device memory, at most.
pub const MAX_PARTS: usize = 256;

wire! {
    #[derive(Debug, Clone, PartialEq)]
    pub enum Ask {
        /// Hold this for a client of an image that is being made; its file's descriptor comes with
        /// it, and those of `parts` in the messages that follow. → `Yes`, `No`
        Hold = 1 {
            image: Text<4096>,
            file: Text<256>,
            bytes: u64,
            checksum: u64,
            on_devices: u64,
            parts: u32,
        },
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

/// Hands over what a client has that is to be held for `file` of `image`.
///
/// # Errors
/// The keeper does not answer, or refuses.
pub fn hand_over(
    keeper: &Path,
    image: &Path,
    file: &str,
    offer: &Offer<'_>,
) -> Result<(), KeeperError> {
    let channel = connect(keeper)?;
    let order = Ask::Hold {
        image: text(image),
        file: Text::truncated(file.to_owned()),
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

/// Takes what follows the `order` of [`hand_over`], which came with `fds`.
pub fn take_over(asker: &Asker, order: Ask, fds: Vec<OwnedFd>) -> Result<Handed, KeeperError> {
    let Ask::Hold { image, file, bytes, checksum, on_devices, parts: count } = order else {
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
    let name = file.into_inner();
    if name.contains('/') {
        return Err(KeeperError::Nonsense);
    }
    let file = FileEntry { name, bytes, checksum };
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
