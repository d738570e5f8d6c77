//! Devices on another machine, of which their server answers.

use kedge_control::joblog::JobLog;
use kedge_control::warn;
use kedge_protocol::management::{Answer, Question, status};
use kedge_remote::Management;
use std::sync::{Arc, Mutex, PoisonError};

/// How often a question is asked whose connection breaks.
const TRIES: u32 = 4;

/// Those of a server's devices that a job has, by number; all if none are named.
pub(super) struct Devices {
    server: String,
    devices: Vec<u32>,
    log: Arc<JobLog>,
    line: Mutex<Option<Management>>,
}

impl Devices {
    pub(super) fn of(server: String, devices: Vec<u32>, log: Arc<JobLog>) -> Devices {
        Devices { server, devices, log, line: Mutex::default() }
    }

    /// Has the server answer. A connection that was cut is opened anew: no question changes
    /// anything, so it does no harm to ask again.
    pub(super) fn ask(&self, question: &Question) -> Answer {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        let mut why = String::new();
        for _ in 0..TRIES {
            match self.try_to_ask(&mut line, question) {
                Ok(answer) => return answer,
                Err(error) => why = error,
            }
        }
        warn!(self.log, "NVML is not answered: {why}");
        Answer::of(status::DRIVER_NOT_LOADED)
    }

    fn try_to_ask(
        &self,
        line: &mut Option<Management>,
        question: &Question,
    ) -> Result<Answer, String> {
        let mut open = match line.take() {
            Some(open) => open,
            None => Management::connect(&self.server, &self.devices).map_err(|e| e.to_string())?,
        };
        let answer = open.ask(question).map_err(|error| format!("{}: {error}", self.server))?;
        *line = Some(open);
        Ok(answer)
    }
}
