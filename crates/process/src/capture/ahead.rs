//! Memory of large processes that is written to the image before the pause, while they run: a clone
//! of them would stand still for its page tables. What they change from then on is told, as for an
//! image that builds on another one, and is in the process's own file, which builds on this one.

use super::changes::near;
use super::memory::{self, Chunk, Reader, Unmapped};
use super::objects::{self, Piece};
use super::{JOB_FILE, Once, Options, process_file};
use crate::EngineError;
use crate::maps;
use crate::proc;
use crate::track::{Pages, Run, View, common, watchable, without};
use kedge_image::{FileEntry, ImageWriter, ahead_of};
use libc::pid_t;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;

/// It is looked so often whether the program writes faster than this.
const LOOKS: usize = 8;
/// The part of what was written that may have changed meanwhile; if it is more, the clone is
/// cheaper.
const PART: u64 = 2;
/// Fewest bytes written that say anything about that.
const MIN_WRITTEN: u64 = 128 << 20;

/// The file of what was written. It goes away with this, unless it is finished.
#[derive(Debug)]
pub(crate) struct Ahead {
    path: PathBuf,
    writer: Option<ImageWriter>,
}

/// What is protected, and was not written all the same.
pub(crate) type Gaps = Vec<Run>;

impl Ahead {
    /// Makes the file on which the one named `name` is to build.
    fn create(options: &Options, name: &str) -> Result<Ahead, EngineError> {
        let name = ahead_of(name);
        let path = options.folder.join(&name);
        Ok(Ahead { writer: Some(options.create(&name)?), path })
    }

    /// Writes shared objects, all of whose mappings are protected: each number and views. What was
    /// not written, by number.
    pub(crate) fn of_objects(
        objects: &[(u64, Vec<View>)],
        options: &Options,
    ) -> Result<(Ahead, BTreeMap<u64, Gaps>), EngineError> {
        let ahead = Ahead::create(options, JOB_FILE)?;
        let Some(writer) = &ahead.writer else { return Ok((ahead, BTreeMap::new())) };
        let pieces = objects.iter().flat_map(|(number, views)| {
            objects::pieces(views, &objects::shown(views)).into_iter().map(|piece| (*number, piece))
        });
        let pieces: Vec<(u64, Piece)> = pieces.collect();
        writer.expect(pieces.iter().map(|(_, piece)| piece.chunk.length()).sum());
        let gaps = Mutex::new(BTreeMap::<u64, Gaps>::new());
        objects::write(
            &pieces,
            writer,
            (options.codec, Unmapped::Fails),
            |number, piece, error| match error {
                EngineError::Image(_) => Err(error),
                // It has ended, or maps something else by now.
                _ => {
                    let mut gaps = gaps.lock().unwrap_or_else(|poison| poison.into_inner());
                    gaps.entry(number).or_default().push(piece.place());
                    Ok(())
                }
            },
        )?;
        Ok((ahead, gaps.into_inner().unwrap_or_else(|poison| poison.into_inner())))
    }

    /// Protects all watched memory of `pid` and writes it, but for what others have
    /// written `once`; `None` if it changes too fast.
    pub(crate) fn of(
        pid: pid_t,
        options: &Options,
        once: &Once,
    ) -> Result<Option<(Ahead, Gaps)>, EngineError> {
        let ahead = Ahead::create(options, &process_file(pid))?;
        let Some(writer) = &ahead.writer else { return Ok(None) };
        let at = proc::reach(pid);
        let failed = |source| EngineError::System { pid, what: "see what it changes", source };
        let mut pages = Pages::of(at).map_err(failed)?;
        let (mut chunks, mut gaps) = (Vec::new(), Vec::new());
        for mapping in maps::of(at)?.iter().filter(|mapping| watchable(mapping)) {
            let whole = (mapping.start, mapping.end);
            // Nobody watches it, or only a part: there is another mapping by now.
            let Ok(Some(since)) = pages.since(whole, true) else {
                gaps.push(whole);
                continue;
            };
            let mut there = [since.written, since.unchanged].concat();
            there.sort_unstable();
            // What came between looking for it and protecting it.
            gaps.extend(without(&since.marked, &there));
            memory::split(mapping, &there, &mut chunks);
        }
        writer.expect(chunks.iter().map(Chunk::length).sum());
        let reader = Reader::of(at)?;
        let gaps = Mutex::new(gaps);
        let storing = once.storing(pid, writer, options.codec);
        let share = chunks.len().div_ceil(LOOKS).max(1);
        for (number, some) in chunks.chunks(share).enumerate() {
            memory::write_what_is_there(&reader, some, writer, &storing, &gaps)?;
            let written = &chunks[..number * share + some.len()];
            if changes_too_fast(&mut pages, written).map_err(failed)? {
                return Ok(None);
            }
        }
        let mut gaps = gaps.into_inner().unwrap_or_else(|poison| poison.into_inner());
        gaps.sort_unstable();
        storing.done(&[]);
        Ok(Some((ahead, gaps)))
    }

    /// Takes out what is not to be in the image, and sees that it is on the disk.
    pub(crate) fn finish(mut self, except: &[Run]) -> Result<Option<FileEntry>, EngineError> {
        let Some(writer) = self.writer.take() else { return Ok(None) };
        except.iter().try_for_each(|(start, end)| writer.forget(*start..*end))?;
        Ok(Some(writer.finish()?))
    }
}

/// Whether so much of the chunks has changed since it was protected that a clone is cheaper.
fn changes_too_fast(pages: &mut Pages, written: &[Chunk]) -> std::io::Result<bool> {
    let bytes = written.iter().map(Chunk::length).sum::<u64>();
    if bytes < MIN_WRITTEN {
        return Ok(false);
    }
    let runs: Vec<Run> = written.iter().map(|c| (c.address(), c.address() + c.length())).collect();
    let mut changed = 0;
    for near in near(runs.clone()) {
        match pages.written(near, false) {
            Ok(marked) => changed += common(&marked, &runs).iter().map(|(s, e)| e - s).sum::<u64>(),
            // It is not the mapping that it was.
            Err(_) => changed += near.1 - near.0,
        }
    }
    Ok(changed > bytes / PART)
}

impl Drop for Ahead {
    fn drop(&mut self) {
        if self.writer.is_some() {
            // What cannot be removed goes with the folder, or is no part of the image.
            let _ = fs::remove_file(&self.path);
        }
    }
}
