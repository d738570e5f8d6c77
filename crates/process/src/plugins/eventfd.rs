//! eventfd: its count.

use crate::plugins::error::{Context, PluginError};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::world::World;
use crate::plugins::{Claim, Plugin};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::write;
use serde::{Deserialize, Serialize};
use serde_json::Value;

#[derive(Debug)]
pub(crate) struct Eventfd;

#[derive(Serialize, Deserialize)]
struct Saved {
    description: u32,
    count: u64,
    semaphore: bool,
}

impl Plugin for Eventfd {
    fn name(&self) -> &'static str {
        "eventfd"
    }

    fn claim(&self, file: &Found, _job: &Job) -> Claim {
        match file.anonymous() {
            Some("eventfd") if told(file).is_none() => Claim::Refused(
                "the kernel (before 6.5) does not tell its count and kind".to_owned(),
            ),
            name => Claim::when(name == Some("eventfd")),
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
        let saved = |index: &usize| {
            let (count, semaphore) = told(capture.file(*index))?;
            Some(Ok(Saved { description: *index as u32, count, semaphore }))
        };
        state(mine.iter().filter_map(saved))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        for saved in world.parse::<Vec<Saved>>(state)? {
            let mut flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            flags.set(EventfdFlags::SEMAPHORE, saved.semaphore);
            let fd = eventfd(0, flags).to(|| "make an eventfd")?;
            // The count above is one that only the kernel itself can reach.
            let count = saved.count.min(u64::MAX - 1);
            write(&fd, &count.to_ne_bytes()).to(|| "set an eventfd's count")?;
            blocking(&fd)?;
            world.made(saved.description, fd)?;
        }
        Ok(())
    }
}

fn told(file: &Found) -> Option<(u64, bool)> {
    let count = u64::from_str_radix(file.info.value("eventfd-count")?, 16).ok()?;
    Some((count, file.info.value("eventfd-semaphore")? != "0"))
}

/// Flags are set when all is made; nothing may wait before.
fn blocking(fd: &rustix::fd::OwnedFd) -> Result<(), PluginError> {
    rustix::io::ioctl_fionbio(fd, false).to(|| "set an eventfd's flags")
}
