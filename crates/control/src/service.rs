//! Answers on a local socket: a request comes, a reply goes, each with descriptors where it has
//! some.
//!
//! Only processes of this one's user are answered, so many at a time, each on a thread of its own
//! and within the limits of the service.

use kedge_socket::frame::{self, Deadline};
use kedge_socket::{SocketError, is_own_user};
use kedge_wire::Wire;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// How long a service waits that cannot accept: it has no descriptors left, most likely, and does
/// not get any by asking faster.
const PAUSE: Duration = Duration::from_millis(200);

/// What a service bears.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections that are answered at a time. One more is closed at once.
    pub connections: usize,
    /// Until a request has come.
    pub request: Duration,
    /// Until a reply has gone.
    pub reply: Duration,
}

/// A service at one or several sockets.
#[derive(Debug, Clone)]
pub struct Service {
    /// Of its threads.
    name: &'static str,
    limits: Limits,
    connections: Arc<AtomicUsize>,
}

impl Service {
    /// Makes a service; `name` is that of its threads, at most 15 bytes.
    pub fn new(name: &'static str, limits: Limits) -> Service {
        Service { name, limits, connections: Arc::default() }
    }

    /// Has `answer` called for each connection, for as long as the process lives.
    pub fn serve<A>(&self, listener: &UnixListener, answer: A) -> !
    where
        A: Fn(&Asker) + Clone + Send + 'static,
    {
        loop {
            self.serve_next(listener, answer.clone());
        }
    }

    /// Accepts one connection, and has `answer` called for it on a thread of its own. The
    /// connection is closed when `answer` returns; at once, if its process is another user's, or
    /// one too many.
    pub fn serve_next<A>(&self, listener: &UnixListener, answer: A)
    where
        A: FnOnce(&Asker) + Send + 'static,
    {
        let Ok((stream, _)) = listener.accept() else { return thread::sleep(PAUSE) };
        let Some(place) = self.place() else { return };
        if !is_own_user(stream.as_fd()).unwrap_or(false) {
            return;
        }
        let limits = self.limits;
        let answering = move || {
            let _place = place;
            answer(&Asker { stream, limits });
        };
        // Where there is no thread, the asker sees the connection closed.
        let _ = thread::Builder::new().name(self.name.into()).spawn(answering);
    }

    /// Takes a place among those that are answered, until it is dropped.
    fn place(&self) -> Option<Place> {
        let place = Place(Arc::clone(&self.connections));
        let before = place.0.fetch_add(1, Ordering::SeqCst);
        (before < self.limits.connections).then_some(place)
    }
}

#[derive(Debug)]
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Who has connected to a service.
#[derive(Debug)]
pub struct Asker {
    stream: UnixStream,
    limits: Limits,
}

impl Asker {
    /// Receives a request and the descriptors that came with it.
    ///
    /// # Errors
    /// None comes in time, or what comes is none.
    pub fn request<T: Wire>(&self) -> Result<(T, Vec<OwnedFd>), SocketError> {
        frame::receive(self.stream.as_fd(), Deadline::after(self.limits.request))
    }

    /// Receives another one, which may take its time.
    ///
    /// # Errors
    /// None comes within `limit`, or what comes is none.
    pub fn request_within<T: Wire>(
        &self,
        limit: Duration,
    ) -> Result<(T, Vec<OwnedFd>), SocketError> {
        frame::receive(self.stream.as_fd(), Deadline::after(limit))
    }

    /// Sends a reply, with at most [`frame::MAX_FDS`] descriptors.
    ///
    /// # Errors
    /// The asker has gone, or does not take it in time.
    pub fn reply<T: Wire>(&self, reply: &T, fds: &[BorrowedFd<'_>]) -> Result<(), SocketError> {
        frame::send(self.stream.as_fd(), reply, fds, Deadline::after(self.limits.reply))
    }

    /// Returns the connection, for what is not said in [`kedge_wire`] messages.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_socket::{Channel, address};
    use std::path::{Path, PathBuf};
    use std::time::Instant;

    const SOON: Duration = Duration::from_secs(20);

    /// Answers with twice what was asked, `connections` at a time. Returns where.
    fn double(name: &str, connections: usize, request: Duration) -> PathBuf {
        let path = std::env::temp_dir().join(format!("kservice-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = address::listen(&path).unwrap();
        let service = Service::new("double", Limits { connections, request, reply: SOON });
        thread::spawn(move || {
            service.serve(&listener, |asker| {
                while let Ok((number, fds)) = asker.request::<u64>() {
                    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
                    asker.reply(&(2 * number), &fds).unwrap();
                }
            })
        });
        path
    }

    fn connect(path: &Path) -> Channel {
        Channel::new(address::connect(path).unwrap().into())
    }

    #[test]
    fn requests_are_answered_with_their_descriptors() {
        let path = double("answers", 2, SOON);
        let asker = connect(&path);
        for number in [1_u64, 21] {
            let (file, _other) = UnixStream::pair().unwrap();
            asker.send(&number, &[file.as_fd()], SOON).unwrap();
            let (answer, fds) = asker.receive::<u64>(SOON).unwrap();
            assert_eq!((answer, fds.len()), (2 * number, 1));
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn one_too_many_is_closed_and_its_place_comes_back() {
        let path = double("many", 1, SOON);
        let ask = |asker: &Channel| {
            // The service may have closed it already.
            asker.send(&1_u64, &[], SOON).and_then(|()| asker.receive::<u64>(SOON))
        };
        let first = connect(&path);
        assert_eq!(ask(&first).unwrap().0, 2);
        assert!(ask(&connect(&path)).is_err());
        drop(first);
        let begin = Instant::now();
        while ask(&connect(&path)).is_err() {
            assert!(begin.elapsed() < SOON, "the place is not given back");
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn who_asks_nothing_is_not_waited_for() {
        let path = double("silent", 1, Duration::from_millis(10));
        let closed = connect(&path).receive::<u64>(SOON).map(|(answer, _)| answer);
        assert!(matches!(closed, Err(SocketError::Closed)), "{closed:?}");
        std::fs::remove_file(path).unwrap();
    }
}
