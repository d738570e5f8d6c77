//! Opening a session for a client.

use super::session::{self, OfClient, Opening, Resumes, Session};
use crate::ending;
use crate::error::SessionError;
use crate::host::ProxyHost;
use kedge_control::gpu::Server;
use kedge_control::proxy::EXIT_LOST;
use kedge_control::session::FarSession;
use kedge_control::warn;
use kedge_kernel_cache::Digest;
use kedge_protocol::{DeviceChoice, Hello, Welcome};
use kedge_remote::{JobKey, Wanted, draw_session_key};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::id as own_id;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How many sessions this process has noted, which is done one after the other: the first removes
/// what a process of the same id has noted before.
static NOTED: Mutex<u32> = Mutex::new(0);

/// A client of a session that is to be opened.
pub(crate) struct Client<'a> {
    pub(crate) hello: &'a Hello,
    /// Which of the session's devices it sees, and as which of its own it counts them: all where
    /// that is empty.
    pub(crate) choice: &'a DeviceChoice,
    pub(crate) windows: &'a [u32],
    pub(crate) host: &'a Arc<ProxyHost>,
    /// The arena that it shares with this process.
    pub(crate) shared: &'a OwnedFd,
    /// Its socket, for descriptors.
    pub(crate) socket: BorrowedFd<'a>,
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
    let Client { hello, choice, windows, host, shared, socket, reconnect, restore } = *client;
    let (server, log) = (server.to_string(), host.log.clone());
    let (program, restores) = (&*hello.program, restore.is_some());
    let key = draw_session_key()?;
    let job = host.folder().map_or(key, |folder| job_key(&folder));
    let wanted = Wanted { job, devices, program, choice, windows, reconnect, restore: restores };
    // Without it only time ends a session whose proxy is killed.
    if let Some(folder) = host.folder()
        && let Err(error) = note(&folder, &FarSession { server: server.clone(), key })
    {
        warn!(log, "{}: cannot say which session it has: {error}", folder.display());
    }
    let _opening = Opening::begin();
    let connected = kedge_remote::connect(&server, key, wanted)?;
    let welcome = connected.welcome.clone();
    let over = move |why: &str| {
        warn!(log, "{why}");
        session::is_over(&key);
        ending::end_now(EXIT_LOST as u8)
    };
    let of_client = OfClient { arena: shared.try_clone()?, socket: socket.try_clone_to_owned()? };
    let resumes = Resumes { reconnect, done: restore.unwrap_or(0), restores };
    let session = Session::new((connected, key), server, host.clone(), of_client, resumes, over)?;
    Ok((session, welcome))
}

fn note(folder: &Path, session: &FarSession) -> io::Result<()> {
    let mut noted = NOTED.lock().unwrap_or_else(PoisonError::into_inner);
    let number = *noted;
    *noted += 1;
    session.note(folder, own_id(), number)
}

/// Returns what tells a job apart from others of its user, here and on other machines.
fn job_key(folder: &Path) -> JobKey {
    let mut whole = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    whole.extend_from_slice(folder.as_os_str().as_bytes());
    Digest::of(&whole).bytes().first_chunk().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_s_processes_have_one_key_and_other_jobs_have_others() {
        let [first, second] = ["/jobs/a", "/jobs/b"].map(|folder| job_key(Path::new(folder)));
        assert_eq!(first, job_key(Path::new("/jobs/a")));
        assert_ne!(first, second);
    }
}
