//! Whether an order has been sent, for whoever is interrupted while it waits.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How far an order to a job has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Stage {
    /// The job knows nothing of it.
    #[default]
    NotSent,
    /// The job carries it out, whether or not anybody waits.
    Sent,
    /// It is known what has come of it.
    Over,
}

/// The stage of one order: its sender sets it, and [`crate::on_interrupt`] holds it.
#[derive(Debug, Clone, Default)]
pub struct Sending(Arc<Mutex<Stage>>);

impl Sending {
    /// Returns the stage, which stays as it is until the guard is dropped: nothing is sent
    /// meanwhile.
    pub(crate) fn hold(&self) -> MutexGuard<'_, Stage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the order by `send`. One that is not sent whole is not carried out.
    pub(crate) fn send<E>(&self, send: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let mut stage = self.hold();
        send()?;
        *stage = Stage::Sent;
        Ok(())
    }

    pub(crate) fn over(&self) {
        *self.hold() = Stage::Over;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::thread;
    use std::time::Duration;

    #[test]
    fn nothing_is_sent_while_the_stage_is_held() {
        let sending = Sending::default();
        let stage = sending.hold();
        let (sent, sees) = channel();
        let sends = sending.clone();
        let sender = thread::spawn(move || sends.send(|| sent.send(())).expect("it is seen"));
        let seen = sees.recv_timeout(Duration::from_millis(50));
        assert_eq!((*stage, seen), (Stage::NotSent, Err(RecvTimeoutError::Timeout)));
        drop(stage);
        sender.join().expect("it ends");
        assert_eq!((*sending.hold(), sees.try_recv()), (Stage::Sent, Ok(())));
    }

    #[test]
    fn what_could_not_be_sent_is_not_sent() {
        let sending = Sending::default();
        assert_eq!(sending.send(|| Err("no line")), Err("no line"));
        assert_eq!(*sending.hold(), Stage::NotSent);
    }
}
