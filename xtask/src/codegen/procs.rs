//! What cuGetProcAddress searches.

use super::MARK;
use crate::table::{Function, Stream};
use std::fmt::Write;

pub(crate) fn generate(functions: &[Function]) -> String {
    let mut rows: Vec<(&Function, u32)> =
        functions.iter().filter_map(|f| Some((f, f.version?))).collect();
    rows.sort_by(|(a, va), (b, vb)| (&a.base, va).cmp(&(&b.base, vb)));
    let mut out = format!("// {MARK}\n\n");
    out.push_str("use super::exports;\nuse crate::procaddress::{Proc, proc};\n\n");
    out.push_str("/// Sorted by name, then version.\n");
    let _ = writeln!(out, "pub(crate) static PROCS: [Proc; {}] = [", rows.len());
    for (f, version) in rows {
        let per_thread = f.stream != Stream::Plain;
        let _ = writeln!(
            out,
            "    proc!(\"{}\", {version}, {per_thread}, exports::{}),",
            f.base, f.symbol
        );
    }
    out.push_str("];\n");
    out
}
