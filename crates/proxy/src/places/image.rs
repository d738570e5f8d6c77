//! Images of devices of several places: a file for each place, by its executor's own way, and one
//! that names them.

use super::{Place, Places, not_several};
use crate::error::CaptureError;
use crate::executor::{Build, Captured, Identity, NearEnd, Nearby, NewFiles, Room, Stored};
use kedge_device::Drained;
use kedge_gpu_image::{PLACES_SECTION, PLACES_VERSION, SavedPlace, SavedPlaces, place_file};
use kedge_image::{Choice, ImageWriter};
use kedge_protocol::DeviceInfo;
use kedge_transport::ATTRIBUTE_PLACE;
use kedge_wire::{List, Text};
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{panic, thread};

/// What has no image as yet.
const OF_GPUS: &str = "a checkpoint of a GPU beside other places' devices";

/// The checksums of the newest image's files: the client's, and each place's, on which the next
/// may build.
#[derive(Debug, Default)]
pub(super) struct Newest(Mutex<Option<(u64, Vec<u64>)>>);

impl Newest {
    fn locked(&self) -> MutexGuard<'_, Option<(u64, Vec<u64>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the file of a place that goes with the client's file `parent`.
    fn of_place(&self, parent: Option<u64>, at: usize) -> Option<u64> {
        let newest = self.locked();
        let (_, places) = newest.as_ref().filter(|(client, _)| Some(*client) == parent)?;
        places.get(at).copied()
    }
}

impl Place {
    /// Returns what a capture of this place is told of the client: these devices alone, as it was
    /// told of them.
    fn identity(&self, of: &Identity) -> Identity {
        let told = |window: &u32| of.devices.get(*window as usize).cloned();
        let devices = self.windows.iter().filter_map(told).map(without_place).collect();
        Identity { gpu: self.gpu.clone(), devices, ..of.clone() }
    }
}

/// Which place it is in is nothing that a device says of itself.
fn without_place(device: DeviceInfo) -> DeviceInfo {
    let attributes = device.attributes.iter().filter(|(id, _)| *id != ATTRIBUTE_PLACE);
    let attributes = List::new(attributes.copied().collect()).unwrap_or_default();
    DeviceInfo { attributes, ..device }
}

impl Places {
    /// Takes what all places hold: nothing happens on any of them meanwhile.
    pub(super) fn take(
        &mut self,
        near: &NearEnd<'_>,
        on: Build,
    ) -> Result<Box<dyn Captured>, CaptureError> {
        if self.places.iter().any(|place| !place.holds) {
            return Err(not_several(OF_GPUS).into());
        }
        let Identity { gpu, hello, client_memory, devices } = near.identity.clone();
        let saved = SavedPlaces {
            version: PLACES_VERSION,
            gpu: Text::truncated(gpu),
            hello,
            driver_version: self.driver_version,
            client_memory,
            devices: List::new(devices)?,
            position: near.position,
            places: List::default(),
        };
        let newest = &self.newest;
        let captured = all(&mut self.places, Place::is_far, |at, place| {
            let identity = &place.identity(near.identity);
            let near = NearEnd { identity, shared: near.shared, position: near.position };
            place.executor.capture(&near, Build { parent: newest.of_place(on.parent, at), ..on })
        });
        let mut places = Vec::new();
        for (place, captured) in self.places.iter().zip(captured) {
            let captured = captured
                .inspect_err(|error| self.hub.log(&format!("the devices of {place}: {error}")))?;
            places.push(CapturedPlace { windows: place.windows.clone(), captured });
        }
        Ok(Box::new(CapturedPlaces { saved, places, newest: newest.clone() }))
    }
}

/// Does something with each of `items`: with those that are elsewhere at once, each on a thread of
/// its own, while this thread does it with the others in turn.
pub(super) fn all<T: Send, R: Send>(
    items: &mut [T],
    is_far: impl Fn(&T) -> bool,
    work: impl Fn(usize, &mut T) -> R + Sync,
) -> Vec<R> {
    let far: Vec<bool> = items.iter().map(is_far).collect();
    let items: Vec<Mutex<&mut T>> = items.iter_mut().map(Mutex::new).collect();
    let run = |at: usize| work(at, &mut items[at].lock().unwrap_or_else(PoisonError::into_inner));
    let mut done: Vec<Option<R>> = items.iter().map(|_| None).collect();
    thread::scope(|scope| {
        let (mut threads, mut here) = (Vec::new(), Vec::new());
        for at in 0..items.len() {
            let thread = || thread::Builder::new().spawn_scoped(scope, move || run(at));
            // Where there can be no more threads, it is done here.
            match far[at].then(thread).and_then(Result::ok) {
                Some(thread) => threads.push((at, thread)),
                None => here.push(at),
            }
        }
        here.into_iter().for_each(|at| done[at] = Some(run(at)));
        for (at, thread) in threads {
            let ended = thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
            done[at] = Some(ended);
        }
    });
    done.into_iter().flatten().collect()
}

/// What the devices of all places held at one moment.
struct CapturedPlaces {
    saved: SavedPlaces,
    places: Vec<CapturedPlace>,
    newest: Arc<Newest>,
}

struct CapturedPlace {
    windows: Vec<u32>,
    captured: Box<dyn Captured>,
}

impl Captured for CapturedPlaces {
    fn bytes(&self) -> u64 {
        let bytes = |place: &CapturedPlace| place.captured.bytes();
        self.places.iter().map(bytes).fold(0, u64::saturating_add)
    }

    fn beside(&self) -> usize {
        self.places.len()
    }

    fn write(self: Box<Self>, to: NewFiles, codec: Choice) -> Result<Stored, CaptureError> {
        let CapturedPlaces { mut saved, places, newest } = *self;
        let NewFiles { name, own, beside: files } = to;
        if files.len() != places.len() {
            return Err(CaptureError::Files { needs: places.len(), got: files.len() });
        }
        let (mut named, mut beside) = (Vec::new(), Vec::new());
        let (mut builds, mut drained) = (false, Drained::default());
        for (windows, stored) in write_all(places, files, &name, codec) {
            let Stored { entry, builds: this, drained: from, .. } = stored?;
            named.push(SavedPlace {
                windows: List::new(windows)?,
                file: Text::new(entry.name.clone())?,
                bytes: entry.bytes,
                checksum: entry.checksum,
            });
            beside.push(entry);
            builds |= this;
            drained.bytes = drained.bytes.saturating_add(from.bytes);
            drained.time = drained.time.max(from.time);
        }
        saved.places = List::new(named)?;
        let mut section = Vec::new();
        kedge_wire::encode(&saved, &mut section);
        let writer = ImageWriter::to_file(own, name)?;
        writer.section(PLACES_SECTION, &section)?;
        let entry = writer.finish()?;
        let checksums = beside.iter().map(|entry| entry.checksum).collect();
        *newest.locked() = Some((entry.checksum, checksums));
        Ok(Stored { entry, beside, builds, drained })
    }

    fn nearby(&self) -> Result<&dyn Nearby, &'static str> {
        Err("its devices are of several places")
    }
}

/// Writes each place's file, all at once: their bytes come over lines of their own.
fn write_all(
    places: Vec<CapturedPlace>,
    files: Vec<File>,
    name: &str,
    codec: Choice,
) -> Vec<(Vec<u32>, Result<Stored, CaptureError>)> {
    let mut places: Vec<_> = places.into_iter().zip(files).map(Some).collect();
    let written = all(
        &mut places,
        |_| true,
        |at, place| {
            let (CapturedPlace { windows, captured }, own) = place.take()?;
            let to = NewFiles { name: place_file(name, at), own, beside: Vec::new() };
            Some((windows, captured.write(to, codec)))
        },
    );
    written.into_iter().flatten().collect()
}

/// Makes room on all places.
pub(super) struct Rooms(pub(super) Vec<Arc<dyn Room>>);

impl Room for Rooms {
    fn prepare(&self, track: bool, full: bool) -> Result<(), CaptureError> {
        let mut rooms = self.0.clone();
        let made = all(&mut rooms, |_| true, |_, room| room.prepare(track, full));
        made.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_with_all_is_in_order() {
        let here = thread::current().id();
        let mut numbers = [3, 40, 5, 60];
        let done = all(
            &mut numbers,
            |number| *number < 10,
            |at, number| {
                *number += 1;
                (at, *number, thread::current().id() == here)
            },
        );
        assert_eq!(done, [(0, 4, false), (1, 41, true), (2, 6, false), (3, 61, true)]);
    }
}
