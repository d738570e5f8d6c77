//! The sessions of a server, and the proxies that serve them.

use crate::ServeSpec;
use kedge_control::gpu::GpuSpec;
use kedge_remote::SessionKey;
use kedge_socket::Channel;
use rustix::rand::{GetRandomFlags, getrandom};
use std::collections::HashMap;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Sessions at a time.
const MAX_SESSIONS: usize = 256;
/// For a proxy to take a connection.
const LIMIT: Duration = Duration::from_secs(10);

/// By key: the way to the proxy of each that waits for its second connection; `None` once it has
/// it.
#[derive(Debug, Default)]
pub(crate) struct Sessions(Mutex<HashMap<SessionKey, Option<Channel>>>);

impl Sessions {
    fn locked(&self) -> MutexGuard<'_, HashMap<SessionKey, Option<Channel>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a proxy for the session on `line`, or says why not.
    pub(crate) fn begin(
        &self,
        spec: &ServeSpec,
        gpu: &GpuSpec,
        line: &TcpStream,
    ) -> Result<(SessionKey, Child), String> {
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
        sessions.insert(key, Some(channel));
        Ok((key, proxy))
    }

    /// Hands a session's second connection over, once.
    pub(crate) fn aside(&self, key: &SessionKey, stream: TcpStream) -> Result<(), String> {
        let channel = self.locked().get_mut(key).and_then(Option::take);
        let channel = channel.ok_or("it names no session that waits for a connection")?;
        channel.send(&(), &[stream.as_fd()], LIMIT).map_err(|error| error.to_string())
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

fn draw_key() -> Result<SessionKey, String> {
    let mut key = SessionKey::default();
    let drawn = getrandom(&mut key, GetRandomFlags::empty());
    match drawn {
        Ok(count) if count == key.len() => Ok(key),
        _ => Err("it cannot draw random keys".into()),
    }
}
