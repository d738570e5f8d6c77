//! Makes Unix sockets again: pairs, then names, then who listens, then who connects.

use super::scratch::Scratch;
use super::{Message, Role, Socket, name::Name};
use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::remove_socket;
use crate::plugins::sockets::filter;
use crate::plugins::sockets::options::{self, SO_BUF_LOCK};
use crate::plugins::sys;
use crate::plugins::world::World;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::{Errno, ioctl_fionbio, retry_on_intr};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix,
    SocketFlags, SocketType, accept_with, listen, sendmsg, sendmsg_addr, shutdown, socket_with,
    socketpair,
};
use std::collections::BTreeMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::path::PathBuf;

type Sockets = BTreeMap<u32, Socket>;

pub(super) fn make(sockets: Vec<Socket>, world: &mut World) -> Result<(), PluginError> {
    let sockets: Sockets = sockets.into_iter().map(|one| (one.description, one)).collect();
    for socket in sockets.values() {
        if !matches!(socket.kind, libc::SOCK_STREAM | libc::SOCK_DGRAM | libc::SOCK_SEQPACKET) {
            return Err(damaged(format!("a Unix socket of type {}", socket.kind)));
        }
    }
    let (mut ends, mut scratches) = (BTreeMap::new(), BTreeMap::new());
    for socket in sockets.values() {
        connected(socket, &sockets, &mut ends, world)?;
    }
    for socket in sockets.values() {
        alone(socket, &mut scratches, world)?;
    }
    for socket in sockets.values() {
        reach(socket, &sockets, &scratches, world)?;
    }
    // Descriptors that are under way may be of any kind.
    world.after(move |world| fill(&sockets, &ends, &scratches, world));
    Ok(())
}

fn new(kind: i32) -> Result<OwnedFd, PluginError> {
    let kind = SocketType::from_raw(kind as u32);
    socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).to(|| "make a Unix socket")
}

fn set_options(fd: impl AsFd, socket: &Socket, world: &mut World) {
    options::apply(fd, &socket.options).into_iter().for_each(|note| world.note(note));
}

/// Both ends of a connection; an end that nobody has is kept in `ends` until all is filled.
fn connected(
    socket: &Socket,
    sockets: &Sockets,
    ends: &mut BTreeMap<u32, OwnedFd>,
    world: &mut World,
) -> Result<(), PluginError> {
    let Role::Connected { peer } = socket.role else { return Ok(()) };
    let Some(peer) = peer else {
        let (own, other) = pair(socket, None, sockets, world)?;
        set_options(&own, socket, world);
        ends.insert(socket.description, other);
        return world.made(socket.description, own);
    };
    let other = sockets.get(&peer).filter(|other| {
        let back =
            matches!(other.role, Role::Connected { peer } if peer == Some(socket.description));
        back && other.kind == socket.kind && peer != socket.description
    });
    let other = other.ok_or_else(|| damaged("a connection with one end"))?;
    if peer < socket.description {
        return Ok(());
    }
    let (a, b) = pair(socket, Some(other), sockets, world)?;
    set_options(&a, socket, world);
    set_options(&b, other, world);
    world.made(socket.description, a)?;
    world.made(peer, b)
}

/// Two sockets that are connected. Names come from how they were connected: the end that was
/// accepted has the name of who listened.
fn pair(
    a: &Socket,
    b: Option<&Socket>,
    sockets: &Sockets,
    world: &mut World,
) -> Result<(OwnedFd, OwnedFd), PluginError> {
    let b_name = b.and_then(|b| b.name.as_ref());
    if a.kind != libc::SOCK_DGRAM && (a.name.is_some() || b_name.is_some()) {
        let listened = |name: Option<&Name>| {
            let listens = |other: &Socket| matches!(other.role, Role::Listening { .. });
            name.is_some() && sockets.values().any(|s| listens(s) && s.name.as_ref() == name)
        };
        let a_accepted = listened(a.name.as_ref()) || (b_name.is_none() && b.is_some());
        let made = match b {
            Some(b) if !a_accepted && b_name.is_some() => {
                accepted(b, Some(a), world).map(|(b, a)| (a, b))
            }
            _ => accepted(a, b, world),
        };
        match made {
            Ok(made) => return Ok(made),
            Err(e) => world.note(format!("a connection has lost its names: {e}")),
        }
    }
    let kind = SocketType::from_raw(a.kind as u32);
    socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).to(|| "make a socket pair")
}

/// (who was accepted, who connected), by somebody who listens for this moment only.
fn accepted(
    server: &Socket,
    client: Option<&Socket>,
    world: &mut World,
) -> Result<(OwnedFd, OwnedFd), PluginError> {
    let what = || "connect a pair of Unix sockets";
    let listener = new(server.kind)?;
    let connecting = new(server.kind)?;
    let mut scratches = Scratches::new();
    if let Some(client) = client.filter(|client| client.name.is_some()) {
        remove(bind(&connecting, client, &mut scratches, world)?)?;
    }
    let Some(name) = &server.name else { return Err(damaged("nobody was accepted")) };
    // The file of the name, if there is one, is who listens'.
    let apart = Socket { file: None, ..server.clone() };
    let file = bind(&listener, &apart, &mut scratches, world)?;
    let connected = (|| {
        listen(&listener, 1)?;
        match scratches.get(&server.description) {
            Some(scratch) => scratch.connect(&connecting, name)?,
            None => name.connect(&connecting, &server.folder.0, world)?,
        }
        Ok::<_, std::io::Error>(accept_with(&listener, SocketFlags::CLOEXEC)?)
    })();
    remove(file)?;
    Ok((connected.to(what)?, connecting))
}

/// Where names are whose files are not there.
type Scratches = BTreeMap<u32, Scratch>;

/// Gives `fd` the socket's name. Returns the file that the name has made and that was not there: it
/// is needed until somebody has connected.
fn bind(
    fd: &OwnedFd,
    socket: &Socket,
    scratches: &mut Scratches,
    world: &mut World,
) -> Result<Option<PathBuf>, PluginError> {
    let Some(name) = &socket.name else { return Ok(None) };
    let folder = &socket.folder.0;
    if name.path().is_some() && socket.file.is_none() {
        let scratch = Scratch::new().to(|| "make a folder for sockets")?;
        if scratch.bind(fd, name).is_ok() {
            scratches.insert(socket.description, scratch);
            return Ok(None);
        }
    }
    // Who may not have another root has the name where it is, for a moment.
    name.bind(fd, socket.file.unwrap_or(0o600), socket.owner, folder, world)?;
    let file = name.file(&world.path(folder)).map(|file| world.path(&file));
    Ok(file.filter(|_| socket.file.is_none()))
}

fn remove(file: Option<PathBuf>) -> Result<(), PluginError> {
    let Some(file) = file else { return Ok(()) };
    remove_socket(&file).to(|| format!("remove {}", file.display()))
}

/// What is not connected, and who listens.
fn alone(socket: &Socket, scratches: &mut Scratches, world: &mut World) -> Result<(), PluginError> {
    if matches!(socket.role, Role::Connected { .. }) {
        return Ok(());
    }
    let fd = new(socket.kind)?;
    set_options(&fd, socket, world);
    remove(bind(&fd, socket, scratches, world)?)?;
    if let Role::Listening { backlog } = socket.role {
        listen(&fd, backlog.min(i32::MAX as u32) as i32).to(|| "listen")?;
    }
    world.made(socket.description, fd)
}

/// Who waits to be accepted, and datagram sockets that send to a name.
fn reach(
    socket: &Socket,
    sockets: &Sockets,
    scratches: &Scratches,
    world: &mut World,
) -> Result<(), PluginError> {
    let fd = |world: &World| {
        let fd = world.get(socket.description)?.try_clone_to_owned();
        fd.to(|| "duplicate a socket")
    };
    // A full queue is waited for by nobody here; the flag is set right with all others.
    let nonblocking =
        matches!(socket.role, Role::Waiting { .. } | Role::Toward(_) | Role::TowardPeer { .. });
    if nonblocking {
        ioctl_fionbio(world.get(socket.description)?, true).to(|| "set a socket's flags")?;
    }
    let connect = |fd: &OwnedFd, peer: &Socket, world: &World| {
        let name = peer.name.as_ref().ok_or_else(|| damaged("it has no name"))?;
        let connected = match scratches.get(&peer.description) {
            Some(scratch) => scratch.connect(fd, name),
            None => name.connect(fd, &peer.folder.0, world),
        };
        connected.to(|| format!("connect to {name} again"))
    };
    match &socket.role {
        Role::Waiting { listener } => {
            let listener = sockets.get(listener).ok_or_else(|| damaged("nobody listens"))?;
            connect(&fd(world)?, listener, world)
        }
        Role::TowardPeer { peer } => {
            let peer = sockets.get(peer).ok_or_else(|| damaged("nobody is its peer"))?;
            if let Err(error) = connect(&fd(world)?, peer, world) {
                world.note(format!("a datagram socket has lost its peer: {error}"));
            }
            Ok(())
        }
        Role::Toward(name) => {
            if let Err(e) = name.connect(&fd(world)?, &socket.folder.0, world) {
                world.note(format!("a datagram socket cannot reach {name} any more: {e}"));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Puts back what waited, and shuts down what was.
fn fill(
    sockets: &Sockets,
    ends: &BTreeMap<u32, OwnedFd>,
    scratches: &Scratches,
    world: &mut World,
) -> Result<(), PluginError> {
    for socket in sockets.values() {
        for message in &socket.queue {
            send(socket, message, sockets, ends, scratches, world)?;
        }
    }
    for socket in sockets.values() {
        let how = match socket.shutdown {
            0 => continue,
            1 => Shutdown::Read,
            2 => Shutdown::Write,
            _ => Shutdown::Both,
        };
        // The other end's shutdown has done it already, or the end is gone.
        let _ = shutdown(world.get(socket.description)?, how);
    }
    for socket in sockets.values() {
        let fd = world.get(socket.description)?;
        let notes = options::apply_late(fd, &socket.options);
        notes.into_iter().for_each(|note| world.note(note));
    }
    // What they keep out waits already.
    for (socket, program) in sockets.values().filter_map(|one| Some((one, one.filter.as_ref()?))) {
        let fd = world.get(socket.description)?;
        filter::attach(fd, program).to(|| "attach a socket's filter")?;
    }
    Ok(())
}

fn send(
    to: &Socket,
    message: &Message,
    sockets: &Sockets,
    ends: &BTreeMap<u32, OwnedFd>,
    scratches: &Scratches,
    world: &World,
) -> Result<(), PluginError> {
    let data = world.blob(&message.data)?;
    let passed = message.passed.iter().map(|description| world.get(*description));
    let passed: Vec<BorrowedFd> = passed.collect::<Result<_, _>>()?;
    if let Role::Connected { peer } = to.role {
        return match (peer, ends.get(&to.description)) {
            (Some(peer), _) => deliver(world.get(peer)?, None, &data, &passed),
            (None, Some(end)) => deliver(end, None, &data, &passed),
            (None, None) => Err(damaged("a message from nowhere")),
        };
    }
    let name = to.name.as_ref().ok_or_else(|| damaged("a message to nowhere"))?;
    let sender =
        sockets.values().find(|s| s.kind == to.kind && s.name == message.from && s.name.is_some());
    // A socket that sent and is gone cannot get an answer anyway.
    let stranger = new(to.kind)?;
    let sender = match sender {
        Some(sender) => world.get(sender.description)?,
        None => stranger.as_fd(),
    };
    let via = |address: &SocketAddrUnix| {
        deliver(sender, Some(address), &data, &passed).map_err(std::io::Error::other)
    };
    let sent = match scratches.get(&to.description) {
        Some(scratch) => scratch.address(name, via),
        None => name.address(&to.folder.0, world, via),
    };
    sent.to(|| format!("send again to {name}"))
}

fn deliver(
    by: impl AsFd,
    address: Option<&SocketAddrUnix>,
    data: &[u8],
    passed: &[BorrowedFd],
) -> Result<(), PluginError> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(passed.len()))];
    let mut done = 0;
    let mut widened = None;
    loop {
        let mut control = SendAncillaryBuffer::new(&mut space);
        if done == 0 && !passed.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(passed));
        }
        let rest = [IoSlice::new(&data[done..])];
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = retry_on_intr(|| match address {
            None => sendmsg(&by, &rest, &mut control, flags),
            Some(address) => sendmsg_addr(&by, address, &rest, &mut control, flags),
        });
        match sent {
            // Cut in other pieces, what was full takes more room.
            Err(Errno::AGAIN) if widened.is_none() => {
                widened = Some(Widened::by(by.as_fd(), data.len()));
                continue;
            }
            other => done += other.to(|| "put back what waited in a socket")?,
        }
        if done >= data.len() {
            return Ok(());
        }
    }
}

/// A socket whose room for what it sends is larger until this is dropped.
struct Widened<'a> {
    socket: BorrowedFd<'a>,
    /// Its size as it is read, and which sizes the program has chosen.
    before: (i32, i32),
}

impl Widened<'_> {
    /// By `bytes` and as much again for what the kernel adds.
    fn by(socket: BorrowedFd<'_>, bytes: usize) -> Widened<'_> {
        let number = |name| sys::socket_number(socket, libc::SOL_SOCKET, name).unwrap_or(0);
        let before = (number(libc::SO_SNDBUF), number(SO_BUF_LOCK));
        let more = before.0.saturating_add(i32::try_from(bytes).unwrap_or(i32::MAX));
        // If there is no more room than an administrator allows, sending says so.
        let _ =
            sys::set_socket_option(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, &more.to_ne_bytes());
        Widened { socket, before }
    }
}

impl Drop for Widened<'_> {
    fn drop(&mut self) {
        // Sizes are read doubled (socket(7)), and setting one fixes it.
        let (size, lock) = (self.before.0 / 2, self.before.1);
        for (name, value) in [(libc::SO_SNDBUF, size), (SO_BUF_LOCK, lock)] {
            let _ =
                sys::set_socket_option(self.socket, libc::SOL_SOCKET, name, &value.to_ne_bytes());
        }
    }
}
