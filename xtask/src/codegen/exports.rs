//! The exported symbols. What each line expands to is in crates/shim/src/entry/macros.rs.

use super::MARK;
use crate::table::{Class, Function, Stream, Types};
use std::fmt::Write;

pub(crate) fn generate(functions: &[Function], types: &Types) -> Result<String, String> {
    let mut out = format!("// {MARK}\n\n");
    out.push_str("use crate::entry::{data, export, unsupported};\n");
    out.push_str("use super::types::*;\n\n");
    for function in functions {
        let line = line(function, types).map_err(|e| format!("{}: {e}", function.symbol))?;
        out.push_str(&line);
        out.push('\n');
    }
    Ok(out)
}

fn line(f: &Function, types: &Types) -> Result<String, String> {
    if f.class == Class::Data {
        return data(f);
    }
    let mut declared = Vec::new();
    let mut passed = Vec::new();
    let mut takes_stream = false;
    for arg in &f.args {
        let (rust, opaque) = types.rust(&arg.c_type)?;
        let name = identifier(&arg.name);
        declared.push(format!("{name}: {rust}"));
        passed.push(if rust == "CUstream" && f.stream != Stream::Plain {
            takes_stream = true;
            format!("entry::per_thread({name})")
        } else if opaque {
            format!("{name}.cast()")
        } else {
            name
        });
    }
    let (symbol, declared) = (&f.symbol, declared.join(", "));
    if f.class == Class::Unsupported {
        return Ok(format!("unsupported!({symbol}({declared}));"));
    }
    // Where no argument names the stream, the implementation asks `entry::default_stream`.
    let mode = if f.stream == Stream::Plain || takes_stream { "" } else { " per_thread" };
    let mut line = String::new();
    let _ = write!(
        line,
        "export!({}{mode}, {symbol}({declared}) = {}::{}({}));",
        f.gate.variant(),
        f.module,
        f.implementation(),
        passed.join(", ")
    );
    Ok(line)
}

/// C names that are words of Rust.
fn identifier(name: &str) -> String {
    match name {
        "type" | "mod" | "ref" | "in" | "fn" => format!("r#{name}"),
        _ => name.to_owned(),
    }
}

fn data(f: &Function) -> Result<String, String> {
    let rust = match f.data.as_str() {
        "u32" => "AtomicU32",
        "u64" => "AtomicU64",
        "char[4096]" => "Path4096",
        other => return Err(format!("data type `{other}` is not u32, u64 or char[4096]")),
    };
    Ok(format!("data!({}: {rust});", f.symbol))
}
