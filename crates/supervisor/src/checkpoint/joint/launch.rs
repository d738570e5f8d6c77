//! Remote shells (docs/design/0045-remote-shells.md): a job that starts one on another host becomes
//! a job of several parts, if it is none, and no checkpoint begins before the new part is there.

use crate::base::signals::look_at_children;
use crate::checkpoint::checkpointer::{Checkpointer, Without};
use crate::checkpoint::launches::{Launching, MAX_LAUNCHES};
use crate::checkpoint::recovery::Loss;
use crate::job::jobs::{JobError, Jobs};
use crate::job::joint::{Joint, part_name};
use crate::job::policy::Policy;
use crate::services::warden::{self, Before};
use kedge_control::job::Launch;
use kedge_control::joblog::COORDINATOR;
use kedge_control::{note, warn};
use kedge_coordinator::{Far, FarError, JobKey};
use kedge_image::DeviceLimits;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError};
use thiserror::Error;

/// A port that was free a moment ago may be another's: so often another one is tried.
const TRIES: u32 = 4;
/// Addresses of documentation (RFC 5737): the way there is the one to other networks. Nothing is
/// sent.
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// Said where the job was to go back to its images by itself.
const NO_RECOVERY: &str = "--recover is off: the job has parts on other hosts from now on, and \
                           does not go back by itself; `kedge restart` brings its images back";
/// Any: nothing is sent.
const PORT: u16 = 22;

/// Why a remote shell cannot be a part of the job.
#[derive(Debug, Error)]
pub(crate) enum LaunchError {
    #[error("{MAX_LAUNCHES} other remote shells are being started")]
    Many,
    #[error("the parts of the job meet on one host: restart it with --at HOST:PORT")]
    OneHost,
    #[error("the job's key is no text, which a remote shell could be given")]
    Key,
    #[error("cannot make a key: {0}")]
    Random(io::Error),
    #[error("no port is free: {0}")]
    Port(io::Error),
    #[error("the parts of the job cannot be reached: {0}")]
    Way(io::Error),
    #[error(transparent)]
    Far(#[from] FarError),
    #[error(transparent)]
    Job(#[from] JobError),
}

impl Checkpointer {
    /// Has a part of the job be started on another host: what it is to know. No checkpoint begins
    /// before the [`Launching`] is dropped.
    ///
    /// # Errors
    /// There can be no such part, or many are on their way.
    pub(crate) fn launch(
        self: &Arc<Self>,
        toward: Option<&str>,
    ) -> Result<(Launching, Launch), LaunchError> {
        let (joint, warning) = self.joint_toward(toward)?;
        let far = joint.place.far.as_ref().ok_or(LaunchError::OneHost)?;
        let key = String::from_utf8(far.key().text().to_vec()).map_err(|_| LaunchError::Key)?;
        let (gpu, limits) = match &*self.devices() {
            Some(devices) => (devices.gpu.clone(), devices.limits),
            None => ("none".to_owned(), DeviceLimits::default()),
        };
        let recover = self.policy.recover.filter(|_| self.recovery.is_wanted());
        let policy = Policy { recover, ..self.policy.of_other_part() };
        let launch = Launch {
            job: joint.job.to_string(),
            at: far.address().to_string(),
            own: source_toward(far.address()).map_err(LaunchError::Way)?,
            key,
            gpu,
            limits: serde_json::to_value(limits).unwrap_or_default(),
            policy: serde_json::to_value(policy).unwrap_or_default(),
            warning,
        };
        // After a checkpoint that is under way.
        let _one = self.turn.wait();
        let launching = self.launches.begin().ok_or(LaunchError::Many)?;
        Ok((launching, launch))
    }

    /// The job of several parts, which this one becomes if it is none; and what its user is told
    /// when it does.
    fn joint_toward(
        self: &Arc<Self>,
        toward: Option<&str>,
    ) -> Result<(&Joint, Option<String>), LaunchError> {
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(joint) = self.joint.get() {
            return Ok((joint, None));
        }
        let joint = first_part(self, toward)?;
        let at = joint.place.far.as_ref().map(|far| far.address().to_string()).unwrap_or_default();
        let guarded = self.recovery.is_wanted().then(|| self.guard(&joint));
        let joint = self.joint.get_or_init(|| joint);
        note!(
            target: COORDINATOR,
            self.log,
            "it starts a remote shell: its parts on other hosts meet at {at}"
        );
        let warning = match guarded {
            Some(Ok(())) => None,
            // Its image is one of several, of which it alone is none.
            none => {
                self.recovery.give_up();
                none.and_then(Result::err)
            }
        };
        warning.iter().for_each(|warning| warn!(target: COORDINATOR, self.log, "{warning}"));
        self.take_part();
        Ok((joint, warning))
    }

    /// Starts the warden by which the job, from now on the first part of several, goes back.
    fn guard(self: &Arc<Self>, joint: &Joint) -> Result<(), String> {
        // The process that could become another restart is not this one, but the init's parent.
        if self.without == Without::Ends {
            return Err(NO_RECOVERY.to_owned());
        }
        // Nobody takes the warden for one of the job's.
        let _one = self.turn.wait();
        let failed = |error: io::Error| format!("{NO_RECOVERY} ({error})");
        warden::start(joint, &self.home, &self.policy, Before::default(), true).map_err(failed)?;
        self.recovery.is_of_part();
        let lost = self.recovery.clone();
        let stop = move || {
            lost.lose(Loss::Others);
            look_at_children();
        };
        let warden = warden::own().ok_or(NO_RECOVERY)?;
        warden.on_stop(stop).map_err(failed)
    }
}

/// Makes the job of `checkpointer` the first part of one of its name.
fn first_part(checkpointer: &Checkpointer, toward: Option<&str>) -> Result<Joint, LaunchError> {
    let jobs = Jobs::open()?;
    let job = &checkpointer.name;
    let mut tries = 0;
    loop {
        tries += 1;
        let far = meeting_place(toward)?;
        let joint = Joint::of(&jobs, job, part_name(job, 0)?, Some(far))?;
        match joint.claim() {
            Ok(true) => return Ok(joint),
            Err(error) if tries >= TRIES => return Err(error.into()),
            Ok(false) if tries >= TRIES => {
                return Err(JobError::InUse { name: job.clone() }.into());
            }
            _ => {}
        }
    }
}

/// A free port at the address of this host that is on the way to `toward`, and a new key.
pub(crate) fn meeting_place(toward: Option<&str>) -> Result<Far, LaunchError> {
    let address = SocketAddr::new(own_address(toward), 0);
    let port = TcpListener::bind(address).and_then(|listener| listener.local_addr());
    let address = port.map_err(LaunchError::Port)?;
    let key = JobKey::generate().map_err(LaunchError::Random)?;
    Ok(Far::new(&address.to_string(), key)?)
}

/// The address that this host has where it sends something to `toward`; to other networks, where
/// `toward` is this very host or nobody knows it.
fn own_address(toward: Option<&str>) -> IpAddr {
    let there = toward.map(|host| (host, PORT).to_socket_addrs());
    let there = there.into_iter().flatten().flatten();
    let all = there.chain([SocketAddr::new(ELSEWHERE.into(), PORT)]);
    let own = all.filter_map(|peer| source_toward(peer).ok());
    let mut usable = own.filter(|own| !own.is_loopback() && !own.is_unspecified());
    usable.next().unwrap_or(Ipv4Addr::LOCALHOST.into())
}

/// The address from which this host would send to `peer`.
fn source_toward(peer: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match peer {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(peer)?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_meet_at_an_address_that_is_this_host_s_own() {
        for toward in [None, Some("127.0.0.1"), Some("localhost"), Some("no such host"), Some("")] {
            let own = own_address(toward);
            assert!(!own.is_unspecified(), "{toward:?}");
            let far = meeting_place(toward).expect("a port");
            assert_eq!(far.address().ip(), own);
            assert_ne!(far.address().port(), 0);
            assert_eq!(far.key().text().len(), 64);
        }
    }
}
