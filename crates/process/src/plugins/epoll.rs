//! epoll: its members. They are added under the numbers that they had when the program added them,
//! because an epoll knows a member by file and number.

use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::procfs::{self, FdInfo};
use crate::plugins::world::{Argument, InjectedCall, World};
use crate::plugins::{Claim, Plugin, carried, pidfd, signalfd, sys};
use rustix::event::epoll;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::io::fcntl_dupfd_cloexec;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

/// Highest number of a member that is read back.
const MAX_NUMBER: i32 = 1 << 24;
/// Between two looks at the members of a running job.
const TICK: Duration = Duration::from_millis(10);

#[derive(Debug)]
pub(crate) struct Epoll;

#[derive(Serialize, Deserialize)]
struct Saved {
    description: u32,
    members: Vec<Member>,
}

#[derive(Serialize, Deserialize)]
struct Member {
    number: i32,
    events: u32,
    data: u64,
    /// The member's description.
    target: u32,
}

impl Plugin for Epoll {
    fn name(&self) -> &'static str {
        "epoll"
    }

    fn requires(&self) -> &'static [&'static str] {
        // All that can be a member.
        &[
            "streams", "pty", "devices", "pipes", "unix", "inet", "raw", "eventfd", "timerfd",
            "signalfd", "pidfd", "inotify", "mqueue", "io_uring", "files",
        ]
    }

    fn claim(&self, file: &Found, job: &Job) -> Claim {
        if file.anonymous() != Some("eventpoll") {
            return Claim::No;
        }
        match members(&file.info) {
            None => Claim::Refused("the kernel does not tell its members".to_owned()),
            Some(members) if !job.patience.is_zero() => lost(file, job, &members)
                .map_or(Claim::Yes, |number| Claim::Refused(format!("it {}", is_lost(number)))),
            Some(_) => Claim::Yes,
        }
    }

    fn saves_under_way(&self, _file: &Found) -> bool {
        true
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        state(mine.iter().map(|index| save(capture, *index)))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        let all: Vec<Saved> = world.parse(state)?;
        // One can be a member of another.
        for saved in &all {
            let fd = epoll::create(epoll::CreateFlags::CLOEXEC).to(|| "make an epoll")?;
            world.made(saved.description, fd)?;
        }
        all.iter().try_for_each(|saved| add(saved, world))
    }
}

/// The number of a member that no process of the running job holds. One that has been added or
/// closed just now is none, nor one that may be under way.
fn lost(file: &Found, job: &Job, told: &[Told]) -> Option<i32> {
    let (pid, fd) = job.place(file);
    let held = |number: i32, which: u32| {
        let member = sys::Member { epoll: fd as u32, number: number as u32, which };
        // Under its number it may be newer than the list of all.
        let has = |at| sys::is_member(at, number, pid, &member).unwrap_or(false);
        likely_first(file, job).any(has) || target(job, file, number, which).is_some()
    };
    let (told, which) = numbered(told).find(|(told, which)| !held(told.0, *which))?;
    if carried::may_be_unseen(job) {
        return None;
    }
    let begin = Instant::now();
    while begin.elapsed() < job.patience {
        thread::sleep(TICK);
        let seen = procfs::descriptor(pid, fd).ok()??;
        if !members(&seen.info)?.contains(told) || held(told.0, which) {
            return None;
        }
    }
    Some(told.0)
}

/// Where the job's processes are in /proc, those first that hold `file`: of hundreds that have an
/// epoll each, one has its members.
fn likely_first(file: &Found, job: &Job) -> impl Iterator<Item = i32> {
    let holds = |process: &usize| file.holders.iter().any(|holder| holder.process == *process);
    let others = (0..job.processes.len()).filter(move |process| !holds(process));
    let holders = file.holders.iter().map(|holder| holder.process);
    holders.chain(others).map(|process| job.processes[process].at)
}

fn is_lost(number: i32) -> String {
    format!(
        "watches a file, once descriptor {number}, that no process of the job holds: remove it \
         from the epoll before closing it"
    )
}

/// A member as the kernel tells it: number, events and data.
type Told = (i32, u32, u64);

/// Each with how many of the same number come before it: the kernel lists those in the order in
/// which kcmp counts them.
fn numbered(told: &[Told]) -> impl Iterator<Item = (&Told, u32)> {
    let mut seen: BTreeMap<i32, u32> = BTreeMap::new();
    told.iter().map(move |told| {
        let which = seen.entry(told.0).and_modify(|count| *count += 1).or_insert(0);
        (told, *which)
    })
}

fn members(info: &FdInfo) -> Option<Vec<Told>> {
    let member = |line: &str| {
        let mut words = line.split_whitespace();
        let number = words.next()?.parse().ok()?;
        let mut next = |name| words.next().filter(|word| *word == name).and_then(|_| words.next());
        let events = u32::from_str_radix(next("events:")?, 16).ok()?;
        Some((number, events, u64::from_str_radix(next("data:")?, 16).ok()?))
    };
    info.values("tfd").map(member).collect()
}

fn save(capture: &mut Capture, index: usize) -> Result<Saved, PluginError> {
    let job = capture.job;
    let file = &job.files[index];
    let mut saved = Vec::new();
    let told = members(&file.info).unwrap_or_default();
    for (&(number, events, data), which) in numbered(&told) {
        let target = target(job, file, number, which).ok_or_else(|| {
            PluginError::Refused(format!("{} {}", job.describe(file), is_lost(number)))
        })?;
        personal(job, file, number, target)?;
        saved.push(Member { number, events, data, target: target as u32 });
    }
    Ok(Saved { description: index as u32, members: saved })
}

/// The file that is a member: most often what a holder of the epoll has under this number.
fn target(job: &Job, file: &Found, number: i32, which: u32) -> Option<usize> {
    let (pid, fd) = job.place(file);
    let member = sys::Member { epoll: fd as u32, number: number as u32, which };
    let is_it = |other: &Found| {
        let (other_pid, other) = job.place(other);
        sys::is_member(other_pid, other, pid, &member).unwrap_or(false)
    };
    let likely = file.holders.iter().filter_map(|holder| job.held(holder.process, number));
    let all = 0..job.files.len();
    likely.chain(all).find(|index| is_it(&job.files[*index]))
}

/// Refuses what only a process itself can add, and none has it under this number any more.
fn personal(job: &Job, file: &Found, number: i32, target: usize) -> Result<(), PluginError> {
    let wanted = &job.files[target];
    if !signalfd::is_one(wanted) && !pidfd::is_one(wanted) {
        return Ok(());
    }
    let has = |process| wanted.holders.iter().any(|h| (h.process, h.fd) == (process, number));
    if file.holders.iter().any(|holder| has(holder.process)) {
        return Ok(());
    }
    let (what, epoll) = (job.describe(wanted), job.describe(file));
    Err(PluginError::Refused(format!(
        "{what} was added to {epoll} as descriptor {number}, which no process has now"
    )))
}

fn add(saved: &Saved, world: &mut World) -> Result<(), PluginError> {
    let above = saved.members.iter().map(|member| member.number).max().unwrap_or(0);
    if above >= MAX_NUMBER || saved.members.iter().any(|member| member.number < 0) {
        return Err(damaged(format!("an epoll's member {above}")));
    }
    let high = |description: u32, world: &World| -> Result<OwnedFd, PluginError> {
        fcntl_dupfd_cloexec(world.get(description)?, above + 1)
            .to(|| format!("have descriptors above {above}: raise the limit (`ulimit -n`)"))
    };
    let epoll = high(saved.description, world)?;
    let mut held = Vec::new();
    let mut members = Vec::new();
    for member in &saved.members {
        if world.is_personal(member.target) {
            inject(saved.description, member, world)?;
            continue;
        }
        let fd = high(member.target, world)?;
        members.push((fd.as_raw_fd(), member.number, member.events, member.data));
        held.push(fd);
    }
    if members.is_empty() {
        return Ok(());
    }
    sys::add_members(epoll.as_raw_fd(), &members).to(|| "add the members of an epoll")
}

/// By a process that has both under their numbers.
fn inject(epoll: u32, member: &Member, world: &mut World) -> Result<(), PluginError> {
    let mut targets = world.holders(member.target).filter(|slot| slot.fd == member.number);
    let found = targets.find_map(|target| world.holders(epoll).find(|slot| slot.pid == target.pid));
    let slot = found.ok_or_else(|| damaged(format!("nobody can add member {}", member.number)))?;
    let number = |number: i32| Argument::Number(number as u64);
    let event = sys::epoll_event(member.events, member.data).to_vec();
    let arguments = vec![
        number(slot.fd),
        number(libc::EPOLL_CTL_ADD),
        number(member.number),
        Argument::Bytes(event),
    ];
    let what = format!("add descriptor {} to epoll {}", member.number, slot.fd);
    world.inject(InjectedCall { pid: slot.pid, number: libc::SYS_epoll_ctl, arguments, what });
    Ok(())
}
