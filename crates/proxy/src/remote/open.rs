//! Opening a session for a client.

use super::session::{self, Resumes, Session};
use crate::ending;
use crate::host::ProxyHost;
use kedge_control::gpu::Server;
use kedge_control::proxy::EXIT_LOST;
use kedge_cuda_types::CuError;
use kedge_protocol::{Hello, Welcome};
use kedge_remote::{ConnectError, Wanted};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// Why a client has no devices on another machine.
#[derive(Debug, Error)]
pub enum SessionError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("cannot go on with the session: {0}")]
    System(#[from] io::Error),
}

impl SessionError {
    /// What cuInit answers.
    pub(crate) fn code(&self) -> CuError {
        match self {
            SessionError::Connect(ConnectError::NoDevice { refusal, .. }) => CuError(refusal.code),
            _ => CuError::NO_DEVICE,
        }
    }
}

/// A client of a session that is to be opened.
pub(crate) struct Client<'a> {
    pub(crate) hello: &'a Hello,
    pub(crate) host: &'a Arc<ProxyHost>,
    /// The arena that it shares with this process.
    pub(crate) shared: &'a OwnedFd,
    /// How long to try to go on after a cut.
    pub(crate) reconnect: Duration,
    /// Where it goes on from an image: the newest message that was taken from its ring.
    pub(crate) restore: Option<u64>,
}

/// Opens a session with a server of devices for a client; the process ends with it.
pub(crate) fn open_session(
    server: &Server,
    devices: &[u32],
    client: &Client<'_>,
) -> Result<(Session, Welcome), SessionError> {
    let Client { hello, host, shared, reconnect, restore } = *client;
    let server = server.to_string();
    let (program, choice) = (&*hello.program, &hello.choice);
    let restores = restore.is_some();
    let wanted = Wanted { devices, program, choice, reconnect, restore: restores };
    let connected = kedge_remote::connect(&server, wanted)?;
    let welcome = connected.welcome.clone();
    let log = host.log.clone();
    let over = move |why: &str| {
        log.line(why);
        session::is_over();
        ending::end_now(EXIT_LOST as u8)
    };
    let arena = shared.try_clone()?;
    let resumes = Resumes { reconnect, done: restore.unwrap_or(0) };
    let session = Session::new(connected, server, host.clone(), arena, resumes, over)?;
    Ok((session, welcome))
}
