//! Gathers what there is to see: from the jobs' folders, from /proc, and from who answers in time.

use super::asking::{Answer, Asking};
use super::board::{Board, Device, Devices, Job, Process, Rates};
use super::tail;
use crate::Failure;
use crate::usage::{Member, Processes};
use kedge_control::gpu::GpuSpec;
use kedge_control::usage::Usage;
use kedge_supervisor::control;
use kedge_supervisor::jobs::{self, JobName, Jobs, Meta, State};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long replies are waited for; later ones are taken at a later look.
const REPLY_TIMEOUT: Duration = Duration::from_millis(250);
/// Who takes longer is told not to answer: a moment is nothing on a busy machine.
const SLOW: Duration = Duration::from_millis(500);
/// Shortest time between two counts that tell how often something is done; what is measured over
/// less is noise.
const MIN_INTERVAL: Duration = Duration::from_millis(200);
/// Most proxies of one job that are asked.
const MAX_PROXIES: usize = 256;
/// Lines of the chosen job's log.
const LINES: usize = 100;

/// Whom a question is for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Whom {
    /// The supervisor of a job.
    Supervisor(String),
    /// The proxy that listens there.
    Proxy(PathBuf),
}

/// What somebody has counted, and when.
#[derive(Debug, Clone, Copy)]
struct Counted {
    at: Instant,
    launches: u64,
    copies: u64,
    rates: Option<Rates>,
}

/// Gathers again and again, and remembers what figures of a time need.
pub(crate) struct Gatherer {
    jobs: Jobs,
    /// Jobs that have ended too.
    all: bool,
    asking: Asking<Whom>,
    counted: BTreeMap<PathBuf, Counted>,
    /// Processor time by process, and the processors that it used before that.
    used: BTreeMap<u32, (Instant, Duration, Option<f64>)>,
}

impl Gatherer {
    pub(crate) fn new(jobs: Jobs, all: bool) -> Gatherer {
        let (counted, used) = Default::default();
        Gatherer { jobs, all, asking: Asking::new(), counted, used }
    }

    /// Whether ended jobs are gathered too, from now on.
    pub(crate) fn set_all(&mut self, all: bool) {
        self.all = all;
    }

    /// Gathers; `chosen` is the job whose log is wanted.
    ///
    /// # Errors
    /// Where the jobs cannot be listed.
    pub(crate) fn gather(&mut self, chosen: Option<&str>) -> Result<Board, Failure> {
        let mut metas = self.jobs.list()?;
        let goes_on = |meta: &Meta| matches!(meta.state, State::Running | State::Unsupervised);
        metas.retain(|meta| self.all || goes_on(meta));
        let sockets: Vec<Vec<PathBuf>> = metas
            .iter()
            .map(|meta| if goes_on(meta) { self.sockets(meta) } else { Vec::new() })
            .collect();
        let answers = self.ask(&metas, &sockets);
        let processes = Processes::now();
        let now = Instant::now();
        let mut used = BTreeMap::new();
        let mut board = Board { now: jobs::now(), jobs: Vec::new() };
        for (meta, sockets) in metas.into_iter().zip(&sockets) {
            let members = match goes_on(&meta) {
                true => processes.members(meta.supervisor),
                false => Vec::new(),
            };
            let processes =
                members.into_iter().map(|one| self.process(one, now, &mut used)).collect();
            let devices = self.devices(&meta, sockets, &answers);
            let is_chosen = chosen == Some(meta.name.as_str());
            board.jobs.push(self.job(meta, processes, devices, &answers, is_chosen));
        }
        self.used = used;
        self.counted.retain(|path, _| sockets.iter().flatten().any(|socket| socket == path));
        Ok(board)
    }

    /// Where proxies of a job listen.
    fn sockets(&self, meta: &Meta) -> Vec<PathBuf> {
        let Ok(name) = meta.name.parse::<JobName>() else { return Vec::new() };
        let mut sockets = self.jobs.usage(&name);
        sockets.truncate(MAX_PROXIES);
        sockets
    }

    fn ask(&mut self, metas: &[Meta], sockets: &[Vec<PathBuf>]) -> BTreeMap<Whom, Answer> {
        let running =
            |name: &str| metas.iter().any(|meta| meta.name == name && meta.state == State::Running);
        self.asking.retain(|whom| match whom {
            Whom::Supervisor(name) => running(name),
            Whom::Proxy(path) => sockets.iter().flatten().any(|socket| socket == path),
        });
        for meta in metas.iter().filter(|meta| meta.state == State::Running) {
            if let Ok(name) = meta.name.parse() {
                let whom = Whom::Supervisor(meta.name.clone());
                self.asking.ask(whom, || control::hail(&self.jobs, &name));
            }
        }
        for path in sockets.iter().flatten() {
            self.asking.ask(Whom::Proxy(path.clone()), || kedge_socket::address::connect(path));
        }
        self.asking.take(REPLY_TIMEOUT)
    }

    fn process(
        &self,
        member: Member,
        now: Instant,
        used: &mut BTreeMap<u32, (Instant, Duration, Option<f64>)>,
    ) -> Process {
        let before = self.used.get(&member.pid).copied();
        let entry = processors(before, now, member.processor);
        used.insert(member.pid, entry);
        Process {
            pid: member.pid,
            name: member.name,
            kedge: member.own,
            resident: member.resident,
            processor_percent: entry.2.map(|processors| 100.0 * processors),
        }
    }

    /// What the proxies that have answered tell together.
    fn devices(
        &mut self,
        meta: &Meta,
        sockets: &[PathBuf],
        answers: &BTreeMap<Whom, Answer>,
    ) -> Devices {
        let mut devices = Devices::default();
        let mut known: BTreeMap<[u8; 16], usize> = BTreeMap::new();
        for path in sockets {
            let usage = match answers.get(&Whom::Proxy(path.clone())) {
                Some(Answer::Bytes(bytes)) => Usage::read(bytes),
                Some(Answer::Silent(time)) => {
                    devices.silent += usize::from(*time >= SLOW);
                    None
                }
                // Nobody listens there any more.
                Some(Answer::None) | None => None,
            };
            let Some(usage) = usage else { continue };
            devices.clients += 1;
            devices.swapped_out |= usage.swapped_out;
            if let Some(rates) = self.rates(path, &usage) {
                let all = devices.rates.get_or_insert_default();
                all.launches += rates.launches;
                all.copies += rates.copies;
            }
            for told in usage.devices.iter() {
                let at = *known.entry(told.uuid).or_insert_with(|| {
                    let name = told.name.to_string();
                    let device = Device { name, place: String::new(), used: None, size: told.size };
                    devices.each.push(device);
                    devices.each.len() - 1
                });
                if let (Some(device), Some(used)) = (devices.each.get_mut(at), told.used) {
                    device.used = Some(device.used.unwrap_or(0).saturating_add(used));
                }
            }
        }
        let places = places(&meta.gpu, devices.each.len());
        for (device, place) in devices.each.iter_mut().zip(places) {
            device.place = place;
        }
        devices
    }

    /// How often a proxy has launched and copied lately; `None` at the first look.
    fn rates(&mut self, path: &Path, usage: &Usage) -> Option<Rates> {
        let (at, launches, copies) = (Instant::now(), usage.launches, usage.copies);
        let before = self.counted.get(path).copied();
        let counted = counted(before, Counted { at, launches, copies, rates: None });
        self.counted.insert(path.to_owned(), counted);
        counted.rates
    }

    fn job(
        &self,
        meta: Meta,
        processes: Vec<Process>,
        devices: Devices,
        answers: &BTreeMap<Whom, Answer>,
        is_chosen: bool,
    ) -> Job {
        let name = meta.name.parse::<JobName>().ok();
        let name = name.as_ref();
        let running = meta.state == State::Running;
        let silent = match answers.get(&Whom::Supervisor(meta.name.clone())) {
            Some(Answer::Silent(time)) => Some(*time).filter(|time| *time >= SLOW),
            _ => None,
        };
        let log = name.map(|name| self.jobs.log_path(name)).unwrap_or_default();
        let next = name.filter(|_| running).and_then(|name| self.jobs.next_checkpoint(name));
        Job {
            tail: if is_chosen { tail::of(&log, LINES) } else { Vec::new() },
            log,
            image: name.and_then(|name| self.jobs.last_image(name)),
            checkpoints: name.map(|name| self.jobs.checkpoints(name)).unwrap_or_default(),
            held: name.filter(|_| running).and_then(|name| self.jobs.held(name)),
            interval: next.map(|next| next.every),
            next: next.map(|next| next.at),
            name: meta.name,
            state: meta.state,
            supervisor: meta.supervisor,
            started: meta.started,
            ended: meta.ended,
            gpu: meta.gpu,
            command: meta.command,
            silent,
            processes,
            devices,
        }
    }
}

/// How many processors a process has used since `before`: what was measured there, if that was just
/// now.
fn processors(
    before: Option<(Instant, Duration, Option<f64>)>,
    now: Instant,
    time: Duration,
) -> (Instant, Duration, Option<f64>) {
    match before {
        // Another process of that number.
        Some((_, earlier, _)) if earlier > time => (now, time, None),
        Some((at, earlier, _)) if now.duration_since(at) >= MIN_INTERVAL => {
            let processors = (time - earlier).as_secs_f64() / now.duration_since(at).as_secs_f64();
            (now, time, Some(processors))
        }
        Some(before) => before,
        None => (now, time, None),
    }
}

/// What is known of a proxy after another look: with how often it did things since `before`.
fn counted(before: Option<Counted>, now: Counted) -> Counted {
    let Some(before) = before else { return now };
    let more = |now: u64, before: u64| now.checked_sub(before);
    let (Some(launches), Some(copies)) =
        (more(now.launches, before.launches), more(now.copies, before.copies))
    else {
        // Another proxy of that name.
        return now;
    };
    let time = now.at.duration_since(before.at);
    if time < MIN_INTERVAL {
        return before;
    }
    let rate = |count: u64| count as f64 / time.as_secs_f64();
    let rates = Rates { launches: rate(launches), copies: rate(copies) };
    Counted { rates: Some(rates), ..now }
}

/// Where each of so many devices is, as `--gpu` names them.
fn places(gpu: &str, count: usize) -> Vec<String> {
    let Ok(spec) = gpu.parse::<GpuSpec>() else { return vec![String::new(); count] };
    let one = |spec: &GpuSpec| match spec {
        GpuSpec::Soft { .. } => "software".to_owned(),
        GpuSpec::Local { .. } => "GPU".to_owned(),
        GpuSpec::Remote { server, .. } => server.to_string(),
        GpuSpec::Several(_) => String::new(),
    };
    let GpuSpec::Several(several) = &spec else { return vec![one(&spec); count] };
    let mut places = vec![String::new(); count];
    for place in several.places() {
        for window in place.windows {
            if let Some(slot) = usize::try_from(window).ok().and_then(|at| places.get_mut(at)) {
                *slot = one(&place.spec);
            }
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(at: Instant, launches: u64, copies: u64) -> Counted {
        Counted { at, launches, copies, rates: None }
    }

    #[test]
    fn how_often_is_measured_between_two_looks() {
        let begin = Instant::now();
        let later = |milliseconds| begin + Duration::from_millis(milliseconds);
        let first = counted(None, at(begin, 100, 7));
        assert_eq!(first.rates, None, "nothing is known of before");
        let second = counted(Some(first), at(later(500), 150, 7));
        assert_eq!(second.rates, Some(Rates { launches: 100.0, copies: 0.0 }));
        let soon = counted(Some(second), at(later(510), 151, 9));
        assert_eq!((soon.rates, soon.launches), (second.rates, 150), "too soon to tell");
        let third = counted(Some(soon), at(later(1500), 160, 17));
        assert_eq!(third.rates, Some(Rates { launches: 10.0, copies: 10.0 }));
        let other = counted(Some(third), at(later(2500), 3, 20));
        assert_eq!(other.rates, None, "another proxy, which begins anew");
    }

    #[test]
    fn processors_are_measured_between_two_looks() {
        let begin = Instant::now();
        let second = Duration::from_secs(1);
        let first = processors(None, begin, second);
        let next = processors(Some(first), begin + second, 3 * second);
        assert_eq!(next.2, Some(2.0));
        assert_eq!(processors(Some(next), begin + second, 3 * second).2, Some(2.0));
        assert_eq!(processors(Some(next), begin + 9 * second, second).2, None, "another process");
    }

    #[test]
    fn devices_are_told_where_they_are() {
        assert_eq!(places("soft:2", 2), ["software", "software"]);
        assert_eq!(places("local", 1), ["GPU"]);
        assert_eq!(places("gpu7/1", 1), ["gpu7:7531"]);
        assert_eq!(places("a/0,soft,a/1", 3), ["a:7531", "software", "a:7531"]);
        assert_eq!(places("\x1b", 1), [""]);
    }
}
