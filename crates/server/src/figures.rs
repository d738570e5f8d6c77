//! What of a server is told to who watches it.

use crate::Lender;
use crate::sessions::Kind;
use kedge_control::account::Counts;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A server at one moment.
#[derive(Debug, Clone)]
pub struct Figures {
    /// What is lent, as `--gpu` has it, and how many devices that are.
    pub gpu: String,
    pub devices: usize,
    /// Since it began.
    pub uptime: Duration,
    /// It begins no more sessions.
    pub ending: bool,
    /// Connections that have not said what they are for.
    pub opening: usize,
    /// Connections that were refused before it was known whose they are.
    pub strangers: u64,
    pub tenants: Vec<TenantFigures>,
}

/// What a key has of a server, or this machine.
#[derive(Debug, Clone)]
pub struct TenantFigures {
    /// The key's name; `None`: this machine.
    pub name: Option<String>,
    pub sessions: usize,
    /// Proxies that answer NVML.
    pub management: usize,
    /// Different ones that its sessions are on.
    pub devices: usize,
    pub counts: Counts,
    /// Bytes a second that it may have, as its newest session began.
    pub bandwidth: Option<u64>,
    /// Sessions since the server began, and what was refused.
    pub begun: u64,
    pub refused: u64,
}

/// Tells a server's figures.
#[derive(Debug, Clone)]
pub struct Watch {
    lender: Arc<Lender>,
    since: Instant,
}

impl Watch {
    pub(crate) fn new(lender: Arc<Lender>) -> Watch {
        Watch { lender, since: Instant::now() }
    }

    /// Returns whether it begins no more sessions.
    pub fn is_ending(&self) -> bool {
        self.lender.sessions.locked().ending
    }

    /// Returns the figures of this moment.
    pub fn figures(&self) -> Figures {
        let Lender { spec, sessions, openings, strangers, .. } = &*self.lender;
        let open = sessions.locked();
        let tenants = open.tenants.used().map(|(name, used)| {
            let own = || open.by_key.values().filter(|it| it.name() == name);
            let of = |kind| own().filter(|it| it.kind == kind).count();
            let devices: BTreeSet<u32> = own().flat_map(|it| it.devices.iter().copied()).collect();
            TenantFigures {
                name: name.map(ToString::to_string),
                sessions: of(Kind::Devices),
                management: of(Kind::Management),
                devices: devices.len(),
                counts: used.counts,
                bandwidth: used.bandwidth,
                begun: used.begun,
                refused: used.refused,
            }
        });
        Figures {
            gpu: spec.gpu.to_string(),
            devices: spec.devices,
            uptime: self.since.elapsed(),
            ending: open.ending,
            opening: openings.count(),
            strangers: strangers.load(Ordering::Relaxed),
            tenants: tenants.collect(),
        }
    }
}
