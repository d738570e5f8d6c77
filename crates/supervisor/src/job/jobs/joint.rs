//! The parts of a joint job: jobs of their own, each with a supervisor.

use super::{ENDING, JobError, JobName, Jobs, Meta, State};
use std::thread;
use std::time::{Duration, Instant};

/// Returns what names of parts are sorted by: NAME.2 comes before NAME.10.
pub(crate) fn by_number(name: &str) -> (u64, String) {
    let number = name.rsplit_once('.').and_then(|(_, number)| number.parse().ok());
    (number.unwrap_or(u64::MAX), name.to_owned())
}

impl Jobs {
    /// The parts of the joint job `job` that are known, by their numbers.
    pub(crate) fn parts(&self, job: &JobName) -> Result<Vec<Meta>, JobError> {
        let mut parts = self.list()?;
        parts.retain(|meta| meta.joint.as_deref() == Some(&job.0));
        parts.sort_by_cached_key(|meta| by_number(&meta.name));
        Ok(parts)
    }

    /// Those that run.
    pub fn running_parts(&self, job: &JobName) -> Vec<JobName> {
        self.parts_in(job, &[State::Running])
    }

    /// Those that run, with a supervisor or without one.
    pub(crate) fn living_parts(&self, job: &JobName) -> Vec<JobName> {
        self.parts_in(job, &[State::Running, State::Unsupervised])
    }

    fn parts_in(&self, job: &JobName, states: &[State]) -> Vec<JobName> {
        let parts = self.parts(job).unwrap_or_default().into_iter();
        let found = parts.filter(|meta| states.contains(&meta.state));
        found.filter_map(|meta| meta.name.parse().ok()).collect()
    }

    /// Removes what the ended parts of the joint job `job` have left.
    ///
    /// # Errors
    ///
    /// If a part runs, or processes of one whose supervisor was killed do; those that were killed
    /// with it may need a moment to end.
    pub(crate) fn make_room(&self, job: &JobName) -> Result<(), JobError> {
        self.make_room_where(job, |_| true)
    }

    /// The same for the parts of these numbers alone.
    pub(crate) fn make_room_of(&self, job: &JobName, numbers: &[u32]) -> Result<(), JobError> {
        let names: Vec<String> = numbers.iter().map(|number| format!("{job}.{number}")).collect();
        self.make_room_where(job, |name| names.iter().any(|one| one == name))
    }

    fn make_room_where(
        &self,
        job: &JobName,
        is_meant: impl Fn(&str) -> bool,
    ) -> Result<(), JobError> {
        let begin = Instant::now();
        let ended = loop {
            let mut parts = self.parts(job)?;
            parts.retain(|meta| is_meant(&meta.name));
            let any = |state: State| parts.iter().any(|meta| meta.state == state);
            match (any(State::Running), any(State::Unsupervised)) {
                (true, _) => return Err(JobError::InUse { name: job.clone() }),
                (_, false) => break parts,
                _ if begin.elapsed() > ENDING => {
                    return Err(JobError::LeftRunning { name: job.clone() });
                }
                _ => thread::sleep(Duration::from_millis(10)),
            }
        };
        let names = ended.iter().filter_map(|meta| meta.name.parse().ok());
        names.for_each(|name| self.remove(&name));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_sorted_by_their_numbers() {
        let mut names = ["j.10", "j.9", "j.100", "j.0", "j.2", "other"].map(str::to_owned);
        names.sort_by_cached_key(|name| by_number(name));
        assert_eq!(names, ["j.0", "j.2", "j.9", "j.10", "j.100", "other"]);
    }
}
