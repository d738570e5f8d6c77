//! A proxy that takes the place of another one which moves the client to it.

use crate::arriving::{Arrived, Arriving, Devices};
use crate::backend::Ready;
use crate::client_memory::ClientMemory;
use crate::error::RestoreError;
use crate::host::ProxyHost;
use crate::local::Local;
use crate::options::Options;
use crate::remote::moving::{self as far, Place};
use crate::restore::{Connection, Restored};
use kedge_control::gpu::GpuSpec;
use kedge_control::joblog::JobLog;
use kedge_transport::Server;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// Takes all rounds of a move from `stream`. The client is not served before the supervisor says
/// so.
pub(crate) fn arrive(
    stream: OwnedFd,
    connection: Connection,
    options: &Options,
    log: &Arc<JobLog>,
    ready: Option<Ready>,
) -> Result<Restored, RestoreError> {
    let Connection { socket, ring, shared } = connection;
    kedge_transport::check_shared_arena(shared.as_fd())?;
    kedge_transport::map_shared_arena(shared.as_fd())?;
    let mut server = Server::resume(socket, ring, 0)?;
    let (outbox, keeper) = (server.outbox().clone(), options.keeper.clone());
    let host = Arc::new(ProxyHost::new(outbox, ClientMemory::new(0), log.clone(), keeper));
    let stream = UnixStream::from(stream);
    if let GpuSpec::Remote { server: lender, devices } = &options.backend.gpu {
        let place = Place { server: lender, devices, reconnect: options.reconnect };
        let (session, saved) = far::arrive(&stream, place, &host, &shared, server.socket())?;
        server.catch_up(saved.position);
        return Ok(Restored {
            server,
            executor: Box::new(session),
            host,
            hub: None,
            saved,
            shared,
        });
    }
    let own = server.socket().try_clone_to_owned().map_err(RestoreError::Socket)?;
    let mut arriving = Arriving::new(&options.backend, host.clone(), own, Devices::Wanted(ready));
    arriving.line = Some(stream.try_clone().map_err(RestoreError::Socket)?);
    arriving.all(&mut &stream, |Arrived { dispatcher, saved }| {
        server.catch_up(saved.position);
        let executor = Box::new(Local::new(dispatcher, host.clone(), options.backend.cache));
        Ok(Restored { server, executor, host, hub: None, saved, shared })
    })
}
