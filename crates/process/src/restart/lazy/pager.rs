//! The thread that brings the memory of one process.

use super::pieces::{Piece, Pieces};
use super::uffd::{Missing, Put, Told};
use super::{Awaited, DONE, progress};
use crate::EngineError;
use kedge_image::{Layers, PAGE};
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;

pub(in crate::restart) struct Pager {
    missing: Missing,
    layers: Arc<Layers>,
    pieces: Pieces,
    /// Pages that somebody waits for.
    waiting: VecDeque<u64>,
    /// The extent that was read last: by layer and offset in the file.
    read: Option<(usize, u64)>,
    bytes: Vec<u8>,
    scratch: Vec<u8>,
}

impl Pager {
    /// Brings what is awaited, on a thread of its own.
    pub(in crate::restart) fn start(awaited: Awaited) -> Result<(), EngineError> {
        let Awaited { missing, layers, pieces } = awaited;
        let (bytes, scratch) = (Vec::new(), Vec::new());
        let waiting = VecDeque::new();
        let mut pager = Pager { missing, layers, pieces, waiting, read: None, bytes, scratch };
        progress().under_way += 1;
        let work = move || {
            if let Err(failure) = pager.run() {
                progress().failure.get_or_insert(failure);
                // Nobody can go on without its memory; while it is watched, nobody does.
                // SAFETY: a plain call; this is the init of the job's own namespace, which it
                // spares.
                unsafe { libc::kill(-1, libc::SIGKILL) };
            }
            drop(pager);
            progress().under_way -= 1;
            DONE.notify_all();
        };
        let started = thread::Builder::new().name("memory".into()).spawn(work);
        started.map(drop).map_err(|source| {
            progress().under_way -= 1;
            EngineError::System { pid: 0, what: "start a thread for its memory", source }
        })
    }

    fn run(&mut self) -> Result<(), String> {
        loop {
            self.hear()?;
            if let Some(address) = self.waiting.pop_front() {
                self.serve(address)?;
            } else if let Some(piece) = self.pieces.take_first() {
                self.place(piece)?;
            } else {
                return Ok(());
            }
        }
    }

    /// Takes in all that the kernel has to tell.
    fn hear(&mut self) -> Result<(), String> {
        let failed = |error: std::io::Error| format!("cannot hear of its memory: {error}");
        while let Some(told) = self.missing.told().map_err(failed)? {
            match told {
                Told::Fault(address) => self.waiting.push_back(address),
                Told::Moved { from, to, length } => self.pieces.move_to(from, to, length),
                Told::Gone { start, end } => drop(self.pieces.take(start, end)),
                Told::Fork(missing) => {
                    let (layers, pieces) = (self.layers.clone(), self.pieces.clone());
                    let child = Awaited { missing, layers, pieces };
                    Pager::start(child).map_err(|error| error.to_string())?;
                }
            }
        }
        Ok(())
    }

    /// Brings the page at `address`, for which somebody waits.
    fn serve(&mut self, address: u64) -> Result<(), String> {
        let address = address & !(PAGE - 1);
        let put = match self.pieces.take_at(address) {
            Some(piece) => return self.place(piece),
            // It has come meanwhile, or was dropped.
            None => self.missing.put_zeros(address),
        };
        match put {
            Put::Later => self.waiting.push_back(address),
            Put::Failed(error) => return Err(failed(address, error)),
            Put::Done(_) | Put::Gone => {}
            Put::There => self.missing.wake(address),
        }
        Ok(())
    }

    /// Puts the bytes of `piece` where they belong; what cannot be yet is kept for later.
    fn place(&mut self, piece: Piece) -> Result<(), String> {
        self.read(&piece)?;
        let bytes = &self.bytes[piece.offset()..piece.offset() + piece.len()];
        let page = PAGE as usize;
        let (mut at, mut one) = (0, false);
        while at < bytes.len() {
            let address = piece.start + at as u64;
            let end = if one { at + page } else { bytes.len() };
            match self.missing.put(address, &bytes[at..end]) {
                Put::Done(count) => at += count as usize,
                Put::There => {
                    self.missing.wake(address);
                    at += page;
                }
                // The rest may lie in several mappings by now: each page for itself.
                Put::Gone if end - at > page => {
                    one = true;
                    continue;
                }
                Put::Gone => at += page,
                Put::Later => {
                    self.pieces.keep(&piece, address);
                    thread::yield_now();
                    return Ok(());
                }
                Put::Failed(error) => return Err(failed(address, error)),
            }
            one = false;
        }
        Ok(())
    }

    /// Reads and checks the extent that `piece` lies in, unless it was the last one.
    fn read(&mut self, piece: &Piece) -> Result<(), String> {
        let (layer, extent) = (piece.source.layer, &piece.source.extent);
        if self.read == Some((layer, extent.offset)) && self.bytes.len() as u64 == extent.decoded {
            return Ok(());
        }
        self.read = None;
        // Bounded by MAX_EXTENT, which the table was checked against.
        self.bytes.resize(extent.decoded as usize, 0);
        let file = self.layers.file(layer);
        let read = file.read(extent, &mut self.scratch, &mut self.bytes);
        read.map_err(|error| format!("memory that a program waits for cannot be had: {error}"))?;
        self.read = Some((layer, extent.offset));
        Ok(())
    }
}

fn failed(address: u64, error: i32) -> String {
    let error = std::io::Error::from_raw_os_error(error);
    format!("cannot put memory at {address:#x}, for which a program waits: {error}")
}
