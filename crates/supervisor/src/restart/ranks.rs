//! The ranks of a step as the parts of one job (docs/design/0048-slurm.md): each part has its
//! rank's number, and they meet where the first one says by a key of the step.

use crate::checkpoint::joint::meeting_place;
use crate::job::jobs::{JobDir, JobError, JobName, Jobs};
use crate::job::joint::{Joint, MAX_PARTS, clear, lock, part_name};
use crate::job::rank::{Meeting, Open, RankError, STARTS, hear, met, tell};
use crate::job::spec::{JobSpec, RunError};
use kedge_coordinator::{Far, FarError, JobKey};
use kedge_pmi::Rank;
use std::path::Path;

/// The host that has started the step: the way to it is one that the step's nodes have.
const LAUNCHER: &str = "SLURM_LAUNCH_NODE_IPADDR";
/// A port that was free a moment ago may be another's: so often another one is tried.
const TRIES: u32 = 4;

/// Makes the rank the part of its number of the joint job that the first rank names.
///
/// # Errors
/// The options are not for ranks, not all ranks come, or one of them fails.
pub(crate) fn enter_step(
    spec: &JobSpec,
    jobs: &Jobs,
    open: &mut Open,
) -> Result<(Joint, JobDir), RunError> {
    if let Err(error) = fits(spec, open) {
        return Err(failed(open, error));
    }
    if open.rank.rank > 0 {
        let (job, far, does) = heard(open)?;
        let agreed = named(spec.name.as_ref(), &job).and_then(|()| does_the_same(STARTS, &does));
        if let Err(error) = agreed {
            return Err(failed(open, error.into()));
        }
        met(open)?;
        return Ok(enter_as(jobs, &job, &open.rank, far)?);
    }
    let job = spec.name.clone().unwrap_or_else(|| JobName::generated(Path::new(&spec.program)));
    let (joint, dir, meeting) = match first(jobs, &job, &open.rank) {
        Ok(first) => first,
        Err(error) => return Err(failed(open, error)),
    };
    // All know the job, and then that it is all ranks' own.
    if let Err(error) = tell(open, Ok(&meeting)).and_then(|()| met(open)) {
        dir.retire();
        return Err(error.into());
    }
    Ok((joint, dir))
}

/// Tells the other ranks, too, before they wait in vain.
pub(crate) fn failed(open: &mut Open, error: RunError) -> RunError {
    // Whoever does not come is told of by the others.
    let _ = tell(open, Err(&error.to_string()));
    error
}

/// Where the first rank says that all meet, the job's name, and what all do.
pub(crate) fn heard(open: &mut Open) -> Result<(JobName, Far, String), RunError> {
    let Meeting { job, at, key, does } = hear(open)?;
    let job: JobName = job.parse()?;
    let bad = |error: FarError| JobError::Join { job: job.clone(), why: error.to_string() };
    let key = JobKey::new(key.as_bytes()).map_err(bad)?;
    let far = Far::new(&at, key).map_err(bad)?;
    Ok((job, far, does))
}

/// A place where the parts of the job `job` can meet, drawn by the first rank, and what the others
/// are told of it: all of them do `does`.
pub(crate) fn draw(job: &JobName, does: &str) -> Result<(Far, Meeting), JobError> {
    let toward = std::env::var(LAUNCHER).ok();
    let bad = |why: String| JobError::Join { job: job.clone(), why };
    let far = meeting_place(toward.as_deref()).map_err(|error| bad(error.to_string()))?;
    let key = String::from_utf8(far.key().text().to_vec());
    let key = key.map_err(|_| bad("its key is no text".to_owned()))?;
    let (at, does) = (far.address().to_string(), does.to_owned());
    let meeting = Meeting { job: job.to_string(), at, key, does };
    Ok((far, meeting))
}

fn fits(spec: &JobSpec, open: &Open) -> Result<(), RunError> {
    let refused = spec.policy.needs_one_part().into_iter();
    let moves = ("--move-to", spec.move_to.is_some());
    if let Some((option, _)) = refused.chain([moves]).find(|(_, given)| *given) {
        return Err(RankError::Option(option).into());
    }
    if open.rank.size > MAX_PARTS {
        return Err(RankError::Many { ranks: open.rank.size, most: MAX_PARTS }.into());
    }
    Ok(())
}

/// Whether a rank that names its job `own`, if it does, can be a part of the first one's `job`.
fn named(own: Option<&JobName>, job: &JobName) -> Result<(), RankError> {
    match own {
        Some(own) if own != job => {
            Err(RankError::Named { own: own.to_string(), first: job.to_string() })
        }
        _ => Ok(()),
    }
}

/// Whether a rank does what the first one does: each looks for images by itself.
pub(crate) fn does_the_same(own: &str, first: &str) -> Result<(), RankError> {
    match own == first {
        true => Ok(()),
        false => Err(RankError::Apart { own: own.to_owned(), first: first.to_owned() }),
    }
}

fn first(jobs: &Jobs, job: &JobName, rank: &Rank) -> Result<(Joint, JobDir, Meeting), RunError> {
    let mut tries = 0;
    loop {
        tries += 1;
        let (far, meeting) = draw(job, STARTS)?;
        match enter_as(jobs, job, rank, far) {
            Ok((joint, dir)) => return Ok((joint, dir, meeting)),
            Err(JobError::Join { .. }) if tries < TRIES => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Takes the part of that rank's number of the job `job` for this process.
fn enter_as(
    jobs: &Jobs,
    job: &JobName,
    rank: &Rank,
    far: Far,
) -> Result<(Joint, JobDir), JobError> {
    let folder = jobs.joint_dir(job)?;
    let _one = lock(&folder.join("parts.lock"))?;
    clear(jobs, &jobs.parts(job)?);
    let part = part_name(job, rank.rank)?;
    let ranks = Some(rank.size);
    let joint = Joint::of(jobs, job, part.clone(), Some(far))?.with_ranks(ranks);
    if !joint.claim()? {
        return Err(JobError::InUse { name: part });
    }
    let dir = jobs.create(&part)?;
    Ok((joint, dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_one_step_do_the_same() {
        assert!(does_the_same(STARTS, STARTS).is_ok());
        let refused = does_the_same(STARTS, "restarts sim-0007 of").unwrap_err().to_string();
        assert!(refused.contains("restarts sim-0007 of the job, and this one starts it"));
    }

    #[test]
    fn ranks_of_one_step_are_one_job() {
        let [sim, other] = ["sim", "sim-1"].map(|name| name.parse::<JobName>().unwrap());
        assert!(named(None, &sim).is_ok() && named(Some(&sim), &sim).is_ok());
        let refused = named(Some(&other), &sim).unwrap_err().to_string();
        for said in ["job is sim,", "sim-1 (--job)", "env -u PMI_FD kedge run"] {
            assert!(refused.contains(said), "{refused}");
        }
    }
}
