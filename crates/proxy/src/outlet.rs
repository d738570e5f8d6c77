//! What a client hears of its devices, and its private memory: through its ring and the kernel
//! where it is on this host, over a line where it is not.

use crate::client_memory::ClientMemory;
use kedge_cuda_types::CuError;
use kedge_protocol::CtxId;
use kedge_transport::{Outbox, ReplyTo};

/// The way from the devices to the client, from any thread.
pub(crate) trait Outlet: Send + Sync {
    /// Answers a call. On failure the caller waits on; the text says why.
    fn reply(&self, to: ReplyTo, bytes: &[u8]) -> Result<(), String>;
    /// Tells the context's sticky error; replies that are sent later find it in place.
    fn set_sticky(&self, ctx: CtxId, error: CuError);
    /// Tells that the context is no more.
    fn clear_sticky(&self, ctx: CtxId);
    /// Returns whether a message waits to be carried out.
    fn wants_reader(&self) -> bool;
    /// Tells that all posts up to sequence number `seq` are complete.
    fn set_completed(&self, seq: u64);
    /// Tells whether device output waits to be taken.
    fn set_output_pending(&self, pending: bool);
    /// Asks the client to run a host function; false while it has no room for another.
    #[must_use]
    fn try_host_fn(&self, token: u64) -> bool;
    /// Tells that the devices are about to be gone.
    fn close(&self);
}

impl Outlet for Outbox {
    fn reply(&self, to: ReplyTo, bytes: &[u8]) -> Result<(), String> {
        Outbox::reply(self, to, bytes).map_err(|error| error.to_string())
    }

    fn set_sticky(&self, ctx: CtxId, error: CuError) {
        Outbox::set_sticky(self, ctx, error);
    }

    fn clear_sticky(&self, ctx: CtxId) {
        Outbox::clear_sticky(self, ctx);
    }

    fn wants_reader(&self) -> bool {
        Outbox::wants_reader(self)
    }

    fn set_completed(&self, seq: u64) {
        Outbox::set_completed(self, seq);
    }

    fn set_output_pending(&self, pending: bool) {
        Outbox::set_output_pending(self, pending);
    }

    fn try_host_fn(&self, token: u64) -> bool {
        Outbox::try_host_fn(self, token)
    }

    fn close(&self) {
        Outbox::close(self);
    }
}

/// The client's private memory.
pub(crate) trait PrivateMemory: Send + Sync {
    /// Fills `out` from `addr` on; fails where the client has no memory there.
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), CuError>;
    /// Fills each part from its address on, as `read` does.
    fn read_parts(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), CuError> {
        parts.iter_mut().try_for_each(|(addr, out)| self.read(*addr, out))
    }
    /// Stores `bytes` at `addr`.
    fn write(&self, addr: u64, bytes: &[u8]) -> Result<(), CuError>;
    /// Takes another process for the client from now on.
    fn belongs_to(&self, pid: u32);
}

impl PrivateMemory for ClientMemory {
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), CuError> {
        ClientMemory::read(self, addr, out)
    }

    fn read_parts(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), CuError> {
        ClientMemory::read_parts(self, parts)
    }

    fn write(&self, addr: u64, bytes: &[u8]) -> Result<(), CuError> {
        ClientMemory::write(self, addr, bytes)
    }

    fn belongs_to(&self, pid: u32) {
        ClientMemory::belongs_to(self, pid);
    }
}
