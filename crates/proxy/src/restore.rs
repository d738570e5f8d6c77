//! A proxy in the place of one that is gone: it builds the devices and everything on them from an
//! image, then serves the client, which notices nothing.

use crate::backend::{self, Ready};
use crate::client_memory::ClientMemory;
use crate::error::RestoreError;
use crate::executor::Executor;
use crate::filling::fill_arena;
use crate::given::Given;
use crate::host::ProxyHost;
use crate::options::Options;
use crate::phases::Phases;
use crate::places::hub::Hub;
use crate::places::restore::Back;
use crate::rebuild::Here;
use crate::remote::restore::{self as far, Gone};
use kedge_control::gpu::GpuSpec;
use kedge_control::joblog::JobLog;
use kedge_control::note;
use kedge_gpu_image::SavedProxy;
use kedge_transport::Server;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// A client's devices, as they were.
pub(crate) struct Restored {
    pub(crate) server: Server,
    pub(crate) executor: Box<dyn Executor>,
    pub(crate) host: Arc<ProxyHost>,
    /// Where its devices are of several places.
    pub(crate) hub: Option<Arc<Hub>>,
    pub(crate) saved: SavedProxy,
    pub(crate) shared: OwnedFd,
}

impl Restored {
    /// The client is this process from now on.
    pub(crate) fn client_is(&self, pid: u32) {
        self.host.client_is(pid);
        self.hub.iter().for_each(|hub| hub.client_is(pid));
    }
}

/// What is handed over to it.
pub(crate) struct Connection {
    /// Its other end is the client's.
    pub(crate) socket: OwnedFd,
    pub(crate) ring: OwnedFd,
    pub(crate) shared: OwnedFd,
}

/// Where it comes from.
pub(crate) struct Origin {
    pub(crate) given: Given,
    /// Of what is held in memory, which is a file like the image's, but for what lies on devices:
    /// that.
    pub(crate) parts: Option<Vec<OwnedFd>>,
}

pub(crate) fn restore(
    from: Origin,
    connection: Connection,
    options: &Options,
    log: &Arc<JobLog>,
    ready: Option<Ready>,
) -> Result<Restored, RestoreError> {
    let mut phases = Phases::begin();
    let Origin { given, parts } = from;
    let (own, beside) = given.open()?;
    let layers = own.layers;
    let file = layers.file(0);
    let places = kedge_gpu_image::read_places(file)?;
    let saved = match &places {
        Some(places) => places.client(),
        None => kedge_gpu_image::read(file)?,
    };
    phases.over("its notes");
    let Connection { socket, ring, shared } = connection;
    kedge_transport::check_shared_arena(shared.as_fd())?;
    kedge_transport::map_shared_arena(shared.as_fd())?;
    let server = Server::resume(socket, ring, saved.position)?;
    if let Some(saved) = &places {
        // What was made ready is of one place, and has the addresses.
        drop(ready);
        let outbox = server.outbox().clone();
        let host = ProxyHost::new(outbox.clone(), ClientMemory::new(0), log.clone(), None);
        let (own, shared_with, socket) = (&own.entry, &shared, server.socket());
        let back = Back { own, saved, options, log, shared: shared_with, socket };
        let (places, hub) = back.restore(beside, outbox, &mut phases)?;
        note!(log, "brought back in {}", phases.told());
        let (executor, host, hub) = (Box::new(places), Arc::new(host), Some(hub));
        let saved = saved.client();
        return Ok(Restored { server, executor, host, hub, saved, shared });
    }
    let memory = ClientMemory::new(0);
    let (outbox, keeper) = (server.outbox().clone(), options.keeper.clone());
    let host = Arc::new(ProxyHost::new(outbox, memory, log.clone(), keeper));
    let executor: Box<dyn Executor> = match &options.backend.gpu {
        GpuSpec::Remote { server: lender, devices } => {
            if parts.is_some_and(|parts| !parts.is_empty()) {
                return Err(RestoreError::HeldHere);
            }
            let (layers, saved, host, shared) = (&layers, &saved, &host, &shared);
            let (socket, reconnect) = (server.socket(), options.reconnect);
            let (choice, windows) = (&saved.hello.choice, &[][..]);
            let gone = Gone { layers, saved, choice, windows, host, shared, socket, reconnect };
            fill_arena(layers, saved)?;
            let (session, _) = far::restore(lender, devices, &gone)?;
            phases.over("its devices, far");
            note!(log, "brought back in {}", phases.told());
            Box::new(session)
        }
        GpuSpec::Several(several) => {
            return Err(RestoreError::OfOnePlace { gpu: several.to_string() });
        }
        _ => {
            let (choice, config) = (&saved.hello.choice, &options.backend);
            let built = backend::build(config, choice, host.clone(), ready)?;
            phases.over("devices");
            let own = server.socket().try_clone_to_owned().map_err(RestoreError::Socket)?;
            let (layers, saved, host) = (&layers, &saved, &host);
            let gone = Here { layers, saved, parts, config, host };
            Box::new(gone.rebuild(built, own, phases)?)
        }
    };
    Ok(Restored { server, executor, host, hub: None, saved, shared })
}
