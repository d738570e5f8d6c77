//! Writing what is held of a process, while the process goes on.

use super::changes::{self, Changes};
use super::flags::{self, Flags};
use super::names::Search;
use super::told::By;
use super::{Held, Memory, Once, Options, guards, inherited, memory, process_file, queries};
use crate::EngineError;
use crate::proc;
use crate::state::{self, ProcessState};
use crate::track::without;
use kedge_image::{FileEntry, ImageWriter};

impl Held {
    pub(super) fn builds_on_another(&self) -> bool {
        match &self.memory {
            Memory::Clone(_, changes) => changes.as_ref().is_some_and(|c| !c.unchanged.is_empty()),
            Memory::Copied { changes, .. } => !changes.unchanged.is_empty(),
        }
    }

    /// Looks for names in memory that is as in another image, and so is not written. Of a process
    /// that runs that is best done at once: it may change it.
    pub(super) fn sweep(&self, search: &Search) {
        let (pid, unchanged) = match &self.memory {
            Memory::Clone(clone, Some(changes)) => (clone.pid(), &changes.unchanged),
            Memory::Copied { changes, .. } => (proc::reach(self.state.ids.pid), &changes.unchanged),
            Memory::Clone(_, None) => return,
        };
        if search.is_anew() {
            // Of one that has ended, nothing is found.
            let _ = search.sweep(pid, unchanged);
        }
    }

    /// Adds what its clone has inherited to what is known of the process.
    pub(super) fn describe(&mut self, by: By<'_>) -> Result<(), EngineError> {
        let Memory::Clone(clone, _) = &self.memory else { return Ok(()) };
        let described = by.describe(clone.pid(), &mut self.state);
        described.map_err(|error| clone.why(self.state.ids.pid, error))
    }

    /// Writes the process's files: they are on the disk when this returns. What several processes
    /// have is stored once, in what is written now and in what was written ahead.
    pub(super) fn finish(
        mut self,
        options: &Options,
        search: &Search,
        (once, once_ahead): (&Once, &Once),
    ) -> Result<Vec<FileEntry>, EngineError> {
        let ahead = self.ahead.take();
        let (state, writer) = self.write(options, search, once)?;
        search.end();
        // What the kernel may drop is in no image. But another process has what was there when this
        // was written ahead, and keeps it.
        let referred = ahead.as_ref().map_or(Vec::new(), |_| once_ahead.referred(state.ids.pid));
        let except = without(&inherited::except(&state, &[]), &referred);
        let own = seal(&state, writer)?;
        let ahead = ahead.map(|ahead| ahead.finish(&except)).transpose()?.flatten();
        Ok(std::iter::once(own).chain(ahead).collect())
    }

    /// Writes its memory; what is to follow.
    fn write(
        self,
        options: &Options,
        search: &Search,
        once: &Once,
    ) -> Result<(ProcessState, ImageWriter), EngineError> {
        let Held { mut state, memory, mappings, writer, written, .. } = self;
        let (codec, pid) = (options.codec, state.ids.pid);
        let writer = writer.map_or_else(|| options.create(&process_file(pid)), Ok)?;
        let storing = once.storing(pid, &writer, codec);
        match memory {
            Memory::Clone(clone, changes) => {
                let write = || {
                    queries::ask_clone(&clone, &mappings, &mut state)?;
                    // It has not inherited those of the mappings that are written already.
                    state.guards.extend(guards::of(clone.pid(), &mappings)?);
                    state.guards.sort_unstable();
                    flags::add_not_inherited(&mut state);
                    let flags = Flags::of_clone(clone.pid());
                    let Some(changes) = changes else {
                        let chunks = memory::chunks(&clone, &mappings, &written)?;
                        writer.expect(chunks.iter().map(memory::Chunk::length).sum());
                        memory::write(&clone, &chunks, &writer, &storing, search)?;
                        flags.add_to(&mut state)?;
                        return forget(&state, &writer);
                    };
                    // Which mappings are wiped has to be known first.
                    flags.add_to(&mut state)?;
                    forget(&state, &writer)?;
                    let chunks = refer(changes, &state, &written, &writer)?;
                    memory::write(&clone, &chunks, &writer, &storing, search)
                };
                write().map_err(|error| clone.why(pid, error))?;
            }
            Memory::Copied { mut changes, flags } => {
                // While the flags are being told, which takes as long.
                changes.store(&writer, |chunk, bytes, packer| {
                    search.look(chunk.address(), bytes);
                    storing.store(chunk, bytes, packer)
                })?;
                flags.add_to(&mut state)?;
                forget(&state, &writer)?;
                changes.refer(0, &inherited::except(&state, &[]), &writer)?;
            }
        }
        storing.done(&inherited::except(&state, &[]));
        Ok((state, writer))
    }
}

/// Takes out what was stored and is not to be in the image.
fn forget(state: &ProcessState, writer: &ImageWriter) -> Result<(), EngineError> {
    let except = inherited::except(state, &[]);
    Ok(except.iter().try_for_each(|(start, end)| writer.forget(*start..*end))?)
}

/// The last of a process's file: its state.
fn seal(state: &ProcessState, writer: ImageWriter) -> Result<FileEntry, EngineError> {
    state.check()?;
    let mappings = state.mappings.iter().filter(|saved| !saved.shared);
    writer.check_within(0, &mappings.map(|s| (s.start, s.end)).collect::<Vec<_>>())?;
    writer.section(state::PROCESS_SECTION, &state::format(state)?)?;
    Ok(writer.finish()?)
}

/// Notes what has not changed; what has.
fn refer(
    changes: Changes,
    state: &ProcessState,
    written: &[u64],
    writer: &ImageWriter,
) -> Result<Vec<memory::Chunk>, EngineError> {
    let except = inherited::except(state, written);
    changes.refer(0, &except, writer)?;
    let mut chunks = changes.chunks;
    chunks.retain(|chunk| !changes::lies_in(chunk.address(), &except));
    Ok(chunks)
}
