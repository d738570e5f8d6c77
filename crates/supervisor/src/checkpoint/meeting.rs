//! Where the parts of a job meet during a checkpoint. All steps are of one series of barriers, so
//! what fails in one part fails, by name, in all of them.

use crate::job::joint::{Joint, SPACE};
use kedge_coordinator::{Client, ClientError, Notice, Series, Who};
use kedge_image::Fate;
use kedge_process::Together;
use kedge_process::plugins::{Rendezvous, Stage};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the parts may need to come to rest, with what hinders one of them.
const STILL: Duration = Duration::from_secs(15);
/// How long others may need before one looks whether they are there.
const SOON: Duration = Duration::from_millis(200);
/// How long one looks away while another writes its image.
const LOOK: Duration = Duration::from_secs(2);
/// How long whoever conducts may need to commit, or to give up, after the meeting was broken.
const COMMITTING: Duration = Duration::from_secs(60);
/// A step that all passed with the first: whoever asks there hears whether the meeting is broken.
const NOW: u64 = 0;

/// What all wait for, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Everybody has heard of it.
    Ready = 1,
    /// What can be written while the processes run is written.
    Prepared = 2,
    /// Every process stands still.
    Stopped = 3,
    /// Every part has told of its connections.
    Told = 4,
    /// What was on its way between parts has arrived.
    Arrived = 5,
    /// Every process is captured.
    Captured = 6,
    /// Every part's image is durable.
    Durable = 7,
    /// The whole counts.
    Committed = 8,
}

/// What the images of the parts build on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Builds {
    /// On none, and none is to build on them.
    #[default]
    Never,
    /// On none: the next ones may build on them.
    Next,
    /// On those of the same parts in this image of the whole job; a part that has made another one
    /// since stores all.
    On(PathBuf),
}

/// One checkpoint, as one of those sees it that take part.
#[derive(Debug)]
pub(crate) struct Meeting {
    client: Mutex<Client>,
    series: Series,
    /// No other meeting has it.
    id: String,
    /// What this part has told the others of its connections.
    told: Mutex<Vec<Notice>>,
    /// The step at which this part waits while its processes stand still, and since when.
    waits: Mutex<Option<(Step, Instant)>>,
    /// Who take part: the parts, and who conducts.
    members: u32,
    /// This part's name, and what its image builds on; `None`: the one that conducts.
    part: Option<(String, Builds)>,
    joint: Joint,
    /// Whether all parts have prepared.
    prepared: AtomicBool,
    /// Whether anything has been stopped for it.
    begun: AtomicBool,
    /// Whether it ended without this one's knowing how.
    open: AtomicBool,
}

/// As what one takes part.
#[derive(Debug)]
pub(crate) enum Role {
    Conductor,
    Part(Builds),
}

impl Meeting {
    /// Of a job of so many parts.
    pub(crate) fn new(joint: &Joint, client: Client, id: &str, parts: u32, role: Role) -> Meeting {
        Meeting {
            client: Mutex::new(client),
            // Parts of another version, which met at other steps, meet nobody here.
            series: Series::of_job(&format!("{id}, in eight steps")),
            id: id.to_owned(),
            told: Mutex::default(),
            waits: Mutex::default(),
            members: parts.saturating_add(1),
            part: match role {
                Role::Conductor => None,
                Role::Part(builds) => Some((joint.part.to_string(), builds)),
            },
            joint: joint.clone(),
            prepared: AtomicBool::new(false),
            begun: AtomicBool::new(false),
            open: AtomicBool::new(false),
        }
    }

    pub(crate) fn client(&self) -> MutexGuard<'_, Client> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is over, for this one; the client is as before.
    pub(crate) fn leave(self) -> Client {
        let told = self.told.lock().map(|mut told| std::mem::take(&mut *told));
        for notice in told.unwrap_or_default() {
            let _ = self.client().withdraw(&notice);
        }
        // One that is lost now has nothing to break.
        let _ = self.client().end(&self.series);
        self.client.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this part's image builds on.
    pub(crate) fn builds(&self) -> Builds {
        self.part.as_ref().map(|(_, builds)| builds.clone()).unwrap_or_default()
    }

    /// Whether the parts have begun to stand still: what fails now has failed for good.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::SeqCst)
    }

    /// That this part waits at `step` once more: an error once it has done so for too long. Whoever
    /// was lost together with the coordinator never comes.
    fn waits_on(&self, step: Step) -> Result<(), String> {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        let since = match *waits {
            Some((at, since)) if at == step => since,
            _ => waits.insert((step, Instant::now())).1,
        };
        drop(waits);
        // Asked late: it reads the folders of all parts.
        let lost = if since.elapsed() > SOON { self.joint.lost() } else { None };
        let why = match lost {
            Some(meta) => format!("the supervisor of {} was killed", meta.name),
            None if since.elapsed() < STILL => return Ok(()),
            None => format!("not all parts of the job came to {step:?} in time"),
        };
        self.fail(&why);
        Err(why)
    }

    fn notice(&self, name: &str) -> Result<Notice, String> {
        let key = format!("{} {name}", self.id);
        Notice::of_job(SPACE, key.as_bytes()).map_err(|error| error.to_string())
    }

    /// Nobody goes on with it.
    pub(crate) fn fail(&self, why: &str) {
        let _ = self.client().break_series(&self.series, why);
    }

    /// Waits for everybody at `step`.
    pub(crate) fn arrive(&self, step: Step) -> Result<(), String> {
        let patient = matches!(step, Step::Prepared | Step::Durable | Step::Committed);
        loop {
            let wait = if patient { LOOK } else { STILL };
            let who = Who::Count { members: self.members };
            let arrived = self.client().arrive(&self.series, step as u64, who, wait);
            match arrived {
                Ok(()) => return Ok(()),
                // Whoever was lost together with the coordinator is known by its folder.
                Err(ClientError::Late) if patient => match self.joint.lost() {
                    None => {}
                    Some(meta) => {
                        let why = format!("the supervisor of {} was killed", meta.name);
                        self.fail(&why);
                        return Err(why);
                    }
                },
                Err(ClientError::Late) => {
                    let why = format!("not all parts of the job came to {step:?} in time");
                    self.fail(&why);
                    return Err(why);
                }
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    /// The image of this part, at `image`, is durable: returns when the whole counts. From here on
    /// that is for whoever conducts to say, and no part may take away what the whole names: one
    /// that is lost breaks the meeting, but not what has been committed.
    pub(crate) fn durable(&self, image: &Path) -> Result<(), String> {
        let met = self.arrive(Step::Durable).and_then(|()| self.arrive(Step::Committed));
        let Err(why) = met else { return Ok(()) };
        match image.parent().map_or(Fate::Open, |whole| kedge_image::fate(whole, COMMITTING)) {
            Fate::Counts => Ok(()),
            Fate::Void => Err(why),
            Fate::Open => {
                self.open.store(true, Ordering::SeqCst);
                Err(why)
            }
        }
    }

    /// Whether the image of this part may belong to one that counts, although this part has not
    /// heard so.
    pub(crate) fn may_count(&self) -> bool {
        self.open.load(Ordering::SeqCst)
    }

    /// How many processes each part has captured.
    pub(crate) fn processes(&self, parts: &[String]) -> usize {
        let count = |part: &String| {
            let at = processes_of(part).ok()?;
            let found = self.client().look(&at, 0, Duration::ZERO).ok()??;
            String::from_utf8(found.value).ok()?.parse::<usize>().ok()
        };
        parts.iter().filter_map(count).fold(0, usize::saturating_add)
    }
}

fn processes_of(part: &str) -> Result<Notice, ClientError> {
    Notice::of_job(SPACE, format!("processes of {part}").as_bytes())
}

impl Together for Meeting {
    fn prepared(&self) -> Result<(), String> {
        // A part that tries again has been met there.
        if !self.prepared.swap(true, Ordering::SeqCst) {
            self.arrive(Step::Prepared)?;
        }
        Ok(())
    }

    fn stopped(&self) -> Result<(), String> {
        self.begun.store(true, Ordering::SeqCst);
        self.arrive(Step::Stopped)
    }

    fn captured(&self, processes: usize) -> Result<(), String> {
        let told = self.part.as_ref().map(|(part, _)| {
            let count = processes.to_string();
            self.client().publish(&processes_of(part)?, count.as_bytes(), false)
        });
        told.transpose().map_err(|error| error.to_string())?;
        self.arrive(Step::Captured)
    }

    fn others(&self) -> Option<&dyn Rendezvous> {
        Some(self)
    }
}

impl Rendezvous for Meeting {
    fn name(&self) -> String {
        self.part.as_ref().map(|(part, _)| part.clone()).unwrap_or_default()
    }

    fn parts(&self) -> Result<Vec<String>, String> {
        self.client().members().map_err(|error| error.to_string())
    }

    fn publish(&self, name: &str, value: &[u8]) -> Result<bool, String> {
        let notice = self.notice(name)?;
        match self.client().publish(&notice, value, true) {
            Ok(()) => {}
            Err(ClientError::Taken { .. }) => return Ok(false),
            Err(error) => return Err(error.to_string()),
        }
        self.told.lock().unwrap_or_else(PoisonError::into_inner).push(notice);
        Ok(true)
    }

    fn look(&self, name: &str) -> Result<Option<Vec<u8>>, String> {
        let found = self.client().look(&self.notice(name)?, 0, Duration::ZERO);
        found.map(|found| found.map(|found| found.value)).map_err(|error| error.to_string())
    }

    fn meet(&self, stage: Stage, wait: Duration) -> Result<bool, String> {
        let step = match stage {
            Stage::Told => Step::Told,
            Stage::Arrived => Step::Arrived,
            Stage::Offered | Stage::Bound => return Err(format!("no checkpoint has {stage:?}")),
        };
        let who = Who::Count { members: self.members };
        let arrived = self.client().arrive(&self.series, step as u64, who, wait);
        match arrived {
            Ok(()) => Ok(true),
            Err(ClientError::Late) => self.waits_on(step).map(|()| false),
            Err(error) => Err(error.to_string()),
        }
    }

    fn still(&self) -> Result<(), String> {
        let everybody = Who::Count { members: u32::MAX };
        match self.client().arrive(&self.series, NOW, everybody, Duration::ZERO) {
            Ok(()) | Err(ClientError::Late) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn fail(&self, why: &str) {
        Meeting::fail(self, why);
    }
}
