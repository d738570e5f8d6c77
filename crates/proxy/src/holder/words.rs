//! What a holder has to say while it runs.

use std::fs::File;
use std::io::Write;
use std::sync::Arc;

/// Where a holder's words go: a descriptor of its own, as a driver's device takes standard error.
#[derive(Debug, Clone)]
pub struct Words(Arc<File>);

impl Words {
    /// Has words go to `file`.
    pub fn new(file: File) -> Words {
        Words(Arc::new(file))
    }

    /// Says a line. Where nobody hears it, nothing depends on it.
    pub(super) fn say(&self, line: &str) {
        let _ = (&*self.0).write_all(format!("kedge-holder: {line}\n").as_bytes());
    }
}
