//! What cubins were made from: the PTX of those that were compiled in this process, of those in the
//! user's kernel cache, which other processes have compiled, and of those beside which it stands.
//!
//! A device that runs PTX and not machine code is so given the PTX with the cubin: [`with_source`].

use super::beside;
use crate::entry::log_once;
use crate::session;
use kedge_kernel_cache::{CacheError, Digest, KernelCache};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

/// PTX that is remembered, in bytes and in number; the oldest is forgotten first.
const MAX_BYTES: usize = 128 << 20;
const MAX_SOURCES: usize = 16384;
/// Texts that one cubin is found to be linked of.
const MAX_PARTS: usize = 64;
/// Cubins beyond this are not looked at.
pub(super) const MAX_CUBIN: u64 = 64 << 20;

/// A cubin and the PTX that it was made from.
#[derive(Debug)]
struct Source {
    cubin: Digest,
    ptx: Arc<[u8]>,
}

/// What was compiled in this process.
#[derive(Debug, Default)]
struct Sources {
    known: VecDeque<Source>,
    bytes: usize,
}

impl Sources {
    fn add(&mut self, cubin: Digest, ptx: Arc<[u8]>) {
        self.bytes += ptx.len();
        self.known.push_back(Source { cubin, ptx });
        while self.bytes > MAX_BYTES || self.known.len() > MAX_SOURCES {
            let Some(old) = self.known.pop_front() else { return };
            self.bytes -= old.ptx.len();
        }
    }

    fn exactly(&self, cubin: &Digest) -> Option<Arc<[u8]>> {
        self.known.iter().rfind(|source| source.cubin == *cubin).map(|source| source.ptx.clone())
    }

    /// Returns the PTX that a cubin with these functions was linked of: the one text that has them
    /// all, or each function's, and what these declare and another text defines. None where one
    /// would have to be guessed.
    fn linked(&self, functions: &[&str]) -> Option<Vec<Arc<[u8]>>> {
        let all = self.by_kernels(functions);
        if let Some(all) = all.as_ref().filter(|all| Functions::of(all).external.is_empty()) {
            return Some(vec![all.clone()]);
        }
        let definitions = self.definitions();
        let defining = |name: &str| definitions.get(name).copied().flatten();
        let mut parts: Vec<Arc<[u8]>> = all.into_iter().collect();
        if parts.is_empty() {
            for name in functions {
                let part = defining(name)?;
                if !parts.contains(part) {
                    parts.push(part.clone());
                }
            }
        }
        let mut at = 0;
        while let Some(part) = parts.get(at).cloned() {
            // What no text defines is the device's own, or left for it to name.
            for other in Functions::of(&part).external.into_iter().filter_map(defining) {
                if !parts.contains(other) {
                    parts.push(other.clone());
                }
            }
            at += 1;
        }
        (parts.len() <= MAX_PARTS).then_some(parts)
    }

    /// The text that defines each function; None for what several do, each in its own way.
    fn definitions(&self) -> HashMap<&str, Option<&Arc<[u8]>>> {
        let mut definitions: HashMap<&str, Option<&Arc<[u8]>>> = HashMap::new();
        for source in &self.known {
            for name in Functions::of(&source.ptx).defined {
                let known = definitions.entry(name).or_insert(Some(&source.ptx));
                *known = known.filter(|other| **other == source.ptx);
            }
        }
        definitions
    }

    /// Returns the PTX that defines all of a cubin's kernels, if one does only: a cubin that was
    /// linked of another is known by them.
    fn by_kernels(&self, kernels: &[&str]) -> Option<Arc<[u8]>> {
        let mut found: Option<&Arc<[u8]>> = None;
        for source in self.known.iter().filter(|source| defines_all(&source.ptx, kernels)) {
            if found.is_some_and(|other| *other != source.ptx) {
                return None;
            }
            found = Some(&source.ptx);
        }
        found.cloned()
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
    sources().add(digest, ptx);
}

fn find_kept(cubin: &Digest) -> Option<Vec<u8>> {
    kept()?.find(cubin).unwrap_or_else(|error| {
        grumble(&error);
        None
    })
}

fn has_software() -> bool {
    session::get().is_ok_and(|session| session.devices.iter().any(|device| device.exact))
}

/// The PTX that a cubin was made from: one text, or those that it was linked of.
fn find(cubin: &[u8]) -> Option<Vec<Arc<[u8]>>> {
    let digest = Digest::of(cubin);
    let known = sources().exactly(&digest);
    // Not remembered here: it would make others ambiguous that are known by their kernels.
    let known = known.or_else(|| find_kept(&digest).map(Arc::from));
    let Some(functions) = kernels_of(cubin) else { return known.map(|ptx| vec![ptx]) };
    let own: Vec<&str> = functions.iter().copied().filter(|name| !is_runtimes(name)).collect();
    let own = if own.is_empty() { &functions } else { &own };
    if let Some(ptx) = known.clone().filter(|ptx| is_whole(ptx, own)) {
        return Some(vec![ptx]);
    }
    let parts = sources().linked(own);
    // An older kedge has kept one text of several; others may name functions in ways of their own.
    let parts = match known {
        Some(ptx) => parts.filter(|parts| parts.len() > 1).or(Some(vec![ptx])),
        None => parts,
    };
    let beside = || beside::find(cubin, &functions).map(|ptx| vec![ptx.into()]);
    // Only a software device needs it so much that folders are searched for it.
    let parts = parts.or_else(|| has_software().then(beside).flatten())?;
    if let [ptx] = parts.as_slice()
        && is_whole(ptx, own)
    {
        keep(&digest, ptx);
        sources().add(digest, ptx.clone());
    }
    Some(parts)
}

/// Whether a text defines all these functions of a cubin: it was not linked of others as well.
fn is_whole(ptx: &[u8], functions: &[&str]) -> bool {
    let defined = Functions::of(ptx).defined;
    functions.iter().all(|name| defined.contains(name))
}

/// Whether a function is libcudadevrt's, which is linked to what waits for its whole grid or
/// launches kernels. The device has its own.
fn is_runtimes(name: &str) -> bool {
    name.starts_with("cudaCG") || name.contains("_cuda_device_runtime_cu_")
}

/// The functions that a PTX text names at the head of a definition or declaration.
#[derive(Debug, Default)]
struct Functions<'a> {
    defined: HashSet<&'a str>,
    /// Declared as another text's.
    external: HashSet<&'a str>,
}

impl<'a> Functions<'a> {
    fn of(ptx: &'a [u8]) -> Self {
        let mut functions = Functions::default();
        let text = std::str::from_utf8(ptx).unwrap_or_default();
        for (at, _) in text.match_indices('.') {
            let rest = &text[at + 1..];
            let Some(named) = rest.strip_prefix("func").or_else(|| rest.strip_prefix("entry"))
            else {
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
            if line.trim_start().starts_with("//") || name.is_empty() {
                continue;
            }
            let external = line.contains(".extern");
            if external { &mut functions.external } else { &mut functions.defined }.insert(name);
        }
        functions
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || "_$".contains(c)
}

/// The names of a cubin's kernels and functions: its sections `.text.NAME`.
fn kernels_of(cubin: &[u8]) -> Option<Vec<&str>> {
    let number = |at: usize, len: usize| -> Option<usize> {
        let bytes = cubin.get(at..at.checked_add(len)?)?;
        Some(bytes.iter().rev().fold(0, |n, byte| n << 8 | usize::from(*byte)))
    };
    let (table, size) = (number(0x28, 8)?, number(0x3A, 2)?);
    let (count, names) = (number(0x3C, 2)?, number(0x3E, 2)?);
    let header = |index: usize| table.checked_add(index.checked_mul(size)?);
    let names = number(header(names)?.checked_add(0x18)?, 8)?;
    let mut kernels = Vec::new();
    for index in 0..count {
        let at = names.checked_add(number(header(index)?, 4)?)?;
        let rest = cubin.get(at..)?;
        let name = rest.split(|byte| *byte == 0).next()?;
        if let Some(kernel) = name.strip_prefix(b".text.") {
            kernels.push(std::str::from_utf8(kernel).ok()?);
        }
    }
    (!kernels.is_empty()).then_some(kernels)
}

/// Whether each of `names` is a word of the text.
fn defines_all(ptx: &[u8], names: &[&str]) -> bool {
    let Ok(text) = std::str::from_utf8(ptx) else { return false };
    let words: HashSet<&str> = text.split(|c: char| !is_word(c)).collect();
    names.iter().all(|name| words.contains(name))
}

/// What goes on in a cubin's place.
#[derive(Debug)]
pub(super) enum Sourced {
    /// A fatbin of it and of the PTX that it was made from; a device takes what it can run.
    Fatbin(Vec<u8>),
    /// The PTX texts that it was linked of, to be linked where it does not run.
    Parts(Vec<Vec<u8>>),
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
    use super::*;

    const PTX: &[u8] = b"//\n.version 8.3\n.target sm_90a\n.visible .entry k() { ret; }\n";

    /// What lacks a part is not kept in the cubin's name: the part may be known later on.
    #[test]
    fn a_text_that_only_declares_a_function_is_not_whole() {
        let caller = b".extern .func bar();\n.visible .entry foo() { call bar; ret; }\n";
        assert!(is_whole(caller, &["foo"]) && !is_whole(caller, &["foo", "bar"]));
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let mut sources = Sources::default();
        let digest = |number: usize| Digest::of(&number.to_le_bytes());
        for number in 0..=MAX_SOURCES {
            sources.add(digest(number), PTX.into());
        }
        assert_eq!(sources.known.len(), MAX_SOURCES);
        assert_eq!(sources.exactly(&digest(0)), None);
        assert_eq!(sources.exactly(&digest(1)).as_deref(), Some(PTX));
        assert_eq!(sources.bytes, MAX_SOURCES * PTX.len());
    }

    const CALLER: &str = "// .func no()\n.extern .func  (.param .b32 func_retval0) bar\n(\n\t.param \
        .b32 x\n)\n;\n.extern .func vprintf(.param .b64 a);\n.visible .entry foo(\n){ call (r), bar, (x); }";
    const CALLEE: &str = ".visible .func (.param .b32 r) bar(.param .b32 x) { ret; }";

    #[test]
    fn functions_are_found_at_their_heads() {
        let functions = Functions::of(CALLER.as_bytes());
        assert_eq!(functions.defined, HashSet::from(["foo"]));
        assert_eq!(functions.external, HashSet::from(["bar", "vprintf"]));
        assert_eq!(Functions::of(CALLEE.as_bytes()).defined, HashSet::from(["bar"]));
        assert!(Functions::of(b"\xff.func x").defined.is_empty());
    }

    /// As nvJitLink links a kernel with a function of another file, and with libcudadevrt.
    #[test]
    fn a_cubin_that_was_linked_is_traced_to_all_its_parts() {
        let mut sources = Sources::default();
        let mut add = |text: &str| {
            sources.add(Digest::of(text.as_bytes()), text.as_bytes().into());
        };
        add(CALLER);
        add(CALLEE);
        add(".visible .entry other() { ret; }");
        add(CALLEE); // compiled again, and no other
        let parts = |sources: &Sources, functions: &[&str]| {
            let parts = sources.linked(functions)?;
            Some(parts.iter().map(|part| String::from_utf8_lossy(part).into_owned()).collect())
        };
        let both: Option<Vec<String>> = Some(vec![CALLER.to_owned(), CALLEE.to_owned()]);
        assert_eq!(parts(&sources, &["foo", "bar"]), both);
        assert_eq!(parts(&sources, &["foo"]), both);
        let three = parts(&sources, &["foo", "bar", "other"]);
        assert_eq!(three.map(|parts| parts.len()), Some(3));
        assert_eq!(parts(&sources, &["foo", "unknown"]), None);
        // Which of two was meant is not guessed: the device names what it lacks.
        let another = ".visible .func (.param .b32 r) bar(.param .b32 x) { trap; }";
        sources.add(Digest::of(b"another"), another.as_bytes().into());
        assert_eq!(parts(&sources, &["foo", "bar"]), Some(vec![CALLER.to_owned()]));
        assert_eq!(parts(&sources, &["bar", "other"]), None);
        assert!(is_runtimes("cudaCGSynchronize") && !is_runtimes("cudaFoo"));
    }

    #[test]
    fn reads_numbers_and_words() {
        assert_eq!((after(PTX, ".target sm_"), after(PTX, ".version ")), (90, 8));
        assert!(defines_all(PTX, &["k"]) && !defines_all(PTX, &["kk"]));
        assert_eq!(kernels_of(b"\x7fELF"), None);
    }
}
