//! Where a host is reached: by which addresses, before a checkpoint and after a restart.

use super::{heard, refused};
use crate::plugins::Rendezvous;
use crate::plugins::error::PluginError;
use crate::plugins::inet::moved;
use crate::plugins::inet::save::canonical;
use crate::translate;
use serde::{Deserialize, Serialize};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Most addresses of one host that are told of.
const MAX_ADDRESSES: usize = 64;

/// A network namespace, as only its own processes see it.
#[derive(Debug, Clone)]
pub(in super::super) struct Here {
    /// No other has it.
    id: String,
    /// Its addresses but for loopback's.
    own: Vec<IpAddr>,
}

impl Here {
    /// Looks at this process's own.
    pub(in super::super) fn look() -> Here {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let network = fs::read_link("/proc/self/ns/net").unwrap_or_default();
        let id = format!("@{:.36}/{:.32}", boot.trim(), network.to_string_lossy());
        let own = moved::own().into_iter().take(MAX_ADDRESSES).collect();
        Here { id, own }
    }

    /// Returns what to add to the name of a connection to `remote`: addresses that mean this host
    /// are another host's as well.
    pub(super) fn scope(&self, remote: SocketAddr) -> &str {
        let ip = remote.ip();
        if ip.is_loopback() || self.own.contains(&ip) { &self.id } else { "" }
    }

    /// Returns where a socket with the address `local` is reached.
    pub(super) fn reached(&self, local: SocketAddr) -> Vec<IpAddr> {
        let ip = local.ip().to_canonical();
        if !ip.is_unspecified() {
            return vec![ip];
        }
        let home = [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()];
        let fits = |one: &IpAddr| one.is_ipv4() || ip.is_ipv6();
        self.own.iter().copied().chain(home).filter(fits).collect()
    }

    /// Offers what is bound to `local`.
    pub(super) fn offer(&self, local: SocketAddr) -> Offer {
        let at = self.reached(local).into_iter().map(|ip| SocketAddr::new(ip, local.port()));
        Offer { here: self.id.clone(), at: at.collect() }
    }

    /// Offers the host itself.
    pub(super) fn all(&self) -> Offer {
        let at = self.own.iter().map(|ip| SocketAddr::new(*ip, 0)).collect();
        Offer { here: self.id.clone(), at }
    }

    /// Whether it has that address, loopback's among them.
    pub(super) fn has(&self, ip: IpAddr) -> bool {
        ip.is_loopback() || self.own.contains(&ip)
    }

    /// Returns the addresses of `offer` that can be reached from here, the likeliest first: the one
    /// that `before` had.
    pub(super) fn choose(&self, offer: &Offer, before: SocketAddr) -> Vec<SocketAddr> {
        let before = canonical(before);
        let near = offer.here == self.id;
        let mut found: Vec<SocketAddr> =
            offer.at.iter().take(MAX_ADDRESSES).copied().map(canonical).collect();
        let of_kind = |one: &SocketAddr| one.is_ipv4() == before.is_ipv4();
        found.retain(|one| of_kind(one) && (near || !one.ip().is_loopback()));
        found.sort_by_key(|one| {
            let same = one.ip() == before.ip();
            // Where a host is known by its loopback address only, nobody has chosen another one.
            (!same, one.ip().is_loopback() != before.ip().is_loopback())
        });
        found
    }
}

/// Where the host of a socket was at the checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in super::super) struct Host {
    here: String,
    /// The addresses by which others reached the socket.
    at: Vec<IpAddr>,
    /// All addresses that it had, and those by which programs know it from before an earlier
    /// restart.
    #[serde(default)]
    pub(super) own: Vec<IpAddr>,
}

impl Host {
    pub(in super::super) fn of(here: &Here, local: Option<SocketAddr>) -> Host {
        let at = local.map(|local| here.reached(local)).unwrap_or_default();
        let mut own = translate::former(&here.own);
        own.extend(&here.own);
        own.truncate(MAX_ADDRESSES);
        Host { here: here.id.clone(), at, own }
    }

    fn name(&self, kind: &str, address: SocketAddr) -> String {
        let here = if address.ip().is_loopback() { &*self.here } else { "" };
        format!("{kind} {address}{here:.80}")
    }
}

/// Where something can be reached since the restart.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in super::super) struct Offer {
    here: String,
    at: Vec<SocketAddr>,
}

/// Publishes that what was at the port of `before` on `host` is at `now`, for sockets of `kind`.
pub(in super::super) fn publish(
    others: &dyn Rendezvous,
    kind: &str,
    (host, before): (&Host, SocketAddr),
    now: SocketAddr,
    here: &Here,
) -> Result<(), PluginError> {
    let offer = serde_json::to_vec(&here.offer(now)).unwrap_or_default();
    for ip in host.at.iter().take(MAX_ADDRESSES) {
        let name = host.name(kind, SocketAddr::new(*ip, before.port()));
        // Hosts may have had the same private address: the first one counts.
        others.publish(&name, &offer).map_err(refused)?;
    }
    Ok(())
}

/// Returns where a socket of another part is by now that was at `before`, seen from `host`; the
/// likeliest first, nothing if no part has had it.
pub(in super::super) fn elsewhere(
    others: &dyn Rendezvous,
    kind: &str,
    (host, before): (&Host, SocketAddr),
    here: &Here,
) -> Result<Vec<SocketAddr>, PluginError> {
    let before = canonical(before);
    let offer: Option<Offer> = heard(others, &host.name(kind, before))?;
    Ok(offer.map(|offer| here.choose(&offer, before)).unwrap_or_default())
}

/// The same address for a socket of IPv6 or of IPv4.
pub(in super::super) fn for_family(address: SocketAddr, six: bool) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(four) if six => SocketAddr::new(four.to_ipv6_mapped().into(), address.port()),
        _ => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here(id: &str, own: &[&str]) -> Here {
        let own = own.iter().map(|ip| ip.parse().unwrap()).collect();
        Here { id: id.to_owned(), own }
    }

    #[test]
    fn the_former_address_comes_first_and_loopback_only_on_the_same_host() {
        let far = here("@a", &["10.1.0.2", "10.2.0.2", "fd00::2"]);
        let offer = far.offer("0.0.0.0:80".parse().unwrap());
        let before = "10.2.0.2:81".parse().unwrap();
        let chosen = here("@b", &["10.1.0.3"]).choose(&offer, before);
        assert_eq!(chosen, ["10.2.0.2:80", "10.1.0.2:80"].map(|one| one.parse().unwrap()));
        let before = "127.0.0.1:80".parse().unwrap();
        assert_eq!(far.choose(&offer, before)[0], before);
        let offer = far.offer("[::]:80".parse().unwrap());
        let chosen = here("@b", &[]).choose(&offer, "[fd00::9]:80".parse().unwrap());
        assert_eq!(chosen, ["[fd00::2]:80".parse().unwrap()]);
    }

    #[test]
    fn what_means_every_host_is_told_apart() {
        let host = here("@a", &["10.1.0.2"]);
        assert_eq!(host.scope("127.0.0.1:1".parse().unwrap()), "@a");
        assert_eq!(host.scope("10.1.0.2:1".parse().unwrap()), "@a");
        assert_eq!(host.scope("10.1.0.3:1".parse().unwrap()), "");
    }
}
