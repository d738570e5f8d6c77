//! Who answers: a process outside of the job, by a connection that is made when something is asked
//! and made anew where it is gone, as after a restart, or is another process's, as after a fork.

use crate::status::Status;
use kedge_protocol::management::{Answer, INIT, Question};
use kedge_socket::{Channel, SocketError};
use kedge_wire::{List, Text};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a reply may take: the first question has the driver's library opened, which wakes
/// devices.
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);
/// A restart in the middle of a question takes the connection; another may come in the middle of
/// the next.
const TRIES: usize = 3;

#[derive(Debug)]
struct State {
    /// Calls of nvmlInit less calls of nvmlShutdown.
    users: u32,
    /// And the process that made it.
    connection: Option<(Channel, u32)>,
}

fn lock() -> MutexGuard<'static, State> {
    static STATE: Mutex<State> = Mutex::new(State { users: 0, connection: None });
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One more user. DRIVER_NOT_LOADED where there is no job, or no device.
pub(crate) fn init() -> Result<(), Status> {
    let mut state = lock();
    if state.users == 0 {
        let question = Question {
            function: Text::truncated(INIT.name.to_owned()),
            arguments: List::default(),
        };
        match state.exchange(&question)?.status {
            0 => {}
            status => return Err(Status(status)),
        }
    }
    state.users += 1;
    Ok(())
}

pub(crate) fn shut_down() -> Result<(), Status> {
    let mut state = lock();
    state.users = state.users.checked_sub(1).ok_or(Status::UNINITIALIZED)?;
    if state.users == 0 {
        state.connection = None;
    }
    Ok(())
}

/// UNINITIALIZED before nvmlInit, and after as many nvmlShutdown.
pub(crate) fn check_started() -> Result<(), Status> {
    if lock().users == 0 { Err(Status::UNINITIALIZED) } else { Ok(()) }
}

pub(crate) fn ask(question: &Question) -> Result<Answer, Status> {
    lock().exchange(question)
}

impl State {
    fn exchange(&mut self, question: &Question) -> Result<Answer, Status> {
        for _ in 0..TRIES {
            let channel = self.connected().ok_or(Status::DRIVER_NOT_LOADED)?;
            if let Ok(answer) = converse(channel, question) {
                return Ok(answer);
            }
            self.connection = None;
        }
        Err(Status::UNKNOWN)
    }

    fn connected(&mut self) -> Option<&Channel> {
        let pid = std::process::id();
        if self.connection.as_ref().is_none_or(|(_, owner)| *owner != pid) {
            self.connection = None;
            let socket = std::env::var_os("KEDGE_SOCKET")?;
            let path = Path::new(&socket).with_file_name("nvml");
            let stream = kedge_socket::address::connect(&path).ok()?;
            self.connection = Some((Channel::new(stream.into()), pid));
        }
        self.connection.as_ref().map(|(channel, _)| channel)
    }
}

fn converse(channel: &Channel, question: &Question) -> Result<Answer, SocketError> {
    channel.send(question, &[], REPLY_TIMEOUT)?;
    channel.receive(REPLY_TIMEOUT).map(|(answer, _)| answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_told_before_init_or_without_a_job() {
        assert_eq!(check_started(), Err(Status::UNINITIALIZED));
        assert_eq!(shut_down(), Err(Status::UNINITIALIZED));
        assert_eq!(init(), Err(Status::DRIVER_NOT_LOADED));
    }
}
