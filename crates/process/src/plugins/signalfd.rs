//! signalfd: its mask. The signals themselves wait in the process.

use crate::plugins::error::{Context, PluginError};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::world::World;
use crate::plugins::{Claim, Plugin, sys};
use serde_json::Value;

#[derive(Debug)]
pub(crate) struct Signalfd;

pub(crate) fn is_one(file: &Found) -> bool {
    file.anonymous() == Some("signalfd")
}

impl Plugin for Signalfd {
    fn name(&self) -> &'static str {
        "signalfd"
    }

    fn claim(&self, file: &Found, _job: &Job) -> Claim {
        match is_one(file) && mask(file).is_none() {
            true => Claim::Refused("the kernel does not tell its mask".to_owned()),
            false => Claim::when(is_one(file)),
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
        let saved = |index: &usize| Some(Ok((*index as u32, mask(capture.file(*index))?)));
        state(mine.iter().filter_map(saved))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        for (description, mask) in world.parse::<Vec<(u32, u64)>>(state)? {
            world.made(description, sys::signalfd(mask).to(|| "make a signalfd")?)?;
            // An epoll hears of the signals of the process that adds it.
            world.personal(description);
        }
        Ok(())
    }
}

fn mask(file: &Found) -> Option<u64> {
    u64::from_str_radix(file.info.value("sigmask")?, 16).ok()
}
