//! timerfd: the time that is left. A date (the real-time clock, absolute) stays that date.

use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::world::World;
use crate::plugins::{Claim, Plugin, sys};
use rustix::fd::OwnedFd;
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_settime,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

const SECOND: i64 = 1_000_000_000;

#[derive(Debug)]
pub(crate) struct Timerfd;

/// Seconds and nanoseconds.
type Time = (i64, i64);

#[derive(Serialize, Deserialize)]
struct Saved {
    description: u32,
    clock: u32,
    /// How often it has expired since it was read.
    ticks: u64,
    /// Of timerfd_settime.
    flags: u32,
    /// What was left; 0: not armed.
    left: Time,
    interval: Time,
    /// The date at the checkpoint.
    now: Time,
}

impl Plugin for Timerfd {
    fn name(&self) -> &'static str {
        "timerfd"
    }

    fn claim(&self, file: &Found, _job: &Job) -> Claim {
        match file.anonymous() {
            Some("timerfd") if told(file, 0, (0, 0)).is_none() => {
                Claim::Refused("the kernel does not tell its time".to_owned())
            }
            name => Claim::when(name == Some("timerfd")),
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
        let now = clock_gettime(ClockId::Realtime);
        let now = (now.tv_sec, now.tv_nsec);
        let saved = |index: &usize| told(capture.file(*index), *index as u32, now).map(Ok);
        state(mine.iter().filter_map(saved))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        for saved in world.parse::<Vec<Saved>>(state)? {
            world.made(saved.description, make(&saved)?)?;
        }
        Ok(())
    }
}

fn told(file: &Found, description: u32, now: Time) -> Option<Saved> {
    let time = |name| {
        let text = file.info.value(name)?.strip_prefix('(')?.strip_suffix(')')?;
        let (seconds, nanoseconds) = text.split_once(',')?;
        Some((seconds.trim().parse().ok()?, nanoseconds.trim().parse().ok()?))
    };
    Some(Saved {
        description,
        clock: file.info.value("clockid")?.parse().ok()?,
        ticks: file.info.value("ticks")?.parse().ok()?,
        flags: u32::from_str_radix(file.info.value("settime flags")?, 8).ok()?,
        left: time("it_value")?,
        interval: time("it_interval")?,
        now,
    })
}

fn clock(number: u32) -> Option<TimerfdClockId> {
    Some(match number {
        0 => TimerfdClockId::Realtime,
        1 => TimerfdClockId::Monotonic,
        7 => TimerfdClockId::Boottime,
        8 => TimerfdClockId::RealtimeAlarm,
        9 => TimerfdClockId::BoottimeAlarm,
        _ => return None,
    })
}

fn timespec(time: Time) -> Result<Timespec, PluginError> {
    match time.0 >= 0 && (0..SECOND).contains(&time.1) {
        true => Ok(Timespec { tv_sec: time.0, tv_nsec: time.1 }),
        false => Err(damaged(format!("the time {time:?}"))),
    }
}

fn make(saved: &Saved) -> Result<OwnedFd, PluginError> {
    let clock = clock(saved.clock).ok_or_else(|| damaged(format!("clock {}", saved.clock)))?;
    let fd = timerfd_create(clock, TimerfdFlags::CLOEXEC).to(|| "make a timerfd")?;
    let mut flags = TimerfdTimerFlags::from_bits_retain(saved.flags);
    let real = matches!(clock, TimerfdClockId::Realtime | TimerfdClockId::RealtimeAlarm);
    let mut value = timespec(saved.left)?;
    let armed = saved.left != (0, 0);
    if armed && real && flags.contains(TimerfdTimerFlags::ABSTIME) {
        value = date(saved)?;
    } else {
        // These clocks begin anew with each boot: what was left is what counts.
        flags = TimerfdTimerFlags::empty();
    }
    let times = Itimerspec { it_interval: timespec(saved.interval)?, it_value: value };
    timerfd_settime(&fd, flags, &times).to(|| "set a timerfd")?;
    if saved.ticks > 0 {
        expire(&fd, saved, times)?;
    }
    Ok(fd)
}

fn date(saved: &Saved) -> Result<Timespec, PluginError> {
    let (now, left) = (timespec(saved.now)?, timespec(saved.left)?);
    let nanoseconds = now.tv_nsec + left.tv_nsec;
    let seconds =
        now.tv_sec.checked_add(left.tv_sec).and_then(|s| s.checked_add(nanoseconds / SECOND));
    let seconds = seconds.ok_or_else(|| damaged("a timer's date"))?;
    timespec((seconds, nanoseconds % SECOND))
}

/// Where the kernel cannot set how often it has expired, it is made to expire once.
fn expire(fd: &OwnedFd, saved: &Saved, times: Itimerspec) -> Result<(), PluginError> {
    if sys::set_ticks(fd, saved.ticks).is_ok() {
        return Ok(());
    }
    let soon = Timespec { tv_sec: 0, tv_nsec: 1 };
    let times = Itimerspec { it_value: soon, ..times };
    timerfd_settime(fd, TimerfdTimerFlags::empty(), &times).to(|| "set a timerfd").map(drop)
}
