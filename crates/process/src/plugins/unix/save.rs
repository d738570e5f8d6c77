//! Reads Unix sockets: who is connected to whom, and what waits.

use super::{Message, Role, Socket, name::Name, waiting};
use crate::plugins::error::{Context, PluginError};
use crate::plugins::job::{Capture, Found, Waiting, state};
use crate::plugins::path::SavedPath;
use crate::plugins::sockets::diagnosis::{Diagnoser, Diagnosis, ESTABLISHED, LISTENING};
use crate::plugins::sockets::{filter, options, queue};
use crate::plugins::sys;
use rustix::fd::OwnedFd;
use rustix::net::{getpeername, getsockname};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What is known of one socket.
struct Known {
    index: usize,
    fd: OwnedFd,
    kind: i32,
    name: Option<Name>,
    told: Diagnosis,
}

pub(super) fn save(capture: &mut Capture, mine: &[usize]) -> Result<Option<Value>, PluginError> {
    if mine.is_empty() {
        return Ok(None);
    }
    let mut diagnoser = Diagnoser::new().to(|| "ask the kernel about sockets")?;
    let mut known = BTreeMap::new();
    for &index in mine {
        let socket = look(capture, index, &mut diagnoser)?;
        known.insert(capture.file(index).stat.inode as u32, socket);
    }
    state(known.values().map(|socket| save_one(capture, socket, &known)))
}

fn look(capture: &Capture, index: usize, diagnoser: &mut Diagnoser) -> Result<Known, PluginError> {
    let file = capture.file(index);
    let what = || format!("look at {}", capture.job.describe(file));
    let fd = capture.duplicate(index)?;
    let told = diagnoser.unix(file.stat.inode).to(what)?;
    let name = Name::of(getsockname(&fd).to(what)?);
    Ok(Known { index, fd, kind: file.socket.map_or(0, |kind| kind.kind), name, told })
}

fn save_one(
    capture: &mut Capture,
    socket: &Known,
    all: &BTreeMap<u32, Known>,
) -> Result<Socket, PluginError> {
    let job = capture.job;
    let file = &job.files[socket.index];
    let folder = folder(capture, socket.index);
    let role = match socket.kind {
        libc::SOCK_DGRAM => datagram_role(capture, socket, all),
        _ => stream_role(capture, socket, all)?,
    };
    let own_file = own_file(socket, &folder);
    let filter = filter::read(&socket.fd).map_err(|_| {
        let what = job.describe(file);
        PluginError::Refused(format!("{what} has an eBPF program as its filter (SO_ATTACH_BPF)"))
    })?;
    // What waits at a listening socket is connections.
    let queue = match role {
        Role::Listening { .. } => Vec::new(),
        _ => messages(capture, socket, file)?,
    };
    Ok(Socket {
        description: socket.index as u32,
        kind: socket.kind,
        options: options::read(&socket.fd),
        name: socket.name.clone(),
        file: own_file.as_ref().map(|metadata| metadata.mode() & 0o7777),
        owner: own_file.map(|metadata| (metadata.uid(), metadata.gid())),
        folder: SavedPath(folder),
        role,
        shutdown: socket.told.shutdown,
        filter,
        queue,
    })
}

/// Where names without a slash in front are from.
fn folder(capture: &Capture, index: usize) -> PathBuf {
    let job = capture.job;
    let process = job.at(&job.files[index]);
    fs::read_link(format!("/proc/{process}/cwd")).unwrap_or_else(|_| PathBuf::from("/"))
}

/// The file that the socket's name made, if that is there.
fn own_file(socket: &Known, folder: &Path) -> Option<fs::Metadata> {
    let path = socket.name.as_ref()?.file(folder)?;
    let metadata = fs::symlink_metadata(path).ok()?;
    (Some(metadata.ino() as u32) == socket.told.file).then_some(metadata)
}

fn stream_role(
    capture: &mut Capture,
    socket: &Known,
    all: &BTreeMap<u32, Known>,
) -> Result<Role, PluginError> {
    let told = &socket.told;
    if told.state == LISTENING {
        if told.waiting.contains(&0) {
            let what = capture.job.describe(capture.file(socket.index));
            return Err(PluginError::Refused(format!("{what}: {}", waiting::unaccepted())));
        }
        return Ok(Role::Listening { backlog: told.backlog });
    }
    let Some(peer) = told.peer.filter(|_| told.state == ESTABLISHED) else {
        return Ok(Role::Idle);
    };
    if let Some(peer) = all.get(&peer) {
        return Ok(Role::Connected { peer: Some(peer.index as u32) });
    }
    let own = capture.file(socket.index).stat.inode as u32;
    if let Some(listener) = all.values().find(|other| other.told.waiting.contains(&own)) {
        if sys::unsent(&socket.fd).to(|| "look at a socket's queue")? > 0 {
            let what = capture.job.describe(capture.file(socket.index));
            return Err(PluginError::Refused(format!(
                "{what} has sent to a socket that nobody has accepted yet: try again later"
            )));
        }
        return Ok(Role::Waiting { listener: listener.index as u32 });
    }
    if peer != 0 {
        outside(capture, socket);
    }
    Ok(Role::Connected { peer: None })
}

fn outside(capture: &mut Capture, socket: &Known) {
    let what = capture.job.describe(capture.file(socket.index));
    let name = getpeername(&socket.fd).ok().flatten().and_then(Name::of);
    let whom = name.map_or_else(String::new, |name| format!(" to {name}"));
    capture.warnings.push(format!(
        "{what} is connected{whom} outside of the job: after a restart it finds the connection closed"
    ));
}

fn datagram_role(capture: &mut Capture, socket: &Known, all: &BTreeMap<u32, Known>) -> Role {
    let own = capture.file(socket.index).stat.inode as u32;
    let Some(inode) = socket.told.peer else { return Role::Idle };
    let peer = all.get(&inode);
    let mutual = peer.filter(|peer| peer.told.peer == Some(own));
    let unreachable = |peer: &&Known| {
        let path = peer.name.as_ref().is_some_and(|name| name.path().is_some());
        path && own_file(peer, &folder(capture, peer.index)).is_none()
    };
    if let Some(peer) = peer.filter(unreachable) {
        return Role::TowardPeer { peer: peer.index as u32 };
    }
    if let Some(name) = getpeername(&socket.fd).ok().flatten().and_then(Name::of) {
        return Role::Toward(name);
    }
    if mutual.is_none() && inode != 0 {
        outside(capture, socket);
    }
    Role::Connected { peer: mutual.map(|peer| peer.index as u32) }
}

fn messages(
    capture: &mut Capture,
    socket: &Known,
    file: &Found,
) -> Result<Vec<Message>, PluginError> {
    let what = capture.job.describe(file);
    let outside = || {
        PluginError::Refused(format!(
            "a descriptor that is under way in {what} has come from outside of the job just now: \
             try again"
        ))
    };
    let mut messages = Vec::new();
    if let Some(waiting) = &file.waiting {
        for Waiting { data, from, passed } in waiting.iter() {
            let placed = |place: &(i32, i32)| capture.job.placed(*place).map(|at| at as u32);
            let passed: Option<Vec<u32>> = passed.iter().map(placed).collect();
            let (passed, from) = (passed.ok_or_else(outside)?, from.clone().and_then(Name::of));
            messages.push(Message { data: capture.blob(data)?, from, passed });
        }
        return Ok(messages);
    }
    let pieces =
        queue::peek(&socket.fd, &mut capture.buffer).to(|| format!("read what waits in {what}"))?;
    for piece in pieces {
        let known = piece.passed.iter().map(|fd| capture.known(fd).map(|known| known as u32));
        let passed = known.collect::<Option<Vec<u32>>>().ok_or_else(outside)?;
        let from = piece.from.and_then(Name::of);
        messages.push(Message { data: capture.blob(&piece.data)?, from, passed });
    }
    Ok(messages)
}
