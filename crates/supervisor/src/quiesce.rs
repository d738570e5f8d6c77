//! Bringing a job's devices to rest, all of them at one moment, without stopping the program's threads.
//!
//! Gates are closed first: what the program asks of its devices from then on waits in its rings, while its
//! threads, callbacks and libraries go on. Then what was asked before must come to its end. It may not: a
//! process that takes part in a collective operation waits for another one, which was gated before it could
//! take part. So if not all is at rest in time, all gates open, and it is tried again.

use crate::proxies::Proxies;
use kedge_proxy::control::{Answer, Control, ControlError, Order};
use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};
use thiserror::Error;

/// How long the first try waits for rest; each later one twice as long as the one before, up to the last.
const FIRST_TRY: Duration = Duration::from_millis(50);
const LONGEST_TRY: Duration = Duration::from_secs(2);
/// Between two tries, so that those who were gated get somewhere.
const BETWEEN: Duration = Duration::from_millis(20);
/// Beyond what a proxy was told to wait for.
const ANSWER: Duration = Duration::from_secs(20);

#[derive(Debug, Error)]
pub(crate) enum QuiesceError {
    #[error(
        "the devices of process {pid} have not come to rest within {seconds} s ({tries} tries): a kernel, \
         copy or callback that does not end, or a message of another process that it waits for; raise --patience"
    )]
    Busy { pid: u32, seconds: u64, tries: u32 },
    #[error("process {pid}: {source}")]
    Proxy { pid: u32, source: ControlError },
}

/// A client whose devices are at rest.
#[derive(Debug, Clone)]
pub(crate) struct Resting {
    pub(crate) control: Arc<Control>,
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
    /// The proxies' process ids.
    pub(crate) proxies: Vec<u32>,
    pub(crate) tries: u32,
    pub(crate) seconds: f64,
    /// No new client meanwhile.
    _none_new: MutexGuard<'a, BTreeMap<u32, Arc<Control>>>,
}

impl Proxies {
    /// Brings all devices to rest within `patience`.
    pub(crate) fn quiesce(&self, patience: Duration) -> Result<Quiet<'_>, QuiesceError> {
        let mut running = self.locked();
        let (begin, mut wait, mut tries) = (Instant::now(), FIRST_TRY, 0);
        loop {
            tries += 1;
            let tried = each(&running, |pid, control| settle(pid, control, wait));
            // A proxy that has ended with its client is no matter.
            running.retain(|pid, _| !matches!(tried.get(pid), Some(Err(_)) if gone(*pid)));
            let mut clients = Vec::new();
            let mut failed = None;
            for (proxy, settled) in tried {
                match settled {
                    _ if !running.contains_key(&proxy) => {}
                    Ok(Settled::Resting(client)) => clients.push(client),
                    Ok(Settled::Busy(pid)) => {
                        let seconds = patience.as_secs();
                        failed = Some(QuiesceError::Busy { pid, seconds, tries });
                    }
                    Err(source) => failed = Some(QuiesceError::Proxy { pid: proxy, source }),
                }
            }
            let Some(error) = failed else {
                let proxies = running.keys().copied().collect();
                let seconds = begin.elapsed().as_secs_f64();
                return Ok(Quiet { clients, proxies, tries, seconds, _none_new: running });
            };
            open(&clients);
            if begin.elapsed() > patience || matches!(error, QuiesceError::Proxy { .. }) {
                return Err(error);
            }
            thread::sleep(BETWEEN);
            wait = (wait * 2).min(LONGEST_TRY);
        }
    }
}

enum Settled {
    Resting(Resting),
    /// The client's process.
    Busy(u32),
}

/// Closes one gate and waits for rest; if that does not come, the gate is open again.
fn settle(proxy: u32, control: &Arc<Control>, wait: Duration) -> Result<Settled, ControlError> {
    let within_ms = wait.as_millis() as u32;
    let limit = wait + ANSWER;
    let (pid, socket, ring, arena) = match control.ask(&Order::Gate { within_ms }, &[], limit)? {
        Answer::Gated { pid, socket, ring, arena } => (pid, socket, ring, arena),
        Answer::No {} => return Ok(Settled::Busy(proxy)),
        _ => return Err(ControlError::Nonsense),
    };
    if control.does(&Order::Rest { within_ms }, limit)? {
        let control = control.clone();
        return Ok(Settled::Resting(Resting { control, pid, socket, ring, arena }));
    }
    control.does(&Order::Open {}, limit)?;
    Ok(Settled::Busy(pid))
}

/// Asks all at once.
fn each<T: Send>(
    proxies: &BTreeMap<u32, Arc<Control>>,
    ask: impl Fn(u32, &Arc<Control>) -> T + Sync,
) -> BTreeMap<u32, T> {
    thread::scope(|scope| {
        let ask = &ask;
        let asked: Vec<_> = proxies
            .iter()
            .map(|(pid, control)| (*pid, scope.spawn(move || ask(*pid, control))))
            .collect();
        asked.into_iter().filter_map(|(pid, asked)| Some((pid, asked.join().ok()?))).collect()
    })
}

/// Whether a child of this process has ended.
fn gone(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    matches!(state, None | Some('Z' | 'X'))
}

fn open(clients: &[Resting]) {
    for client in clients {
        // One that does not hear it has ended, and its gate with it.
        let _ = client.control.does(&Order::Open {}, ANSWER);
    }
}

impl Drop for Quiet<'_> {
    /// Opens all gates.
    fn drop(&mut self) {
        open(&self.clients);
    }
}
