//! Conducting a checkpoint of all parts: whoever is asked calls them, and makes the whole count
//! when each part's image is durable.

use super::call::Call;
use crate::checkpoint::checkpointer::{Checkpointer, LAUNCHES};
use crate::checkpoint::error::{CheckpointError, ConductError};
use crate::checkpoint::meeting::{Builds, Meeting, Role, Step};
use crate::job::jobs::{self, JobName, by_number};
use crate::job::joint::{Joint, SPACE};
use crate::job::turn::Turn;
use crate::services::control::{Order, Progress};
use kedge_control::info;
use kedge_control::joblog::COORDINATOR;
use kedge_coordinator::{Client, ClientError, Notice};
use kedge_image::{Claim, Manifest, Parent, Part, Pin};
use kedge_process::{Together, Tracker};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long a part that has been started may need to join, or one that has ended to be gone.
const JOINING: Duration = Duration::from_secs(5);

impl Checkpointer {
    /// Takes a checkpoint of the job of which this is a part.
    pub(crate) fn conduct(
        &self,
        joint: &Joint,
        order: &Order,
        mut tell: impl FnMut(Progress),
    ) -> Result<(), CheckpointError> {
        // Who is about to join is to be among them.
        if !self.launches.wait_for_none(LAUNCHES) {
            return Err(CheckpointError::Launching);
        }
        if let Some(lost) = joint.lost() {
            return Err(ConductError::Lost(lost.name).into());
        }
        let mut client = joint.join(false).map_err(ConductError::from)?;
        let alone = Notice::of_job(SPACE, b"conductor").map_err(ConductError::from)?;
        match client.publish(&alone, conductor().as_bytes(), true) {
            Err(ClientError::Taken { .. }) => return Err(CheckpointError::Busy),
            other => other.map_err(ConductError::from)?,
        }
        is_left(&self.turn, &self.over)?;
        let parts = present(joint, &mut client, &self.over)?;
        let dir = self.dir(order)?;
        // Read before there is a claim, whose folder has no manifest.
        let (tracker, full) = self.content(order);
        let last = tracker.as_ref().filter(|_| !full).and_then(Tracker::base);
        let base = last.and_then(|part| Base::of(&part, &dir, self.policy.longest_chain()));
        let claim = Claim::new(&dir, &joint.job.to_string())?;
        let count = u32::try_from(parts.len()).unwrap_or(u32::MAX);
        let call = Call {
            id: conductor(),
            folder: claim.folder().to_owned(),
            parts: count,
            order: order.clone(),
            // Whoever conducts says so by what it has made itself.
            builds: match (&tracker, &base) {
                (None, _) => Builds::Never,
                (Some(_), None) => Builds::Next,
                (Some(_), Some(base)) => Builds::On(base.folder.clone()),
            },
        };
        let meeting = Meeting::new(joint, client, &call.id, count, Role::Conductor);
        let taken = self.lead(&meeting, &call, &parts, base.as_ref(), &mut tell);
        if let Err(error) = &taken {
            meeting.fail(&error.to_string());
            // A full disk may keep even this from being done; then `kedge rm` does it.
            let _ = claim.abandon();
        }
        // The base may go as any other; nobody else conducts, and builds on what goes, until this
        // one has left.
        drop(base);
        if taken.is_ok() {
            self.retain(&dir, &joint.job.to_string());
        }
        // What it has published goes with it.
        drop(meeting.leave());
        taken
    }

    fn lead(
        &self,
        meeting: &Meeting,
        call: &Call,
        parts: &[String],
        base: Option<&Base>,
        tell: &mut impl FnMut(Progress),
    ) -> Result<(), CheckpointError> {
        let begin = Instant::now();
        let text = serde_json::to_vec(call).map_err(|e| ConductError::Failed(e.to_string()))?;
        let place = Call::place().map_err(ConductError::from)?;
        meeting.client().publish(&place, &text, false).map_err(ConductError::from)?;
        let failed = ConductError::Failed;
        meeting.arrive(Step::Ready).map_err(failed)?;
        meeting.prepared().map_err(failed)?;
        let still = Instant::now();
        meeting.stopped().map_err(failed)?;
        let at = jobs::now();
        // It has no connections of its own.
        meeting.arrive(Step::Told).map_err(failed)?;
        meeting.arrive(Step::Arrived).map_err(failed)?;
        meeting.captured(0).map_err(failed)?;
        let stall_seconds = still.elapsed().as_secs_f64();
        let (image, processes) = (call.folder.clone(), meeting.processes(parts));
        tell(Progress::Captured { image, processes, stall_seconds, warnings: Vec::new() });
        meeting.arrive(Step::Durable).map_err(failed)?;
        let manifest = self.commit(meeting, &call.folder, at, parts, base)?;
        // It counts: a part that does not hear of it has only missed the news.
        let _ = meeting.arrive(Step::Committed);
        let (image, bytes) = (call.folder.clone(), manifest.bytes());
        let seconds = begin.elapsed().as_secs_f64();
        info!(
            target: COORDINATOR,
            self.log,
            "checkpoint {}: {} parts, {} processes, {bytes} bytes, durable after {seconds:.2} s",
            image.display(),
            parts.len(),
            manifest.process_count()
        );
        let verified = call.order.verify.then(|| "each part".to_owned());
        tell(Progress::Durable { image, bytes, seconds, verified });
        Ok(())
    }

    /// Makes the images of the parts one.
    fn commit(
        &self,
        meeting: &Meeting,
        folder: &Path,
        at: u64,
        parts: &[String],
        base: Option<&Base>,
    ) -> Result<Manifest, CheckpointError> {
        let mut now = meeting.client().members().map_err(ConductError::from)?;
        now.sort_by_cached_key(|part| by_number(part));
        if now != parts {
            return Err(ConductError::Changed.into());
        }
        let Some(joint) = self.joint.get() else { return Err(ConductError::Changed.into()) };
        let mut manifest = Manifest::new(joint.job.to_string(), self.command.clone(), at);
        for part in parts {
            let name = format!("{part}-0001");
            let found = Manifest::read(&folder.join(&name))?;
            manifest.parts.push(Part::of(&name, &found));
            if found.parent.is_some() {
                manifest.parent = base.map(|base| base.parent.clone());
            }
        }
        manifest.settings = self.policy.to_settings();
        manifest.write(folder)?;
        Ok(manifest)
    }
}

/// Whether anything is left to be saved, now that nobody else conducts: this part may just be
/// ending with the image of the one before, who has left, and says so before its turn is over.
fn is_left(turn: &Turn, over: &AtomicBool) -> Result<(), CheckpointError> {
    drop(turn.take().ok_or(CheckpointError::Busy)?);
    if over.load(Ordering::SeqCst) { Err(CheckpointError::Over) } else { Ok(()) }
}

/// An image of the whole job on which the next one builds. It stays for as long as this.
struct Base {
    folder: PathBuf,
    parent: Parent,
    _pin: Pin,
}

impl Base {
    /// That of which `part` is a part, if it lies in `dir` with all that it builds on, fewer than
    /// `most` in all: another part's images may build on more than this one's do.
    fn of(part: &Path, dir: &Path, most: u32) -> Option<Base> {
        let folder = part.parent().filter(|whole| whole.parent() == Some(dir))?.to_owned();
        let pin = Pin::new(&folder).ok()?;
        let chain = kedge_image::chain(&folder).ok().filter(|chain| chain.len() < most as usize)?;
        let (_, whole) = chain.first().filter(|(_, whole)| !whole.parts.is_empty())?;
        Some(Base { parent: whole.as_parent(&folder)?, folder, _pin: pin })
    }
}

/// The parts, once all that run on this host have joined: one that has just been started is about
/// to.
fn present(
    joint: &Joint,
    client: &mut Client,
    over: &AtomicBool,
) -> Result<Vec<String>, ConductError> {
    let begin = Instant::now();
    loop {
        let mut joined = client.members()?;
        joined.sort_by_cached_key(|part| by_number(part));
        let running = joint.jobs.running_parts(&joint.job);
        let running: Vec<String> = running.iter().map(JobName::to_string).collect();
        // Of those on other hosts nobody here knows but by their having joined.
        let all_here = running.iter().all(|part| joined.contains(part));
        let complete = all_here && (joint.place.far.is_some() || joined.len() == running.len());
        // A step of fewer ranks could not bring them back.
        let missing = joint.ranks.filter(|all| joined.len() != *all as usize);
        if complete && missing.is_none() && !joined.is_empty() {
            return Ok(joined);
        }
        if begin.elapsed() > JOINING || over.load(Ordering::SeqCst) {
            let there = joined.len();
            let ranks = |all| ConductError::Ranks { there, all };
            return Err(missing.map_or(ConductError::Changed, ranks));
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// A name that no other call has, and under which this one conducts.
fn conductor() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("checkpoint {:x} of {}", now.as_nanos(), std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever asked while the last image was made conducted another one, of ranks that had gone.
    #[test]
    fn a_job_that_ends_with_an_image_is_not_saved_again() {
        let (turn, over) = (Turn::default(), AtomicBool::new(false));
        assert!(is_left(&turn, &over).is_ok());
        let one = turn.take();
        let left = thread::scope(|scope| {
            let asking = scope.spawn(|| is_left(&turn, &over).is_ok());
            // It has asked by then; if not, this proves less.
            thread::sleep(Duration::from_millis(50));
            over.store(true, Ordering::SeqCst);
            drop(one);
            asking.join().unwrap()
        });
        assert!(!left && matches!(is_left(&turn, &over), Err(CheckpointError::Over)));
    }
}
