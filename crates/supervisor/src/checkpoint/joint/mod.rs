//! Checkpoints of jobs of several parts: the call to one, whoever conducts it, and remote shells,
//! which bring new parts.

mod call;
mod conduct;
mod launch;

use crate::checkpoint::checkpointer::Checkpointer;
use kedge_control::error;
use kedge_control::joblog::COORDINATOR;
pub(crate) use launch::{LaunchError, meeting_place};
use std::sync::Arc;
use std::thread;

impl Checkpointer {
    /// Takes part in the checkpoints of the whole job, for as long as the process lives.
    pub(crate) fn take_part(self: &Arc<Self>) {
        let Some(joint) = self.joint.get().cloned() else { return };
        let checkpointer = self.clone();
        let part = thread::Builder::new().name("part".into());
        if part.spawn(move || call::answer_calls(&joint, &checkpointer)).is_err() {
            error!(
                target: COORDINATOR,
                self.log,
                "cannot start a thread: the job cannot be checkpointed as a whole"
            );
        }
    }
}
