//! What waits in a pty. The kernel lets nobody look at it: it is taken out and put back.

use super::settings::Settings;
use crate::plugins::apart::survive;
use rustix::fd::OwnedFd;
use rustix::fs::OFlags;
use rustix::io::{Errno, ioctl_fionread, read, retry_on_intr, write};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer};
use std::io;
use std::time::{Duration, Instant};

/// How long the kernel may take from one side to the other.
const ARRIVAL: Duration = Duration::from_secs(2);
/// How long it is given where it cannot be asked: half a line.
const GRACE: Duration = Duration::from_millis(20);
/// Most that waits in one direction: 4 KiB to be read and 64 KiB on their way, doubled.
const MAX: usize = 256 << 10;
/// As much as is read at once.
const CHUNK: usize = 4096;

/// Both directions of a pty, and what is in them.
#[derive(Debug)]
pub(crate) struct Flight {
    master: OwnedFd,
    /// An opening of its own, so that nobody's flags are touched.
    slave: OwnedFd,
    own: Settings,
    raw: Settings,
    quiet: Settings,
    pub output: Vec<u8>,
    pub input: Vec<u8>,
}

/// Looks at what waits: takes it out and puts it back, in one go that is finished even if this
/// process is killed. `None` if that is nothing, and then nothing is touched. A line that has been
/// begun but not ended, alone, is not seen.
pub(super) fn look(
    master: OwnedFd,
    slave: &OwnedFd,
    settings: &Settings,
    packets: bool,
) -> io::Result<Option<Flight>> {
    let (output, input) = (ioctl_fionread(&master)?, ioctl_fionread(slave)?);
    if output == 0 && input == 0 || packets {
        return Ok(None);
    }
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let nonblocking = OpenptFlags::from_bits_retain(OFlags::NONBLOCK.bits());
    let slave = ioctl_tiocgptpeer(&master, flags | nonblocking)?;
    let room = || Vec::with_capacity(MAX + CHUNK);
    let mut flight = Flight::new(master, slave, settings, room(), room());
    survive(|| flight.take_and_put())??;
    Ok(Some(flight))
}

/// Reads as long as something is said to be there, so that it never waits. `data` has room for it.
fn all(fd: &OwnedFd, data: &mut Vec<u8>) -> io::Result<()> {
    let mut buffer = [0; CHUNK];
    while ioctl_fionread(fd)? > 0 && data.len() < MAX {
        match retry_on_intr(|| read(fd, &mut buffer)) {
            Ok(0) | Err(Errno::AGAIN) => break,
            Ok(count) => data.extend_from_slice(&buffer[..count]),
            Err(e) => return Err(e.into()),
        }
        // What was behind it comes now.
        std::thread::yield_now();
    }
    Ok(())
}

impl Flight {
    pub(super) fn new(
        master: OwnedFd,
        slave: OwnedFd,
        settings: &Settings,
        output: Vec<u8>,
        input: Vec<u8>,
    ) -> Flight {
        let (own, raw, quiet) = (settings.clone(), settings.raw(), settings.quiet());
        Flight { master, slave, own, raw, quiet, output, input }
    }

    /// Fills `output` and `input`. Allocates nothing.
    fn take_and_put(&mut self) -> io::Result<()> {
        self.raw.set(&self.master)?;
        let taken = all(&self.master, &mut self.output);
        let taken = taken.and(all(&self.slave, &mut self.input));
        self.put().and(taken)
    }

    /// Puts it in, and the settings. Allocates nothing.
    pub(super) fn put(&self) -> io::Result<()> {
        let put = self.put_both();
        self.own.set(&self.master).and(put)
    }

    fn put_both(&self) -> io::Result<()> {
        if !self.output.is_empty() {
            self.raw.set(&self.master)?;
            let before = ioctl_fionread(&self.master)?;
            put(&self.slave, &self.output)?;
            arrived(&self.master, before + (self.output.len() as u64).min(4095))?;
        }
        if !self.input.is_empty() {
            self.quiet.set(&self.master)?;
            let lines = self.input.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
            let canonical = self.own.canonical();
            put(&self.master, &self.input)?;
            arrived(
                &self.slave,
                if canonical { lines } else { self.input.len() }.min(4095) as u64,
            )?;
            if canonical && lines < self.input.len() {
                std::thread::sleep(GRACE);
            }
        }
        Ok(())
    }
}

/// Writes all, as long as the other side takes it; a descriptor that waits would wait for ever.
fn put(fd: &OwnedFd, mut data: &[u8]) -> io::Result<()> {
    let begin = Instant::now();
    while !data.is_empty() {
        match retry_on_intr(|| write(fd, data)) {
            Ok(count) => data = &data[count.min(data.len())..],
            Err(Errno::AGAIN) if begin.elapsed() < ARRIVAL => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn arrived(fd: &OwnedFd, count: u64) -> io::Result<()> {
    let begin = Instant::now();
    while ioctl_fionread(fd)? < count {
        if begin.elapsed() > ARRIVAL {
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(())
}
