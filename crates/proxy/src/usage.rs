//! What the client uses of its devices, for who watches the job (`kedge top`): counted where
//! messages are carried out, told to whoever connects, and until then worth nothing more.

use crate::executor::Room;
use crate::host::ProxyHost;
use kedge_control::service::{Limits, Service};
use kedge_control::usage::{DeviceUse, FOLDER, MAX_DEVICES, Usage, VERSION};
use kedge_protocol::DeviceInfo;
use kedge_wire::List;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

/// How long a question or an answer may take: who does not take one at once does without.
const TIMEOUT: Duration = Duration::from_secs(1);
const LIMITS: Limits = Limits { connections: 4, request: TIMEOUT, reply: TIMEOUT };
/// Names that are tried: a proxy that was killed has left its own.
const NAMES: u32 = 16;

/// Where this process listens.
static SOCKET: OnceLock<PathBuf> = OnceLock::new();

/// What is told.
struct Told {
    host: Arc<ProxyHost>,
    room: Arc<dyn Room>,
    devices: Vec<DeviceInfo>,
}

impl Told {
    fn usage(&self) -> Usage {
        let counts = &self.host.counts;
        let device = |(info, number): (&DeviceInfo, u32)| DeviceUse {
            name: info.name.clone(),
            uuid: info.uuid,
            size: info.total_memory,
            used: self.room.used(number),
        };
        let devices = self.devices.iter().zip(0..).take(MAX_DEVICES).map(device);
        Usage {
            version: VERSION,
            launches: counts.launches.load(Ordering::Relaxed),
            copies: counts.copies.load(Ordering::Relaxed),
            swapped_out: counts.swapped_out.load(Ordering::Relaxed),
            devices: List::new(devices.collect()).unwrap_or_default(),
        }
    }
}

/// Tells whoever connects to a socket in the job's `folder`, for as long as this process lives.
///
/// # Errors
/// There can be no socket there, or no thread.
pub(crate) fn tell(
    folder: &Path,
    host: Arc<ProxyHost>,
    room: Arc<dyn Room>,
    devices: Vec<DeviceInfo>,
) -> io::Result<()> {
    let (path, listener) = listen(&folder.join(FOLDER))?;
    let _ = SOCKET.set(path);
    let told = Arc::new(Told { host, room, devices });
    let serve = move || {
        Service::new("usage", LIMITS).serve(&listener, move |asker| {
            // Who has gone needs no answer.
            let _ = asker.reply(&told.usage(), &[]);
        })
    };
    thread::Builder::new().name("usage".into()).spawn(serve).map(drop)
}

/// Listens in `folder`, which is made if need be, under this process's id.
fn listen(folder: &Path) -> io::Result<(PathBuf, UnixListener)> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let pid = std::process::id();
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for number in 0..NAMES {
        let name = if number == 0 { pid.to_string() } else { format!("{pid}-{number}") };
        let path = folder.join(name);
        match kedge_socket::address::listen(&path) {
            Ok(listener) => {
                fs::set_permissions(&path, PermissionsExt::from_mode(0o600))?;
                return Ok((path, listener));
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

/// Removes the socket: the process is about to end.
pub(crate) fn conclude() {
    if let Some(path) = SOCKET.get() {
        let _ = fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_a_killed_proxy_has_left_is_passed_over() {
        let folder = std::env::temp_dir().join(format!("kedge-usage-{}", std::process::id()));
        let (first, listener) = listen(&folder).unwrap();
        drop(listener);
        let (second, _listener) = listen(&folder).unwrap();
        let mode = fs::metadata(&folder).unwrap().permissions().mode();
        fs::remove_dir_all(&folder).unwrap();
        assert_ne!(first, second);
        assert_eq!(mode & 0o777, 0o700);
    }
}
