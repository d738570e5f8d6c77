//! A job of many members without sockets and clock: what their barriers ask of the coordinator.

use crate::message::{Hello, Name, Reply, Request, Series, VERSION, Who};
use crate::state::{Conn, State, Violation};
use kedge_wire::List;

/// Longer than any simulation.
const WAIT_MS: u32 = u32::MAX;

/// Members that meet at one barrier after the other, each on a node of its own.
#[derive(Debug)]
pub struct Simulated {
    state: State,
    members: u32,
    step: u64,
}

impl Simulated {
    /// Makes a job of so many members, also of more than a coordinator of a real one takes.
    ///
    /// # Errors
    /// The coordinator does not let them in.
    pub fn new(members: u32) -> Result<Simulated, Violation> {
        let name = |text: String| Name::truncated(text);
        let mut state = State::with_room("simulated".to_owned(), 0, members as usize);
        for number in 0..members {
            let hello = Hello {
                version: VERSION,
                job: name("simulated".into()),
                member: name(format!("simulated.{number}")),
                node: name(format!("node{number}")),
                part: true,
                passed: List::default(),
                broken: List::default(),
            };
            state.ask(Conn::from(number), Request::Hello { hello }, 0)?;
        }
        let welcome = |reply: &(Conn, Reply)| matches!(reply.1, Reply::Welcome { .. });
        match state.replies().iter().all(welcome) {
            true => Ok(Simulated { state, members, step: 0 }),
            false => Err(Violation::Greeting),
        }
    }

    /// Has all of them arrive at the next barrier, in turn: how many messages the coordinator read
    /// and wrote for it.
    ///
    /// # Errors
    /// It takes one of them for broken.
    pub fn barrier(&mut self) -> Result<u64, Violation> {
        self.step += 1;
        let (who, step) = (Who::Count { members: self.members }, self.step);
        let mut messages = 0;
        for number in 0..self.members {
            let series = Series::of_job("rounds");
            let request = Request::Arrive { series, step, who, wait_ms: WAIT_MS };
            self.state.ask(Conn::from(number), request, 0)?;
            messages += 1 + self.state.replies().len() as u64;
        }
        Ok(messages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barrier_takes_two_messages_a_member_however_many_there_are() {
        for members in [1, 10, 1000, 10_000] {
            let mut job = Simulated::new(members).unwrap();
            for _ in 0..2 {
                assert_eq!(job.barrier(), Ok(2 * u64::from(members)));
            }
        }
    }
}
