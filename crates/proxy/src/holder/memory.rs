//! A device's memory in places, by the contract that all devices fill.

use super::slots::LENGTH;
use super::waiting::Rooms;
use super::words::Words;
use kedge_cuda_types::CuError;
use kedge_cuda_types::arena::{SHARED_BASE, device_base};
use kedge_device::{Backend, Done, Host};
use kedge_holder::{PART, UNSHARED};
use kedge_protocol::{Copy3d, CtxId, OutputTarget, Shape, StreamId, StreamOp};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

const CTX: CtxId = CtxId(1);
const LEGACY: StreamId = StreamId(1);
/// What goes to the device, and what comes from it: a drain's reads pass the puts on the bus.
const PUTS: StreamId = StreamId(2);
const GETS: StreamId = StreamId(3);

/// What a device asks of a process that has no client.
#[derive(Debug)]
pub(super) struct MemoryHost(pub(super) Words);

impl Host for MemoryHost {
    fn read_client(&self, _: u64, _: &mut [u8]) -> Result<(), CuError> {
        Err(CuError::INVALID_VALUE)
    }
    fn write_client(&self, _: u64, _: &[u8]) -> Result<(), CuError> {
        Err(CuError::INVALID_VALUE)
    }
    fn host_function(&self, _: u64, done: Done) {
        done(Err(CuError::NOT_SUPPORTED));
    }
    fn output(&self, _: OutputTarget, _: &[u8]) {}
    fn fault(&self, _: CtxId, error: CuError) {
        self.log(&format!("the device failed: {error}"));
    }
    fn idle(&self) {}
    fn log(&self, line: &str) {
        self.0.say(line);
    }
}

/// Where an answer goes.
type Tell = Sender<Result<(), CuError>>;

/// What the thread that has the device is asked.
enum Task {
    Put { from: u64, place: u32, keep: u64, tell: Tell },
    Get { place: u32, offset: u64, to: u64, length: u64, tell: Tell },
    Free { place: u32, tell: Tell },
    Stands { tell: Sender<Result<Stands, CuError>> },
}

/// How a device stands.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stands {
    /// Bytes that are free; [`UNSHARED`] where no other process can have them.
    pub(super) free: u64,
    /// Bytes of it that are held.
    pub(super) held: u64,
}

/// The places of a device: one thread has it, as its contract asks; what it is asked waits for the
/// device and not for each other.
#[derive(Debug)]
pub(super) struct Memory(Sender<Task>);

impl Memory {
    /// Takes a new device into use, with the slots at their place.
    ///
    /// # Errors
    /// What the device has against it.
    pub(super) fn start(
        backend: Arc<dyn Backend>,
        exact: bool,
        rooms: Arc<Rooms>,
    ) -> Result<Memory, CuError> {
        let (sender, tasks) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        let work = move || {
            let (granted, busy) = (BTreeSet::new(), Busy::default());
            let device = Device { backend, exact, rooms, granted, busy };
            let ready = device.prepare();
            let failed = ready.is_err();
            // It waits for that.
            let _ = tell.send(ready);
            if !failed {
                device.work(&tasks);
            }
        };
        let thread = thread::Builder::new().name("device".into()).spawn(work);
        thread.map_err(|_| CuError::OPERATING_SYSTEM)?;
        told.recv().unwrap_or(Err(CuError::UNKNOWN))?;
        Ok(Memory(sender))
    }

    fn ask(&self, task: impl FnOnce(Tell) -> Task) -> Result<(), CuError> {
        let (tell, told) = mpsc::channel();
        self.0.send(task(tell)).map_err(|_| CuError::UNKNOWN)?;
        // The thread has gone, or the device has dropped what was to tell.
        told.recv().unwrap_or(Err(CuError::UNKNOWN))
    }

    /// Copies a part from the slot at `from` to a place. `keep` bytes of the device stay free.
    ///
    /// # Errors
    /// OUT_OF_MEMORY if the device has none for it; what it failed with.
    pub(super) fn put(&self, from: u64, place: u32, keep: u64) -> Result<(), CuError> {
        self.ask(|tell| Task::Put { from, place, keep, tell })
    }

    /// Returns how the device stands.
    ///
    /// # Errors
    /// What it failed with.
    pub(super) fn stands(&self) -> Result<Stands, CuError> {
        let (tell, told) = mpsc::channel();
        self.0.send(Task::Stands { tell }).map_err(|_| CuError::UNKNOWN)?;
        told.recv().unwrap_or(Err(CuError::UNKNOWN))
    }

    /// Copies bytes of a place, from `offset` on, to the slot at `to`.
    ///
    /// # Errors
    /// What the device failed with, or that it has not such a place.
    pub(super) fn get(&self, place: u32, offset: u64, to: u64, length: u64) -> Result<(), CuError> {
        self.ask(|tell| Task::Get { place, offset, to, length, tell })
    }

    /// Gives a place's memory back to the device.
    ///
    /// # Errors
    /// NOT_READY while bytes go there or come from there; what the device failed with.
    pub(super) fn free(&self, place: u32) -> Result<(), CuError> {
        self.ask(|tell| Task::Free { place, tell })
    }
}

fn address(place: u32) -> u64 {
    device_base(0) + u64::from(place) * PART
}

/// The device, as its thread has it.
struct Device {
    backend: Arc<dyn Backend>,
    exact: bool,
    /// Who else needs its memory.
    rooms: Arc<Rooms>,
    /// The places that have memory.
    granted: BTreeSet<u32>,
    /// Copies to and from each place that are not over: its memory stays as long.
    busy: Busy,
}

/// Copies at work, by place.
type Busy = Arc<Mutex<BTreeMap<u32, u32>>>;

fn lock(busy: &Busy) -> MutexGuard<'_, BTreeMap<u32, u32>> {
    busy.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_over(busy: &Busy, place: u32) {
    let mut busy = lock(busy);
    let left = busy.get(&place).map_or(0, |count| count.saturating_sub(1));
    match left {
        0 => busy.remove(&place),
        left => busy.insert(place, left),
    };
}

impl Device {
    fn prepare(&self) -> Result<(), CuError> {
        let backend = &*self.backend;
        backend.create_context(CTX, 0, LEGACY)?;
        for stream in [PUTS, GETS] {
            // Neither waits for the other one.
            backend.create_stream(stream, CTX, false, 0)?;
        }
        backend.share(SHARED_BASE, LENGTH)
    }

    fn work(mut self, tasks: &Receiver<Task>) {
        while let Ok(task) = tasks.recv() {
            match task {
                Task::Put { from, place, keep, tell } => match self.grant(place, keep) {
                    Ok(()) => self.copy(PUTS, place, (from, address(place)), PART, tell),
                    refused => answer(&tell, refused),
                },
                Task::Get { place, offset, to, length, tell } if self.granted.contains(&place) => {
                    self.copy(GETS, place, (address(place) + offset, to), length, tell);
                }
                // The device would fail for good.
                Task::Get { tell, .. } => answer(&tell, Err(CuError::INVALID_VALUE)),
                Task::Free { place, tell } => answer(&tell, self.give_back(place)),
                Task::Stands { tell } => {
                    // Who asked has gone with its connection.
                    let _ = tell.send(self.stands());
                }
            }
        }
    }

    fn stands(&self) -> Result<Stands, CuError> {
        let free = match self.backend.shared_as(0) {
            Some(_) => self.backend.free_memory(0)?,
            None => UNSHARED,
        };
        Ok(Stands { free, held: self.granted.len() as u64 * PART })
    }

    /// Has a place have memory for what is put there. Nothing is put while others need the device:
    /// seen here, nothing comes between their look at what is free and this one.
    fn grant(&mut self, place: u32, keep: u64) -> Result<(), CuError> {
        if self.rooms.rest() {
            return Err(CuError::OUT_OF_MEMORY);
        }
        if self.granted.contains(&place) {
            return Ok(());
        }
        if self.stands()?.free < keep.saturating_add(PART) {
            return Err(CuError::OUT_OF_MEMORY);
        }
        self.backend.grant(0, address(place), PART)?;
        if self.exact
            && let Err(error) = self.backend.map(CTX, address(place), PART)
        {
            self.backend.give_back(0, address(place), PART)?;
            return Err(error);
        }
        self.granted.insert(place);
        Ok(())
    }

    fn give_back(&mut self, place: u32) -> Result<(), CuError> {
        if lock(&self.busy).contains_key(&place) {
            return Err(CuError::NOT_READY);
        }
        if !self.granted.remove(&place) {
            return Ok(());
        }
        if self.exact {
            self.backend.unmap(address(place), PART)?;
        }
        self.backend.give_back(0, address(place), PART)
    }

    /// Copies from and to these addresses, one of which is in a place, and tells when that is over.
    fn copy(&self, stream: StreamId, place: u32, (from, to): (u64, u64), length: u64, tell: Tell) {
        let shape = Shape::line(length);
        let (src, dst) = (shape.packed_at(from), shape.packed_at(to));
        let copy = Copy3d { src, dst, width: length, height: 1, depth: 1 };
        *lock(&self.busy).entry(place).or_default() += 1;
        let busy = self.busy.clone();
        match self.backend.submit(stream, StreamOp::Copy { copy }) {
            Ok(()) => {
                let done = move |result| {
                    is_over(&busy, place);
                    answer(&tell, result);
                };
                self.backend.when_stream_idle(stream, Box::new(done));
            }
            refused => {
                is_over(&busy, place);
                answer(&tell, refused);
            }
        }
    }
}

fn answer(tell: &Tell, result: Result<(), CuError>) {
    // Who asked has gone with its connection.
    let _ = tell.send(result);
}
