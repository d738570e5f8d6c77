//! The flags of a process's mappings, such as those that madvise(2) leaves, and their policies.
//!
//! Only smaps and numa_maps tell them, and the kernel walks all of the process's memory for that.
//! So a stopped process's are told when it goes on already, and what it maps otherwise by then is
//! looked for in what was told just before the pause.

use super::inherited::NOT_INHERITED;
use crate::EngineError;
use crate::maps::{self, Mapping};
use crate::numa::{self, Policies};
use crate::proc;
use crate::state::{ProcessState, Saved};
use crate::track::Run;
use libc::pid_t;
use std::thread::{self, JoinHandle};

#[derive(Debug)]
pub(super) struct Flags {
    /// What is known already, in a pause.
    told: Told,
    telling: JoinHandle<Telling>,
}

#[derive(Debug)]
enum Told {
    /// Of a stopped process.
    Whole(Vec<Mapping>),
    /// Of one that has gone on since: as told before the pause.
    Before(Vec<Mapping>),
}

/// What is told while the process goes on already.
#[derive(Debug)]
struct Telling {
    /// `None` where the flags are known.
    flags: Option<Result<Vec<Mapping>, EngineError>>,
    /// Programs seldom say another one, so that it need not be known at any moment.
    policies: Policies,
}

impl Telling {
    fn begin(pid: pid_t, flags: bool) -> JoinHandle<Telling> {
        let telling = move || Telling { flags: flags.then(|| tell(pid)), policies: policies(pid) };
        thread::spawn(telling)
    }
}

impl Flags {
    /// Of a clone, which has inherited them: told while its memory is written.
    pub(super) fn of_clone(pid: pid_t) -> Flags {
        Flags { told: Told::Before(Vec::new()), telling: Telling::begin(pid, true) }
    }

    /// Of a stopped process that has those `mappings`; `before` was told just before the pause.
    /// From here on it may go on.
    pub(super) fn of_stopped(
        pid: pid_t,
        mappings: &[Mapping],
        before: Vec<Mapping>,
    ) -> Result<Flags, EngineError> {
        // What is new may be gone by the time that it is told.
        if mappings.iter().any(|m| find(&before, (m.start, m.end), m.shared).is_none()) {
            let told = Told::Whole(tell(pid)?);
            return Ok(Flags { told, telling: Telling::begin(pid, false) });
        }
        Ok(Flags { told: Told::Before(before), telling: Telling::begin(pid, true) })
    }

    /// Adds them to the mappings of `state`.
    pub(super) fn add_to(self, state: &mut ProcessState) -> Result<(), EngineError> {
        let (known, mut policies) = self.known(state.ids.pid)?;
        // That is what is told of mappings that have none.
        policies.retain(|_, policy| *policy != state.attributes.policy);
        for saved in &mut state.mappings {
            saved.policy = policies.remove(&saved.start);
            if let Some(found) = known.of((saved.start, saved.end), saved.shared) {
                // Some mappings' flags were asked for before.
                saved.flags.retain(|flag| !found.contains(flag));
                saved.flags.extend(found.iter().cloned());
            }
        }
        Ok(())
    }

    fn known(self, pid: pid_t) -> Result<(Known, Policies), EngineError> {
        let Telling { flags, policies } =
            self.telling.join().map_err(|_| EngineError::Ended { pid })?;
        let (before, now) = match self.told {
            Told::Whole(told) => (Vec::new(), Some(Ok(told))),
            Told::Before(before) => (before, flags),
        };
        let told = now.unwrap_or(Err(EngineError::Ended { pid }))?;
        Ok((Known { before, told }, policies))
    }
}

struct Known {
    before: Vec<Mapping>,
    told: Vec<Mapping>,
}

impl Known {
    fn of(&self, place: Run, shared: bool) -> Option<&[String]> {
        let exact = find(&self.told, place, shared).filter(|at| (at.start, at.end) == place);
        exact.or_else(|| find(&self.before, place, shared)).map(|found| &found.flags[..])
    }
}

fn tell(pid: pid_t) -> Result<Vec<Mapping>, EngineError> {
    // The thread by which it is reached may end while they are told.
    let first = proc::reach(pid);
    match maps::with_flags(first) {
        Err(EngineError::Ended { .. }) if proc::reach(pid) != first => {
            maps::with_flags(proc::reach(pid))
        }
        told => told,
    }
}

/// The policies of what `pid` maps: none on a kernel that knows no nodes, and none of one that has
/// ended.
fn policies(pid: pid_t) -> Policies {
    numa::told(&proc::text(proc::reach(pid), "numa_maps").unwrap_or_default())
}

/// Adds the flags of the mappings that a clone of `state`'s process has not inherited, as the
/// process has them by now: it goes on already. Where the process has something else mapped by now,
/// the flags stay as they were told.
pub(super) fn add_not_inherited(state: &mut ProcessState) {
    let is_missing = |saved: &Saved| saved.flags.iter().any(|flag| flag == NOT_INHERITED);
    if !state.mappings.iter().any(is_missing) {
        return;
    }
    // Of one that has ended, nothing is told.
    let Ok(told) = tell(state.ids.pid) else { return };
    for saved in state.mappings.iter_mut().filter(|saved| is_missing(saved)) {
        let place = (saved.start, saved.end);
        let found = find(&told, place, saved.shared);
        let same = found.filter(|at| {
            (at.start, at.end) == place && at.flags.iter().any(|flag| flag == NOT_INHERITED)
        });
        if let Some(found) = same {
            saved.flags.retain(|flag| !found.flags.contains(flag));
            saved.flags.extend(found.flags.iter().cloned());
        }
    }
}

/// The mapping at that place, or the one that it was a moment before it was cut, joined or made
/// longer: its flags stay as they are. `mappings` are in order.
fn find(mappings: &[Mapping], (start, end): Run, shared: bool) -> Option<&Mapping> {
    let from = mappings.partition_point(|mapping| mapping.end <= start);
    let met = mappings[from..].iter().take_while(|mapping| mapping.start < end);
    let mut alike = met.filter(|mapping| mapping.shared == shared);
    let same = alike.clone().find(|mapping| (mapping.start, mapping.end) == (start, end));
    same.or_else(|| alike.next())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(line: &str, flags: &str) -> Mapping {
        let mapping = Mapping::parse(line).unwrap();
        Mapping { flags: vec![flags.to_owned()], ..mapping }
    }

    /// Of what the process maps no more when it goes on, and of what it mapped just before it
    /// stopped.
    #[test]
    fn flags_are_those_that_there_were_in_the_pause() {
        const LENGTH: u64 = 16 * kedge_image::PAGE;
        let own = std::process::id() as pid_t;
        for is_new in [false, true] {
            let (access, flags) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: a new mapping, wherever the kernel puts it, that is wiped by a fork.
            let start = unsafe {
                let at = libc::mmap(std::ptr::null_mut(), LENGTH as usize, access, flags, -1, 0);
                assert_eq!(libc::madvise(at, LENGTH as usize, libc::MADV_WIPEONFORK), 0);
                at as u64
            };
            let place = (start, start + LENGTH);
            let mappings = maps::of(own).unwrap();
            let mut before = maps::with_flags(own).unwrap();
            before.retain(|mapping| !is_new || mapping.start != start);
            let telling = Flags::of_stopped(own, &mappings, before).unwrap();
            // SAFETY: nobody else knows of it.
            unsafe { libc::munmap(start as *mut libc::c_void, LENGTH as usize) };
            let (known, _) = telling.known(own).unwrap();
            let found = known.of(place, false).expect("its flags");
            assert!(found.iter().any(|flag| flag == "wf"), "{is_new}: {found:?}");
        }
    }

    #[test]
    fn a_mapping_is_known_by_its_place_or_a_part_of_it() {
        let before = [
            mapping("1000-4000 rw-p 00000000 00:00 0 ", "hg"),
            mapping("4000-6000 rw-p 00000000 00:00 0 ", "wf"),
            mapping("9000-a000 rw-s 00000000 00:01 7 /dev/zero (deleted)", "dc"),
        ];
        let flags = |run, shared| find(&before, run, shared).map(|found| found.flags[0].as_str());
        assert_eq!(flags((0x4000, 0x6000), false), Some("wf"));
        // Cut, and made longer.
        assert_eq!(flags((0x2000, 0x3000), false), Some("hg"));
        assert_eq!(flags((0x5000, 0x9000), false), Some("wf"));
        assert_eq!(flags((0x8000, 0xb000), true), Some("dc"));
        for new in [((0x7000, 0x9000), false), ((0x9000, 0xa000), false), ((0xb000, 0xc000), true)]
        {
            assert_eq!(flags(new.0, new.1), None, "{new:x?}");
        }
    }
}
