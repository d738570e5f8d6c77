//! The devices that have no state: /dev/null and its like.

use crate::plugins::error::{Context, PluginError};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::path::SavedPath;
use crate::plugins::world::World;
use crate::plugins::{Claim, Plugin, reach};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Major and minor number (devices.txt): null, zero, full, random, urandom.
const STATELESS: [(u32, u32); 5] = [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9)];

#[derive(Debug)]
pub(crate) struct Devices;

fn is_stateless(device: u64) -> bool {
    STATELESS.contains(&(libc::major(device), libc::minor(device)))
}

#[derive(Serialize, Deserialize)]
struct Device {
    description: u32,
    path: SavedPath,
}

impl Plugin for Devices {
    fn name(&self) -> &'static str {
        "devices"
    }

    fn claim(&self, file: &Found, _job: &Job) -> Claim {
        let device = file.stat.kind() == libc::S_IFCHR && !file.is_path_only();
        Claim::when(device && is_stateless(file.stat.special))
    }

    fn checkpoint(
        &self,
        capture: &mut Capture,
        mine: &[usize],
    ) -> Result<Option<Value>, PluginError> {
        let path = |index: &usize| SavedPath(capture.file(*index).link.clone().into());
        state(mine.iter().map(|index| Ok(Device { description: *index as u32, path: path(index) })))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        for device in world.parse::<Vec<Device>>(state)? {
            let path = world.path(&device.path.0);
            let access = world.flags(device.description)? & libc::O_ACCMODE as u32;
            let flags = OFlags::from_bits_retain(access) | OFlags::CLOEXEC | OFlags::NOCTTY;
            let what = || format!("open {}", path.display());
            // Opening others may do something.
            let found = reach::find(&path, true).to(what)?;
            let there = rustix::fs::fstat(&found).to(what)?;
            let is_device = there.st_mode & libc::S_IFMT == libc::S_IFCHR;
            if !is_device || !is_stateless(there.st_rdev) {
                let what = format!("{} is another device than it was", path.display());
                return Err(PluginError::Refused(what));
            }
            let fd = reach::again(&found, flags).to(what)?;
            world.made(device.description, fd)?;
        }
        Ok(())
    }
}
