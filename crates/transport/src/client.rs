use crate::{ConnectError, Dead};
use kedge_cuda_types::CuError;
use kedge_protocol::{Call, CtxId, Post, Welcome};
use kedge_wire::Wire;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

/// One process's connection to its proxy. No threads of its own; every method may be called from
/// any thread. After `fork()` the child must not use it.
#[derive(Debug)]
pub struct Client {
    shared: OwnedFd,
}

impl Client {
    /// Connects to the supervisor's socket, maps the shared arena, reserves the device arenas'
    /// address range without access, and shakes hands with the proxy. `program` names this process
    /// in the job's log.
    pub fn connect(socket: &Path, _program: &str) -> Result<(Client, Welcome), ConnectError> {
        let source = std::io::ErrorKind::Unsupported.into();
        Err(ConnectError::Socket { path: socket.to_owned(), source })
    }

    /// Appends a one-way message. Returns once it is in the ring; waits while the ring is full.
    pub fn post(&self, _post: &Post) -> Result<(), Dead> {
        Err(Dead)
    }

    /// Appends `call` and waits for its reply, whose type the call's documentation names. Other
    /// threads post and call meanwhile.
    pub fn call<T: Wire>(&self, _call: &Call) -> Result<T, Dead> {
        Err(Dead)
    }

    /// The context's sticky error, if an execution fault has set one. One shared-memory load.
    pub fn sticky(&self, _ctx: CtxId) -> Option<CuError> {
        None
    }

    /// Sequence number of the newest post of this process.
    pub fn posted(&self) -> u64 {
        0
    }

    /// All posts up to this sequence number are complete, work on the device included.
    pub fn completed(&self) -> u64 {
        0
    }

    /// Whether everything that this process posted is complete. `false` may be stale, `true` holds
    /// until the next post.
    pub fn is_idle(&self) -> bool {
        self.completed() >= self.posted()
    }

    /// Whether device printf or assert output waits to be taken with `Call::TakeOutput`.
    pub fn output_pending(&self) -> bool {
        false
    }

    /// Blocks until the proxy wants a host function run and returns its token. For one thread.
    pub fn next_host_fn(&self) -> Result<u64, Dead> {
        Err(Dead)
    }

    /// The shared arena's memfd: offset 0 is mapped at `arena::SHARED_BASE`.
    pub fn shared_fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.shared.as_fd()
    }

    /// Whether the proxy is still there. A system call, unless it is already known to be gone.
    pub fn alive(&self) -> bool {
        false
    }
}
