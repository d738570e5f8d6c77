//! What a stopped process maps, as an image describes it. Most of it does not depend on the other
//! processes, so that several are described at once.

use super::lookup::{Files, Lookup};
use super::objects::Objects;
use crate::maps::Mapping;
use crate::plugins;
use crate::state::{Backing, KERNEL_MAPPINGS, MappedFile, Saved};
use crate::track::Shared;
use crate::vdso::{NAME as VDSO, Vdso};
use crate::{EngineError, aio, huge, maps};
use libc::pid_t;

/// What processes are described by.
#[derive(Clone, Copy)]
pub(super) struct By<'a> {
    pub(super) lookup: &'a Lookup,
    pub(super) descriptors: &'a plugins::Saved,
    /// As yet without what several processes share.
    pub(super) objects: &'a Objects,
}

/// The mappings of a process.
pub(super) struct Mapped {
    files: Vec<MappedFile>,
    saved: Vec<Saved>,
    /// The indices of those that belong to an object, whose numbers are not known yet.
    objects: Vec<usize>,
    /// Code and checksum of its vDSO.
    vdso: (Vec<u8>, u64),
}

impl Mapped {
    /// Describes the `mappings` of the process that its thread `pid` answers for.
    ///
    /// # Errors
    ///
    /// [`EngineError::Unsupported`], which names the mapping.
    pub(super) fn of<'a>(
        pid: pid_t,
        mappings: impl Iterator<Item = &'a Mapping>,
        vdso: &Vdso,
        by: By<'_>,
    ) -> Result<Mapped, EngineError> {
        let code = vdso.clean();
        let checksum = kedge_image::checksum(&code);
        let mut files = Files::new(by.lookup);
        let (mut saved, mut objects) = (Vec::new(), Vec::new());
        for mapping in mappings {
            // Segments first: a memfd may have a segment's id for its inode.
            let held = held(mapping, |device, inode| by.descriptors.description_of(device, inode));
            let backing = match (by.objects.segment(mapping), held) {
                (Some(id), _) => Backing::Segment(id),
                (None, Some(description)) => Backing::Description(description),
                (None, None) => match backing(pid, mapping, &mut files, checksum)? {
                    Some(backing) => backing,
                    None => {
                        objects.push(saved.len());
                        Backing::Object(0)
                    }
                },
            };
            saved.push(Saved {
                start: mapping.start,
                end: mapping.end,
                protection: mapping.protection,
                shared: mapping.shared,
                offset: mapping.offset,
                backing,
                flags: mapping.flags.clone(),
                name: mapping.given_name().map(str::to_owned),
                huge: huge::pages_of(mapping).unwrap_or(0),
                policy: None,
            });
        }
        Ok(Mapped { files: files.list, saved, objects, vdso: (code, checksum) })
    }

    /// Returns the files that the process `pid` maps, and its mappings, which are `mappings`, with
    /// what it shares with others.
    pub(super) fn numbered(
        self,
        pid: pid_t,
        mappings: &[Mapping],
        objects: &mut Objects,
        shared: &mut Shared,
    ) -> (Vec<MappedFile>, Vec<Saved>) {
        let Mapped { files, mut saved, objects: unnumbered, vdso: (code, checksum) } = self;
        for index in unnumbered {
            saved[index].backing = Backing::Object(objects.note(pid, &mappings[index], shared));
        }
        objects.note_vdso(checksum, code);
        (files, saved)
    }
}

/// Refuses what a running process maps and could not be saved, as [`Mapped::of`] would when it
/// stands still. Returns where it has memory to which nothing but mappings leads. `is_held` tells
/// whether the job has a file of this device and inode open.
///
/// # Errors
///
/// [`EngineError::Unsupported`], which names the mapping.
pub(super) fn look(
    pid: pid_t,
    mappings: &[Mapping],
    lookup: &Lookup,
    is_held: impl Fn(u64, u64) -> bool,
) -> Result<Vec<(u64, u64)>, EngineError> {
    let (mut files, mut nameless) = (Files::new(lookup), Vec::new());
    for mapping in mappings.iter().filter(|mapping| mapping.start < maps::TOP) {
        let segment = mapping.shared && mapping.name.starts_with("/SYSV");
        if segment || held(mapping, |device, inode| is_held(device, inode).then_some(())).is_some()
        {
            continue;
        }
        if backing(pid, mapping, &mut files, 0)?.is_none() {
            nameless.push((mapping.start, mapping.end));
        }
    }
    Ok(nameless)
}

/// What `description` knows of the file that a mapping is a mapping of: one of shared memory, or
/// one without a name. One that the process has closed is another matter.
fn held<T>(mapping: &Mapping, description: impl Fn(u64, u64) -> Option<T>) -> Option<T> {
    let (major, minor) = mapping.device.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    let device = libc::makedev(number(major)?, number(minor)?);
    let shared = mapping.shared && mapping.inode != 0 && mapping.path() != Some("/dev/zero");
    let kind = shared || mapping.deleted();
    kind.then(|| description(device, mapping.inode))?
}

/// What backs a mapping, where `vdso` is the checksum of the process's vDSO; `None` if that is an
/// object that others may share.
fn backing<'a>(
    pid: pid_t,
    mapping: &'a Mapping,
    files: &mut Files<'a>,
    vdso: u64,
) -> Result<Option<Backing>, EngineError> {
    let unsupported = |what: &str| {
        let name = &mapping.name;
        Err(EngineError::unsupported(pid, format!("it maps {name}, {what}")))
    };
    let name = mapping.name.as_str();
    if KERNEL_MAPPINGS.contains(&name) {
        let checksum = if name == VDSO { vdso } else { 0 };
        return Ok(Some(Backing::Kernel { name: name.into(), checksum }));
    }
    if mapping.inode == 0 {
        let plain =
            name.is_empty() || ["[heap]", "[stack]"].contains(&name) || name.starts_with("[anon:");
        return match (plain, mapping.shared) {
            (true, false) => Ok(Some(Backing::Anonymous)),
            _ => unsupported("which kedge cannot save yet"),
        };
    }
    if name.starts_with("anon_inode:") || name.starts_with("/SYSV") {
        return unsupported("which kedge cannot save yet");
    }
    if aio::is_ring(mapping) {
        return Ok(Some(Backing::Aio));
    }
    if files.is_device(mapping) {
        return unsupported("a device, whose memory cannot be saved");
    }
    match (files.index(mapping), mapping.shared, mapping.deleted()) {
        (Some(index), _, _) => Ok(Some(Backing::File(index))),
        (None, false, true) => Ok(Some(Backing::Anonymous)),
        (None, true, true) => Ok(None),
        (None, _, false) => unsupported("but another file has that name now: put the old one back"),
    }
}
