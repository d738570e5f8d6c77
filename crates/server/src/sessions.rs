//! The sessions of a server, and the proxies that serve them.

use crate::ServeSpec;
use kedge_control::gpu::GpuSpec;
use kedge_remote::{Handover, SessionKey};
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

/// By key: the way to the proxy of each.
#[derive(Debug, Default)]
pub(crate) struct Sessions(Mutex<HashMap<SessionKey, Arc<Channel>>>);

impl Sessions {
    fn locked(&self) -> MutexGuard<'_, HashMap<SessionKey, Arc<Channel>>> {
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
        sessions.insert(key, Arc::new(channel));
        Ok((key, proxy))
    }

    /// Hands a connection to the proxy of its session, which answers.
    pub(crate) fn join(
        &self,
        key: &SessionKey,
        hand: Handover,
        stream: &TcpStream,
    ) -> Result<(), String> {
        let channel = self.locked().get(key).cloned();
        let channel = channel.ok_or("it has no such session: the devices' memory is lost")?;
        channel.send(&hand, &[stream.as_fd()], LIMIT).map_err(|error| error.to_string())
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
