//! The devices that have no state: /dev/null and its like.

use crate::plugins::error::{Context, PluginError, damaged};
use crate::plugins::job::{Capture, Found, Job, state};
use crate::plugins::path::ResolvedPath;
use crate::plugins::procfs::Stat;
use crate::plugins::world::World;
use crate::plugins::{Claim, Plugin, reach};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, chmodat, mknodat, open};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Major and minor number (devices.txt): null, zero, full, random, urandom.
const STATELESS: [(u32, u32); 5] = [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9)];
const NAMES: [&str; 5] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];
/// Most names that are tried for a node.
const MAX_NAMES: u32 = 1_000;

#[derive(Debug)]
pub(crate) struct Devices;

fn is_stateless(device: u64) -> bool {
    STATELESS.contains(&(libc::major(device), libc::minor(device)))
}

#[derive(Serialize, Deserialize)]
struct Device {
    description: u32,
    path: ResolvedPath,
    /// Which device: major and minor number as one; 0 in older images.
    #[serde(default)]
    number: u64,
    /// Permissions of its node.
    #[serde(default)]
    mode: u32,
    /// Its path did not lead to it any more.
    #[serde(default)]
    unlinked: bool,
}

impl Plugin for Devices {
    fn name(&self) -> &'static str {
        "devices"
    }

    fn claim(&self, file: &Found, _job: &Job) -> Claim {
        let device = file.stat.kind() == libc::S_IFCHR && !file.is_path_only();
        Claim::when(device && is_stateless(file.stat.special))
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
            let file = capture.file(*index);
            let node = fs::symlink_metadata(&file.link).map(|metadata| Stat::of(&metadata));
            Ok(Device {
                description: *index as u32,
                path: ResolvedPath(file.link.clone().into()),
                number: file.stat.special,
                mode: file.stat.mode & 0o777,
                unlinked: !node.is_ok_and(|node| node.is(&file.stat)),
            })
        };
        state(mine.iter().map(saved))
    }

    fn restart(&self, state: Value, world: &mut World) -> Result<(), PluginError> {
        for device in world.parse::<Vec<Device>>(state)? {
            let path = world.path(&device.path.0);
            let access = world.flags(device.description)? & libc::O_ACCMODE as u32;
            let flags = OFlags::from_bits_retain(access) | OFlags::CLOEXEC | OFlags::NOCTTY;
            let fd = if device.unlinked {
                nameless(&device, flags)?
            } else {
                open_node(&path, device.number, flags)?
            };
            world.made(device.description, fd)?;
        }
        Ok(())
    }
}

/// Opens the device at `path`, if it is the one with that number, where that is known.
fn open_node(path: &Path, number: u64, flags: OFlags) -> Result<OwnedFd, PluginError> {
    let what = || format!("open {}", path.display());
    // Opening others may do something.
    let found = reach::find(path, true).to(what)?;
    let there = rustix::fs::fstat(&found).to(what)?;
    let is_device = there.st_mode & libc::S_IFMT == libc::S_IFCHR;
    let known = is_stateless(there.st_rdev) && (number == 0 || number == there.st_rdev);
    if !is_device || !known {
        let what = format!("{} is another device than it was", path.display());
        return Err(PluginError::Refused(what));
    }
    reach::again(&found, flags).to(what)
}

/// A device whose node has no name any more: by a new node, where this user may make one; else by
/// the usual one.
fn nameless(device: &Device, flags: OFlags) -> Result<OwnedFd, PluginError> {
    if !is_stateless(device.number) {
        return Err(damaged("a device that has a state"));
    }
    let folder = std::env::temp_dir();
    let made = (0..MAX_NAMES).map(|number| {
        let path = folder.join(format!(".kedge-{}-{number}", std::process::id()));
        let mode = Mode::from_raw_mode(device.mode & 0o777);
        (mknodat(CWD, &path, FileType::CharacterDevice, mode, device.number).map(|()| path), mode)
    });
    let made = made.into_iter().find(|(made, _)| !matches!(made, Err(Errno::EXIST)));
    if let Some((Ok(path), mode)) = made {
        // As it is, whatever this process masks out.
        let opened = chmodat(CWD, &path, mode, AtFlags::empty())
            .and_then(|()| open(&path, flags | OFlags::NOFOLLOW, Mode::empty()));
        fs::remove_file(&path).to(|| format!("remove {}", path.display()))?;
        if let Ok(opened) = opened {
            return Ok(opened);
        }
    }
    let index =
        STATELESS.iter().position(|(major, minor)| libc::makedev(*major, *minor) == device.number);
    let name = index.map(|index| NAMES[index]).ok_or_else(|| damaged("a device"))?;
    open_node(Path::new(name), device.number, flags)
}
