//! A line that is cut again and again: it stands between a near end and its server.

use crate::random::fraction;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Ends with its value: then connections are refused.
#[derive(Debug)]
pub struct Relay {
    /// As `--gpu` takes it.
    pub address: String,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    server: Mutex<String>,
    /// Bytes that pass each way before a cut, on average; 0: no cuts.
    mean: AtomicU64,
    /// Milliseconds that a connection takes to begin.
    slow: AtomicU64,
    /// No connection gets through.
    closed: AtomicBool,
    /// The epoch of those that are open: an older one is cut.
    epoch: AtomicU64,
    cuts: AtomicU64,
    /// Bytes that have passed, both ways.
    passed: AtomicU64,
    ended: AtomicBool,
}

impl Relay {
    /// Leads to `server`; each connection is cut after about `mean` bytes, or never (0).
    ///
    /// # Panics
    /// There is no loopback.
    pub fn start(server: &str, mean: u64) -> Relay {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let address = listener.local_addr().expect("an address").to_string();
        let state = Arc::new(State {
            server: server.to_owned().into(),
            mean: mean.into(),
            slow: 0.into(),
            closed: false.into(),
            epoch: 0.into(),
            cuts: 0.into(),
            passed: 0.into(),
            ended: false.into(),
        });
        let accepts = state.clone();
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                if accepts.ended.load(Ordering::SeqCst) {
                    return;
                }
                let state = accepts.clone();
                thread::spawn(move || state.carry(near));
            }
        });
        Relay { address, state }
    }

    /// Returns how often a connection has been cut.
    pub fn cuts(&self) -> u64 {
        self.state.cuts.load(Ordering::SeqCst)
    }

    /// Returns how many bytes have passed, both ways.
    pub fn passed(&self) -> u64 {
        self.state.passed.load(Ordering::SeqCst)
    }

    /// Has each connection from now on wait so long before anything passes.
    pub fn slow_down(&self, begin: Duration) {
        self.state.slow.store(begin.as_millis() as u64, Ordering::SeqCst);
    }

    /// Cuts all connections, and leads to another server.
    pub fn lead_to(&self, server: &str) {
        let mut leads = self.state.server.lock().unwrap_or_else(PoisonError::into_inner);
        server.clone_into(&mut leads);
        drop(leads);
        self.cut(false);
    }

    /// Cuts all connections, and lets others through or not.
    pub fn cut(&self, closed: bool) {
        self.state.closed.store(closed, Ordering::SeqCst);
        self.state.epoch.fetch_add(1, Ordering::SeqCst);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::SeqCst);
        self.cut(true);
        let _ = TcpStream::connect(&self.address);
    }
}

impl State {
    fn carry(self: Arc<State>, near: TcpStream) {
        let epoch = self.epoch.load(Ordering::SeqCst);
        if self.closed.load(Ordering::SeqCst) {
            return;
        }
        let server = self.server.lock().unwrap_or_else(PoisonError::into_inner).clone();
        thread::sleep(Duration::from_millis(self.slow.load(Ordering::SeqCst)));
        let Ok(far) = TcpStream::connect(server) else { return };
        let limit = || match self.mean.load(Ordering::SeqCst) {
            0 => u64::MAX,
            mean => (fraction() * 2.0 * mean as f64) as u64,
        };
        let _ = near.set_nodelay(true).and_then(|()| far.set_nodelay(true));
        let (there, back) = (limit(), limit());
        let (from, to) = (far.try_clone(), near.try_clone());
        let (Ok(from), Ok(to)) = (from, to) else { return };
        let state = self.clone();
        let other = thread::spawn(move || state.pass(&from, &to, back, epoch));
        self.pass(&near, &far, there, epoch);
        let _ = other.join();
        self.cuts.fetch_add(1, Ordering::SeqCst);
    }

    fn pass(&self, mut from: &TcpStream, mut to: &TcpStream, mut left: u64, epoch: u64) {
        let mut bytes = [0; 16 << 10];
        let _ = from.set_read_timeout(Some(Duration::from_millis(20)));
        while left > 0 && self.epoch.load(Ordering::SeqCst) == epoch {
            let want = (bytes.len() as u64).min(left) as usize;
            match from.read(&mut bytes[..want]) {
                Ok(0) => break,
                Ok(count) if to.write_all(&bytes[..count]).is_ok() => {
                    left -= count as u64;
                    self.passed.fetch_add(count as u64, Ordering::SeqCst);
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                _ => break,
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }
}
