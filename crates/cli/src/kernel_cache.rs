//! `kedge kernel-cache`: the PTX of cubins that frameworks keep on disk.

use crate::output::{self, PLAIN, Table};
use crate::{Failure, images};
use clap::{Args, Subcommand};
use kedge_control::size::Size;
use kedge_kernel_cache::{Entry, KernelCache};
use serde::Serialize;
use std::path::PathBuf;
use std::time::UNIX_EPOCH;

const AFTER_HELP: &str = "\
CuPy, Numba, Warp and others keep machine code that they compile on disk. Software devices run \
PTX: what such code was made from is kept here, by its hash, so that a program's next run finds \
it. The cache holds 512 MiB at most; what was used longest ago goes first. Without it, the \
frameworks' own caches are of no use to software devices: clear those, too.

Examples:
  kedge kernel-cache ls
  kedge kernel-cache clear
  XDG_CACHE_HOME=/scratch/me kedge run -- ./program     another cache, for the frameworks too";

/// List or clear the PTX that kedge keeps of kernels that programs have compiled
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP, subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct KernelCacheArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the entries, the one that was used last first
    Ls {
        /// Print a JSON object: path (of the cache), entries (a list of objects: cubin, the SHA-256
        /// of the machine code; kernels, their names; bytes, of the PTX; used, seconds since 1970)
        #[arg(long)]
        json: bool,
    },
    /// Remove all entries
    Clear {
        /// Print a JSON object: path (of the cache), entries (how many were removed), bytes
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Serialize)]
struct Listing {
    path: PathBuf,
    entries: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    cubin: String,
    kernels: Vec<String>,
    bytes: u64,
    used: u64,
}

#[derive(Debug, Serialize)]
struct Cleared {
    path: PathBuf,
    entries: usize,
    bytes: u64,
}

pub(crate) fn run(args: &KernelCacheArgs) -> Result<(), Failure> {
    let cache = KernelCache::of_user()?;
    match args.command {
        Command::Ls { json } => list(&cache, json),
        Command::Clear { json } => clear(&cache, json),
    }
}

fn list(cache: &KernelCache, json: bool) -> Result<(), Failure> {
    let found = cache.list()?;
    if json {
        let entries = found.iter().map(row).collect();
        return Ok(output::json(&Listing { path: cache.path().to_owned(), entries })?);
    }
    if found.is_empty() {
        return Ok(output::print(&format!("{} is empty\n", cache.path().display()))?);
    }
    let mut table = Table::new(&["CUBIN", "PTX", "USED", "KERNELS"], &[1]);
    for entry in &found {
        table.row([
            (PLAIN, entry.cubin.to_string()[..12].to_owned()),
            (PLAIN, Size(entry.bytes).to_string()),
            (PLAIN, images::date(row(entry).used)),
            (PLAIN, named(&entry.kernels)),
        ]);
    }
    Ok(output::print(&table.render())?)
}

fn row(entry: &Entry) -> Row {
    let used = entry.used.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (cubin, kernels) = (entry.cubin.to_string(), entry.kernels.clone());
    Row { cubin, kernels, bytes: entry.bytes, used }
}

/// Most characters of a name that are shown: C++'s may have thousands.
const MAX_NAME_LEN: usize = 40;

/// The first names, and how many more there are.
fn named(kernels: &[String]) -> String {
    const MAX_NAMES: usize = 2;
    let short = |name: &String| match name.char_indices().nth(MAX_NAME_LEN) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.clone(),
    };
    let mut text = kernels.iter().take(MAX_NAMES).map(short).collect::<Vec<_>>().join(", ");
    match kernels.len() {
        0 => text.push('-'),
        all if all > MAX_NAMES => text.push_str(&format!(" and {} more", all - MAX_NAMES)),
        _ => {}
    }
    text
}

fn clear(cache: &KernelCache, json: bool) -> Result<(), Failure> {
    let cleared = cache.clear()?;
    let (entries, bytes) = (cleared.entries, cleared.bytes);
    if json {
        let path = cache.path().to_owned();
        return Ok(output::json(&Cleared { path, entries, bytes })?);
    }
    let what = if entries == 1 { "entry" } else { "entries" };
    Ok(output::print(&format!("{entries} {what} removed, {}\n", Size(bytes)))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_cut() {
        let names =
            |names: &[&str]| named(&names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>());
        assert_eq!(names(&[]), "-");
        assert_eq!(names(&["a", "b"]), "a, b");
        assert_eq!(names(&["a", "b", "c", "d"]), "a, b and 2 more");
        assert_eq!(names(&[&"é".repeat(41)]), "é".repeat(40) + "…");
    }
}
