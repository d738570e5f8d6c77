//! The shadows of a cache that a process writes into by itself (docs/cache.md).
//!
//! Their bytes are the cache's, which has them also without this process. A restarted one has no
//! lease: by the page that it maps, which comes back empty ([`crate::maps`]). Its descriptor only
//! keeps the number taken, until the program closes it: the cache's library leaves alone what is no
//! shadow any more.

use crate::plugins::error::{Context, PluginError};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::world::World;
use crate::plugins::{Claim, Plugin};
use rustix::fs::{Mode, OFlags, open};
use serde_json::Value;
use std::os::unix::ffi::OsStrExt;

/// What a descriptor is opened of that nothing is written to.
const NOTHING: &str = "/dev/null";

#[derive(Debug)]
pub(crate) struct Leases;

impl Plugin for Leases {
    fn name(&self) -> &'static str {
        "leases"
    }

    fn claim(&self, file: &Found, _job: &Job) -> Claim {
        let regular = file.stat.kind() == libc::S_IFREG;
        Claim::when(regular && kedge_cache_lease::is_shadow(file.link.as_bytes()))
    }

    fn saves_under_way(&self, _file: &Found) -> bool {
        true
    }

    fn checkpoint(&self, _: &mut Capture, mine: &[usize]) -> Result<Option<Value>, PluginError> {
        state(mine.iter().map(|index| Ok(*index as u32)))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        for description in world.parse::<Vec<u32>>(state)? {
            let access = world.flags(description)? & libc::O_ACCMODE as u32;
            let flags = OFlags::from_bits_retain(access) | OFlags::CLOEXEC;
            let fd = open(NOTHING, flags, Mode::empty()).to(|| format!("open {NOTHING}"))?;
            world.made(description, fd)?;
        }
        Ok(())
    }
}
