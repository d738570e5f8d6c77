//! What cubins were made from: the PTX of those that were compiled in this process, of those in the
//! user's kernel cache, which other processes have compiled, and of those beside which it stands.
//!
//! A device that runs PTX and not machine code is so given the PTX with the cubin: [`with_source`].

use super::beside;
use super::cubin::Cubin;
use super::linked::{self, Input, Unknown};
use crate::entry::log_once;
use crate::session;
use kedge_kernel_cache::{CacheError, Digest, KernelCache};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

/// What is remembered, in bytes and in number; the oldest is forgotten first.
const MAX_BYTES: usize = 128 << 20;
const MAX_SOURCES: usize = 16384;
/// Cubins beyond this are not looked at.
pub(super) const MAX_CUBIN: u64 = 64 << 20;

/// A cubin and the PTX that it was made from.
#[derive(Debug)]
struct Source {
    cubin: Digest,
    ptx: Arc<[u8]>,
    /// The cubin itself, if it is one to be linked.
    relocatable: Option<Arc<[u8]>>,
}

impl Source {
    fn bytes(&self) -> usize {
        self.ptx.len() + self.relocatable.as_ref().map_or(0, |cubin| cubin.len())
    }
}

/// What was compiled in this process.
#[derive(Debug, Default)]
struct Sources {
    known: VecDeque<Source>,
    bytes: usize,
}

impl Sources {
    fn add(&mut self, source: Source) {
        self.bytes += source.bytes();
        self.known.push_back(source);
        while self.bytes > MAX_BYTES || self.known.len() > MAX_SOURCES {
            let Some(old) = self.known.pop_front() else { return };
            self.bytes -= old.bytes();
        }
    }

    fn exactly(&self, cubin: &Digest) -> Option<Arc<[u8]>> {
        self.known.iter().rfind(|source| source.cubin == *cubin).map(|source| source.ptx.clone())
    }

    /// What linkers may have been given, the newest last.
    fn inputs(&self) -> Vec<Input> {
        let input = |source: &Source| {
            let cubin = source.relocatable.clone()?;
            Some(Input { ptx: source.ptx.clone(), cubin })
        };
        self.known.iter().filter_map(input).collect()
    }
}

fn sources() -> MutexGuard<'static, Sources> {
    static SOURCES: LazyLock<Mutex<Sources>> = LazyLock::new(Mutex::default);
    SOURCES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The user's cache. What is wrong with it is logged once, and it is done without.
fn kept() -> Option<&'static KernelCache> {
    static CACHE: OnceLock<Option<KernelCache>> = OnceLock::new();
    CACHE.get_or_init(|| KernelCache::of_user().map_err(|error| grumble(&error)).ok()).as_ref()
}

fn grumble(error: &CacheError) {
    log_once("kernel cache", || format!("kernel cache: {error}"));
}

fn keep(cubin: &Digest, ptx: &[u8]) {
    if let Some(Err(error)) = kept().map(|cache| cache.keep(cubin, ptx)) {
        grumble(&error);
    }
}

/// Remembers what a compiler has made, here and for other processes.
#[cfg(feature = "private-tables")]
pub(crate) fn remember(cubin: &[u8], ptx: Arc<[u8]>) {
    let digest = Digest::of(cubin);
    keep(&digest, &ptx);
    let relocatable = Cubin::parse(cubin).is_some_and(|cubin| cubin.relocatable);
    let relocatable = relocatable.then(|| cubin.into());
    sources().add(Source { cubin: digest, ptx, relocatable });
}

fn find_kept(cubin: &Digest) -> Option<Vec<u8>> {
    kept()?.find(cubin).unwrap_or_else(|error| {
        grumble(&error);
        None
    })
}

pub(super) fn has_software() -> bool {
    session::get().is_ok_and(|session| session.devices.iter().any(|device| device.exact))
}

/// The PTX that a cubin was made from: one text, or those that it was linked of.
fn find(image: &[u8]) -> Option<Vec<Arc<[u8]>>> {
    let digest = Digest::of(image);
    if let Some(ptx) = sources().exactly(&digest) {
        return Some(vec![ptx]);
    }
    let kept = find_kept(&digest).map(Arc::from);
    let Some(cubin) = Cubin::parse(image) else { return kept.map(|ptx| vec![ptx]) };
    let functions = cubin.functions();
    // Unlocked again before they are compared.
    let inputs = sources().inputs();
    let parts = known(&cubin, kept, &inputs).map_err(|unknown| {
        log_once("linked of unknown", || format!("note: {unknown}"));
    });
    let parts = parts.ok().filter(|parts| !parts.is_empty());
    let beside = || beside::find(image, &functions).map(|ptx| vec![ptx.into()]);
    // Only a software device needs it so much that folders are searched for it.
    let parts = parts.or_else(|| has_software().then(beside).flatten())?;
    if let [ptx] = parts.as_slice() {
        keep(&digest, ptx);
        sources().add(Source { cubin: digest, ptx: ptx.clone(), relocatable: None });
    }
    Some(parts)
}

/// What a cubin was made from, of what has been kept for it and what this process has compiled to
/// be linked. Code tells more of a linked cubin: an older kedge found what it kept for one by the
/// names of functions, and kept one text of several.
fn known(
    cubin: &Cubin<'_>,
    kept: Option<Arc<[u8]>>,
    inputs: &[Input],
) -> Result<Vec<Arc<[u8]>>, Unknown> {
    let kept = match kept {
        Some(ptx) if cubin.relocatable => return Ok(vec![ptx]),
        // What compilers add has a `$`, and is in no text.
        kept => kept.filter(|ptx| {
            let shared = cubin.shared_functions();
            let named = |name: &&str| !name.starts_with('$') && !is_runtimes(name);
            is_whole(ptx, &shared.into_iter().filter(named).collect::<Vec<_>>())
        }),
    };
    let functions = cubin.functions();
    let own: Vec<&str> = functions.iter().copied().filter(|name| !is_runtimes(name)).collect();
    let own = if own.is_empty() { &functions } else { &own };
    match (linked::parts(cubin, own, inputs), kept) {
        (Ok(parts), Some(kept)) if parts.is_empty() => Ok(vec![kept]),
        (Err(_), Some(kept)) => Ok(vec![kept]),
        (parts, _) => parts,
    }
}

/// Whether a text defines all these functions of a cubin: it was not linked of others as well.
fn is_whole(ptx: &[u8], functions: &[&str]) -> bool {
    let defined = defined(ptx);
    functions.iter().all(|name| defined.contains(name))
}

/// Whether a function is libcudadevrt's, which is linked to what waits for its whole grid or
/// launches kernels. The device has its own.
fn is_runtimes(name: &str) -> bool {
    name.starts_with("cudaCG") || name.contains("_cuda_device_runtime_cu_")
}

/// The functions that a PTX text defines.
fn defined(ptx: &[u8]) -> HashSet<&str> {
    let mut defined = HashSet::new();
    let text = std::str::from_utf8(ptx).unwrap_or_default();
    for (at, _) in text.match_indices('.') {
        let rest = &text[at + 1..];
        let Some(named) = rest.strip_prefix("func").or_else(|| rest.strip_prefix("entry")) else {
            continue;
        };
        let line = text[..at].rsplit(['\n', ';', '}']).next().unwrap_or_default();
        // What it returns stands before its name.
        let named = named.trim_start();
        let named = match named.strip_prefix('(') {
            Some(returned) => returned.split_once(')').map_or("", |(_, named)| named),
            None => named,
        };
        let name = named.trim_start().split(|c: char| !is_word(c)).next().unwrap_or_default();
        let is_definition = !line.trim_start().starts_with("//") && !line.contains(".extern");
        if is_definition && !name.is_empty() {
            defined.insert(name);
        }
    }
    defined
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || "_$".contains(c)
}

/// What goes on in a cubin's place.
#[derive(Debug)]
pub(super) enum Sourced {
    /// A fatbin of it and of the PTX that it was made from; a device takes what it can run.
    Fatbin(Vec<u8>),
    /// The PTX texts that it was linked of, to be linked where it does not run.
    Parts(Vec<Vec<u8>>),
}

/// How many registers a thread of each function has in a cubin, as its compiler has told.
pub(super) fn registers(cubin: &[u8]) -> HashMap<String, u32> {
    let registers = Cubin::parse(cubin).map(|cubin| cubin.registers).unwrap_or_default();
    registers.into_iter().map(|(name, count)| (name.to_owned(), count)).collect()
}

/// Returns a cubin with the PTX that it was made from. `None` where that is not known.
pub(super) fn with_source(cubin: &[u8]) -> Option<Sourced> {
    let parts = (cubin.len() as u64 <= MAX_CUBIN).then(|| find(cubin)).flatten()?;
    log_once("run from source", || {
        "note: a cubin that was compiled at run time is passed on with the PTX that it was made \
         from"
            .to_owned()
    });
    let [ptx] = parts.as_slice() else {
        let text = |ptx: &Arc<[u8]>| [ptx.strip_suffix(&[0]).unwrap_or(ptx), &[0]].concat();
        return Some(Sourced::Parts(parts.iter().map(text).collect()));
    };
    let mut entries = Vec::new();
    entry(&mut entries, KIND_ELF, cubin, after(ptx, ".target sm_"), 0);
    entry(&mut entries, KIND_PTX, ptx, after(ptx, ".target sm_"), after(ptx, ".version "));
    let mut fatbin = Vec::with_capacity(entries.len() + 16);
    fatbin.extend(0xBA55_ED50_u32.to_le_bytes());
    fatbin.extend([1, 0, 16, 0]);
    fatbin.extend((entries.len() as u64).to_le_bytes());
    fatbin.extend(entries);
    Some(Sourced::Fatbin(fatbin))
}

const KIND_PTX: u16 = 1;
const KIND_ELF: u16 = 2;
/// Bytes of an entry's header.
const ENTRY: u32 = 64;
/// 64-bit, Linux.
const FLAGS: u64 = 0x11;

/// Appends one entry of a fatbin. `version` is the major one.
fn entry(out: &mut Vec<u8>, kind: u16, payload: &[u8], sm: u32, version: u32) {
    let padded = payload.len().next_multiple_of(8);
    let start = out.len();
    out.extend(kind.to_le_bytes());
    out.extend(0x101_u16.to_le_bytes());
    out.extend(ENTRY.to_le_bytes());
    out.extend((padded as u64).to_le_bytes());
    out.extend([0; 10]); // compressed size, options, minor version
    out.extend((version as u16).to_le_bytes());
    out.extend(sm.to_le_bytes());
    out.extend([0; 8]); // name
    out.extend(FLAGS.to_le_bytes());
    out.resize(start + ENTRY as usize, 0);
    out.extend_from_slice(payload);
    out.resize(start + ENTRY as usize + padded, 0);
}

/// The number behind `key`; 0 without one.
fn after(ptx: &[u8], key: &str) -> u32 {
    let text = String::from_utf8_lossy(ptx);
    let Some((_, rest)) = text.split_once(key) else { return 0 };
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..digits].parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::cubin::tests::{Made, make};
    use super::*;

    const PTX: &[u8] = b"//\n.version 8.3\n.target sm_90a\n.visible .entry k() { ret; }\n";

    /// What lacks a part is not kept in the cubin's name: the part may be known later on.
    #[test]
    fn a_text_that_only_declares_a_function_is_not_whole() {
        let caller = b".extern .func bar();\n.visible .entry foo() { call bar; ret; }\n";
        assert!(is_whole(caller, &["foo"]) && !is_whole(caller, &["foo", "bar"]));
    }

    #[test]
    fn code_tells_more_than_what_was_kept() {
        let foo: Made<'_> = ("foo", 1, &[1; 32], &[(16, "bar")]);
        let bar: Made<'_> = ("bar", 1, &[2; 16], &[]);
        let added: Made<'_> = ("$div", 1, &[3; 16], &[]);
        let text = |names: &[&str]| -> Arc<[u8]> {
            names
                .iter()
                .map(|name| format!(".func {name}() {{}}\n"))
                .collect::<String>()
                .as_bytes()
                .into()
        };
        let whole = text(&["foo", "bar"]);
        let file = make(false, &[foo, bar, added]);
        let cubin = Cubin::parse(&file).unwrap();
        let input = |ptx: &Arc<[u8]>, functions: &[Made<'_>]| Input {
            ptx: ptx.clone(),
            cubin: make(true, functions).into(),
        };
        let (caller, callee) = (text(&["foo"]), text(&["bar"]));
        let inputs = [input(&caller, &[foo, added]), input(&callee, &[bar])];
        // Of an edited callee, as its name alone once told.
        let parts = known(&cubin, Some(whole.clone()), &inputs);
        assert_eq!(parts, Ok(vec![caller.clone(), callee]));
        assert_eq!(known(&cubin, Some(whole.clone()), &[]), Ok(vec![whole.clone()]));
        assert!(known(&cubin, Some(caller.clone()), &inputs[..1]).is_err());
        // What was compiled and not linked is known by its bytes.
        let file = make(true, &[foo, bar]);
        let parts = known(&Cubin::parse(&file).unwrap(), Some(caller.clone()), &inputs);
        assert_eq!(parts, Ok(vec![caller]));
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let mut sources = Sources::default();
        let digest = |number: usize| Digest::of(&number.to_le_bytes());
        let source =
            |number, relocatable| Source { cubin: digest(number), ptx: PTX.into(), relocatable };
        (0..=MAX_SOURCES).for_each(|number| sources.add(source(number, None)));
        assert_eq!(sources.known.len(), MAX_SOURCES);
        assert_eq!(sources.exactly(&digest(0)), None);
        assert_eq!(sources.exactly(&digest(1)).as_deref(), Some(PTX));
        assert_eq!(sources.bytes, MAX_SOURCES * PTX.len());
        sources.add(source(0, Some(vec![7; MAX_BYTES - PTX.len()].into())));
        assert_eq!((sources.known.len(), sources.bytes), (1, MAX_BYTES));
        assert_eq!(sources.inputs().len(), 1);
    }

    #[test]
    fn functions_are_found_at_their_heads() {
        let caller = "// .func no()\n.extern .func  (.param .b32 func_retval0) bar\n(\n\t.param .b32 \
            x\n)\n;\n.extern .func vprintf(.param .b64 a);\n.visible .entry foo(\n){ call bar; }";
        let callee = b".visible .func (.param .b32 r) bar(.param .b32 x) { ret; }";
        assert_eq!(defined(caller.as_bytes()), HashSet::from(["foo"]));
        assert_eq!(defined(callee), HashSet::from(["bar"]));
        assert!(defined(b"\xff.func x").is_empty());
        assert!(is_runtimes("cudaCGSynchronize") && !is_runtimes("cudaFoo"));
    }

    #[test]
    fn reads_numbers() {
        assert_eq!((after(PTX, ".target sm_"), after(PTX, ".version ")), (90, 8));
    }
}
