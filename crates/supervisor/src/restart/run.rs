//! Restarting a job from its image: it is a job as any other, but that its processes live in
//! namespaces of their own, where the init that made them takes its checkpoints.

use crate::base::signals::{self, Signals};
use crate::base::told::tell;
use crate::checkpoint::recovery::Loss;
use crate::checkpoint::together::Ranks;
use crate::checkpoint::watch::Watch;
use crate::job::images::Images;
use crate::job::jobs::{self, JobDir, JobName, Jobs, Meta, State};
use crate::job::leaving;
use crate::job::left::Marks;
use crate::job::missed::Missed;
use crate::job::noted::{finish, left_for, open_log};
use crate::job::outcome::Outcome;
use crate::job::policy::Policy;
use crate::job::postscript::{Ended, Postscript};
use crate::job::rank::{RankError, Seat};
use crate::job::spec::RunError;
use crate::restart::back::{End, GoBack};
use crate::restart::candidates::Candidates;
use crate::restart::end::{end_all, see_all_end};
use crate::restart::first::{CameBack, Place, first_that_works};
use crate::restart::gate::Gate;
use crate::restart::part::{end_together, tell_warden};
use crate::restart::parts::restart_parts;
use crate::restart::resume;
use crate::restart::spec::RestartSpec;
use crate::services::control;
use crate::services::keeper::Keeper;
use crate::services::warden;
use kedge_control::joblog::JobLog;
use kedge_control::{error, warn};
use kedge_image::{ImageError, Manifest};
use kedge_process::plugins::settle_all;
use kedge_process::{EngineError, Restarted};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Instant;

/// Restarts a job and runs it to its end. Takes this process's signals and children over; it must
/// have one thread only.
pub fn restart(spec: &RestartSpec) -> Result<End, RunError> {
    let begin = Instant::now();
    signals::block_file_limit();
    let what = "take the socket at which it is to wait";
    let gate = spec.gate.map(Gate::at).transpose();
    let gate = gate.map_err(|source| RunError::System { what, source })?.map(Arc::new);
    // What a restart has left that was killed with all that belonged to it.
    settle_all().said.iter().for_each(|said| tell(said));
    let found = if spec.back.is_none() { Some(spec.images()?) } else { None };
    let spec = &spec.beside_images(found.as_deref().unwrap_or_default());
    if let (Some(images), None) = (&found, &spec.joining) {
        if images.first().is_some_and(|(_, manifest)| !manifest.parts.is_empty()) {
            return restart_parts(spec, images).map(|outcome| End::Ended(outcome.into()));
        }
        if let Some(refused) = images.first().and_then(|(_, first)| spec.refuse_several(first)) {
            return Err(RunError::Several(refused));
        }
        // Each of several ranks would bring it back.
        if spec.resume.is_some()
            && let Some(ranks) = Seat::here().filter(Seat::has_others).map(|seat| seat.size)
        {
            return Err(RankError::Size { parts: 1, ranks }.into());
        }
    }
    let jobs = Jobs::open()?;
    let (name, dir, images) = place(spec, &jobs, found)?;
    let joint = spec.joining.as_ref().map(|joining| joining.joint(&jobs, &name)).transpose()?;
    let keeper = Keeper::of(&dir);
    // Before this process adopts what others leave.
    spec.start_warden(joint.as_ref(), dir.path(), &images)?;
    let warm = spec.warm(&dir, &images);
    let _management = spec.management(&dir, &images);
    let place =
        Place { name: &name, joint: joint.as_ref(), dir: &dir, warm: warm.as_ref(), gate, begin };
    let outcome = restart_one(spec, &place, &images, &keeper);
    if let Some(warden) = warden::own() {
        match &outcome {
            Ok(Some(_)) => {}
            Ok(None) => return Ok(end_together(warden, dir)),
            // One that its user has ended is given up below.
            Err(RunError::Restart(EngineError::GivenUp)) if !warden::has_stopped_it() => {}
            Err(error) => {
                warden.say(&format!("lost it has not come back: {error}"));
                end_all()?;
                return Ok(end_together(warden, dir));
            }
        }
    }
    if let (Err(_), None) = (&outcome, &spec.back) {
        dir.remove_meta();
    }
    let outcome = given_up(outcome, spec.requeue_exit(&images));
    tell_warden(&outcome);
    if let Ok(None) = outcome {
        let used = spec.used();
        return GoBack::new(&name, dir, spec.clone(), used, &keeper, warm).map(End::GoBack);
    }
    if let (Err(error), Some(_)) = (&outcome, &spec.back) {
        if spec.goes_back(&dir, &images, Loss::Restart) {
            end_all()?;
            return GoBack::new(&name, dir, spec.clone(), spec.used(), &keeper, warm)
                .map(End::GoBack);
        }
        dir.note_failure(error.exit_code());
    }
    dir.retire();
    jobs.prune();
    Ok(End::Ended(outcome?.unwrap_or(Outcome::Killed(libc::SIGKILL).into())))
}

/// Undoes what restarts that were killed have left half done, of this user's files: what was done,
/// a sentence each.
pub fn settle_restarts() -> Vec<String> {
    settle_all().said
}

/// A restart that a signal has ended is no failure: this process ends as [`given_up_by`] that
/// signal, once nothing is left.
fn given_up(
    outcome: Result<Option<Ended>, RunError>,
    requeue: Option<u8>,
) -> Result<Option<Ended>, RunError> {
    let Err(RunError::Restart(EngineError::GivenUp)) = outcome else { return outcome };
    end_all()?;
    let signal = signals::sent_to_end().unwrap_or(libc::SIGINT);
    Ok(Some(given_up_by(signal, requeue).into()))
}

/// The image is as it was: a job that is asked to end is to be requeued as one that was saved.
fn given_up_by(signal: libc::c_int, requeue: Option<u8>) -> Outcome {
    let requeue = requeue.filter(|_| signal == libc::SIGTERM);
    requeue.map_or(Outcome::Killed(signal), Outcome::Exited)
}

/// The job's name, its folder, and the images that it may be restarted from, the newest first:
/// those that were `found`, or those that a job that goes back has noted.
fn place(
    spec: &RestartSpec,
    jobs: &Jobs,
    found: Option<Candidates>,
) -> Result<(JobName, JobDir, Candidates), RunError> {
    if let (Some(back), Some(name)) = (&spec.back, &spec.name) {
        let dir = jobs.take_over(name, back.lock)?;
        let images = Images::of(&dir).all();
        return Ok((name.clone(), dir, images));
    }
    let images = found.map_or_else(|| spec.images(), Ok)?;
    let (_, first) = images.first().ok_or(ImageError::NoImage { path: spec.path.clone() })?;
    let name = spec.name.clone().map_or_else(|| first.job.parse(), Ok)?;
    let dir = jobs.create(&name)?;
    Ok((name, dir, images))
}

/// `None`: the job goes back, and nothing of it runs any more.
fn restart_one(
    spec: &RestartSpec,
    place: &Place<'_>,
    images: &[(PathBuf, Manifest)],
    keeper: &Keeper,
) -> Result<Option<Ended>, RunError> {
    let dir = place.dir;
    let log = open_log(dir)?;
    let postscript = Postscript::begin(dir.log());
    if let Some(why) = spec.joining.as_ref().and_then(|joining| joining.why.as_ref()) {
        warn!(log, "{why}");
    }
    // Of a job that goes back it is there.
    if let (Some((_, manifest)), None) = (images.first(), &spec.back) {
        dir.write_meta(&meta_of(spec, place, manifest))?;
    }
    let signals = Signals::block();
    signals::become_subreaper();
    let came_back = first_that_works(spec, place, images, &log)?;
    let CameBack { restarted, manifest, held, stand_in: _stand_in } = came_back;
    if let Some(held) = held {
        keeper.adopt(held);
    }
    if manifest.devices.is_some()
        && let Err(error) = keeper.serve()
    {
        warn!(log, "{}: {error}: nothing is held in memory", dir.keeper().display());
    }
    let policy = spec.policy.or(Policy::of_image(manifest));
    let pid = restarted.root();
    let meta = Meta { pid, marks: Some(Marks::here(pid)), ..meta_of(spec, place, manifest) };
    // It runs: a disk that has become full does not change that.
    if let Err(error) = dir.write_meta(&meta) {
        warn!(log, "{error}");
    }
    let restarted = Arc::new(restarted);
    let missed = Arc::new(Missed::new());
    let ranks = Ranks::of(place.joint, &policy, dir);
    let outcome = watch((policy.clone(), ranks), dir, &log, &signals, &restarted, &missed);
    if let Some(moved) = leaving::moved_from(dir.path()) {
        drop(restarted);
        see_all_end();
        leaving::keep_signals(dir.path(), &signals);
        return Ok(Some(left_for(dir, meta, moved, &log)));
    }
    let part = warden::own();
    let is_lost = dir.lost().exists() || outcome.is_some_and(warden::is_about_to_stop);
    if let (true, Some(warden)) = (is_lost || outcome.is_none(), part) {
        warden.say("lost its program or its devices are lost");
    }
    let goes_back = || part.is_some() || spec.goes_back(dir, images, Loss::Init);
    if is_lost || outcome.is_none() && goes_back() {
        drop(restarted);
        end_all()?;
        return Ok(None);
    }
    // An init that was killed takes the job with it.
    let outcome = outcome.unwrap_or(Outcome::Killed(libc::SIGKILL));
    finish(dir, meta, outcome, &log);
    let concluded = resume::concluded(place.name, &policy, outcome, &missed, &log);
    let mut ended = postscript.of(place.name, outcome, missed.told());
    ended.outcome = concluded;
    Ok(Some(ended))
}

/// What is told of a job that does not run as yet.
fn meta_of(spec: &RestartSpec, place: &Place<'_>, manifest: &Manifest) -> Meta {
    Meta {
        name: place.name.to_string(),
        supervisor: std::process::id(),
        pid: None,
        command: manifest.command.clone(),
        gpu: spec.devices(manifest).map_or("none".into(), |devices| devices.gpu),
        started: jobs::now(),
        ended: None,
        state: State::Running,
        policy: Some(spec.policy.or(Policy::of_image(manifest))),
        joint: place.joint.map(|joint| joint.job.to_string()),
        marks: Some(Marks::here(None)),
    }
}

/// Waits for the job's end: how that was; `None` where its init was killed, and nobody knows.
fn watch(
    (policy, ranks): (Policy, Option<Ranks>),
    dir: &JobDir,
    log: &Arc<JobLog>,
    signals: &Signals,
    restarted: &Arc<Restarted>,
    missed: &Arc<Missed>,
) -> Option<Outcome> {
    let status = Arc::new(OnceLock::new());
    let (waiting, told) = (restarted.clone(), status.clone());
    let wait = move || {
        let _ = told.set(waiting.wait().ok().map(Outcome::of));
        signals::look_at_children();
    };
    if thread::Builder::new().name("wait".into()).spawn(wait).is_err() {
        error!(log, "cannot start a thread: the job's end will not be noticed");
    }
    let signalled = restarted.clone();
    if let Some(warden) = warden::own() {
        let killed = restarted.clone();
        // Its init sees it end, and ends the rest.
        if warden.on_stop(move || drop(killed.signal(libc::SIGKILL))).is_err() {
            warn!(log, "cannot start a thread: the part's warden ends it by force");
        }
    }
    let control = dir.control();
    let watch = Watch {
        control: control.clone(),
        settle: Box::new(move |deadline| control::settle(&control, deadline)),
        policy,
        log: log.clone(),
        // One that has ended takes no signal.
        signal: Arc::new(move |signal| drop(signalled.signal(signal))),
        missed: missed.clone(),
        ranks,
    };
    watch.wait(signals, || status.get().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_that_sigterm_ends_is_requeued() {
        assert_eq!(given_up_by(libc::SIGTERM, Some(85)), Outcome::Exited(85));
        assert_eq!(given_up_by(libc::SIGTERM, None), Outcome::Killed(libc::SIGTERM));
        assert_eq!(given_up_by(libc::SIGINT, Some(85)), Outcome::Killed(libc::SIGINT));
    }
}
