//! Bringing a job's devices to rest, all of them at one moment, without stopping the program's
//! threads.
//!
//! Gates are closed first: what the program asks of its devices from then on waits in its rings,
//! while its threads, callbacks and libraries go on. Then what was asked before must come to its
//! end. It may not: a process that takes part in a collective operation waits for another one,
//! which was gated before it could take part. So those that are at rest while others are not are
//! let on by one message at a time, which brings the late ones to where the others wait. Where that
//! does not help either, those that are busy are let on by a few messages, too: a kernel may wait
//! for another one, which its own process submits. At last all gates open for a while, and it is
//! tried again.

use crate::devices::proxies::{Known, Proxies, Proxy, has_ended};
use kedge_control::proxy::{Answer, Control, ControlError, Order};
use std::sync::{Arc, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long the first try may take; each later one twice as long as the one before.
const FIRST_TRY: Duration = Duration::from_millis(500);
/// Between two tries, so that those who were gated get somewhere.
const BETWEEN: Duration = Duration::from_millis(50);
/// What a dispatcher may need for the message that it is at.
const GATE_MS: u32 = 2_000;
/// One look at whether all rest, and the time to take one message. An operation that all take part
/// in ends everywhere within much less.
const LOOK_MS: u32 = 1;
/// Messages by which who is busy is let on, one at a time; more would only be more work. And how
/// long each may take.
const LET_ON: u32 = 4;
const LET_ON_MS: u32 = 5;
/// How long a proxy whose client has ended may take to end.
const ENDING: Duration = Duration::from_secs(2);
/// Beyond what a proxy was told to wait for.
const ANSWER: Duration = Duration::from_secs(70);

#[derive(Debug, Error)]
pub(crate) enum QuiesceError {
    #[error(
        "the devices of process {pid} have not come to rest within {seconds} s ({tries} tries): a kernel, \
         copy or callback that does not end, or a message of another process that it waits for; try again when that has ended"
    )]
    Busy { pid: u32, seconds: u64, tries: u32 },
    #[error(
        "devices have not come to rest within {0} s: each time a thread of the job waited for a \
         page that a device had, and what the device did then waited for the job; try again later"
    )]
    Waiting(u64),
    #[error("process {pid}: {source}")]
    Proxy { pid: u32, source: ControlError },
}

/// A client whose devices are at rest.
#[derive(Debug, Clone)]
pub(crate) struct Resting {
    pub(crate) proxy: Arc<Proxy>,
    /// The client's process.
    pub(crate) pid: u32,
    /// The proxy's end of the connection, the ring and the shared arena: inodes.
    pub(crate) socket: u64,
    pub(crate) ring: u64,
    pub(crate) arena: u64,
}

/// All clients at rest, until this is dropped or opened.
#[derive(Debug)]
pub(crate) struct Quiet<'a> {
    pub(crate) clients: Vec<Resting>,
    /// The process ids of the proxies that are children.
    pub(crate) proxies: Vec<u32>,
    pub(crate) tries: u32,
    pub(crate) seconds: f64,
    /// No new client meanwhile.
    none_new: MutexGuard<'a, Known>,
}

impl Proxies {
    /// Brings all devices to rest within `patience`, after the order to prepare for what follows.
    pub(crate) fn quiesce(
        &self,
        patience: Duration,
        preparing: &Order,
    ) -> Result<Quiet<'_>, QuiesceError> {
        self.quiesce_after(patience, preparing, || {})
    }

    /// The same; `last` is done when all have prepared and none waits yet.
    pub(crate) fn quiesce_after(
        &self,
        patience: Duration,
        preparing: &Order,
        last: impl FnOnce(),
    ) -> Result<Quiet<'_>, QuiesceError> {
        let known = self.locked();
        // A proxy that has ended with its client is no matter. Whoever collects it still has to
        // know it.
        let mut running = known.clone();
        without_gone(&mut running);
        prepare(&running, preparing);
        last();
        let begin = Instant::now();
        let (mut wait, mut tries) = (FIRST_TRY, 0);
        loop {
            tries += 1;
            let end = (begin + patience).min(Instant::now() + wait);
            let tried = gate(&running).and_then(|clients| {
                let settled = settle(&clients, end);
                if !matches!(settled, Ok(None)) {
                    open(&clients);
                }
                settled.map(|busy| (clients, busy))
            });
            let busy = match tried {
                Ok((clients, None)) => {
                    let proxies = Proxies::children(&known);
                    let seconds = begin.elapsed().as_secs_f64();
                    return Ok(Quiet { clients, proxies, tries, seconds, none_new: known });
                }
                Ok((_, Some(busy))) => busy,
                Err(QuiesceError::Proxy { pid, ref source })
                    if without_gone(&mut running) || ends(pid, source) =>
                {
                    continue;
                }
                Err(QuiesceError::Busy { pid, .. }) => pid,
                Err(error) => return Err(error),
            };
            if begin.elapsed() >= patience {
                return Err(QuiesceError::Busy { pid: busy, seconds: patience.as_secs(), tries });
            }
            thread::sleep(BETWEEN);
            wait *= 2;
        }
    }
}

/// Has all proxies make room for what they will capture, before anything stands still. One that
/// does not answer is found out by the next order.
fn prepare(running: &Known, preparing: &Order) {
    let controls: Vec<(u32, &Control)> = running.values().map(|p| (p.pid(), &p.control)).collect();
    ask_all(&controls, preparing);
}

/// Closes all gates, or none.
fn gate(running: &Known) -> Result<Vec<Resting>, QuiesceError> {
    let controls: Vec<(u32, &Control)> = running.values().map(|p| (p.pid(), &p.control)).collect();
    let answers = ask_all(&controls, &Order::Gate { within_ms: GATE_MS });
    let (mut clients, mut failed) = (Vec::new(), None);
    for (proxy, answer) in running.values().zip(answers) {
        match answer {
            Ok(Answer::Gated { pid, socket, ring, arena }) => {
                let proxy = proxy.clone();
                clients.push(Resting { proxy, pid, socket, ring, arena });
            }
            Ok(_) => failed = Some(QuiesceError::Busy { pid: proxy.pid(), seconds: 0, tries: 0 }),
            Err(source) => failed = Some(QuiesceError::Proxy { pid: proxy.pid(), source }),
        }
    }
    match failed {
        None => Ok(clients),
        Some(error) => {
            // Also those that have not answered: they close theirs when they come to it. One that
            // does not hear it has ended, and its gate with it.
            for (_, control) in controls {
                let _ = control.give(&Order::Open {}, &[]);
            }
            Err(error)
        }
    }
}

/// Waits until all rest: `None`, or the process of one that does not at `end`.
fn settle(clients: &[Resting], end: Instant) -> Result<Option<u32>, QuiesceError> {
    let all: Vec<(u32, &Control)> = clients.iter().map(|c| (c.pid, &c.proxy.control)).collect();
    loop {
        let (resting, busy) = split(&all, LOOK_MS)?;
        let Some((pid, _)) = busy.first() else { return Ok(None) };
        if Instant::now() >= end {
            return let_on(&all).map(|rest| if rest { None } else { Some(*pid) });
        }
        yes(&resting, &Order::Step { within_ms: LOOK_MS })?;
    }
}

/// Lets those that are busy on by one message after the other: whether all rest then.
fn let_on(all: &[(u32, &Control)]) -> Result<bool, QuiesceError> {
    for _ in 0..LET_ON {
        let (_, busy) = split(all, LET_ON_MS)?;
        if busy.is_empty() {
            return Ok(true);
        }
        yes(&busy, &Order::Step { within_ms: LOOK_MS })?;
    }
    Ok(split(all, LET_ON_MS)?.1.is_empty())
}

type Clients<'a> = Vec<(u32, &'a Control)>;

/// Those that rest within so many milliseconds, and those that do not.
fn split<'a>(
    all: &[(u32, &'a Control)],
    within_ms: u32,
) -> Result<(Clients<'a>, Clients<'a>), QuiesceError> {
    let mut rest = yes(all, &Order::Rest { within_ms })?.into_iter();
    Ok(all.iter().copied().partition(|_| rest.next() == Some(true)))
}

/// Who says yes to an order.
fn yes(clients: &[(u32, &Control)], order: &Order) -> Result<Vec<bool>, QuiesceError> {
    let answers = ask_all(clients, order).into_iter().zip(clients);
    let told = answers.map(|(answer, (pid, _))| match answer {
        Ok(answer) => Ok(answer == Answer::Yes {}),
        Err(source) => Err(QuiesceError::Proxy { pid: *pid, source }),
    });
    told.collect()
}

/// Gives all the order before it waits for the first answer.
pub(crate) fn ask_all(
    clients: &[(u32, &Control)],
    order: &Order,
) -> Vec<Result<Answer, ControlError>> {
    let given: Vec<_> = clients.iter().map(|(_, control)| control.give(order, &[])).collect();
    let answers = given.into_iter().zip(clients);
    answers.map(|(given, (_, control))| given.and_then(|()| control.answer(ANSWER))).collect()
}

/// Whether it has ended, or is about to: connections close before a GPU's driver has put away what
/// a process had.
fn ends(pid: u32, error: &ControlError) -> bool {
    let closed = matches!(error, ControlError::Channel(_));
    let begin = Instant::now();
    while !has_ended(pid) {
        if !closed || begin.elapsed() > ENDING {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
    true
}

/// Leaves those out that have ended; whether there were any.
fn without_gone(running: &mut Known) -> bool {
    let before = running.len();
    running.retain(|_, proxy| !proxy.is_over());
    running.len() < before
}

/// Opens the gates of all, and waits until they have: one that is late keeps no other one's shut.
fn open(clients: &[Resting]) {
    let controls: Vec<(u32, &Control)> =
        clients.iter().map(|client| (client.pid, &client.proxy.control)).collect();
    // One that does not hear it has ended, and its gate with it.
    let _ = ask_all(&controls, &Order::Open {});
}

impl Quiet<'_> {
    /// Opens all gates for a while; no new client comes.
    pub(crate) fn let_on(&self) {
        open(&self.clients);
    }

    /// Closes them again. Returns whether all devices rest after so long.
    pub(crate) fn rest_again(&mut self, time: Duration) -> Result<bool, QuiesceError> {
        self.clients = gate(&self.none_new)?;
        Ok(settle(&self.clients, Instant::now() + time)?.is_none())
    }

    /// A client has another proxy, whose gate is open as soon as it serves; the old one is none of
    /// the job's any more, however it ends.
    pub(crate) fn replace(&mut self, old: &Proxy, new: Arc<Proxy>) {
        self.clients.retain(|client| client.proxy.id != old.id);
        self.none_new.remove(&old.id);
        self.none_new.insert(new.id, new);
    }
}

impl Drop for Quiet<'_> {
    /// Opens all gates.
    fn drop(&mut self) {
        open(&self.clients);
    }
}
