//! What is shown to the other proxy in a round, and the way there.

use super::line::Reply;
use crate::changes::Tracked;
use crate::error::{CaptureError, LineError};
use std::io::Write;
use std::os::fd::BorrowedFd;

/// What the other proxy has already, and who follows what changes of it.
#[derive(Default)]
pub(crate) enum Follows {
    /// It has nothing.
    #[default]
    Nothing,
    /// This process.
    Here(Tracked),
    /// The proxy on the other machine, which has the devices.
    There,
}

/// What the devices held when a round began.
pub(crate) trait Shown: Send {
    fn bytes(&self) -> u64;

    /// Gives the other proxy what it has not got; `None` where it cannot take that.
    fn cross(&mut self, last: bool, way: &mut Way<'_>) -> Result<Option<Crossed>, CaptureError>;
}

/// The way to the other proxy.
pub(crate) struct Way<'a> {
    pub(crate) to: &'a mut (dyn Write + Send),
    pub(crate) reply: &'a mut (dyn FnMut() -> Result<Reply, LineError> + Send),
    /// Descriptors go by this socket, if it is the same way.
    pub(crate) socket: Option<BorrowedFd<'a>>,
}

/// What has crossed.
pub(crate) struct Crossed {
    pub(crate) bytes: u64,
    /// For the next round.
    pub(crate) follows: Follows,
}
