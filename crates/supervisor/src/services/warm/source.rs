//! Where a job gets proxies that are ready.

use super::adopted::{WarmProxy, bring_to_own_group};
use super::{Kind, node_socket};
use kedge_control::joblog::JobLog;
use kedge_control::note;
use kedge_control::warm::{Ask, REQUEST_TIMEOUT, Reply, ask};
use kedge_socket::SocketError;
use kedge_wire::Text;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// For one that is just being made ready: less than a new one takes.
const STARTING: Duration = Duration::from_secs(2);

/// The job's own keeper of such proxies, and the node's.
#[derive(Debug, Clone)]
pub(crate) struct Sources {
    kind: Kind,
    own: Option<PathBuf>,
    node: Option<PathBuf>,
    log: Arc<JobLog>,
}

impl Sources {
    /// `own`: the socket of the job's own keeper, if it has one.
    pub(crate) fn new(kind: Kind, own: Option<PathBuf>, log: Arc<JobLog>) -> Sources {
        Sources { kind, own, node: node_socket().ok(), log }
    }

    /// A proxy that is ready, if there is one. The log tells why there is none where one could be
    /// expected.
    pub(crate) fn take(&self) -> Option<WarmProxy> {
        let own = self.own.as_deref().and_then(|socket| self.ask(socket, "the job's"));
        let node = self.node.as_deref().filter(|socket| own.is_none() && socket.exists());
        own.or_else(|| self.ask(node?, "the node's"))
    }

    /// So many, or as many as there are.
    pub(crate) fn take_some(&self, count: usize) -> Vec<WarmProxy> {
        std::iter::from_fn(|| self.take()).take(count).collect()
    }

    fn ask(&self, socket: &Path, whose: &str) -> Option<WarmProxy> {
        let kind = Text::new(serde_json::to_string(&self.kind).ok()?).ok()?;
        let order = Ask::Take { kind, wait_ms: STARTING.as_millis() as u32 };
        let cold = |why: &str| {
            note!(self.log, "no warm proxy from {whose} keeper ({why}): a new one starts");
            None
        };
        match ask(socket, &order, STARTING + REQUEST_TIMEOUT) {
            Ok((Reply::Ready { pid }, fds)) => match <[OwnedFd; 2]>::try_from(fds) {
                Ok([control, process]) => {
                    if !bring_to_own_group(pid).unwrap_or(false) {
                        note!(
                            self.log,
                            "the warm proxy {pid} stays in the control group of its keeper"
                        );
                    }
                    Some(WarmProxy::new(pid, control, process))
                }
                Err(_) => cold("it sends no descriptors"),
            },
            Ok((Reply::No { why }, _)) => cold(&why),
            Ok(_) => cold("it answers nonsense"),
            Err(SocketError::System(error)) if error.kind() == ErrorKind::ConnectionRefused => {
                cold("it has ended")
            }
            Err(error) => cold(&error.to_string()),
        }
    }
}
