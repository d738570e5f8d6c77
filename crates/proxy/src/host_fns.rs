//! Host functions on their way to the client's callback thread and back.

use crate::outlet::Outlet;
use kedge_device::Done;
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

/// What the client has been asked to run, and what still waits for room in its queue.
#[derive(Default)]
pub(crate) struct HostFns {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// One token may be under way several times: a graph is launched again before it has run.
    running: HashMap<u64, VecDeque<Done>>,
    waiting: VecDeque<u64>,
}

impl HostFns {
    /// Asks the client to run `token`.
    pub(crate) fn ask(&self, outlet: &dyn Outlet, token: u64, done: Done) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.running.entry(token).or_default().push_back(done);
        state.waiting.push_back(token);
        send_waiting(&mut state, outlet);
    }

    /// Asks the client to run what waits for room.
    pub(crate) fn ask_waiting(&self, outlet: &dyn Outlet) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        send_waiting(&mut state, outlet);
    }

    /// Whether none is under way.
    pub(crate) fn none(&self) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).running.is_empty()
    }

    /// The client has run `token`: what to tell the device, `None` where it was never asked.
    pub(crate) fn done(&self, outlet: &dyn Outlet, token: u64) -> Option<Done> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        send_waiting(&mut state, outlet);
        let queue = state.running.get_mut(&token)?;
        let done = queue.pop_front();
        if queue.is_empty() {
            state.running.remove(&token);
        }
        done
    }
}

fn send_waiting(state: &mut State, outlet: &dyn Outlet) {
    while let Some(token) = state.waiting.front() {
        if !outlet.try_host_fn(*token) {
            return;
        }
        state.waiting.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn more_than_the_queue_holds_all_run_in_order() {
        let (client, server) = kedge_transport::pair().unwrap();
        let (fns, ran) = (HostFns::default(), Arc::new(AtomicUsize::new(0)));
        for token in 0..1000 {
            let ran = ran.clone();
            let done = Box::new(move |_: Result<_, _>| {
                ran.fetch_add(1, Ordering::Relaxed);
            });
            fns.ask(server.outbox(), token, done);
        }
        for expected in 0..1000 {
            assert_eq!(client.next_host_fn(), Ok(expected));
            fns.done(server.outbox(), expected).expect("asked for")(Ok(()));
        }
        assert_eq!(ran.load(Ordering::Relaxed), 1000);
        assert!(fns.done(server.outbox(), 5).is_none());
    }
}
