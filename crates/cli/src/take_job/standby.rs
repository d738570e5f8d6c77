//! A restart of a job that arrives, begun with the first of its images. It takes in each image that
//! comes, so that little is left to be done while the job stands still.

use super::arrival::Arrival;
use super::{ALL_MADE, SAID, Waiting, end, wait_for};
use crate::output;
use kedge_supervisor::{MADE, WAITS, bring_image};
use rustix::process::{Pid, Signal, kill_process};
use std::io;
use std::path::Path;
use std::time::Duration;

/// What a restart is told that is to begin before the last image is here.
const STANDBY: &str = "--standby";
/// For an image to be taken in while the job runs elsewhere: whoever moves it waits longer.
const TAKEN_IN: Duration = Duration::from_secs(300);

/// One that has begun. Where it fails, nothing is lost but time: the job is restarted from its last
/// image alone.
#[derive(Debug)]
pub(super) struct Standby(Option<Waiting>);

impl Standby {
    /// Begins with an image, and returns when that is made; or why it cannot be.
    pub(super) fn begin(arrival: &Arrival, image: &Path) -> Result<Standby, String> {
        let begun = Waiting::begin(arrival, image, &[STANDBY]);
        let mut standby = Standby(Some(begun.map_err(|error| error.to_string())?));
        standby.wait(MADE, TAKEN_IN).map_err(|error| standby.why(&error))?;
        Ok(standby)
    }

    /// Takes in another image, and returns when that is done; or why it cannot be.
    pub(super) fn take_in(mut self, image: &Path) -> Result<Standby, String> {
        let taken = self.tell(image, false).and_then(|()| self.wait(MADE, TAKEN_IN));
        match taken {
            Ok(()) => Ok(self),
            Err(error) => Err(self.why(&error)),
        }
    }

    /// Takes in the last image: the job, which is here as a whole; `None` where that fails.
    pub(super) fn last(mut self, image: &Path) -> Option<Waiting> {
        match self.tell(image, true).and_then(|()| self.wait(WAITS, ALL_MADE)) {
            Ok(()) => self.0.take(),
            Err(error) => {
                output::complain(&format!("made from the last image alone: {}", self.why(&error)));
                None
            }
        }
    }

    fn tell(&self, image: &Path, is_last: bool) -> io::Result<()> {
        let Waiting { gate, .. } = self.0.as_ref().ok_or(io::ErrorKind::NotFound)?;
        bring_image(gate, image, is_last)
    }

    fn wait(&mut self, word: u8, most: Duration) -> io::Result<()> {
        let Waiting { restart, gate, .. } = self.0.as_mut().ok_or(io::ErrorKind::NotFound)?;
        wait_for(gate, word, restart, most)
    }

    /// Ends it: what it has said, or the error.
    fn why(&mut self, error: &io::Error) -> String {
        let said = self.0.take().and_then(|mut waiting| {
            finish(&mut waiting);
            waiting.streams.last_words(SAID)
        });
        said.unwrap_or_else(|| error.to_string())
    }
}

impl Drop for Standby {
    /// Nothing of it is left then.
    fn drop(&mut self) {
        if let Some(mut waiting) = self.0.take() {
            finish(&mut waiting);
        }
    }
}

/// Ends a restart, whatever it does at the moment.
fn finish(waiting: &mut Waiting) {
    let pid = Pid::from_raw(waiting.restart.id().cast_signed());
    // Until it has been waited for, the id is its own.
    if let (Ok(None), Some(pid)) = (waiting.restart.try_wait(), pid) {
        let _ = kill_process(pid, Signal::TERM);
    }
    end(&mut waiting.restart);
}
