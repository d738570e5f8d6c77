//! The plugin by which the parts of a job wait for each other before any goes on.

use crate::job::joint::{Joint, MAX_PARTS, SPACE, part_name};
use crate::restart::joining::Joining;
use kedge_coordinator::{Client, ClientError, Member, Notice, Series, Who};
use kedge_process::plugins::{Claim, Found, Job, Plugin, PluginError, Rendezvous, Stage};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Longer than any part takes to read its memory; one that fails is told of at once.
const REBUILD_TIMEOUT: Duration = Duration::from_secs(3600);
/// Every part has said where its connections can be reached.
const OFFERED: u64 = 1;
/// Every part's connections are there.
const BOUND: u64 = 2;
/// Every part is there: the last step.
const REBUILT: u64 = 3;
/// Whoever has been at this one takes part: for as long as it lives, a series that was broken stays
/// so, also for parts that come later.
pub(crate) const PRESENT: u64 = 0;

/// The plugin of a part that is restarted: it has the part wait for the others before its processes
/// run.
#[derive(Debug)]
pub(crate) struct Join {
    joint: Joint,
    joining: Joining,
    /// The connection to the coordinator, which it has in its init alone.
    client: Mutex<Option<Client>>,
}

impl Join {
    pub(crate) fn new(joint: Joint, joining: Joining) -> Join {
        Join { joint, joining, client: Mutex::default() }
    }

    /// Does `what` with the connection to the coordinator, in the series in which the parts meet.
    fn with<T>(
        &self,
        what: impl FnOnce(&mut Client, Series, Who) -> Result<T, ClientError>,
    ) -> Result<T, String> {
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        let series = Series::of_job(&self.joining.series);
        let who = Who::Count { members: self.joining.parts };
        let done = self.joined(&mut client).and_then(|client| what(client, series, who));
        done.map_err(|error| format!("{}: {error}", self.joint.job))
    }

    /// Returns the connection, which is made at its first use.
    fn joined<'a>(&self, client: &'a mut Option<Client>) -> Result<&'a mut Client, ClientError> {
        match client {
            Some(client) => Ok(client),
            none => {
                let place = self.joint.place.clone();
                let find = Box::new(move || place.connect());
                let own = member(&self.joint, self.joint.part.to_string());
                Ok(none.insert(Client::join(&own, find)?))
            }
        }
    }

    fn notice(series: &Series, name: &str) -> Result<Notice, ClientError> {
        Notice::of_job(SPACE, format!("{} {name}", &*series.name).as_bytes())
    }
}

impl Rendezvous for Join {
    fn name(&self) -> String {
        self.joint.part.to_string()
    }

    fn parts(&self) -> Result<Vec<String>, String> {
        let numbers = 0..self.joining.parts.min(MAX_PARTS);
        let names = numbers.map(|number| part_name(&self.joint.job, number));
        let names = names.map(|name| name.map(|name| name.to_string()));
        names.collect::<Result<_, _>>().map_err(|error| error.to_string())
    }

    fn publish(&self, name: &str, value: &[u8]) -> Result<bool, String> {
        self.with(|client, series, _| {
            match client.publish(&Join::notice(&series, name)?, value, true) {
                Ok(()) => Ok(true),
                Err(ClientError::Taken { .. }) => Ok(false),
                Err(error) => Err(error),
            }
        })
    }

    fn look(&self, name: &str) -> Result<Option<Vec<u8>>, String> {
        let look = |client: &mut Client, series: Series, _| {
            client.look(&Join::notice(&series, name)?, 0, Duration::ZERO)
        };
        Ok(self.with(look)?.map(|found| found.value))
    }

    fn meet(&self, stage: Stage, wait: Duration) -> Result<bool, String> {
        let step = match stage {
            Stage::Offered => OFFERED,
            Stage::Bound => BOUND,
            Stage::Told | Stage::Arrived => return Err(format!("no restart has {stage:?}")),
        };
        self.with(|client, series, who| match client.arrive(&series, step, who, wait) {
            Ok(()) => Ok(true),
            Err(ClientError::Late) => Ok(false),
            Err(error) => Err(error),
        })
    }

    fn still(&self) -> Result<(), String> {
        let everybody = Who::Count { members: u32::MAX };
        let ask = |client: &mut Client, series: Series, _| {
            client.arrive(&series, PRESENT, everybody, Duration::ZERO)
        };
        let joined = |error: &ClientError| matches!(error, ClientError::Late);
        self.with(|client, series, who| match ask(client, series, who) {
            Err(error) if joined(&error) => Ok(()),
            other => other,
        })
    }

    fn fail(&self, why: &str) {
        // Whoever cannot be told is told by whoever has started this part.
        let _ = self.with(|client, series, _| client.break_series(&series, why));
    }
}

impl Plugin for Join {
    fn name(&self) -> &'static str {
        "joint"
    }

    fn claim(&self, _file: &Found, _job: &Job) -> Claim {
        Claim::No
    }

    fn agreed(&self) -> Result<(), PluginError> {
        let met =
            self.with(|client, series, who| client.arrive(&series, REBUILT, who, REBUILD_TIMEOUT));
        // From here on it is a part as any other, with a connection of its own.
        *self.client.lock().unwrap_or_else(PoisonError::into_inner) = None;
        met.map_err(PluginError::Refused)
    }
}

pub(crate) fn member(joint: &Joint, name: String) -> Member {
    Member { job: joint.job.to_string(), name, node: joint.node(), part: false }
}
