//! The gate between the ring and the devices: closed, no message is carried out, and the thread
//! that would do what it is asked to instead.

use crate::executor::Executor;
use crate::host::ProxyHost;
use crate::trace;
use crate::wait::until;
use kedge_transport::{Nudge, Server};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// What that thread has, while the gate is closed.
pub(crate) struct Parked<'a> {
    pub(crate) executor: &'a mut dyn Executor,
    pub(crate) server: &'a mut Server,
    pub(crate) host: &'a ProxyHost,
}

impl Parked<'_> {
    /// Carries out one message, once there is one, within `limit`: whether there was. A broken ring
    /// is found out again when the gate is open.
    pub(crate) fn step_within(&mut self, limit: Duration) -> bool {
        let stepped = until(limit, || self.step());
        self.executor.flush();
        stepped
    }

    fn step(&mut self) -> bool {
        match self.server.try_next() {
            Ok(Some(incoming)) => {
                self.host.counts.count(&incoming.message);
                self.executor.execute(incoming);
                true
            }
            _ => false,
        }
    }
}

type Job = Box<dyn FnOnce(&mut Parked<'_>) + Send>;

pub(crate) struct Gate {
    closed: AtomicBool,
    nudge: Nudge,
    /// Where a dispatcher that finds the gate closed takes its jobs from.
    jobs: Mutex<Option<Receiver<Job>>>,
}

/// Keeps a gate closed.
pub(crate) struct Closed<'a> {
    gate: &'a Gate,
    jobs: Sender<Job>,
}

impl Gate {
    pub(crate) fn new(nudge: Nudge) -> Gate {
        Gate { closed: AtomicBool::new(false), nudge, jobs: Mutex::default() }
    }

    /// Closes it. The dispatcher may still be busy with a message.
    pub(crate) fn close(&self) -> Closed<'_> {
        let (jobs, receiver) = channel();
        *self.jobs.lock().unwrap_or_else(PoisonError::into_inner) = Some(receiver);
        self.closed.store(true, Ordering::SeqCst);
        self.nudge.now();
        Closed { gate: self, jobs }
    }

    /// Asked before each message: returns when the gate is open.
    #[inline]
    pub(crate) fn pass(&self, executor: &mut dyn Executor, server: &mut Server, host: &ProxyHost) {
        if self.closed.load(Ordering::Relaxed) {
            self.park(&mut Parked { executor, server, host });
        }
    }

    #[cold]
    fn park(&self, parked: &mut Parked<'_>) {
        let host = parked.host;
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner).take();
        host.parked.store(true, Ordering::Relaxed);
        let begin = trace::pause_begins();
        // They end when the gate is opened.
        while let Some(Ok(job)) = jobs.as_ref().map(Receiver::recv) {
            job(parked);
        }
        trace::pause_ends(begin);
        host.parked.store(false, Ordering::Relaxed);
    }
}

impl Closed<'_> {
    /// Has the dispatcher's thread do `job`: `None` if that is not done within `limit`. The job may
    /// still be done then.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        limit: Duration,
        job: impl FnOnce(&mut Parked<'_>) -> T + Send + 'static,
    ) -> Option<T> {
        let (answer, answered) = channel();
        let job = move |parked: &mut Parked<'_>| drop(answer.send(job(parked)));
        self.jobs.send(Box::new(job)).ok()?;
        answered.recv_timeout(limit).ok()
    }
}

impl Drop for Closed<'_> {
    /// Opens the gate.
    fn drop(&mut self) {
        self.gate.closed.store(false, Ordering::SeqCst);
        *self.gate.jobs.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
