//! The hosts of the job as its programs remember them, and as they are.

use super::place::{Here, Offer};
use super::{heard, say};
use crate::plugins::Rendezvous;
use crate::plugins::error::PluginError;
use crate::plugins::inet::{Role, Socket};
use crate::translate::Table;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

/// Most addresses, and most ports, of one part.
const MAX_OF_PART: usize = 512;

/// What a part tells of its host.
#[derive(Debug, Serialize, Deserialize)]
struct Page {
    before: Vec<IpAddr>,
    /// Where it is reached: of TCP, if `true`.
    ports: Vec<(bool, u16)>,
    now: Offer,
}

fn name(part: &str) -> String {
    format!("host of {part}")
}

/// Tells the other parts which host this part's was, and which it is.
pub(in super::super) fn write(
    sockets: &BTreeMap<u32, Socket>,
    others: &dyn Rendezvous,
    here: &Here,
) -> Result<(), PluginError> {
    let hosts = sockets.values().filter_map(|socket| socket.host.as_ref());
    let before: BTreeSet<IpAddr> = hosts.flat_map(|host| host.own.iter().copied()).collect();
    let bound = sockets
        .values()
        .filter(|socket| !socket.is_stream() || matches!(socket.role, Role::Listening { .. }));
    let ports = bound.filter_map(|socket| Some((socket.is_stream(), socket.local?.port())));
    let ports: BTreeSet<(bool, u16)> = ports.collect();
    let (before, ports) =
        (before.into_iter().take(MAX_OF_PART), ports.into_iter().take(MAX_OF_PART));
    let page = Page { before: before.collect(), ports: ports.collect(), now: here.all() };
    say(others, &name(&others.name()), &page)
}

/// Reads what all have told, this part first: where two hosts have become one, or one has become
/// two, that counts.
pub(in super::super) fn read(others: &dyn Rendezvous, here: &Here) -> Result<Table, PluginError> {
    let mut table = Table::default();
    let own = others.name();
    let mut parts = others.parts().map_err(super::refused)?;
    parts.sort_by_key(|part| *part != own);
    for part in parts {
        // One without sockets has told nothing.
        let Some(page) = heard::<Page>(others, &name(&part))? else { continue };
        for before in page.before.iter().take(MAX_OF_PART).filter(|before| !before.is_loopback()) {
            let chosen = here.choose(&page.now, SocketAddr::new(*before, 0));
            let Some(now) = chosen.first().map(SocketAddr::ip) else { continue };
            table.host(*before, now);
            for (tcp, port) in page.ports.iter().take(MAX_OF_PART) {
                table.port(*tcp, SocketAddr::new(*before, *port), now);
            }
        }
    }
    Ok(table)
}
