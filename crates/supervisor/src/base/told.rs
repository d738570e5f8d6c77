//! What this process tells its user by itself.

use std::io::{self, Write};

/// Whoever has closed his end of standard error is not told.
pub(crate) fn tell(what: &str) {
    let _ = writeln!(io::stderr(), "kedge: {what}");
}
