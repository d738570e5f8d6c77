//! What programs ask of a file by extended attributes that no file has: how much of it is not on a
//! disk below, how much of that no partner has either, and that it be below before it counts as
//! drained. kedge's images do.

use crate::engine::Engine;
use crate::file::{CachedFile, Keeping, Key};
use crate::partner::Link;
use crate::tier::lock;
use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Tells how many bytes of a file are not below yet, as a decimal number.
const UNDRAINED: &str = "kedge.cache.undrained";
/// Tells how many of those bytes a connected partner does not have as they are here: as many are
/// lost with this node.
const ALONE: &str = "kedge.cache.alone";
/// Has each part of an open file synced below before it counts as drained: `synced`, or `last` for
/// a file that is not drained before all others in its folder.
const KEEP: &str = "kedge.cache.keep";

/// Returns whether an attribute of that name is a question to the cache, and no file's own.
pub(crate) fn is_of_cache(name: &OsStr) -> bool {
    name == UNDRAINED || name == ALONE || name == KEEP
}

impl Engine {
    /// Answers a question for an attribute; `None` if it is the file's own.
    pub(crate) fn asked(&self, key: Key, name: &OsStr) -> Option<Vec<u8>> {
        let count: fn(&Engine, &CachedFile) -> u64 = match name.to_str()? {
            UNDRAINED => |_, file| file.lock().extents.unwritten(),
            ALONE => Engine::alone,
            _ => return None,
        };
        let bytes = self.known(key).map_or(0, |file| count(self, &file));
        Some(bytes.to_string().into_bytes())
    }

    /// Returns how many bytes of a file are lost with this node.
    ///
    /// What was sent counts before the partner has synced it: an fsync that has returned says that.
    /// A partner that cannot be reached may be lost as well, and counts for nothing.
    fn alone(&self, file: &CachedFile) -> u64 {
        let connected = self.partner.as_ref().is_some_and(Link::is_connected);
        let state = file.lock();
        let unwritten = state.extents.unwritten_within(0..u64::MAX);
        let there = |part: &Range<u64>| -> u64 {
            let copies = state.copied.within(part.clone()).filter(|(_, copied)| copied.newest);
            copies.map(|(range, _)| range.end - range.start).sum()
        };
        let alone =
            |part: &Range<u64>| part.end - part.start - if connected { there(part) } else { 0 };
        unwritten.iter().map(alone).sum()
    }

    /// Does what setting an attribute asks for; `None` if it is the file's own.
    pub(crate) fn told(&self, key: Key, name: &OsStr, value: &[u8]) -> Option<io::Result<()>> {
        if name != KEEP {
            return None;
        }
        let keeping = match value {
            b"synced" => Keeping::Synced,
            b"last" => Keeping::Last,
            _ => return Some(Err(rustix::io::Errno::INVAL.into())),
        };
        // Whoever asks has it open.
        let Some(file) = self.known(key) else { return Some(Err(rustix::io::Errno::BADF.into())) };
        file.lock().keeping = keeping;
        Some(Ok(()))
    }

    /// Returns a file that is to be below before another one of its folder, and is not; one that
    /// could not be drained, if there is such a one.
    pub(crate) fn pending_before(&self, file: &CachedFile) -> Option<Arc<CachedFile>> {
        let state = file.lock();
        if state.keeping != Keeping::Last {
            return None;
        }
        let folder = parent(&state.path).to_vec();
        drop(state);
        let files: Vec<Arc<CachedFile>> = lock(&self.files).by_number.values().cloned().collect();
        let others = files.into_iter().filter(|other| {
            let state = other.lock();
            state.keeping != Keeping::Last
                && !state.extents.is_clean()
                && parent(&state.path) == folder
        });
        others.max_by_key(|other| other.troubled.load(Ordering::Relaxed))
    }
}

/// Returns the folder of a name.
fn parent(path: &[u8]) -> &[u8] {
    path.iter().rposition(|byte| *byte == b'/').map_or(&[], |end| &path[..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::{Scratch, open, write};
    use crate::faults::Faults;
    use crate::file::Handle;
    use crate::spec::{Fsync, Medium};
    use crate::write::Write;
    use std::sync::mpsc;
    use std::time::Duration;
    use std::{fs, thread};

    /// Returns what is not below. Without a partner, it is on this node alone.
    fn asked(engine: &Engine, key: Key) -> Vec<u8> {
        let [undrained, alone] = [UNDRAINED, ALONE]
            .map(|name| engine.asked(key, OsStr::new(name)).expect("it is no file's own"));
        assert_eq!(undrained, alone);
        undrained
    }

    #[test]
    fn what_is_to_be_kept_counts_as_drained_once_a_disk_has_it() {
        let scratch = Scratch::new("keep");
        let mut engine = scratch.engine(&[("ram", Medium::Ram)], Fsync::Memory);
        let flag = scratch.0.join("lost");
        let faults = Faults::parse(&format!("lost={}", flag.display()));
        Arc::get_mut(&mut engine).expect("no one else has it").faults = faults;
        let handle = open(&engine, &scratch.below("a"));
        let key = handle.file.key;
        let tell = |value| engine.told(key, OsStr::new(KEEP), value).expect("no file's own");
        assert!(tell(b"otherwise").is_err() && tell(b"synced").is_ok());
        assert!(engine.told(key, OsStr::new("user.own"), b"synced").is_none());
        assert!(engine.asked(key, OsStr::new("user.own")).is_none());
        assert!([UNDRAINED, ALONE, KEEP].iter().all(|name| is_of_cache(OsStr::new(name))));
        assert!(!is_of_cache(OsStr::new("user.own")), "it would be looked up below");
        write(&engine, &handle, 0, b"bytes");
        assert_eq!(asked(&engine, key), b"5");
        fs::write(&flag, "").expect("a file");
        assert!(engine.drain_file(&handle.file).is_err(), "no disk has it");
        assert_eq!(asked(&engine, key), b"5");
        engine.drain_file(&handle.file).expect("drained");
        assert_eq!(asked(&engine, key), b"0");
    }

    #[test]
    fn what_says_what_there_is_comes_last() {
        let scratch = Scratch::new("last");
        fs::create_dir(scratch.below("image")).expect("a folder");
        let engine = scratch.engine(&[("ram", Medium::Ram)], Fsync::Memory);
        let files = ["image/data", "image/manifest", "other"].map(|name| {
            let handle = open(&engine, &scratch.below(name));
            write(&engine, &handle, 0, name.as_bytes());
            handle
        });
        let [data, manifest, _] = &files;
        let last = engine.told(manifest.file.key, OsStr::new(KEEP), b"last");
        last.expect("no file's own").expect("it is open");
        let waits = |handle: &Handle| engine.pending_before(&handle.file).is_some();
        assert!(waits(manifest) && !waits(data));
        engine.drain_file(&data.file).expect("drained");
        assert!(!waits(manifest), "the other one is elsewhere");
    }

    /// An engine that fails as it is told, and an image's data and manifest in its tier.
    fn image(scratch: &Scratch, faults: &str) -> (Arc<Engine>, [Arc<Handle>; 2]) {
        fs::create_dir(scratch.below("image")).expect("a folder");
        let mut engine = scratch.engine(&[("ram", Medium::Ram)], Fsync::Memory);
        Arc::get_mut(&mut engine).expect("no one else has it").faults = Faults::parse(faults);
        let files = [("image/data", "synced"), ("image/manifest", "last")];
        let files = files.map(|(name, keeping)| {
            let handle = open(&engine, &scratch.below(name));
            write(&engine, &handle, 0, name.as_bytes());
            let told = engine.told(handle.file.key, OsStr::new(KEEP), keeping.as_bytes());
            told.expect("no file's own").expect("it is open");
            handle
        });
        (engine, files)
    }

    #[test]
    fn what_says_what_there_is_stays_where_another_cannot_be_drained() {
        let scratch = Scratch::new("stays");
        let flag = scratch.0.join("lost");
        let (engine, [data, manifest]) = image(&scratch, &format!("lost={}", flag.display()));
        let below = || fs::read(scratch.below("image/manifest")).expect("there");
        // No disk has the data.
        fs::write(&flag, "").expect("a file");
        let failed = engine.drain_all().expect_err("a sync below failed");
        let names: Vec<&str> = failed.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!((names, below()), (vec!["image/data", "image/manifest"], vec![]));
        let before = engine.pending_before(&manifest.file).expect("a drain thread would take it");
        assert!(Arc::ptr_eq(&before, &data.file));
        engine.drain_all().expect("drained");
        assert_eq!(below(), b"image/manifest");
    }

    #[test]
    fn what_waits_for_one_that_cannot_be_drained_promises_no_room() {
        let scratch = Scratch::new("noroom");
        let flag = scratch.0.join("eio");
        fs::write(&flag, "").expect("a file");
        let (engine, files) = image(&scratch, &format!("eio={}", flag.display()));
        for handle in &files {
            engine.let_go(&handle.file);
        }
        let other = open(&engine, &scratch.below("other"));
        engine.scheduler().limits.set_limit(0, 0);
        let (sender, result) = mpsc::channel();
        let (handle, offset) = (other.clone(), 0);
        let late = Write { handle, offset, length: 4, append: false, user: 0, writer: 1 };
        engine.write(late, b"late", Box::new(move |written| sender.send(written).expect("a test")));
        let own = engine.clone();
        let drains = thread::spawn(move || own.drain_forever());
        let written = result.recv_timeout(Duration::from_secs(30));
        engine.scheduler().stopped = true;
        drains.join().expect("it ends");
        assert!(written.is_ok(), "it waits for room as long as the image is stuck");
        assert_eq!(fs::read(scratch.below("image/manifest")).expect("there"), b"");
    }
}
