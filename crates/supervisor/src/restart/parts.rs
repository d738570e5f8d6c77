//! Restarting a job of several parts: each by a process of its own, and none goes on before all are
//! there.

use crate::base::again::kedge_again;
use crate::base::signals::{Signal, Signals};
use crate::base::told::tell as tell_user;
use crate::job::jobs::{JobName, Jobs};
use crate::job::joint::{Joint, KEY, SPACE, lock, part_name};
use crate::job::outcome::Outcome;
use crate::job::rank::{Open, RankError, Seat, is_of_rank, met, tell};
use crate::job::spec::RunError;
use crate::restart::join::{PRESENT, member};
use crate::restart::joining::Joining;
use crate::restart::ranks;
use crate::restart::resume;
use crate::restart::spec::RestartSpec;
use kedge_coordinator::{Client, ClientError, Far, Leader, Notice, Place, Series, Server, Who};
use kedge_image::{ImageError, Manifest, Part};
use kedge_pmi::Rank;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long another host may need until its part of a restart begins.
const OTHERS: Duration = Duration::from_secs(60);
/// How long one on this host may need that has just taken the lock.
const SOON: Duration = Duration::from_secs(5);

/// Restarts the parts of the newest of `images` whose parts are there, and waits for their end:
/// what the first one of them that failed ended with.
pub(crate) fn restart_parts(
    spec: &RestartSpec,
    images: &[(PathBuf, Manifest)],
) -> Result<Outcome, RunError> {
    let (folder, manifest) = usable(images)?;
    let jobs = Jobs::open()?;
    let job: JobName = spec.name.clone().map_or_else(|| manifest.job.parse(), Ok)?;
    // Before anything is started, so that only the waiting below sees them.
    let signals = Signals::block();
    let (spec, met) = match seat(spec, folder, manifest)? {
        Some(seat) => meet_in_step(spec, (folder, manifest), &jobs, &job, seat)?,
        None => (spec.clone(), meet(spec, &jobs, &job)?),
    };
    let spec = &spec;
    let chosen = chosen(spec, manifest)?;
    let Met { joint, server, mut client, mut starting, rank } = met;
    let series = series(spec, manifest);
    let (times, why) =
        spec.together.as_ref().map_or((0, None), |note| (note.times, Some(note.why.clone())));
    let parts = u32::try_from(manifest.parts.len()).unwrap_or(u32::MAX);
    let at = spec.far.as_ref().map(|far| far.address().to_string());
    let joining =
        Joining { job: job.to_string(), series: series.clone(), parts, at, rank, times, why };
    let names = chosen.iter().map(|number| part_name(&job, *number));
    let names = names.collect::<Result<Vec<JobName>, _>>()?;
    let again = spec.together.is_some();
    claim(&mut client, &joint, (&series, again), &names)?;
    let mut running = Parts(Vec::new());
    for (number, name) in chosen.into_iter().zip(names) {
        let image = folder.join(&manifest.parts[number as usize].name);
        let mut command = command(spec, &image, &name, &joining);
        // Each may be on devices of its own.
        let gpu = spec.gpu.as_ref().map(ToString::to_string);
        let gpu = spec.together.as_ref().map_or(gpu, |note| note.gpu_of(number).map(str::to_owned));
        command.args(gpu.iter().flat_map(|gpu| ["--gpu", gpu]));
        // One of the parts asks for all of them.
        if let (0, Some(interval)) = (number, spec.policy.interval) {
            command.arg("--interval").arg(interval.to_string());
        }
        running.start(name, command)?;
    }
    // A coordinator on another host ends with the parts there, when those here may have ended too.
    client.look_once();
    let mut ended = |name: &JobName, status: ExitStatus| {
        // Whoever still waits for it waits in vain.
        let _ =
            client.break_series(&Series::of_job(&series), &format!("{name} has ended: {status}"));
    };
    while running.look(&mut ended) {
        match signals.next() {
            Signal::Child => {}
            Signal::Forward(signal) | Signal::Group(signal) => running.signal(signal),
        }
        // They have their names, or have failed.
        starting = starting.filter(|_| running.all_named(&jobs));
    }
    drop(server);
    if let (Some(_), Some(dir)) = (&spec.resume, &spec.policy.dir) {
        running.note_done(dir);
    }
    Ok(running.outcome())
}

/// What restarts parts, once it knows the coordinator.
struct Met {
    joint: Joint,
    server: Option<Server>,
    client: Client,
    /// No other part gets a name on this host.
    starting: Option<File>,
    rank: Option<(Seat, Rank)>,
}

fn meet(spec: &RestartSpec, jobs: &Jobs, job: &JobName) -> Result<Met, RunError> {
    let joint = Joint::of(jobs, job, job.clone(), spec.far.clone())?;
    let lock = lock(&joint.place.folder.join("parts.lock"))?;
    let starting = match &spec.together {
        // Others of its parts may be on this host, and come back by themselves: they are not to
        // wait for these.
        Some(note) => {
            jobs.make_room_of(job, &note.parts)?;
            None
        }
        None => {
            jobs.make_room(job)?;
            Some(lock)
        }
    };
    let (server, client) = coordinate(&joint)?;
    Ok(Met { joint, server, client, starting, rank: None })
}

/// The one of several ranks that is to restart one part, if the parts are ranks and nobody has said
/// which are restarted where.
fn seat(spec: &RestartSpec, folder: &Path, manifest: &Manifest) -> Result<Option<Seat>, RunError> {
    if spec.far.is_some() || !spec.parts.is_empty() {
        return Ok(None);
    }
    let Some(seat) = Seat::here().filter(Seat::has_others) else { return Ok(None) };
    for part in &manifest.parts {
        if is_of_rank(&part.check(folder)?)? {
            return Ok(Some(seat));
        }
    }
    Ok(None)
}

/// In a step, whose ranks restart one part each: what this one is to do.
fn meet_in_step(
    spec: &RestartSpec,
    (folder, manifest): (&Path, &Manifest),
    jobs: &Jobs,
    job: &JobName,
    seat: Seat,
) -> Result<(RestartSpec, Met), RunError> {
    let image = folder.file_name().unwrap_or_default().to_string_lossy();
    let does = format!("restarts {image} of");
    let mut open = Open::begin(&seat)?;
    // Others on this host may have begun by the time that all have met.
    let room = || {
        fits_step(spec, manifest, &open)?;
        let folder = jobs.joint_dir(job)?;
        let _one = lock(&folder.join("parts.lock"))?;
        Ok(jobs.make_room(job)?)
    };
    if let Err(error) = room() {
        return Err(ranks::failed(&mut open, error));
    }
    let meet = |far: Far| -> Result<_, RunError> {
        let joint = Joint::of(jobs, job, job.clone(), Some(far))?;
        let (server, client) = coordinate(&joint)?;
        Ok((joint, server, client))
    };
    let (joint, server, client) = if open.rank.rank == 0 {
        let drawn = || {
            let (far, meeting) = ranks::draw(job, &does)?;
            Ok((meet(far)?, meeting))
        };
        match drawn() {
            Ok((coordinated, meeting)) => {
                tell(&mut open, Ok(&meeting))?;
                // All do the same.
                met(&mut open)?;
                coordinated
            }
            Err(error) => return Err(ranks::failed(&mut open, error)),
        }
    } else {
        let (named, far, other) = ranks::heard(&mut open)?;
        let agreed = match named == *job {
            true => ranks::does_the_same(&does, &other),
            false => Err(RankError::Failed(format!("it {other} {named}, and this one {job}"))),
        };
        if let Err(error) = agreed {
            return Err(ranks::failed(&mut open, error.into()));
        }
        met(&mut open)?;
        meet(far)?
    };
    let (far, number) = (joint.place.far.clone(), open.rank.rank);
    let rank = Some((seat, open.rank));
    let spec = RestartSpec { far, parts: vec![number], showing: None, ..spec.clone() };
    Ok((spec, Met { joint, server, client, starting: None, rank }))
}

fn fits_step(spec: &RestartSpec, manifest: &Manifest, open: &Open) -> Result<(), RunError> {
    let mut given = spec.policy.needs_one_part().into_iter();
    if let Some((option, _)) = given.find(|(_, given)| *given) {
        return Err(RankError::Option(option).into());
    }
    let (parts, ranks) = (manifest.parts.len(), open.rank.size);
    if parts != ranks as usize {
        return Err(RankError::Size { parts, ranks }.into());
    }
    Ok(())
}

/// Has the parts be restarted by this process alone, before anything of theirs is touched. If
/// another host has been told to restart one of them, neither of the two goes on.
fn claim(
    client: &mut Client,
    joint: &Joint,
    (series, again): (&str, bool),
    parts: &[JobName],
) -> Result<(), RunError> {
    let failed = |error: ClientError| RunError::System {
        what: "tell the other hosts which parts are restarted here",
        source: io::Error::other(error),
    };
    let everybody = Who::Count { members: u32::MAX };
    match client.arrive(&Series::of_job(series), PRESENT, everybody, Duration::ZERO) {
        Ok(()) | Err(ClientError::Late) => {}
        Err(error) => return Err(failed(error)),
    }
    for part in parts {
        // Whoever has restarted the job before may still wait for a part's supervisor.
        let own = match again {
            true => format!("restarted {part}, {series}"),
            false => format!("restarted {part}"),
        };
        let own = Notice::of_job(SPACE, own.as_bytes()).map_err(failed)?;
        match client.publish(&own, joint.node().as_bytes(), true) {
            Ok(_) => {}
            Err(ClientError::Taken { by }) => {
                let error = RunError::PartTaken { part: part.clone(), by };
                // If that cannot be said, nobody is there to hear it.
                let _ = client.break_series(&Series::of_job(series), &error.to_string());
                return Err(error);
            }
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(())
}

/// Where they meet: all hosts that restart one image meet in one series.
fn series(spec: &RestartSpec, manifest: &Manifest) -> String {
    if let Some(note) = &spec.together {
        return note.series.clone();
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    match spec.far {
        Some(_) => format!("restart of {:x}", manifest.identity()),
        None => format!("restart {now:x} of {}", std::process::id()),
    }
}

/// The numbers of the parts that are to be restarted here.
fn chosen(spec: &RestartSpec, manifest: &Manifest) -> Result<Vec<u32>, RunError> {
    let all = u32::try_from(manifest.parts.len()).unwrap_or(u32::MAX);
    if spec.parts.is_empty() {
        return Ok((0..all).collect());
    }
    match spec.parts.iter().find(|part| **part >= all) {
        Some(part) => Err(RunError::NoPart { part: *part, all }),
        None => Ok(spec.parts.clone()),
    }
}

/// The newest image whose parts are those that it was made of, with all that they build on.
fn usable(images: &[(PathBuf, Manifest)]) -> Result<&(PathBuf, Manifest), ImageError> {
    let mut failure = None;
    for image in images.iter().filter(|(_, manifest)| !manifest.parts.is_empty()) {
        let whole = |part: &Part| kedge_image::chain(&part.check(&image.0)?).map(drop);
        let checked = image.1.parts.iter().try_for_each(whole);
        match checked {
            Ok(()) => return Ok(image),
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    Err(failure.unwrap_or(ImageError::NoImage { path: PathBuf::new() }))
}

fn coordinate(joint: &Joint) -> Result<(Option<Server>, Client), RunError> {
    let failed = |source| RunError::System { what: "coordinate the job's parts", source };
    let (place, job) = (joint.place.clone(), &joint.job);
    let server = coordinator(&place, job).map_err(failed)?;
    // Whoever coordinates now may be a warden that is about to leave.
    let name = job.to_string();
    let find = Box::new(move || {
        let (stream, leader) = place.reach(&name)?;
        if let Leader::This(server) = leader {
            server.forever();
        }
        Ok(stream)
    });
    // Two hosts that have been told to restart the same part are two members.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let client = Client::join(&member(joint, format!("{job} restarted ({now:x})")), find);
    Ok((server, client.map_err(|error| failed(std::io::Error::other(error)))?))
}

/// The coordinator, if it is this process. One on another host may not be there yet.
fn coordinator(place: &Place, job: &JobName) -> io::Result<Option<Server>> {
    let begin = Instant::now();
    loop {
        match place.reach(&job.to_string()) {
            Ok((_, Leader::This(server))) => return Ok(Some(server)),
            Ok((_, Leader::Other)) => return Ok(None),
            Err(error) if begin.elapsed() > if place.far.is_none() { SOON } else { OTHERS } => {
                return Err(error);
            }
            Err(_) => thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// What restarts one part.
fn command(spec: &RestartSpec, image: &Path, name: &JobName, joining: &Joining) -> Command {
    let mut command = kedge_again();
    command.arg("restart").arg(image).arg("--job").arg(name.to_string());
    command.arg("--part").arg(serde_json::to_string(joining).unwrap_or_default());
    if let Some(far) = &spec.far {
        command.env(KEY, OsStr::from_bytes(far.key().text()));
    }
    if let Some(dir) = &spec.policy.dir {
        command.arg("--ckpt-dir").arg(dir);
    }
    if let Some(bytes) = spec.soft_memory {
        command.arg("--soft-memory").arg(bytes.to_string());
    }
    if spec.quiet {
        command.arg("--quiet");
    }
    if let Some(keep) = spec.policy.keep {
        command.arg("--keep").arg(keep.to_string());
    }
    if let Some(every) = spec.policy.full_every {
        command.arg("--incremental").arg("--full-every").arg(every.to_string());
    }
    if let Some(warm) = spec.policy.warm {
        command.arg(format!("--warm={warm}"));
    }
    // Whoever ends with one part's last image has the others end with it.
    if let (Some(on_term), Some(_)) = (spec.policy.on_term, &joining.rank) {
        command.arg("--on-term").arg(on_term.to_string());
        let status = on_term.requeue_exit.map(|status| status.to_string());
        command.args(status.iter().flat_map(|status| ["--requeue-exit", status]));
    }
    if spec.lazy {
        command.arg("--lazy");
    }
    for (old, new) in &spec.paths {
        let mut pair = OsString::from(old);
        pair.push("=");
        pair.push(new);
        command.arg("--path-map").arg(pair);
    }
    command
}

/// The processes that restart the parts and supervise them.
struct Parts(Vec<(JobName, Child, Option<ExitStatus>)>);

impl Parts {
    fn start(&mut self, name: JobName, mut command: Command) -> Result<(), RunError> {
        let failed = |source| RunError::System { what: "start kedge for a part", source };
        match command.spawn() {
            Ok(child) => {
                self.0.push((name, child, None));
                Ok(())
            }
            Err(error) => {
                self.signal(libc::SIGKILL);
                Err(failed(error))
            }
        }
    }

    /// Collects those that have ended; whether any has not.
    fn look(&mut self, ended: &mut impl FnMut(&JobName, ExitStatus)) -> bool {
        for (name, child, status) in &mut self.0 {
            if status.is_none()
                && let Ok(Some(now)) = child.try_wait()
            {
                *status = Some(now);
                ended(name, now);
            }
        }
        self.0.iter().any(|(_, _, status)| status.is_none())
    }

    /// Whether each has its folder, or has ended.
    fn all_named(&self, jobs: &Jobs) -> bool {
        let named = |name| jobs.find(name).is_some();
        self.0.iter().all(|(name, _, status)| status.is_some() || named(name))
    }

    fn signal(&self, signal: libc::c_int) {
        for (_, child, status) in &self.0 {
            if status.is_none()
                && let Some(pid) =
                    i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw)
                && let Some(signal) = rustix::process::Signal::from_named_raw(signal)
            {
                let _ = rustix::process::kill_process(pid, signal);
            }
        }
    }

    /// Notes in `dir` which parts' programs have ended well.
    fn note_done(&self, dir: &Path) {
        let well = |status: Option<ExitStatus>| status.is_some_and(|status| status.success());
        for (name, ..) in self.0.iter().filter(|(_, _, status)| well(*status)) {
            if let Err(error) = resume::note_done(dir, name) {
                let why = "a next --resume goes on from an image";
                tell_user(&format!("{}: {name}: {error}: {why}", dir.display()));
            }
        }
    }

    fn outcome(&self) -> Outcome {
        let statuses = self.0.iter().filter_map(|(_, _, status)| *status);
        statuses
            .map(|status| Outcome::of(status.into_raw()))
            .find(|o| *o != Outcome::Exited(0))
            .unwrap_or(Outcome::Exited(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_part_that_failed_is_not_done() {
        let dir = std::env::temp_dir().join(format!("kedge-parts-done-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let part = |name: &str, status| {
            let child = Command::new("true").spawn().unwrap();
            (name.parse().unwrap(), child, status)
        };
        let statuses = [Some(ExitStatus::from_raw(0)), Some(ExitStatus::from_raw(85 << 8)), None];
        let parts = ["j.0", "j.1", "j.2"].into_iter().zip(statuses);
        let mut parts = Parts(parts.map(|(name, status)| part(name, status)).collect());
        parts.note_done(&dir);
        let done: Vec<_> = fs::read_dir(&dir).unwrap().map(|it| it.unwrap().file_name()).collect();
        parts.0.iter_mut().for_each(|(_, child, _)| drop(child.wait()));
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(done, [".j.0.done"]);
    }
}
