//! What a part of several and its warden say to each other at the part's end.

use crate::job::jobs::{JobDir, State};
use crate::job::outcome::Outcome;
use crate::job::postscript::Ended;
use crate::job::spec::RunError;
use crate::restart::back::End;
use crate::services::warden::{self, Verdict, Warden};

/// What becomes of a part of which nothing runs any more, as its warden says.
pub(crate) fn end_together(warden: &Warden, dir: JobDir) -> End {
    match warden.verdict() {
        Verdict::Back(together) => {
            dir.note_end(State::Killed(libc::SIGKILL));
            End::Together(*together)
        }
        Verdict::End(why) => {
            let killed = Outcome::Killed(libc::SIGKILL);
            dir.note_end(State::Killed(libc::SIGKILL));
            dir.retire();
            End::Ended(Ended { postscript: vec![why], ..killed.into() })
        }
    }
}

/// Tells this part's warden, if it has one, how it has ended: so it stays.
pub(crate) fn tell_warden(outcome: &Result<Option<Ended>, RunError>) {
    let Some(warden) = warden::own() else { return };
    match outcome {
        Ok(Some(ended)) => warden.say(&format!("ended {}", ended.outcome)),
        Ok(None) => {}
        Err(error) => warden.say(&format!("ended {error}")),
    }
}
