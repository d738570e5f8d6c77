//! The process that answers a job's questions to NVML, NVIDIA's management library ([`kedge_protocol::management`]): of
//! GPUs by NVIDIA's own, opened when the first question comes; of software devices by what is known of them. It is
//! none of the job's processes, and ends with the job's supervisor.

mod soft;

use crate::backend::{BackendConfig, GpuSpec};
use crate::joblog::JobLog;
use kedge_device_nvidia::Nvml;
use kedge_protocol::management::{Answer, Question};
use kedge_transport::{Channel, SocketError, peer_uid};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

/// Processes that may be connected at a time.
const MOST_ASKERS: usize = 1024;
/// A connection may be silent for as long as its process lives.
const SILENCE: Duration = Duration::from_secs(30 * 24 * 3600);
/// Until an answer has gone.
const PATIENCE: Duration = Duration::from_secs(20);

/// Who knows the devices.
enum Source {
    Nvidia(Nvml),
    Soft(soft::Devices),
    /// What nvmlInit returns for that.
    Nobody(u32),
}

struct Management {
    config: BackendConfig,
    log: Arc<JobLog>,
    source: OnceLock<Source>,
    askers: AtomicUsize,
}

/// Answers whoever connects to `listener`, until the other end of `supervisor` is closed.
pub fn serve(
    supervisor: &OwnedFd,
    listener: OwnedFd,
    config: BackendConfig,
    log: Arc<JobLog>,
) -> io::Result<()> {
    let listener = UnixListener::from(listener);
    let (source, askers) = (OnceLock::new(), AtomicUsize::new(0));
    let management = Arc::new(Management { config, log, source, askers });
    let watched = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut polled = [watched(supervisor.as_raw_fd()), watched(listener.as_raw_fd())];
    loop {
        // SAFETY: two structures that live as long as the call.
        let ready = unsafe { libc::poll(polled.as_mut_ptr(), 2, -1) };
        if ready < 0 && io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return Err(io::Error::last_os_error());
        }
        if polled[0].revents != 0 {
            return Ok(());
        }
        if polled[1].revents != 0 {
            match listener.accept() {
                Ok((asker, _)) => admit(&management, asker),
                // Out of descriptors, most likely: does not get better by asking faster.
                Err(_) => thread::sleep(Duration::from_millis(200)),
            }
        }
    }
}

/// Answers a process on a thread of its own. One that is not admitted sees the socket closed.
fn admit(management: &Arc<Management>, asker: UnixStream) {
    // SAFETY: a plain call.
    let uid = unsafe { libc::geteuid() };
    let same = peer_uid(asker.as_fd()).is_ok_and(|peer| peer == uid);
    if !same || management.askers.load(Ordering::SeqCst) >= MOST_ASKERS {
        return;
    }
    management.askers.fetch_add(1, Ordering::SeqCst);
    let inside = Arc::clone(management);
    let answering = move || {
        // It has ended, or does not speak as it should: both see the socket closed.
        let _ = inside.converse(&Channel::new(asker.into()));
        inside.askers.fetch_sub(1, Ordering::SeqCst);
    };
    if thread::Builder::new().name("nvml".into()).spawn(answering).is_err() {
        management.askers.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Management {
    fn converse(&self, asker: &Channel) -> Result<(), SocketError> {
        loop {
            let (question, _) = asker.receive::<Question>(SILENCE)?;
            let (name, arguments) = (&*question.function, &question.arguments);
            let answer = match self.source.get_or_init(|| self.open()) {
                Source::Nvidia(nvml) => nvml.ask(name, arguments),
                Source::Soft(devices) => devices.ask(name, arguments),
                Source::Nobody(status) => Answer::of(*status),
            };
            asker.send(&answer, &[], PATIENCE)?;
        }
    }

    fn open(&self) -> Source {
        match &self.config.gpu {
            GpuSpec::Soft { devices } => Source::Soft(soft::Devices::of(&self.config, *devices)),
            GpuSpec::Local { .. } => match Nvml::open() {
                Ok(nvml) => Source::Nvidia(nvml),
                Err(status) => {
                    self.log.line(&format!(
                        "NVML cannot be started here ({status}): programs that ask it are told that there is no driver"
                    ));
                    Source::Nobody(status)
                }
            },
        }
    }
}
