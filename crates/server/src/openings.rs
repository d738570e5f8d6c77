//! Connections that have not said what they are for.
//!
//! Their number is bounded. Where there are as many already, the oldest of whoever has most of them
//! goes: one address cannot keep the others out, and a connection that comes is never refused.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bits of an IPv6 address that its holder does not choose.
const PREFIX: u32 = 64;

/// All that there are.
#[derive(Debug, Clone)]
pub struct Openings(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// Those at a time.
    most: usize,
    last: u64,
    count: usize,
    /// By origin, the oldest first.
    origins: HashMap<IpAddr, BTreeMap<u64, TcpStream>>,
}

impl State {
    /// Forgets one that ends or is dropped.
    fn remove(&mut self, origin: IpAddr, number: u64) -> Option<TcpStream> {
        let there = self.origins.get_mut(&origin)?;
        let removed = there.remove(&number)?;
        if there.is_empty() {
            self.origins.remove(&origin);
        }
        self.count -= 1;
        Some(removed)
    }

    /// Shuts the oldest of whoever has most.
    fn make_room(&mut self) {
        let most = self.origins.iter().max_by_key(|(_, there)| there.len());
        let oldest = most.and_then(|(origin, there)| Some((*origin, *there.keys().next()?)));
        if let Some((origin, number)) = oldest
            && let Some(stream) = self.remove(origin, number)
        {
            // Its thread finds it at its end.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Openings {
    /// Counts up to `most` connections at a time.
    pub fn new(most: usize) -> Openings {
        let state = State { most, last: 0, count: 0, origins: HashMap::new() };
        Openings(Arc::new(Mutex::new(state)))
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how many there are.
    pub(crate) fn count(&self) -> usize {
        self.locked().count
    }

    /// Counts a connection until the value is dropped.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn add(&self, stream: &TcpStream, from: IpAddr) -> std::io::Result<Opened> {
        let (origin, stream) = (origin(from), stream.try_clone()?);
        let mut state = self.locked();
        if state.count >= state.most {
            state.make_room();
        }
        state.last += 1;
        state.count += 1;
        let number = state.last;
        state.origins.entry(origin).or_default().insert(number, stream);
        drop(state);
        Ok(Opened { openings: self.clone(), origin, number })
    }
}

/// One of them.
#[derive(Debug)]
pub struct Opened {
    openings: Openings,
    origin: IpAddr,
    number: u64,
}

impl Opened {
    /// Returns whether it has not had to go.
    pub(crate) fn is_there(&self) -> bool {
        let state = self.openings.locked();
        state.origins.get(&self.origin).is_some_and(|there| there.contains_key(&self.number))
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.openings.locked().remove(self.origin, self.number);
    }
}

/// Returns what of an address stands for whoever is behind it.
fn origin(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> PREFIX << PREFIX).into(),
        ip => ip,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read};
    use std::net::TcpListener;

    #[test]
    fn the_oldest_of_the_most_goes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let pair = || {
            let client = TcpStream::connect(address).unwrap();
            client.set_nonblocking(true).unwrap();
            (client, listener.accept().unwrap().0)
        };
        let is_open = |client: &mut TcpStream| match client.read(&mut [0]) {
            Ok(_) => false,
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        };
        const MAX_OPENINGS: usize = 512;
        let openings = Openings::new(MAX_OPENINGS);
        let (hostile, other): (IpAddr, IpAddr) =
            ("192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap());
        let (mut first, first_stream) = pair();
        let mut kept = vec![openings.add(&first_stream, other).unwrap()];
        let (mut oldest, stream) = pair();
        kept.push(openings.add(&stream, hostile).unwrap());
        // One pair of sockets will do for all the others.
        let (mut next, stream) = pair();
        for _ in 2..MAX_OPENINGS {
            kept.push(openings.add(&stream, hostile).unwrap());
        }
        let count = || openings.count();
        assert_eq!(count(), MAX_OPENINGS);
        assert!(is_open(&mut oldest) && is_open(&mut first) && is_open(&mut next));
        kept.push(openings.add(&stream, other).unwrap());
        assert_eq!(count(), MAX_OPENINGS);
        let gone = kept.iter().filter(|opened| !opened.is_there()).count();
        assert_eq!(gone, 1);
        assert!(!is_open(&mut oldest) && is_open(&mut first) && is_open(&mut next));
        drop(kept);
        assert_eq!(count(), 0);
    }

    #[test]
    fn a_holder_of_many_addresses_is_one() {
        let of = |text: &str| origin(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:ffff::9"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }
}
