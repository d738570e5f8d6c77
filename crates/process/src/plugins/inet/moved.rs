//! Addresses on another machine. What listened at the old machine's own address listens at this
//! one's, if that has but one: nobody is reached by networks that the program did not choose.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Longest of the kernel's tables that is read, in bytes.
const MAX_TABLE_LEN: usize = 4 << 20;

/// `address` where this machine has it; else this machine's own of its kind with that port. `None`
/// if it has none or several.
pub(super) fn here(address: SocketAddr) -> Option<SocketAddr> {
    let ip = address.ip();
    let everywhere = ip.is_unspecified() || ip.is_loopback();
    let own = if ip.is_ipv4() { own_four() } else { own_six() };
    if everywhere || own.contains(&ip) {
        return Some(address);
    }
    match own[..] {
        [one] => Some(SocketAddr::new(one, address.port())),
        _ => None,
    }
}

/// This machine's addresses of both kinds, but for loopback's and those of one link alone.
pub(super) fn own() -> Vec<IpAddr> {
    own_four().into_iter().chain(own_six()).collect()
}

fn table(path: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    if text.len() > MAX_TABLE_LEN { String::new() } else { text }
}

fn own_four() -> Vec<IpAddr> {
    four(&table("/proc/self/net/fib_trie"))
}

fn own_six() -> Vec<IpAddr> {
    six(&table("/proc/self/net/if_inet6"))
}

/// The local addresses in a routing table as /proc/net/fib_trie shows it, but for loopback's.
fn four(text: &str) -> Vec<IpAddr> {
    let (mut found, mut last) = (Vec::new(), None);
    for line in text.lines().map(str::trim) {
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse::<Ipv4Addr>().ok();
        } else if line == "/32 host LOCAL" {
            found.extend(last.filter(|address| !address.is_loopback()).map(IpAddr::V4));
        }
    }
    // Each is in two tables.
    found.sort_unstable();
    found.dedup();
    found
}

/// The addresses in /proc/net/if_inet6 that are good everywhere, not on one link alone.
fn six(text: &str) -> Vec<IpAddr> {
    const GLOBAL: &str = "00";
    let address = |line: &str| {
        let mut words = line.split_whitespace();
        let (address, scope) = (words.next()?, words.nth(2)?);
        let bits = u128::from_str_radix(address, 16).ok()?;
        (scope == GLOBAL).then_some(IpAddr::V6(Ipv6Addr::from_bits(bits)))
    };
    text.lines().filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_read() {
        let text = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     +-- 10.77.1.0/24 2 0 2\n        \
                    |-- 10.77.1.0\n           /24 link UNICAST\n        |-- 10.77.1.1\n           /32 host LOCAL\n        |-- 10.77.1.255\n           \
                    /32 link BROADCAST\n     |-- 127.0.0.1\n        /32 host LOCAL\nLocal:\n        |-- 10.77.1.1\n           /32 host LOCAL\n";
        assert_eq!(four(text), [IpAddr::V4(Ipv4Addr::new(10, 77, 1, 1))]);
        let text = "00000000000000000000000000000001 01 80 10 80       lo\n\
                    20010db8000000000000000000000007 02 40 00 00     eth0\n\
                    fe80000000000000cc6bb5fffee102a5 02 40 20 80     eth0\n";
        assert_eq!(six(text), ["2001:db8::7".parse::<IpAddr>().unwrap()]);
        assert!(four("|-- x\n/32 host LOCAL").is_empty() && six("x y").is_empty());
    }

    #[test]
    fn what_is_here_stays() {
        for text in ["127.0.0.1:80", "0.0.0.0:80", "[::1]:80"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(here(address), Some(address));
        }
    }
}
