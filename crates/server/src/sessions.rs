//! The sessions of a server, and the proxies that serve them.

use crate::ServeSpec;
use kedge_control::gpu::GpuSpec;
use kedge_keys::{Connection, Name};
use kedge_remote::{HandedOver, SessionKey};
use kedge_socket::Channel;
use rustix::rand::{GetRandomFlags, getrandom};
use std::collections::HashMap;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Sessions at a time.
const MAX_SESSIONS: usize = 256;
/// For a proxy to take a connection.
const LIMIT: Duration = Duration::from_secs(10);

/// By key.
#[derive(Debug, Default)]
pub(crate) struct Sessions(Mutex<HashMap<SessionKey, Session>>);

#[derive(Debug)]
struct Session {
    /// Whose it is; nobody's name where it comes from this machine.
    who: Option<Name>,
    /// The way to its proxy.
    channel: Arc<Channel>,
}

/// A proxy that has been started for a session, and waits for its line's secrets.
pub(crate) struct Begun {
    pub(crate) key: SessionKey,
    pub(crate) proxy: Child,
    pub(crate) channel: Arc<Channel>,
}

impl Sessions {
    fn locked(&self) -> MutexGuard<'_, HashMap<SessionKey, Session>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a proxy for the session on `line`, or says why not.
    pub(crate) fn begin(
        &self,
        spec: &ServeSpec,
        gpu: &GpuSpec,
        who: Option<Name>,
        line: &TcpStream,
    ) -> Result<Begun, String> {
        let key = draw_key()?;
        let mut sessions = self.locked();
        if sessions.len() >= MAX_SESSIONS {
            return Err(format!("it has {MAX_SESSIONS} sessions already"));
        }
        let failed = |error: std::io::Error| format!("it cannot start a proxy: {error}");
        let line: OwnedFd = line.as_fd().try_clone_to_owned().map_err(failed)?;
        let (channel, far) = Channel::pair().map_err(failed)?;
        let mut command = Command::new(&spec.proxy);
        command.args(["--far", "--gpu", &gpu.to_string()]);
        if let Some(bytes) = spec.soft_memory {
            command.args(["--soft-memory", &bytes.to_string()]);
        }
        // Near ends choose among the server's devices.
        command.env_remove("CUDA_VISIBLE_DEVICES").stdin(line).stdout(Stdio::from(far));
        let proxy = command.spawn().map_err(failed)?;
        let channel = Arc::new(channel);
        sessions.insert(key, Session { who, channel: channel.clone() });
        Ok(Begun { key, proxy, channel })
    }

    /// Returns the way to a session's proxy, if it is theirs who ask.
    pub(crate) fn proxy_of(&self, key: &SessionKey, who: Option<&Name>) -> Option<Arc<Channel>> {
        let sessions = self.locked();
        let session = sessions.get(key).filter(|session| session.who.as_ref() == who)?;
        Some(session.channel.clone())
    }

    /// Waits for a session's proxy: how it ended.
    pub(crate) fn wait(&self, key: &SessionKey, mut proxy: Child) -> String {
        let ended = proxy.wait();
        self.locked().remove(key);
        match ended {
            Ok(status) if status.success() => "its program has ended".into(),
            Ok(status) => format!("its proxy has failed ({status})"),
            Err(error) => format!("its proxy is lost: {error}"),
        }
    }
}

/// Has a session's proxy go on with its line, of which it has the stream.
pub(crate) fn tell_secrets(channel: &Channel, line: Connection) -> Result<(), String> {
    let (_, secrets) = line.into_secrets().map_err(|error| error.to_string())?;
    channel.send(&secrets, &[], LIMIT).map_err(|error| error.to_string())
}

/// Hands a connection to the proxy of its session, which answers.
pub(crate) fn hand_over(
    channel: &Channel,
    what: HandedOver,
    connection: Connection,
) -> Result<(), String> {
    let (stream, secrets) = connection.into_secrets().map_err(|error| error.to_string())?;
    let handed = channel.send(&(what, secrets), &[stream.as_fd()], LIMIT);
    handed.map_err(|error| error.to_string())
}

fn draw_key() -> Result<SessionKey, String> {
    let mut key = SessionKey::default();
    let drawn = getrandom(&mut key, GetRandomFlags::empty());
    match drawn {
        Ok(count) if count == key.len() => Ok(key),
        _ => Err("it cannot draw random keys".into()),
    }
}
