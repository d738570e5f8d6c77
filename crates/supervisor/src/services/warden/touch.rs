//! A warden's touch with the coordinator: a thread that tells of its part, and hears of the others,
//! once in a while. Whatever else the warden does, this goes on.

use super::plan::{FENCE, Plan, Seen, Stage, Told, View};
use super::since_boot;
use crate::job::joint::{Joint, SPACE, part_name};
use kedge_coordinator::{Client, ClientError, Leader, Member, Notice};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// From one word to the next, while all is well, and once it is not.
const BEAT: Duration = Duration::from_secs(1);
const SOON: Duration = Duration::from_millis(100);
/// How often between the two it is seen whether there is something new.
const LOOKS: u32 = 10;
/// Who has not listened for so long may have missed what was said: silence is counted anew.
pub(super) const GAP: Duration = Duration::from_secs(4);

/// What the warden and its thread tell each other.
#[derive(Debug)]
pub(super) struct Known {
    /// What is published.
    pub(super) own: Told,
    /// The others, and this one as it was published last.
    pub(super) view: View,
    /// When the coordinator was last asked something that it has answered.
    pub(super) reached: Duration,
    /// What this one would have all do.
    pub(super) proposal: Option<Plan>,
    /// What all do.
    pub(super) plan: Option<Plan>,
    /// This part has another warden by now.
    pub(super) replaced: bool,
    /// Why the coordinator could not be asked last.
    pub(super) error: String,
    /// The part is a new one: it may join a job that has gone back already.
    pub(super) is_new: bool,
}

impl Known {
    /// There is a part of that number.
    pub(super) fn learn(&mut self, number: u32) {
        let none = || Seen { told: None, heard: since_boot(), joined: false };
        self.view.parts.entry(number).or_insert_with(none);
    }

    /// Counts as the others do, before anything of this part has been told.
    fn join_late(&mut self) {
        let told = self.view.parts.values().filter_map(|seen| seen.told.as_ref());
        let times = told.map(|told| told.times).max().unwrap_or_default();
        if self.is_new && times > self.own.times {
            (self.own.times, self.view.times) = (times, times);
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Touch(Arc<Mutex<Known>>);

impl Touch {
    pub(super) fn new(known: Known) -> Touch {
        Touch(Arc::new(Mutex::new(known)))
    }

    pub(super) fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Goes on for as long as the process.
    pub(super) fn keep(&self, joint: Joint) -> std::io::Result<()> {
        let touch = self.clone();
        let beats = move || {
            loop {
                // Whatever is wrong: the fence sees to it, and the next time it may go.
                if let Err(error) = touch.listen(&joint) {
                    touch.known().error = error.to_string();
                }
                thread::sleep(SOON);
            }
        };
        thread::Builder::new().name("touch".into()).spawn(beats).map(drop)
    }

    fn listen(&self, joint: &Joint) -> Result<(), ClientError> {
        let found = Arc::new(AtomicU32::new(0));
        let (mut client, name) = join(joint, self.known().own.life, found.clone())?;
        if self.known().own.beat == 0 {
            self.hear(&mut client, joint)?;
            self.known().join_late();
        }
        let (mut last, mut before) = (since_boot(), u32::MAX);
        let (mut said, mut heard) = (None, 0);
        loop {
            let begin = since_boot();
            self.tell(&mut client, joint, (&name, begin), &mut said)?;
            self.hear(&mut client, joint)?;
            let now = found.load(Ordering::SeqCst);
            let mut known = self.known();
            known.view.now = since_boot();
            // Another coordinator may not have been told everything as yet.
            let gap = now != before || known.view.now.saturating_sub(last) > GAP;
            if gap {
                let now = known.view.now;
                known.view.parts.values_mut().for_each(|seen| seen.heard = now);
                known.view.since = now;
                known.proposal = None;
            }
            (before, last) = (now, known.view.now);
            let (times, proposal) = (known.own.times, known.proposal.take());
            let is_quiet = [Stage::Runs, Stage::Ended].contains(&known.own.stage);
            let pause = if is_quiet { beat(known.view.parts.len()) } else { SOON };
            drop(known);
            if let Some(plan) = proposal {
                let text = serde_json::to_vec(&plan).unwrap_or_default();
                match client.publish(&way_back(times)?, &text, true) {
                    Ok(()) | Err(ClientError::Taken { .. }) => {}
                    Err(ClientError::TooLong(error)) => give_up(&mut client, times, &error)?,
                    Err(error) => return Err(error),
                }
            }
            // Whatever is new is told at once, and heard.
            for _ in 0..LOOKS {
                if let Some(found) = client.look(&news(times)?, heard, pause / LOOKS)? {
                    heard = found.revision;
                    let number = found.value.try_into().map(u32::from_le_bytes);
                    number.into_iter().for_each(|number| self.known().learn(number));
                    break;
                }
                let stage = self.known().own.stage.clone();
                if said.as_ref().is_none_or(|(_, said)| *said != stage) {
                    break;
                }
            }
        }
    }

    /// Publishes what is known of this part.
    fn tell(
        &self,
        client: &mut Client,
        joint: &Joint,
        (name, begin): (&str, Duration),
        said: &mut Option<(u32, Stage)>,
    ) -> Result<(), ClientError> {
        let own = self.known().view.own;
        let place = notice(joint, own)?;
        if let Some(found) = client.look(&place, 0, Duration::ZERO)?
            && found.by != name
            && let Ok(other) = serde_json::from_slice::<Told>(&found.value)
        {
            let mut known = self.known();
            if (other.times, other.life) > (known.own.times, known.own.life) {
                known.replaced = true;
                return Ok(());
            }
        }
        let told = {
            let mut known = self.known();
            known.own.beat += 1;
            known.own.clone()
        };
        let text = serde_json::to_vec(&told).unwrap_or_default();
        client.publish(&place, &text, false)?;
        let stage = (told.times, told.stage.clone());
        if *said != Some(stage.clone()) {
            // At once, and also for those who have not heard of this part as yet.
            client.publish(&news(told.times)?, &own.to_le_bytes(), false)?;
            *said = Some(stage);
        }
        let mut known = self.known();
        known.reached = known.reached.max(begin);
        known.view.times = told.times;
        let seen = Seen { told: Some(told), heard: since_boot(), joined: true };
        known.view.parts.insert(own, seen);
        Ok(())
    }

    /// Hears what the others have published.
    fn hear(&self, client: &mut Client, joint: &Joint) -> Result<(), ClientError> {
        let members = client.members()?;
        let number = |name: &String| name.rsplit_once('.')?.1.parse::<u32>().ok();
        let (own, times, others) = {
            let mut known = self.known();
            let heard = since_boot();
            let none = || Seen { told: None, heard, joined: false };
            for number in members.iter().filter_map(number) {
                known.view.parts.entry(number).or_insert_with(none).joined = true;
            }
            let others: Vec<u32> = known.view.parts.keys().copied().collect();
            (known.view.own, known.own.times, others)
        };
        for number in others.into_iter().filter(|number| *number != own) {
            let found = client.look(&notice(joint, number)?, 0, Duration::ZERO)?;
            let told = found.and_then(|found| serde_json::from_slice::<Told>(&found.value).ok());
            let mut known = self.known();
            if let (Some(told), Some(seen)) = (told, known.view.parts.get_mut(&number)) {
                seen.hear(told, times, since_boot());
            }
        }
        if let Some(found) = client.look(&way_back(times)?, 0, Duration::ZERO)?
            && let Ok(plan) = serde_json::from_slice::<Plan>(&found.value)
        {
            let mut known = self.known();
            if known.own.times == times {
                known.plan = Some(plan);
            }
        }
        Ok(())
    }
}

/// From one word to the next of a job of so many parts: each hears each.
fn beat(parts: usize) -> Duration {
    let more = Duration::from_millis(10) * u32::try_from(parts).unwrap_or(u32::MAX);
    BEAT + more.min(BEAT)
}

/// Publishes that the job does not come back: the plan cannot be told.
fn give_up(client: &mut Client, times: u32, error: &dyn Display) -> Result<(), ClientError> {
    let plan = Plan::GivenUp { why: format!("the plan cannot be told: {error}") };
    let text = serde_json::to_vec(&plan).unwrap_or_default();
    match client.publish(&way_back(times)?, &text, true) {
        Ok(()) | Err(ClientError::Taken { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

fn notice(joint: &Joint, number: u32) -> Result<Notice, ClientError> {
    let part = part_name(&joint.job, number).map(|part| part.to_string()).unwrap_or_default();
    Notice::of_job(SPACE, format!("warden of {part}").as_bytes())
}

/// Where a part says that it has something new to tell, in a job that has gone back so often.
fn news(times: u32) -> Result<Notice, ClientError> {
    Notice::of_job(SPACE, format!("news {times}").as_bytes())
}

/// Where the plan is published of a job that has gone back so often.
fn way_back(times: u32) -> Result<Notice, ClientError> {
    Notice::of_job(SPACE, format!("way back {times}").as_bytes())
}

/// Joins as a warden, which no other is; coordinates where nobody does. `found` counts how often
/// the coordinator had to be found.
fn join(joint: &Joint, life: u64, found: Arc<AtomicU32>) -> Result<(Client, String), ClientError> {
    let (place, job) = (joint.place.clone(), joint.job.to_string());
    let find = Box::new(move || {
        let (stream, leader) = place.reach(&job)?;
        if let Leader::This(server) = leader {
            server.forever();
        }
        found.fetch_add(1, Ordering::SeqCst);
        Ok(stream)
    });
    let name = format!("warden of {} ({life:x})", joint.part);
    let (job, node) = (joint.job.to_string(), joint.node());
    let member = Member { job, name: name.clone(), node, part: false };
    Ok((Client::join(&member, find)?, name))
}

/// Those of the numbers, of which nothing has been heard.
pub(super) fn unheard(numbers: impl Iterator<Item = u32>) -> BTreeMap<u32, Seen> {
    let none = || Seen { told: None, heard: since_boot(), joined: false };
    numbers.map(|number| (number, none())).collect()
}

/// When the coordinator was reached last, as it counts for parts of one host, which stand still
/// together (a suspended laptop): who has not looked for long then has a moment to reach it again.
pub(super) fn after_standstill(reached: Duration, looked: Duration, now: Duration) -> Duration {
    match now.saturating_sub(looked) > GAP {
        true => reached.max(now.saturating_sub(FENCE - GAP)),
        false => reached,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_stood_still_has_a_moment_to_reach_the_coordinator() {
        let seconds = Duration::from_secs;
        // It was reached all the time, and is not from now on.
        let now = seconds(120);
        assert_eq!(after_standstill(seconds(100), seconds(100), now), now - (FENCE - GAP));
        let cut_off = after_standstill(seconds(100), now - SOON, now);
        assert!(now - cut_off > FENCE, "who has looked is cut off all the same");
        assert_eq!(after_standstill(now, seconds(100), now), now);
    }
}
