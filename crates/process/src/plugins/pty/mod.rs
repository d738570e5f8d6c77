//! Pseudo-terminals whose master the job holds: settings, size, session, and what waits in them.

mod flight;
mod settings;

use crate::plugins::error::{Context, PluginError};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::world::{Argument, InjectedCall, World};
use crate::plugins::{Blob, Claim, Plugin, procfs, sys};
use flight::Flight;
use rustix::fd::OwnedFd;
use rustix::fs::{Gid, Mode, Uid, fchmod, fchown};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt};
use rustix::termios::{Winsize, tcgetpgrp, tcgetsid, tcgetwinsize, tcsetwinsize};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use settings::Settings;

/// devices.txt: /dev/ptmx, and the slaves' major number.
const PTMX: (u32, u32) = (5, 2);
const SLAVES: u32 = 136;
/// Most masters that are opened to get one with its old number.
const MAX_SPARE: usize = 256;

const TIOCGPTN: u64 = 0x8004_5430;
const TIOCSPTLCK: u64 = 0x4004_5431;
const TIOCGPKT: u64 = 0x8004_5438;
const TIOCGPTLCK: u64 = 0x8004_5439;

#[derive(Debug)]
pub(crate) struct Ptys;

#[derive(Serialize, Deserialize)]
struct Pty {
    /// N of /dev/pts/N.
    number: u32,
    master: u32,
    slaves: Vec<u32>,
    settings: Settings,
    /// Rows, columns, and the same in pixels.
    window: (u16, u16, u16, u16),
    locked: bool,
    packets: bool,
    /// Owner, group and permissions of /dev/pts/N.
    #[serde(default)]
    owner: Option<(u32, u32, u32)>,
    /// The leader of the session whose terminal it is, and the process group in front.
    session: Option<(i32, i32)>,
    /// What the master has not read yet, and what the slaves have not.
    output: Blob,
    input: Blob,
}

fn device(file: &Found) -> Option<(u32, u32)> {
    let special = file.stat.special;
    let is_one = file.stat.kind() == libc::S_IFCHR && !file.is_path_only();
    is_one.then(|| (libc::major(special), libc::minor(special)))
}

/// The number of the pty that this is the master of.
fn master(file: &Found) -> Option<u32> {
    device(file).filter(|device| *device == PTMX)?;
    file.info.value("tty-index")?.parse().ok()
}

fn slave(file: &Found) -> Option<u32> {
    device(file).filter(|device| device.0 == SLAVES).map(|device| device.1)
}

/// Whether the job holds the master of this terminal.
pub(crate) fn has(terminal: u64, job: &Job) -> bool {
    let number = (libc::major(terminal) == SLAVES).then(|| libc::minor(terminal));
    number.is_some() && job.files.iter().any(|other| master(other) == number)
}

/// Whether this is a slave whose master the job holds.
pub(crate) fn inside(file: &Found, job: &Job) -> bool {
    slave(file).is_some() && has(file.stat.special, job)
}

impl Plugin for Ptys {
    fn name(&self) -> &'static str {
        "pty"
    }

    fn claim(&self, file: &Found, job: &Job) -> Claim {
        match device(file) {
            Some(PTMX) if master(file).is_none() => {
                Claim::Refused("the kernel does not tell its number".to_owned())
            }
            Some(PTMX) => Claim::Yes,
            _ => Claim::when(inside(file, job)),
        }
    }

    fn saves_under_way(&self, _file: &Found) -> bool {
        true
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        let masters: Vec<(usize, u32)> =
            mine.iter().filter_map(|index| Some((*index, master(capture.file(*index))?))).collect();
        let slaves = |number: u32| {
            let slaves =
                mine.iter().filter(|index| slave(&capture.job.files[**index]) == Some(number));
            slaves.copied().collect::<Vec<usize>>()
        };
        let all: Vec<_> =
            masters.into_iter().map(|(index, number)| (index, number, slaves(number))).collect();
        state(all.iter().map(|(master, number, slaves)| save(capture, *number, *master, slaves)))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        // Lower numbers first: they are given away in order.
        let mut all = world.parse::<Vec<Pty>>(state)?;
        all.sort_by_key(|pty| pty.number);
        all.iter().try_for_each(|pty| make(pty, world))
    }
}

fn save(
    capture: &mut Capture,
    number: u32,
    index: usize,
    slaves: &[usize],
) -> Result<Pty, PluginError> {
    let what = || format!("read the terminal /dev/pts/{number}");
    let fd = capture.duplicate(index)?;
    let window = tcgetwinsize(&fd).to(what)?;
    let flag = |request| sys::number(&fd, request).map(|value| value != 0);
    let (locked, packets) = (flag(TIOCGPTLCK).to(what)?, flag(TIOCGPKT).to(what)?);
    let settings = Settings::read(&fd).to(what)?;
    let inner = |pid: rustix::process::Pid| {
        let pid = pid.as_raw_nonzero().get();
        capture.job.inner(pid).or_else(|| procfs::inner_pid(pid).ok())
    };
    let session = tcgetsid(&fd).ok().and_then(inner);
    let front = tcgetpgrp(&fd).ok().and_then(inner);
    let owner = slaves.first().map(|slave| {
        let stat = capture.file(*slave).stat;
        (stat.owner.0, stat.owner.1, stat.mode & 0o7777)
    });
    let mut flight = None;
    if let Some(slave) = slaves.first() {
        let slave = capture.duplicate(*slave)?;
        flight = flight::look(fd, &slave, &settings, packets).to(what)?;
    }
    if packets && flight.is_none() {
        capture.warnings.push(format!(
            "what waits in /dev/pts/{number}, a terminal in packet mode, is not in the image"
        ));
    }
    let (output, input) =
        flight.map_or((Vec::new(), Vec::new()), |flight| (flight.output, flight.input));
    let (output, input) = (capture.blob(&output)?, capture.blob(&input)?);
    Ok(Pty {
        number,
        master: index as u32,
        slaves: slaves.iter().map(|index| *index as u32).collect(),
        settings,
        window: (window.ws_row, window.ws_col, window.ws_xpixel, window.ws_ypixel),
        locked,
        packets,
        owner,
        session: session.zip(front.or(session)),
        output,
        input,
    })
}

fn make(pty: &Pty, world: &mut World) -> Result<(), PluginError> {
    let what = || format!("make the terminal /dev/pts/{}", pty.number);
    let (fd, number) = open(pty.number).to(what)?;
    if number != pty.number {
        let (old, new) = (pty.number, number);
        world.note(format!("the terminal /dev/pts/{old} is /dev/pts/{new} now"));
    }
    sys::set_number(&fd, TIOCSPTLCK, 0).to(what)?;
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    // A first slave, for what waits; where the job has none, the master sees that it was closed.
    let nonblocking = OpenptFlags::from_bits_retain(libc::O_NONBLOCK as u32);
    let slave = ioctl_tiocgptpeer(&fd, flags | nonblocking).to(what)?;
    let (ws_row, ws_col, ws_xpixel, ws_ypixel) = pty.window;
    tcsetwinsize(&fd, Winsize { ws_row, ws_col, ws_xpixel, ws_ypixel }).to(what)?;
    pty.settings.set(&fd).to(what)?;
    if let Some((user, group, mode)) = pty.owner {
        own(&slave, (user, group), mode, pty.number, world);
    }
    for description in &pty.slaves {
        let access = world.flags(*description)? & libc::O_ACCMODE as u32;
        let flags =
            OpenptFlags::from_bits_retain(access) | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let opened = ioctl_tiocgptpeer(&fd, flags).to(what)?;
        world.made(*description, opened)?;
    }
    let (output, input) = (world.blob(&pty.output)?, world.blob(&pty.input)?);
    // Nothing waits for ever here; the flag is set right with all others.
    rustix::io::ioctl_fionbio(&fd, true).to(what)?;
    let master = crate::plugins::recreate::again(&fd)?;
    Flight::new(master, slave, &pty.settings, output, input).put().to(what)?;
    if pty.packets {
        sys::set_number(&fd, libc::TIOCPKT, 1).to(what)?;
    }
    sys::set_number(&fd, TIOCSPTLCK, i32::from(pty.locked)).to(what)?;
    control(pty, number, world);
    world.made(pty.master, fd)
}

/// Gives the slave's file its owner and permissions. Who may not do that owns it himself, as any
/// terminal that he opens.
fn own(slave: &OwnedFd, owner: (u32, u32), mode: u32, number: u32, world: &mut World) {
    let now = rustix::fs::fstat(slave);
    if now
        .is_ok_and(|now| (now.st_uid, now.st_gid, now.st_mode & 0o7777) == (owner.0, owner.1, mode))
    {
        return;
    }
    let (user, group) = (Uid::from_raw(owner.0), Gid::from_raw(owner.1));
    let owned = fchown(slave, Some(user), Some(group));
    if let Err(error) = owned.and(fchmod(slave, Mode::from_raw_mode(mode))) {
        world.note(format!("/dev/pts/{number} cannot be given its owner and mode: {error}"));
    }
}

/// A master, with this number if that can be had.
fn open(wanted: u32) -> std::io::Result<(OwnedFd, u32)> {
    let one = || -> std::io::Result<(OwnedFd, u32)> {
        let fd = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        let number = sys::number(&fd, TIOCGPTN)? as u32;
        Ok((fd, number))
    };
    // The kernel gives the lowest number that is free; lower ones go back when these are closed.
    let mut spare = Vec::new();
    loop {
        let (fd, number) = one()?;
        if number >= wanted || spare.len() == MAX_SPARE {
            return Ok((fd, number));
        }
        spare.push(fd);
    }
}

/// The leader makes it its session's terminal, and puts the right group in front.
fn control(pty: &Pty, number: u32, world: &mut World) {
    let Some((leader, front)) = pty.session else { return };
    if !world.has_process(leader) {
        return;
    }
    let path = format!("/dev/pts/{number}\0").into_bytes();
    let flags = (libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC) as u64;
    let number = |number: i64| Argument::Number(number as u64);
    let steps = [
        (libc::SYS_open, vec![Argument::Bytes(path), number(flags as i64)]),
        (libc::SYS_ioctl, vec![Argument::Earlier(1), number(libc::TIOCSCTTY as i64), number(0)]),
        (
            libc::SYS_ioctl,
            vec![
                Argument::Earlier(2),
                number(libc::TIOCSPGRP as i64),
                Argument::Bytes(front.to_ne_bytes().to_vec()),
            ],
        ),
        (libc::SYS_close, vec![Argument::Earlier(3)]),
    ];
    for (number, arguments) in steps {
        let what = "take its terminal again".to_owned();
        world.inject(InjectedCall { pid: leader, number, arguments, what });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_is_free_can_be_had_again() {
        let (first, number) = open(0).unwrap();
        drop(first);
        assert_eq!(open(number).unwrap().1, number);
    }
}
