//! What programs ask of a file by extended attributes that no file has: how much of it is not on a
//! disk below, and that it be there before it counts as drained. kedge's images do.

use crate::engine::Engine;
use crate::file::{CachedFile, Keeping, Key};
use crate::tier::lock;
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;

/// Tells how many bytes of a file are not below yet, as a decimal number.
const UNDRAINED: &str = "kedge.cache.undrained";
/// Has each part of an open file synced below before it counts as drained: `synced`, or `last` for
/// a file that is not drained before all others in its folder.
const KEEP: &str = "kedge.cache.keep";

impl Engine {
    /// Answers a question for an attribute; `None` if it is the file's own.
    pub(crate) fn asked(&self, key: Key, name: &OsStr) -> Option<Vec<u8>> {
        if name != UNDRAINED {
            return None;
        }
        let bytes = self.known(key).map_or(0, |file| file.lock().extents.unwritten());
        Some(bytes.to_string().into_bytes())
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

    /// Returns whether a file is to be drained after others of its folder, which are not all below.
    pub(crate) fn waits_for_others(&self, file: &CachedFile) -> bool {
        let state = file.lock();
        if state.keeping != Keeping::Last {
            return false;
        }
        let folder = parent(&state.path).to_vec();
        drop(state);
        let files: Vec<Arc<CachedFile>> = lock(&self.files).by_number.values().cloned().collect();
        files.iter().filter(|other| other.number != file.number).any(|other| {
            let state = other.lock();
            state.keeping != Keeping::Last
                && !state.extents.is_clean()
                && state.trouble.is_none()
                && parent(&state.path) == folder
        })
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
    use crate::spec::{Fsync, Medium};
    use std::fs;

    fn asked(engine: &Engine, key: Key) -> Vec<u8> {
        engine.asked(key, OsStr::new(UNDRAINED)).expect("it is no file's own")
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
        assert!(engine.waits_for_others(&manifest.file) && !engine.waits_for_others(&data.file));
        engine.drain_file(&data.file).expect("drained");
        assert!(!engine.waits_for_others(&manifest.file), "the other one is elsewhere");
    }
}
