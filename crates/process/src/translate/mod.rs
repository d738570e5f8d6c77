//! Addresses that programs remember. In a job of parts that was restarted on other hosts, an
//! address that a host had before means the host on which that part is now: connect(), bind(),
//! sendto() and the questions for names are answered from outside, everything else is the kernel's
//! alone.
//!
//! A filter of each restarted process (seccomp) hands those calls to the job's init. What needs no
//! translation is let through unchanged; the filter keeps nobody from anything, so it does not
//! matter that the program could change its memory meanwhile. docs/design/0039-wires.md says more.

mod answer;
mod filter;

pub(crate) use filter::{install, is_filter};

use crate::EngineError;
use answer::answer;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use rustix::io::retry_on_intr;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::OnceLock;

/// The table of this process, if it is the init of a job whose calls are translated.
static TABLE: OnceLock<Table> = OnceLock::new();

/// Where the job's hosts were, and where they are.
#[derive(Debug, Clone, Default)]
pub(crate) struct Table {
    hosts: BTreeMap<IpAddr, IpAddr>,
    /// Of a port (of TCP, if `true`) where somebody of the job listened: several hosts may have
    /// come of one.
    ports: BTreeMap<(bool, IpAddr, u16), IpAddr>,
    back: BTreeMap<IpAddr, IpAddr>,
}

impl Table {
    /// Says that the host that had `before` has `now`. What was said first counts.
    pub(crate) fn host(&mut self, before: IpAddr, now: IpAddr) {
        self.hosts.entry(before).or_insert(now);
        self.back.entry(now).or_insert(before);
    }

    /// The same of one port of that host.
    pub(crate) fn port(&mut self, tcp: bool, before: SocketAddr, now: IpAddr) {
        self.ports.entry((tcp, before.ip(), before.port())).or_insert(now);
    }

    /// Whether every host has its addresses.
    pub(crate) fn is_idle(&self) -> bool {
        let same = |(before, now): (&IpAddr, &IpAddr)| before == now;
        self.hosts.iter().all(same) && self.ports.iter().all(|((_, before, _), now)| before == now)
    }

    /// Returns where that is now what was at `address`; `None`: where it was.
    fn now(&self, tcp: bool, address: SocketAddr) -> Option<SocketAddr> {
        let ip = address.ip();
        let found = self.ports.get(&(tcp, ip, address.port())).or_else(|| self.hosts.get(&ip))?;
        (*found != ip).then(|| SocketAddr::new(*found, address.port()))
    }

    /// Returns what the program calls what is at `address`; `None`: the same.
    fn before(&self, address: SocketAddr) -> Option<SocketAddr> {
        let found = self.back.get(&address.ip())?;
        (*found != address.ip()).then(|| SocketAddr::new(*found, address.port()))
    }
}

/// Whether the processes of this one's job have a filter of kedge's.
pub(crate) fn is_on() -> bool {
    TABLE.get().is_some()
}

/// The addresses by which the programs of this init's job know the host that has one of `own`.
pub(crate) fn former(own: &[IpAddr]) -> Vec<IpAddr> {
    let Some(table) = TABLE.get() else { return Vec::new() };
    let here = table.hosts.iter().filter(|(_, now)| own.contains(now));
    here.map(|(before, _)| *before).collect()
}

/// Answers the calls that come by `listeners`, until nobody is left who makes any.
pub(crate) fn serve(listeners: Vec<OwnedFd>, table: Table) -> Result<(), EngineError> {
    if listeners.is_empty() {
        return Ok(());
    }
    let table = TABLE.get_or_init(|| table);
    let thread = std::thread::Builder::new().name("addresses".into());
    let started = thread.spawn(move || answer_all(listeners, table));
    let what = "start a thread that translates addresses";
    started.map(drop).map_err(|source| EngineError::System { pid: 0, what, source })
}

fn answer_all(mut listeners: Vec<OwnedFd>, table: &'static Table) {
    while !listeners.is_empty() {
        let mut fds: Vec<PollFd> =
            listeners.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        // Without it nobody would answer: it is asked again.
        if retry_on_intr(|| poll(&mut fds, None)).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(1));
            continue;
        }
        let events: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        drop(fds);
        let mut events = events.into_iter();
        listeners.retain(|listener| {
            let now = events.next().unwrap_or(PollFlags::empty());
            if now.contains(PollFlags::IN) {
                answer(listener, table);
            }
            // All who had that filter have ended.
            now.contains(PollFlags::IN) || !now.intersects(PollFlags::HUP | PollFlags::ERR)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_counts_before_its_host_and_what_was_said_first_before_all() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let mut table = Table::default();
        assert!(table.is_idle());
        table.host(ip("10.1.0.1"), ip("10.1.0.1"));
        assert!(table.is_idle());
        table.host(ip("10.1.0.2"), ip("10.2.0.2"));
        table.host(ip("10.1.0.2"), ip("10.2.0.3"));
        table.port(true, at("10.1.0.2:80"), ip("10.2.0.3"));
        assert!(!table.is_idle());
        assert_eq!(table.now(true, at("10.1.0.2:80")), Some(at("10.2.0.3:80")));
        assert_eq!(table.now(false, at("10.1.0.2:80")), Some(at("10.2.0.2:80")));
        assert_eq!(table.now(true, at("10.1.0.1:80")), None);
        assert_eq!(table.now(true, at("10.9.0.1:80")), None);
        assert_eq!(table.before(at("10.2.0.2:7")), Some(at("10.1.0.2:7")));
        assert_eq!(table.before(at("10.1.0.1:7")), None);
    }
}
