//! Variables where they lay, although modules that were loaded before theirs are gone by now.
//!
//! A program knows where its variables are, and only the driver places them: each where, in the
//! order in which it looks, there is room first (seen with driver 580 on H200s: pools of 32 MiB, in
//! them chunks of 2 MiB that small variables share). A restart loads what is left of the modules.
//! Where others that have been unloaded since had the room before a variable, it would lie in
//! theirs: so something of ours lies there while its module is loaded.

use crate::NvidiaBackend;
use crate::context::Context;
use crate::modules::{Module, Room, RoomKind};
use kedge_cuda_types::CuError;
use kedge_device::Code;
use kedge_protocol::{LoadError, ModuleId};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Small variables share chunks of this size; others have some of their own.
const CHUNK: u64 = 2 << 20;
/// What variables are multiples of.
const GRANULE: u64 = 256;
/// Largest room that is taken at once, in bytes.
const MAX_ROOM_LEN: u64 = 32 << 20;
/// Most rooms that are taken for one module at a time.
const MAX_ROOMS: usize = 1024;
/// Most bytes of these rooms.
const MAX_BYTES: u64 = 1 << 30;
/// So often the module is loaded.
const MAX_LOADS: usize = 8;
/// How long one module may hold a restart up, with each kind of room: a driver that many processes
/// use needs a second where an idle one needs some milliseconds, and a restart that is refused
/// helps nobody. The first module that stays elsewhere ends all of this.
const STEER_TIMEOUT: Duration = Duration::from_secs(30);

/// A variable that the program knows the address of.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Known {
    pub(crate) name: String,
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
}

/// Room for variables, where the driver gives it. It is given back by being dropped.
trait Rooms {
    type Room;

    /// Room for a variable of so many bytes, and its address.
    fn take(&mut self, bytes: u64) -> Result<(u64, Self::Room), CuError>;

    /// From now on that of variables of another kind, which the driver places elsewhere. Whether
    /// there is one.
    fn change_kind(&mut self) -> bool;
}

/// The variables of what the driver has loaded.
pub(crate) trait Placed {
    /// The first of `known` that is not where it was, and where it is.
    fn elsewhere<'a>(&self, known: &'a [Known]) -> Option<(&'a Known, u64)>;
}

impl NvidiaBackend {
    /// Loads a module; during a restart such that its variables lie where the program knows them to
    /// be, if that can be had.
    pub(crate) fn place_module(
        &self,
        context: &Arc<Context>,
        id: ModuleId,
        code: &Code<Vec<u8>>,
    ) -> Result<Module, LoadError> {
        let driver = &self.shared.driver;
        let known = self.restoring().known.remove(&id).unwrap_or_default();
        let rooms = ContextRooms { backend: self, module: id, kind: RoomKind::Empty };
        let mut steering = Steering::new(rooms);
        let load = || self.managed().load(id, || Module::load(driver, context, code));
        let unload = |module: Module| {
            // One that cannot be unloaded takes room, no more.
            let _ = module.unload();
        };
        let loaded = load_steered(&known, &mut steering, load, unload)?;
        let Some(first) = &steering.first else { return Ok(loaded) };
        let told = match loaded.elsewhere(&known) {
            None => format!("{first}, but for {} rooms of ours", steering.kept.len()),
            Some((wanted, at)) => {
                // The restart will be refused: it need not try the same for all that follow.
                self.restoring().known.clear();
                format!("{first}; {} is at {at:#x} after {}", wanted.name, steering.tried)
            }
        };
        self.shared.host.log(&format!("module {}: {told}", id.0));
        Ok(loaded)
    }
}

/// Room in the current context.
struct ContextRooms<'a> {
    backend: &'a NvidiaBackend,
    module: ModuleId,
    kind: RoomKind,
}

impl Rooms for ContextRooms<'_> {
    type Room = Room;

    fn take(&mut self, bytes: u64) -> Result<(u64, Room), CuError> {
        let driver = &self.backend.shared.driver;
        self.backend.managed().load(self.module, || Room::take(driver, bytes, self.kind))
    }

    fn change_kind(&mut self) -> bool {
        std::mem::replace(&mut self.kind, RoomKind::Filled) == RoomKind::Empty
    }
}

/// Loads until the variables are where they were, or nothing more can be done about it: then with
/// those elsewhere.
fn load_steered<R: Rooms, P: Placed, E>(
    known: &[Known],
    steering: &mut Steering<R>,
    mut load: impl FnMut() -> Result<P, E>,
    unload: impl Fn(P),
) -> Result<P, E> {
    let mut steered = Vec::new();
    while steered.len() < MAX_LOADS {
        let loaded = load()?;
        let Some((wanted, at)) = loaded.elsewhere(known) else { return Ok(loaded) };
        unload(loaded);
        let found =
            || format!("{} would have been at {at:#x} instead of {:#x}", wanted.name, wanted.addr);
        steering.first.get_or_insert_with(found);
        let again = steered.contains(&wanted);
        let barred = if again { steering.block_room(at, wanted.bytes, known) } else { Ok(()) };
        if barred.and_then(|()| steering.clear(wanted, known)).unwrap_or(false) {
            steered.push(wanted);
        } else if steering.rooms.change_kind() {
            steering.begin();
            steered.clear();
        } else {
            break;
        }
    }
    // The module is needed all the same, and room for it.
    steering.begin();
    load()
}

struct Steering<R: Rooms> {
    rooms: R,
    kept: Vec<R::Room>,
    bytes: u64,
    end: Instant,
    /// What was elsewhere first, in words.
    first: Option<String>,
    tried: Tried,
}

/// What was done in vain.
#[derive(Debug, Default)]
struct Tried {
    takes: usize,
    rooms: usize,
    bytes: u64,
    /// Where the last room was given.
    last: u64,
    out_of_time: bool,
}

impl std::fmt::Display for Tried {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Tried { takes, rooms, bytes, last, out_of_time } = self;
        write!(f, "{takes} tries, the last at {last:#x}, {rooms} rooms of ours, {bytes} bytes")?;
        if *out_of_time { f.write_str(", out of time") } else { Ok(()) }
    }
}

impl<R: Rooms> Steering<R> {
    fn new(rooms: R) -> Steering<R> {
        let end = Instant::now() + STEER_TIMEOUT;
        Steering { rooms, kept: Vec::new(), bytes: 0, end, first: None, tried: Tried::default() }
    }

    /// Gives back what was taken, to begin anew.
    fn begin(&mut self) {
        self.tried.rooms += self.kept.len();
        self.tried.bytes += self.bytes;
        self.tried.out_of_time |= Instant::now() >= self.end;
        self.kept.clear();
        (self.bytes, self.end) = (0, Instant::now() + STEER_TIMEOUT);
    }

    fn take(&mut self, bytes: u64) -> Result<(u64, R::Room), CuError> {
        let (at, room) = self.rooms.take(bytes)?;
        self.tried.takes += 1;
        self.tried.last = at;
        Ok((at, room))
    }

    /// Whether `wanted`, one of `known`, would lie there if it came next. Room for the others is
    /// left.
    fn clear(&mut self, wanted: &Known, known: &[Known]) -> Result<bool, CuError> {
        while self.kept.len() < MAX_ROOMS && self.bytes < MAX_BYTES && Instant::now() < self.end {
            let (at, probe) = self.take(wanted.bytes)?;
            if at == wanted.addr {
                return Ok(true);
            }
            drop(probe);
            if !self.fill(at, wanted.bytes, known)? {
                break;
            }
        }
        Ok(false)
    }

    /// Takes as much of the room at `at`, where so many bytes would come, as none of `known` needs.
    /// Whether there was any.
    fn fill(&mut self, at: u64, wanted: u64, known: &[Known]) -> Result<bool, CuError> {
        let behind = known.iter().filter_map(|one| one.addr.checked_sub(at)).min();
        let gap = match behind {
            None => CHUNK - at % CHUNK,
            Some(gap) if gap < CHUNK => gap,
            Some(gap) => (gap - gap % CHUNK).min(MAX_ROOM_LEN),
        };
        if gap == 0 {
            return Ok(false);
        }
        let mut bytes = gap;
        while bytes > wanted.max(GRANULE) {
            let (got, room) = self.take(bytes)?;
            if got == at {
                self.keep(room, bytes);
                return Ok(true);
            }
            drop(room);
            bytes = (bytes / 2).next_multiple_of(GRANULE);
        }
        // Where it does not lie there, it is out of the way for the next.
        let bytes = wanted.min(gap);
        let (got, room) = self.take(bytes)?;
        let good = is_apart(got, bytes, known);
        if good {
            self.keep(room, bytes);
        }
        Ok(good)
    }

    /// Takes the room at `at`: the driver prefers it for a module, though not for what is ours.
    fn block_room(&mut self, at: u64, bytes: u64, known: &[Known]) -> Result<(), CuError> {
        let mut aside = Vec::new();
        for _ in 0..MAX_LOADS {
            let (got, room) = self.take(bytes)?;
            if is_apart(got, bytes, known) {
                self.keep(room, bytes);
            } else {
                aside.push(room);
            }
            if got == at {
                break;
            }
        }
        Ok(())
    }

    fn keep(&mut self, room: R::Room, bytes: u64) {
        self.bytes += bytes;
        self.kept.push(room);
    }
}

/// Whether none of `known` was there.
fn is_apart(at: u64, bytes: u64, known: &[Known]) -> bool {
    let apart = |one: &Known| {
        at.saturating_add(bytes) <= one.addr || one.addr.saturating_add(one.bytes) <= at
    };
    known.iter().all(apart)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::rc::Rc;

    const POOLS: [u64; 2] = [0x3_1400_0000, 0x2_0000_0000];
    const POOL: u64 = 32 << 20;

    /// A driver that gives the first room that fits, of the pools in their order.
    #[derive(Default)]
    struct Driver {
        /// By address.
        taken: BTreeMap<u64, u64>,
        takes: usize,
        /// Of small rooms, modules get the last that others have left in a chunk.
        contrary: bool,
    }

    impl Driver {
        fn place(&mut self, bytes: u64, of_module: bool) -> Result<u64, CuError> {
            self.takes += 1;
            let small = bytes < CHUNK;
            let (step, len) = match small {
                true => (GRANULE, bytes.next_multiple_of(GRANULE)),
                false => (CHUNK, bytes.next_multiple_of(CHUNK)),
            };
            let all = || POOLS.iter().flat_map(|pool| (*pool..pool + POOL).step_by(step as usize));
            let inside = |at: u64| {
                POOLS
                    .iter()
                    .any(|pool| (*pool..pool + POOL).contains(&at) && at + len <= pool + POOL)
            };
            let one_chunk = |at: u64| !small || at % CHUNK + len <= CHUNK;
            // Small ones lie in chunks that have such already, if they can.
            let shared = |at: u64| {
                self.taken.range(at - at % CHUNK..at - at % CHUNK + CHUNK).any(|one| *one.1 < CHUNK)
            };
            let free = |at: &u64| inside(*at) && one_chunk(*at) && self.is_free(*at, len);
            let mut holes = all().filter(|at| small && shared(*at)).filter(free);
            let hole = if self.contrary && of_module { holes.last() } else { holes.next() };
            let found = hole.or_else(|| {
                all().filter(|at| !small || at % CHUNK == 0 && self.is_free(*at, CHUNK)).find(free)
            });
            let at = found.ok_or(CuError::OUT_OF_MEMORY)?;
            self.taken.insert(at, len);
            Ok(at)
        }

        fn is_free(&self, at: u64, len: u64) -> bool {
            let before = self.taken.range(..at + len).next_back();
            before.is_none_or(|(start, bytes)| start + bytes <= at)
        }
    }

    type Shared = Rc<RefCell<Driver>>;

    struct Taken(Shared, u64);

    impl Drop for Taken {
        fn drop(&mut self) {
            self.0.borrow_mut().taken.remove(&self.1);
        }
    }

    struct Fakes(Shared);

    impl Rooms for Fakes {
        type Room = Taken;

        fn take(&mut self, bytes: u64) -> Result<(u64, Taken), CuError> {
            let at = self.0.borrow_mut().place(bytes, false)?;
            Ok((at, Taken(Rc::clone(&self.0), at)))
        }

        fn change_kind(&mut self) -> bool {
            false
        }
    }

    /// Variables with their names, in the order in which they are placed.
    struct Loaded(Vec<(String, Taken)>);

    impl Placed for Loaded {
        fn elsewhere<'a>(&self, known: &'a [Known]) -> Option<(&'a Known, u64)> {
            let place =
                |one: &Known| self.0.iter().find(|own| own.0 == one.name).map(|own| own.1.1);
            known
                .iter()
                .filter_map(|one| Some((one, place(one)?)))
                .find(|(one, at)| one.addr != *at)
        }
    }

    fn load_module(driver: &Shared, sizes: &[u64]) -> Loaded {
        let place = |(index, bytes): (usize, &u64)| {
            let at = driver.borrow_mut().place(*bytes, true).unwrap();
            (format!("v{index}"), Taken(Rc::clone(driver), at))
        };
        Loaded(sizes.iter().enumerate().map(place).collect())
    }

    fn known(module: &Loaded, sizes: &[u64]) -> Vec<Known> {
        let one = |((name, room), bytes): (&(String, Taken), &u64)| Known {
            name: name.clone(),
            addr: room.1,
            bytes: *bytes,
        };
        module.0.iter().zip(sizes).map(one).collect()
    }

    /// What a module of these variables is loaded as after those before it have been, of which
    /// `gone` are not at the restart: whether all is where it was, and how often the driver was
    /// asked for room.
    fn comes_back(before: &[&[u64]], gone: &[usize], sizes: &[u64]) -> (bool, usize) {
        let first = Shared::default();
        let _others: Vec<Loaded> = before.iter().map(|sizes| load_module(&first, sizes)).collect();
        let known = known(&load_module(&first, sizes), sizes);
        let second = Shared::default();
        let left = before.iter().enumerate().filter(|(index, _)| !gone.contains(index));
        let _others: Vec<Loaded> = left.map(|(_, sizes)| load_module(&second, sizes)).collect();
        let already = second.borrow().taken.len();
        let loaded = {
            let mut steering = Steering::new(Fakes(Rc::clone(&second)));
            load_steered(&known, &mut steering, || Ok::<_, ()>(load_module(&second, sizes)), drop)
                .unwrap()
        };
        assert_eq!(second.borrow().taken.len(), already + sizes.len(), "all room is given back");
        (loaded.elsewhere(&known).is_none(), second.borrow().takes)
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn nothing_is_done_where_they_lie_where_they_lay() {
        assert_eq!(comes_back(&[&[8], &[3 * MIB]], &[], &[100]), (true, 3));
        assert_eq!(comes_back(&[&[8], &[3 * MIB]], &[1], &[100]), (true, 2));
    }

    #[test]
    fn variables_lie_behind_what_is_gone() {
        // Small ones in chunks that others had opened, and in chunks of their own.
        assert!(comes_back(&[&[8], &[5000], &[8]], &[1], &[100]).0);
        assert!(comes_back(&[&[8], &[5000], &[8]], &[0, 1, 2], &[100]).0);
        assert!(comes_back(&[&[3 * MIB], &[2 * MIB], &[2 * MIB]], &[0, 1, 2], &[20_000]).0);
        assert!(comes_back(&[&[3 * MIB], &[2 * MIB], &[2 * MIB]], &[1], &[20_000]).0);
        // Long ones; in the other pool as well.
        assert!(comes_back(&[&[3 * MIB], &[2 * MIB]], &[0, 1], &[5 * MIB]).0);
        assert!(comes_back(&[&[30 * MIB], &[8], &[2 * MIB]], &[0, 1], &[5 * MIB]).0);
        assert!(comes_back(&[&[30 * MIB], &[8], &[2 * MIB]], &[0, 1, 2], &[700]).0);
    }

    #[test]
    fn all_variables_of_a_module_do() {
        assert!(comes_back(&[&[3 * MIB], &[600]], &[0, 1], &[3 * MIB, 8, 40]).0);
        assert!(comes_back(&[&[600], &[2 * MIB]], &[0, 1], &[8, 8, 3 * MIB]).0);
    }

    #[test]
    fn what_modules_are_given_first_is_barred() {
        let driver = Shared::default();
        let others =
            [100, 300, 100, 300, 100, CHUNK - 2048].map(|bytes| load_module(&driver, &[bytes]));
        let [_a, gone, _b, last, _c, _rest] = others;
        let wanted = known(&gone, &[300]);
        drop((gone, last));
        driver.borrow_mut().contrary = true;
        let mut steering = Steering::new(Fakes(Rc::clone(&driver)));
        let load = || Ok::<_, ()>(load_module(&driver, &[300]));
        let loaded = load_steered(&wanted, &mut steering, load, drop).unwrap();
        assert!(loaded.elsewhere(&wanted).is_none() && steering.kept.len() == 1);
    }

    #[test]
    fn it_does_not_take_long() {
        let (sound, takes) = comes_back(&[&[CHUNK - GRANULE]], &[0], &[8]);
        assert!(sound && takes < 30, "{takes}");
        let (sound, takes) = comes_back(&[&[30 * MIB], &[30 * MIB]], &[0, 1], &[8]);
        assert!(sound && takes < 60, "{takes}");
    }

    #[test]
    fn it_ends_where_nothing_helps() {
        let driver = Shared::default();
        let other = load_module(&driver, &[8]);
        let wanted = Known { name: "v0".to_owned(), addr: other.0[0].1.1, bytes: 8 };
        let mut steering = Steering::new(Fakes(Rc::clone(&driver)));
        let loaded = load_steered(
            &[wanted],
            &mut steering,
            || Ok::<_, ()>(load_module(&driver, &[8])),
            drop,
        );
        assert_ne!(loaded.unwrap().0[0].1.1, other.0[0].1.1);
    }
}
