//! The plugin's life: a socket in the kubelet's folder, a registration with each kubelet that comes
//! to be there, and an orderly end.

use crate::api::plugin::device_plugin_server::DevicePluginServer;
use crate::api::registration::registration_client::RegistrationClient;
use crate::api::{Device, RegisterRequest, VERSION};
use crate::offer::Offer;
use crate::options::Options;
use crate::service::{ABOUT, Service};
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Endpoint, Server};

/// The kubelet's socket in its folder of device plugins.
const KUBELET: &str = "kubelet.sock";
/// How often the kubelet's socket and kedge's files are looked at.
const LOOK: Duration = Duration::from_millis(500);
/// How long a kubelet may take to answer a registration; it calls the plugin back meanwhile.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long conversations have to end when the plugin does.
const FAREWELL: Duration = Duration::from_secs(2);
/// Calls of one connection at a time; the kubelet has one that lasts and one or two others.
const MAX_CALLS: u32 = 64;
/// Bytes of a socket's path that the system takes.
const MAX_PATH: usize = 107;

#[derive(Debug, Error)]
pub enum LifeError {
    #[error("cannot listen on {path}: {source}; the plugin writes to the kubelet's folder", path = .path.display())]
    Listen { path: PathBuf, source: io::Error },
    #[error("{path} is there and no socket: another program has put it there", path = .0.display())]
    InTheWay(PathBuf),
    #[error("{path}: another plugin listens there: stop it, or give another --resource", path = .0.display())]
    InUse(PathBuf),
    #[error("{path} is too long for a socket: give a shorter folder or resource", path = .0.display())]
    TooLong(PathBuf),
    #[error("cannot hear signals: {0}")]
    Signals(io::Error),
}

/// Why the kubelet does not know the plugin.
#[derive(Debug, Error)]
enum RegisterError {
    #[error("the kubelet's socket takes no connection: {0}")]
    Connect(#[from] tonic::transport::Error),
    #[error("the kubelet refuses: {0}")]
    Refused(String),
    #[error("the kubelet has not answered for {REGISTER_TIMEOUT:?}")]
    Silent,
}

/// Serves until `end` is over: each kubelet that comes to be there is told of the devices.
///
/// # Errors
/// The plugin's socket cannot be made.
pub async fn serve(options: &Options, end: impl Future<Output = ()>) -> Result<(), LifeError> {
    let kubelet = options.folder.join(KUBELET);
    let own = options.folder.join(endpoint(&options.resource));
    if own.as_os_str().len() > MAX_PATH || kubelet.as_os_str().len() > MAX_PATH {
        return Err(LifeError::TooLong(own));
    }
    let offer = Arc::new(options.offer.clone());
    let mut end = pin!(end);
    let mut waits = false;
    loop {
        if let Some(met) = identity(&kubelet) {
            waits = false;
            let session = Session::begin(&own, &offer)?;
            let ended = tokio::select! {
                () = &mut end => true,
                () = session.last(&kubelet, met, &own, options, &offer) => false,
            };
            session.end().await;
            if ended {
                return Ok(());
            }
        } else if !std::mem::replace(&mut waits, true) {
            say(&format!("waits for a kubelet: {} is not there", kubelet.display()));
        }
        tokio::select! {
            () = &mut end => return Ok(()),
            () = sleep(LOOK) => {}
        }
    }
}

/// The name of the plugin's socket, each resource's another one: no name has both a slash and `=`.
fn endpoint(resource: &str) -> String {
    format!("kedge-{}.sock", resource.replace('/', "="))
}

fn say(text: &str) {
    eprintln!("kedge-k8s: {text}");
}

/// Tells one socket from another that has its name later. A socket's inode may have the number of
/// one that was removed; its time of change differs then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    file: (u64, u64),
    changed: (i64, i64),
}

/// The socket there, if there is one. A link is none.
fn identity(path: &Path) -> Option<Identity> {
    let found = fs::symlink_metadata(path).ok().filter(|found| found.file_type().is_socket())?;
    let (file, changed) = ((found.dev(), found.ino()), (found.ctime(), found.ctime_nsec()));
    Some(Identity { file, changed })
}

/// The plugin's service for as long as one kubelet runs.
struct Session {
    devices: watch::Sender<Vec<Device>>,
    over: watch::Sender<bool>,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
    socket: PathBuf,
    identity: Option<Identity>,
}

impl Session {
    fn begin(own: &Path, offer: &Arc<Offer>) -> Result<Session, LifeError> {
        let listener = listen(own)?;
        let (devices, list) = watch::channel(offer.listed());
        let (over, mut is_over) = watch::channel(false);
        let service = Service { offer: offer.clone(), devices: list };
        let ended = async move {
            let _ = is_over.wait_for(|over| *over).await;
        };
        let server = Server::builder().max_concurrent_streams(MAX_CALLS);
        let (service, calls) =
            (DevicePluginServer::new(service), UnixListenerStream::new(listener));
        let server = server.serve_with_incoming_shutdown(service, calls, ended);
        let server = tokio::spawn(server);
        let socket = own.to_owned();
        Ok(Session { devices, over, server, identity: identity(&socket), socket })
    }

    /// Registers with the kubelet whose socket is `met`, then watches until that is another
    /// kubelet's or the plugin's own socket is gone: a kubelet that starts empties the folder.
    async fn last(
        &self,
        kubelet: &Path,
        met: Identity,
        own: &Path,
        options: &Options,
        offer: &Offer,
    ) {
        match register(kubelet, own, &options.resource).await {
            Ok(()) => {
                let count = offer.ids().len();
                say(&format!("the kubelet knows of {count} {}", options.resource));
            }
            Err(error) => {
                say(&format!("{error}; tries again"));
                return;
            }
        }
        while identity(kubelet) == Some(met) && identity(own) == self.identity {
            self.devices.send_if_modified(|listed| {
                let now = offer.listed();
                let changed = *listed != now;
                if changed {
                    let health = offer.missing().map(|file| format!("{file} is missing"));
                    say(&health.unwrap_or_else(|| "the devices are healthy again".to_owned()));
                    *listed = now;
                }
                changed
            });
            sleep(LOOK).await;
        }
        say("the kubelet has begun anew or has ended");
    }

    /// Ends all conversations and removes the socket, if it is still this one's.
    async fn end(self) {
        let Session { devices, over, mut server, socket, identity: made } = self;
        // The lists of devices end with their sender.
        drop(devices);
        let _ = over.send(true);
        if made.is_some() && identity(&socket) == made {
            let _ = fs::remove_file(&socket);
        }
        if timeout(FAREWELL, &mut server).await.is_err() {
            server.abort();
        }
    }
}

/// Listens on a new socket in the place of one that an ended plugin has left.
fn listen(path: &Path) -> Result<UnixListener, LifeError> {
    let failed = |source| LifeError::Listen { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => {
            if std::os::unix::net::UnixStream::connect(path).is_ok() {
                return Err(LifeError::InUse(path.to_owned()));
            }
            fs::remove_file(path).map_err(failed)?;
        }
        Ok(_) => return Err(LifeError::InTheWay(path.to_owned())),
        Err(_) => {}
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    fs::set_permissions(path, PermissionsExt::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

async fn register(kubelet: &Path, own: &Path, resource: &str) -> Result<(), RegisterError> {
    let endpoint = own.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let request = RegisterRequest {
        version: VERSION.to_owned(),
        endpoint,
        resource_name: resource.to_owned(),
        options: Some(ABOUT),
    };
    let told = async {
        let channel = Endpoint::from_shared(format!("unix:{}", kubelet.display()))?;
        let mut client = RegistrationClient::new(channel.connect().await?);
        let answer = client.register(request).await;
        answer
            .map_err(|status| RegisterError::Refused(status.message().chars().take(400).collect()))
    };
    timeout(REGISTER_TIMEOUT, told).await.map_err(|_| RegisterError::Silent)?.map(drop)
}

/// Runs the plugin in this process, which SIGTERM and SIGINT end.
///
/// # Errors
/// Its socket cannot be made; the system has no signals or no memory for it.
pub fn run(options: &Options) -> Result<(), LifeError> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(LifeError::Signals)?.block_on(async {
        let hear = |kind| signal(kind).map_err(LifeError::Signals);
        let (mut term, mut int) = (hear(SignalKind::terminate())?, hear(SignalKind::interrupt())?);
        let end = async {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
            }
        };
        serve(options, end).await
    })
}
