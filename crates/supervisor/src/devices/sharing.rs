//! Device memory and events that several processes of a job have together. One of them owns each:
//! its proxy saves the bytes, and the others' note where a restart finds them.

use crate::devices::proxies::Proxy;
use crate::devices::quiesce::{Resting, ask_all};
use kedge_control::aliases;
use kedge_control::proxy::{Answer, Control, ControlError, Order};
use kedge_control::sharing::{Bond, Identity, PeerName, Share, What};
use kedge_process::plugins::{Capture, Found, Job};
use kedge_wire::List;
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;
use thiserror::Error;

/// A proxy has it at hand.
const LIMIT: Duration = Duration::from_secs(70);

#[derive(Debug, Error)]
pub(crate) enum SharingError {
    #[error("process {pid}: {source}")]
    Proxy { pid: u32, source: ControlError },
    #[error(
        "process {pid} has device memory of a process that has ended, or is not of this job (or not of this part of \
         it), by a descriptor (cuMemImportFromShareableHandle), which no checkpoint keeps: start both in one `kedge run`, \
         or take the checkpoint after it has released it"
    )]
    Foreign { pid: u32 },
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

/// Memory of which the program may have descriptors of its own.
#[derive(Debug)]
pub(crate) struct Lent {
    /// The owner's proxy.
    proxy: u32,
    known: Vec<Identity>,
    pub(crate) name: PeerName,
}

impl Lent {
    /// Whether a description of the program's, of which this process has that descriptor, is of
    /// this memory.
    pub(crate) fn is(&self, file: &Found, holder: (i32, i32)) -> bool {
        let stat = &file.stat;
        self.known.iter().any(|identity| match identity {
            Identity::Name { .. } => false,
            Identity::File { device, inode } => (*device, *inode) == (stat.device, stat.inode),
            Identity::Descriptor { number } => {
                let file = stat.mode & libc::S_IFMT == libc::S_IFREG;
                !file && same((self.proxy as i32, *number), holder)
            }
        })
    }
}

/// The shared device memory whose descriptor a process has.
pub(crate) fn memory<'a>(file: &Found, job: &Job, lent: &'a [Lent]) -> Option<&'a Lent> {
    lent.iter().find(|lent| lent.is(file, job.place(file)))
}

/// The descriptions of such memory, and where a restart finds it.
pub(crate) fn save(capture: &Capture, mine: &[usize], lent: &[Lent]) -> Vec<(u32, String)> {
    let name = |index: &usize| {
        let lent = memory(capture.file(*index), capture.job, lent)?;
        Some((*index as u32, aliases::text(&lent.name)))
    };
    mine.iter().filter_map(name).collect()
}

/// Whether two descriptors, each by its process, are of one description.
fn same(a: (i32, i32), b: (i32, i32)) -> bool {
    const KCMP_FILE: libc::c_int = 0;
    // SAFETY: this kind of kcmp takes numbers alone.
    unsafe { libc::syscall(libc::SYS_kcmp, a.0, b.0, KCMP_FILE, a.1 as u64, b.1 as u64) == 0 }
}

/// Waits until all proxies have brought their clients' devices back. The first that fails is told
/// of at once: others may wait for what it was to make.
pub(crate) fn wait_for_all<'a>(
    all: impl Iterator<Item = (u32, &'a Arc<Proxy>)>,
    limit: Duration,
) -> Result<(), SharingError> {
    let (said, hear) = channel();
    for (pid, proxy) in all {
        let (said, proxy) = (said.clone(), Arc::clone(proxy));
        let wait = move || drop(said.send((pid, proxy.control.answer(limit))));
        let started = thread::Builder::new().stack_size(64 << 10).spawn(wait);
        started.map_err(SharingError::Thread)?;
    }
    drop(said);
    hear.iter().try_for_each(|(pid, answer)| match answer {
        Ok(_) => Ok(()),
        Err(source) => Err(SharingError::Proxy { pid, source }),
    })
}

/// What one client has together with others.
struct Client<'a> {
    pid: u32,
    proxy: u32,
    control: &'a Control,
    shares: Vec<Share>,
}

/// Finds an owner for all that the clients, which are at rest, share, and has it noted who that is:
/// what of it is memory that can travel as a descriptor.
pub(crate) fn bind(clients: &[Resting]) -> Result<Vec<Lent>, SharingError> {
    let mut owners = Owners::default();
    let clients = ask(clients, &mut owners)?;
    for client in &clients {
        owners.add(client);
    }
    for client in &clients {
        let others = client.shares.iter().filter(|share| share.name.is_none());
        let bonds =
            others.map(|share| owners.bond(client, share)).collect::<Result<Vec<_>, _>>()?;
        let bonds: Vec<Bond> = bonds.into_iter().flatten().collect();
        if !client.shares.is_empty() {
            // As many as were told of, at most.
            let order = Order::Bind { borrows: List::new(bonds).unwrap_or_default() };
            let bound = client.control.does(&order, LIMIT);
            bound.map_err(|source| SharingError::Proxy { pid: client.pid, source })?;
        }
    }
    Ok(owners.lent)
}

fn ask<'a>(clients: &'a [Resting], owners: &mut Owners) -> Result<Vec<Client<'a>>, SharingError> {
    let controls: Vec<_> =
        clients.iter().map(|client| (client.pid, &client.proxy.control)).collect();
    let answers = ask_all(&controls, &Order::Shares {});
    let mut all = Vec::new();
    for (client, answer) in clients.iter().zip(answers) {
        let failed = |source| SharingError::Proxy { pid: client.pid, source };
        let Answer::Shares { pid, shares, released } = answer.map_err(failed)? else {
            return Err(failed(ControlError::Nonsense));
        };
        owners.released.extend(released.into_inner());
        let (shares, control) = (shares.into_inner(), &client.proxy.control);
        all.push(Client { pid: client.pid, proxy: pid, control, shares });
    }
    Ok(all)
}

/// Who has what.
#[derive(Default)]
struct Owners {
    names: HashMap<Identity, PeerName>,
    /// What only the driver can tell: proxies and their descriptors.
    descriptors: Vec<((i32, i32), PeerName)>,
    /// Files of memory that processes of this job had.
    released: HashSet<(u64, u64)>,
    lent: Vec<Lent>,
}

impl Owners {
    /// What a client owns.
    fn add(&mut self, client: &Client<'_>) {
        for share in &client.shares {
            if let Some(name) = share.name {
                self.owns(client, share, name);
            }
        }
    }

    fn owns(&mut self, client: &Client<'_>, share: &Share, name: PeerName) {
        for identity in share.known.iter() {
            match identity {
                Identity::Descriptor { number } => {
                    self.descriptors.push(((client.proxy as i32, *number), name));
                }
                known => drop(self.names.insert(*known, name)),
            }
        }
        // What is known by its name alone was opened by that, and has no descriptor.
        let by_name = |identity: &Identity| matches!(identity, Identity::Name { .. });
        if matches!(share.what, What::Handle { .. }) && !share.known.iter().all(by_name) {
            let known = share.known.to_vec();
            self.lent.push(Lent { proxy: client.proxy, known, name });
        }
    }

    fn find(&self, client: &Client<'_>, share: &Share) -> Option<PeerName> {
        share.known.iter().find_map(|identity| match identity {
            Identity::Descriptor { number } => {
                let mine = (client.proxy as i32, *number);
                let found = self.descriptors.iter().find(|(other, _)| same(mine, *other));
                found.map(|(_, name)| *name)
            }
            known => self.names.get(known).copied(),
        })
    }

    /// Where a restart finds what is another's; `None` of what becomes the client's own, because
    /// who made it has it no more.
    fn bond(&mut self, client: &Client<'_>, share: &Share) -> Result<Option<Bond>, SharingError> {
        if let Some(name) = self.find(client, share) {
            return Ok(Some(Bond { what: share.what, name }));
        }
        let may_be_a_strangers = share.known.iter().any(|identity| match identity {
            Identity::Name { .. } => false,
            Identity::File { device, inode } => !self.released.contains(&(*device, *inode)),
            Identity::Descriptor { .. } => true,
        });
        if may_be_a_strangers {
            return Err(SharingError::Foreign { pid: client.pid });
        }
        let adopted = client.control.ask(&Order::Adopt { what: share.what }, &[], LIMIT);
        let failed = |source| SharingError::Proxy { pid: client.pid, source };
        let Answer::Adopted { name } = adopted.map_err(failed)? else {
            return Err(failed(ControlError::Nonsense));
        };
        self.owns(client, share, name);
        Ok(None)
    }
}
