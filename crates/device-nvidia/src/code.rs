//! Addresses of functions in modules' variables. Nothing makes the driver place code where it was
//! (seen with NCCL's table of functions on two H200s, driver 580): where it lies elsewhere after a
//! restart, such words become the addresses of the same functions there.

use crate::NvidiaBackend;
use crate::context::Context;
use crate::driver::check;
use crate::modules::{Module, Variable};
use crate::notes::{Moved, too_many};
use crate::pinned::SLOT;
use kedge_cuda_types::CuError;
use kedge_device::{Object, SnapshotError};
use kedge_protocol::ModuleId;
use kedge_wire::{List, Text, wire};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// No two functions of a small module are further apart.
const NEAR: u64 = 16 << 20;
/// Words that are no further apart are read together.
const GAP: u64 = 4096;

wire! {
    /// The words of one variable that began as addresses of functions.
    #[derive(Debug, Clone, PartialEq)]
    pub struct CodeTable {
        pub module: ModuleId,
        pub name: Text<65536>,
        /// Where in the variable, and its value.
        pub words: List<(u64, u64), 1_048_576>,
    }
}

/// By variable: where in it which address of a function is to be.
pub(crate) type Corrections = HashMap<(ModuleId, String), Vec<(u64, u64)>>;

/// What must be known of a module's functions after a restart: these words of its variables, as
/// they are now.
pub(crate) fn tables(
    backend: &NvidiaBackend,
    id: ModuleId,
    module: &Module,
    placed: &[Variable],
) -> Result<Vec<CodeTable>, SnapshotError> {
    let symbols = module.symbols();
    let Some(Ok(symbols)) = symbols.get() else { return Ok(Vec::new()) };
    let mut all = Vec::new();
    for variable in placed {
        let Some(offsets) = symbols.code_words.get(&variable.name) else { continue };
        let inside = offsets.iter().filter(|at| at.saturating_add(8) <= variable.bytes);
        let offsets: Vec<u64> = inside.copied().collect();
        let values = backend.words(&module.ctx, variable.addr, &offsets)?;
        let words = List::new(offsets.into_iter().zip(values).collect()).map_err(too_many)?;
        let name = Text::new(variable.name.clone()).map_err(too_many)?;
        all.push(CodeTable { module: id, name, words });
    }
    Ok(all)
}

impl NvidiaBackend {
    /// Words of 64 bits of a variable at `base`, of which `offsets` are in ascending order.
    fn words(&self, ctx: &Arc<Context>, base: u64, offsets: &[u64]) -> Result<Vec<u64>, CuError> {
        let driver = &*self.shared.driver;
        let held = ctx.hold()?;
        let stream = held.streams().bus;
        let mut slot = self.shared.slots.take(ctx)?;
        let mut read = || {
            let mut words = Vec::with_capacity(offsets.len());
            let near = |a: &u64, b: &u64| b - a <= GAP;
            for run in offsets.chunk_by(near).flat_map(|run| run.chunks(SLOT / GAP as usize)) {
                let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
                let room = &mut slot.bytes()[..(last - first) as usize + 8];
                let to = room.as_mut_ptr().cast();
                // SAFETY: the variable's bytes, as the caller has checked; a pinned buffer of that
                // length, which is waited for.
                unsafe {
                    check((driver.cuMemcpyDtoHAsync_v2)(to, base + first, room.len(), stream))?;
                    check((driver.cuStreamSynchronize)(stream))?;
                }
                let word = |at: &u64| room.get((at - first) as usize..)?.first_chunk().copied();
                words.extend(run.iter().filter_map(word).map(u64::from_le_bytes));
            }
            Ok(words)
        };
        let words = read();
        self.shared.slots.put(slot);
        words
    }

    /// A restart: finds out where the functions of these tables are now, before any bytes are put
    /// back. What was a function's address and is none any more is added to `moved`.
    pub(crate) fn find_code(
        &self,
        tables: &[CodeTable],
        mut locate: impl FnMut(ModuleId, &str) -> Result<(Arc<Context>, u64, u64), CuError>,
        moved: &mut Vec<Moved>,
    ) -> Result<Corrections, SnapshotError> {
        let mut corrections = Corrections::new();
        for tables in tables.chunk_by(|a, b| a.module == b.module) {
            let mut pairs = Vec::new();
            for table in tables {
                let (ctx, addr, bytes) = locate(table.module, &table.name)?;
                let offsets: Vec<u64> = table.words.iter().map(|word| word.0).collect();
                let ascend = offsets.is_sorted_by(|a, b| a < b);
                if !ascend || offsets.last().is_some_and(|at| at.saturating_add(8) > bytes) {
                    return Err(CuError::INVALID_VALUE.into());
                }
                let here = self.words(&ctx, addr, &offsets)?;
                pairs.extend(table.words.iter().map(|word| word.1).zip(here));
            }
            let module = tables.first().map_or(ModuleId(0), |table| table.module);
            let Some(to) = translation(&pairs).ok_or_else(|| unknown(module))? else { continue };
            // Functions that lie in the context's own memory often lie where they lay.
            let elsewhere = to.iter().filter(|(was, now)| was != now);
            self.shared.host.log(&format!(
                "the driver has placed {} of {} functions of module {} elsewhere: words of its variables that are their \
                 addresses follow them",
                elsewhere.clone().count(),
                to.len(),
                module.0
            ));
            moved.extend(elsewhere.map(|(was, now)| Moved {
                range: *was..was.saturating_add(1),
                name: format!("a function of module {}", module.0),
                to: *now,
            }));
            for table in tables {
                let follow = |(at, was): &(u64, u64)| (*at, to.get(was).copied().unwrap_or(0));
                let words = table.words.iter().map(follow).collect();
                corrections.insert((module, table.name.to_string()), words);
            }
        }
        Ok(corrections)
    }
}

fn unknown(module: ModuleId) -> SnapshotError {
    let message = format!(
        "the driver has placed the code of module {} elsewhere, and which functions its variables point to cannot be told: \
         restart with the driver and the GPU model of the checkpoint",
        module.0
    );
    SnapshotError::new(CuError::INVALID_ADDRESS_SPACE, message)
}

/// Where each function is now, by where it was, from pairs of a word as it was and as the driver
/// has made it here: the program may have changed some of the former. `Some(None)` if all are where
/// they were; `None` if that cannot be told.
fn translation(pairs: &[(u64, u64)]) -> Option<Option<BTreeMap<u64, u64>>> {
    let was: BTreeSet<u64> = pairs.iter().map(|pair| pair.0).filter(|was| *was != 0).collect();
    let here: HashSet<u64> = pairs.iter().map(|pair| pair.1).filter(|now| *now != 0).collect();
    if was.iter().all(|was| here.contains(was)) {
        return Some(None);
    }
    let both = || pairs.iter().filter(|(was, now)| *was != 0 && *now != 0);
    if was.len() == 1 {
        // A function that the module has no other word for, or code that lies elsewhere.
        return both().all(|(was, now)| was.abs_diff(*now) < NEAR).then_some(None);
    }
    let distances: BTreeSet<u64> = both().map(|(was, now)| now.wrapping_sub(*was)).collect();
    let fits = |by: &u64| was.iter().all(|was| here.contains(&was.wrapping_add(*by)));
    let mut fitting = distances.into_iter().filter(fits);
    if let (Some(by), None) = (fitting.next(), fitting.next()) {
        return Some(Some(was.iter().map(|was| (*was, was.wrapping_add(by))).collect()));
    }
    one_to_one(both().copied()).filter(|to| was.iter().all(|was| to.contains_key(was))).map(Some)
}

/// If nobody has changed any of them, the same functions are the same.
fn one_to_one(pairs: impl Iterator<Item = (u64, u64)>) -> Option<BTreeMap<u64, u64>> {
    let (mut to, mut back) = (BTreeMap::new(), BTreeMap::new());
    for (was, now) in pairs {
        if *to.entry(was).or_insert(now) != now || *back.entry(now).or_insert(was) != was {
            return None;
        }
    }
    Some(to)
}

/// An object's bytes from `start` on, with `value` of each address of a function in place of what
/// it was.
pub(crate) fn corrected<'a>(
    corrections: &Corrections,
    object: &Object,
    start: u64,
    bytes: &'a [u8],
    value: impl Fn(u64) -> u64,
) -> Cow<'a, [u8]> {
    let Object::Variable { module, name } = object else { return bytes.into() };
    // Most restarts have none.
    if corrections.is_empty() {
        return bytes.into();
    }
    let Some(words) = corrections.get(&(*module, name.clone())) else { return bytes.into() };
    let mut all = bytes.to_vec();
    for (at, word) in words {
        let inside = at.checked_sub(start).and_then(|at| all.get_mut(at as usize..));
        if let Some(here) = inside.and_then(|rest| rest.first_chunk_mut()) {
            *here = value(*word).to_le_bytes();
        }
    }
    all.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to(pairs: &[(u64, u64)]) -> Option<BTreeMap<u64, u64>> {
        translation(pairs).expect("it can be told")
    }

    #[test]
    fn code_that_stays_needs_nothing() {
        assert_eq!(to(&[]), None);
        assert_eq!(to(&[(0x100, 0x100), (0x180, 0x180), (0, 0)]), None);
        // The program has exchanged two, and taken one away.
        assert_eq!(to(&[(0x180, 0x100), (0x100, 0x180), (0, 0x200)]), None);
        // It has chosen one that no other word has.
        assert_eq!(to(&[(0x180, 0x100)]), None);
    }

    #[test]
    fn code_that_moved_as_a_whole_is_found_by_most_words() {
        let by = 0x7000_0000;
        let expected = BTreeMap::from([(0x100, by + 0x100), (0x180, by + 0x180)]);
        // Null where there is no such function here, as in NCCL's table.
        let whole = [(0x100, by + 0x100), (0, 0), (0x180, by + 0x180)];
        assert_eq!(to(&whole), Some(expected.clone()));
        // The program has chosen another for the third.
        let chosen = [whole[0], whole[2], (0x180, by + 0x100), (0, by + 0x180)];
        assert_eq!(to(&chosen), Some(expected));
    }

    #[test]
    fn functions_that_moved_each_by_itself_are_found_if_nobody_has_changed_them() {
        let pairs = [(0x100, 0x9100), (0x180, 0x5180), (0x100, 0x9100)];
        assert_eq!(to(&pairs), Some(BTreeMap::from([(0x100, 0x9100), (0x180, 0x5180)])));
        assert_eq!(translation(&[pairs[0], pairs[1], (0x180, 0x9100)]), None);
        // Chosen by the program, of a function that was not there at first.
        assert_eq!(translation(&[pairs[0], pairs[1], (0x200, 0)]), None);
        assert_eq!(translation(&[(0x100, 0x100 + NEAR)]), None);
    }

    #[test]
    fn words_are_corrected_in_any_part_of_a_variable() {
        let (module, name) = (ModuleId(3), "table".to_owned());
        let words = vec![(8, 0x0102), (24, 0x0304)];
        let corrections = Corrections::from([((module, name.clone()), words)]);
        let object = Object::Variable { module, name };
        let same = |word| word;
        let whole = corrected(&corrections, &object, 0, &[9; 40], same).into_owned();
        assert_eq!((whole[7], &whole[8..16]), (9, &0x0102u64.to_le_bytes()[..]));
        assert_eq!((&whole[24..32], whole[32]), (&0x0304u64.to_le_bytes()[..], 9));
        let tail = corrected(&corrections, &object, 16, &[9; 12], same).into_owned();
        assert_eq!(tail, [9; 12], "a word that is not whole in it");
        let memory = corrected(&corrections, &Object::Memory, 8, &[9; 8], same);
        assert!(matches!(memory, Cow::Borrowed(_)));
    }
}
