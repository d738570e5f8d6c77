//! The process that answers a job's questions to NVML, NVIDIA's management library
//! ([`kedge_protocol::management`]): of GPUs by NVIDIA's own, opened when the first question comes;
//! of software devices by what is known of them. It is none of the job's processes, and ends with
//! the job's supervisor.

mod far;
mod places;
mod soft;

use crate::backend::BackendConfig;
use kedge_control::gpu::GpuSpec;
use kedge_control::joblog::JobLog;
use kedge_control::service::{Asker, Limits, Service};
use kedge_control::warn;
use kedge_device_nvidia::Nvml;
use kedge_protocol::management::{Answer, Question, status};
use kedge_socket::SocketError;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A connection may be silent for as long as its process lives.
const LIMITS: Limits = Limits {
    connections: 1024,
    request: Duration::from_secs(30 * 24 * 3600),
    reply: Duration::from_secs(20),
};

/// Who knows the devices.
enum Source {
    Nvidia(Nvml),
    Soft(soft::Devices),
    Far(Box<far::Devices>),
    /// What nvmlInit returns for that.
    Nobody(u32),
}

/// The answers of the devices that a configuration names.
pub(crate) struct Management {
    config: BackendConfig,
    log: Arc<JobLog>,
    source: OnceLock<Source>,
}

/// Answers whoever connects to `listener`, until the other end of `supervisor` is closed.
pub fn serve(
    supervisor: &OwnedFd,
    listener: OwnedFd,
    config: BackendConfig,
    log: Arc<JobLog>,
) -> io::Result<()> {
    let listener = UnixListener::from(listener);
    let management = Arc::new(Management::new(config, log));
    let service = Service::new("nvml", LIMITS);
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
            let management = Arc::clone(&management);
            service.serve_next(&listener, move |asker| {
                // It has ended, or does not speak as it should: both see the socket closed.
                let _ = management.converse(asker);
            });
        }
    }
}

impl Management {
    pub(crate) fn new(config: BackendConfig, log: Arc<JobLog>) -> Management {
        Management { config, log, source: OnceLock::new() }
    }

    fn converse(&self, asker: &Asker) -> Result<(), SocketError> {
        loop {
            let (question, _) = asker.request::<Question>()?;
            asker.reply(&self.ask(&question), &[])?;
        }
    }

    /// Answers a question.
    pub(crate) fn ask(&self, question: &Question) -> Answer {
        let (name, arguments) = (&*question.function, &question.arguments);
        match self.source.get_or_init(|| self.open()) {
            Source::Nvidia(nvml) => nvml.ask(name, arguments),
            Source::Soft(devices) => devices.ask(name, arguments),
            Source::Far(devices) => devices.ask(question),
            Source::Nobody(status) => Answer::of(*status),
        }
    }

    fn open(&self) -> Source {
        match &self.config.gpu {
            GpuSpec::Soft { devices, .. } => {
                Source::Soft(soft::Devices::of(&self.config, *devices))
            }
            GpuSpec::Local { .. } => match Nvml::open() {
                Ok(nvml) => Source::Nvidia(nvml),
                Err(status) => {
                    warn!(
                        self.log,
                        "NVML cannot be started here ({status}): programs that ask it are told that there is no driver"
                    );
                    Source::Nobody(status)
                }
            },
            GpuSpec::Remote { server, devices } => Source::Far(Box::new(far::Devices::of(
                server.to_string(),
                devices.clone(),
                self.log.clone(),
            ))),
            GpuSpec::Several(_) => {
                warn!(
                    self.log,
                    "NVML does not tell of devices of several places as yet: programs that ask it \
                     are told that there is no driver"
                );
                Source::Nobody(status::DRIVER_NOT_LOADED)
            }
        }
    }
}
