//! What keys have done to jobs: by what the commands call, each on a thread of its own.

use super::view::{Deed, Note, Target};
use crate::kill;
use crate::progress::Speed;
use kedge_control::size::Size;
use kedge_supervisor::control::{self, Kill, Order, Progress, Sending, Until};
use kedge_supervisor::jobs::{JobName, Jobs};
use std::collections::BTreeSet;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

/// What a deed has to say, and whether it is over.
struct Said {
    of: (String, Deed),
    note: Note,
    over: bool,
}

/// Deeds that are under way.
pub(crate) struct Deeds {
    jobs: Jobs,
    under_way: BTreeSet<(String, Deed)>,
    tell: Sender<Said>,
    told: Receiver<Said>,
}

impl Deeds {
    pub(crate) fn new(jobs: Jobs) -> Deeds {
        let (tell, told) = mpsc::channel();
        Deeds { jobs, under_way: BTreeSet::new(), tell, told }
    }

    /// Begins one: what there is to say of it at once.
    pub(crate) fn begin(&mut self, target: Target, deed: Deed) -> Note {
        let of = (target.name.to_string(), deed);
        if self.under_way.contains(&of) {
            return bad(format!("{}: {} already", target.name, under_way(deed)));
        }
        let (jobs, tell, begun) = (self.jobs.clone(), self.tell.clone(), of.clone());
        let name = target.name.clone();
        let work = move || {
            let say = |note, over| {
                // Nobody looks any more: the deed goes on.
                let _ = tell.send(Said { of: begun.clone(), note, over });
            };
            let done = carry_out(&jobs, &target, deed, |text| say(good(text), false));
            let note = match done {
                Ok(text) => good(format!("{}: {text}", target.name)),
                Err(why) => bad(format!("{}: {why}", target.name)),
            };
            say(note, true);
        };
        match thread::Builder::new().name("deed".into()).spawn(work) {
            Ok(_) => {
                self.under_way.insert(of);
                good(format!("{name}: {}…", under_way(deed)))
            }
            Err(error) => bad(format!("cannot start a thread: {error}")),
        }
    }

    /// The latest of what has been said since this was asked last.
    pub(crate) fn news(&mut self) -> Option<Note> {
        let mut latest = None;
        while let Ok(said) = self.told.try_recv() {
            if said.over {
                self.under_way.remove(&said.of);
            }
            latest = Some(said.note);
        }
        latest
    }
}

fn good(text: String) -> Note {
    Note { text, bad: false }
}

fn bad(text: String) -> Note {
    Note { text, bad: true }
}

fn under_way(deed: Deed) -> &'static str {
    match deed {
        Deed::Checkpoint => "is being checkpointed",
        Deed::SwapOut => "is being swapped out",
        Deed::SwapIn => "is being swapped in",
        Deed::End => "is being ended",
    }
}

/// What came of it, or why nothing did.
fn carry_out(
    jobs: &Jobs,
    target: &Target,
    deed: Deed,
    say: impl FnMut(String),
) -> Result<String, String> {
    let found = jobs.find(&target.name);
    let same = found
        .is_some_and(|meta| (meta.supervisor, meta.started) == (target.supervisor, target.started));
    if !same {
        return Err("another job has that name by now: nothing was done".into());
    }
    let name = &target.name;
    let done = match deed {
        Deed::Checkpoint => return checkpoint(jobs, name, say),
        Deed::SwapOut => control::swap(jobs, name, true, &Sending::default())
            .map(|bytes| format!("{} are off the devices", Size(bytes))),
        Deed::SwapIn => control::swap(jobs, name, false, &Sending::default())
            .map(|_| "is on its devices again".to_owned()),
        Deed::End => {
            let end = Kill::End { grace_ms: kill::GRACE.as_millis() as u64 };
            control::kill(jobs, name, end).map(|()| "has ended".to_owned())
        }
    };
    done.map_err(|error| error.to_string())
}

/// As `kedge checkpoint` does without options.
fn checkpoint(jobs: &Jobs, name: &JobName, mut say: impl FnMut(String)) -> Result<String, String> {
    let order = Order { ahead: true, tell: true, ..Order::default() };
    let (speed, mut stall, mut done) = (Speed::new(), 0.0, None);
    let taken =
        control::checkpoint(jobs, name, &order, Until::Durable, &Sending::default(), |progress| {
            match progress {
                Progress::Writing { done, bytes } => {
                    say(format!("{name}: writing {}…", speed.of(*done, *bytes)));
                }
                Progress::Captured { stall_seconds, .. } => {
                    stall = *stall_seconds;
                    say(format!(
                        "{name}: captured, stood still for {:.0} ms; writing…",
                        stall * 1e3
                    ));
                }
                Progress::Verifying { .. } => {}
                Progress::Durable { image, bytes, seconds, .. } => {
                    let image =
                        image.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    done = Some((image, *bytes, *seconds));
                }
            }
        });
    taken.map_err(|error| error.to_string())?;
    let (image, bytes, seconds) = done.ok_or("nothing was said of the image")?;
    Ok(format!(
        "{image}, {}, stood still {:.0} ms, durable in {seconds:.1} s",
        Size(bytes),
        stall * 1e3
    ))
}
