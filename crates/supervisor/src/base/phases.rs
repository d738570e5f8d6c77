//! Where tests hold what is under way, to do something at that moment and no other.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// A variable for tests: `PHASE:FILE`. When a move first comes to that phase, FILE is made, and it
/// goes on once that is gone.
const MOVE: &str = "KEDGE_HOLD_MOVE";
/// A variable for tests: a folder. A checkpoint that comes to a phase of which there is a file
/// PHASE renames it to PHASE.held, and goes on once that is gone.
const CHECKPOINT: &str = "KEDGE_HOLD_CHECKPOINT";
/// Between two looks whether it is.
const LOOK: Duration = Duration::from_millis(1);

/// A move has come so far.
pub fn moved(phase: &str) {
    let Some(hold) = std::env::var(MOVE).ok() else { return };
    let Some(file) = hold.strip_prefix(phase).and_then(|rest| rest.strip_prefix(':')) else {
        return;
    };
    static HELD: AtomicBool = AtomicBool::new(false);
    if !HELD.swap(true, Ordering::SeqCst) && fs::write(file, phase).is_ok() {
        wait_while_there(Path::new(file));
    }
}

/// A checkpoint has come so far: all devices are `resting`, what they hold is `captured`, the files
/// of the image are `written` and count as soon as its manifest is there.
pub(crate) fn checkpointed(phase: &str) {
    let Some(folder) = std::env::var_os(CHECKPOINT) else { return };
    let folder = Path::new(&folder);
    let held = folder.join(format!("{phase}.held"));
    if folder.is_absolute() && fs::rename(folder.join(phase), &held).is_ok() {
        wait_while_there(&held);
    }
}

fn wait_while_there(file: &Path) {
    while file.exists() {
        thread::sleep(LOOK);
    }
}
