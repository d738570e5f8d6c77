//! What a bench says beside its figures.

use kedge_control::text::harmless;
use std::io::Write;

/// Writes `text` to stdout, for whatever has started this process.
pub(crate) fn tell(text: &str) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| error.to_string())
}

/// Says on stderr that something is left out, and why.
pub(crate) fn warn(said: &str) {
    // Whoever has closed his end of it is not told.
    let _ = writeln!(std::io::stderr(), "kedge: warning: {}", harmless(said));
}
