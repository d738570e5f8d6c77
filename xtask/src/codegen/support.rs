//! docs/support.md, and the list that conformance is measured by.

use super::MARK;
use crate::table::{Class, Function, Stream};
use std::collections::BTreeMap;
use std::fmt::Write;

/// How the C names of one implementation are listed: its plain symbols.
fn plain(functions: &[Function]) -> impl Iterator<Item = &Function> {
    functions.iter().filter(|f| f.stream == Stream::Plain && f.class != Class::Data)
}

pub(crate) fn page(functions: &[Function]) -> String {
    let mut modules: BTreeMap<&str, (Vec<&Function>, Vec<&Function>)> = BTreeMap::new();
    for f in plain(functions) {
        let (done, missing) = modules.entry(&f.module).or_default();
        if f.class == Class::Unsupported { missing.push(f) } else { done.push(f) }
    }
    let exported = functions.len();
    let total = plain(functions).count();
    let done: usize = modules.values().map(|(done, _)| done.len()).sum();
    let mut out = format!("<!-- {MARK} -->\n\n# What kedge supports of the CUDA driver API\n\n");
    let _ = writeln!(
        out,
        "libcuda.so.1 exports all {exported} symbols of driver 580. Without the per-thread variants \
         and the\ndebugger's variables they are {total} functions, of which **{done} are implemented**. \
         Every other one returns\n`CUDA_ERROR_NOT_SUPPORTED` and leaves a line with its name in the \
         job's log.\n\nA call is *local* (answered inside the program), a *post* (one way, the program \
         goes on), a *call* (waits\nfor the proxy) or *custom* (it depends).\n"
    );
    let _ = writeln!(out, "| Module | Implemented | Not supported |\n|---|---|---|");
    for (module, (done, missing)) in &modules {
        let _ = writeln!(out, "| [{module}](#{module}) | {} | {} |", done.len(), missing.len());
    }
    for (module, (done, missing)) in &modules {
        let _ = writeln!(out, "\n## {module}\n");
        for class in [Class::Local, Class::Post, Class::Call, Class::Custom] {
            list(&mut out, class.word(), done.iter().filter(|f| f.class == class));
        }
        list(&mut out, "not supported", missing.iter());
    }
    out
}

fn list<'a>(out: &mut String, title: &str, functions: impl Iterator<Item = &'a &'a Function>) {
    let names: Vec<String> = functions.map(|f| format!("`{}`", f.symbol)).collect();
    if !names.is_empty() {
        let _ = writeln!(out, "- {title}: {}", names.join(", "));
    }
}

pub(crate) fn conformance(functions: &[Function]) -> String {
    let mut out = format!("# {MARK}\n# Implemented functions: symbol, class, module.\n");
    for f in plain(functions).filter(|f| f.class != Class::Unsupported) {
        let _ = writeln!(out, "{} {} {}", f.symbol, f.class.word(), f.module);
    }
    out
}
