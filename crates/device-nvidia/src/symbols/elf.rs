//! Names in a cubin: an ELF file (64-bit, little-endian) with the program's variables in its symbol
//! table (in `.nv.global*` and `.nv.constant3*`, but a name too many does no harm), whose
//! `.nv.callgraph` holds pairs of symbols, caller and callee, and whose `.rela.nv.*` name the words
//! of variables that begin as addresses of functions.

use super::{Allocators, CodeWords, MAX_VARIABLES, PRINTERS, Symbols};
use std::collections::{BTreeSet, HashMap};

const SECTION_HEADER: usize = 64;
const SYMBOL: usize = 24;
const RELOCATION: usize = 24;
const SHT_SYMTAB: u32 = 2;
const SHT_RELA: u32 = 4;
const SHT_NOBITS: u32 = 8;
/// A word of 64 bits that is to be a symbol's address.
const R_CUDA_64: u32 = 2;
const STT_OBJECT: u8 = 1;
/// What relocatable machine code has instead.
const STT_CUDA_OBJECT: u8 = 13;
const STT_FUNC: u8 = 2;
/// In a symbol's `st_other`: a kernel.
const STO_CUDA_ENTRY: u8 = 0x10;
const SHN_UNDEF: u16 = 0;

/// The variables and the use of malloc in a cubin.
pub(super) fn symbols(bytes: &[u8]) -> Result<Symbols, String> {
    let damaged = || "its machine code's headers are damaged".to_owned();
    let file = File { bytes };
    let sections = file.sections().ok_or_else(damaged)?;
    let Some(table) = sections.iter().find(|section| section.kind == SHT_SYMTAB) else {
        return Err("its machine code has no symbol table".into());
    };
    let all = file.symbols(table, &sections).ok_or_else(damaged)?;
    let names = file.section_names(&sections).ok_or_else(damaged)?;
    let inside_kernels = |index: u16| {
        names
            .get(usize::from(index))
            .is_some_and(|name| name.starts_with(b".nv.shared") || name.starts_with(b".nv.local"))
    };
    let is_variable = |s: &&Symbol<'_>| {
        let object = s.kind == STT_OBJECT || s.kind == STT_CUDA_OBJECT;
        object && s.section != SHN_UNDEF && s.size > 0 && !inside_kernels(s.section)
    };
    let variables: Vec<&Symbol<'_>> = all.iter().filter(is_variable).collect();
    let code_words = code_words(&file, &sections, &all, &variables).ok_or_else(damaged)?;
    let variables =
        variables.iter().map(|s| s.text()).collect::<Option<_>>().ok_or_else(damaged)?;
    let graph = names.iter().position(|name| *name == b".nv.callgraph");
    let graph = graph.and_then(|at| file.content(&sections[at]));
    let prints = all.iter().any(|s| PRINTERS.iter().any(|printer| printer.as_bytes() == s.name));
    Ok(Symbols { variables, allocators: allocators(&all, graph), prints, code_words })
}

/// The words of variables that the driver makes addresses of functions when it loads them.
fn code_words(
    file: &File<'_>,
    sections: &[Section],
    symbols: &[Symbol<'_>],
    variables: &[&Symbol<'_>],
) -> Option<CodeWords> {
    let mut found = CodeWords::new();
    for relocations in sections.iter().filter(|section| section.kind == SHT_RELA) {
        let mut there: Vec<_> =
            variables.iter().filter(|s| u32::from(s.section) == relocations.info).collect();
        if there.is_empty() {
            continue;
        }
        there.sort_unstable_by_key(|s| s.value);
        let entries = file.content(relocations)?.chunks_exact(RELOCATION);
        if entries.len() > 16 * MAX_VARIABLES {
            return None;
        }
        for entry in entries {
            let one = File { bytes: entry };
            let (at, kind, symbol) = (one.u64(0)?, one.u32(8)?, one.u32(12)?);
            let is_code = symbols.get(symbol as usize).is_some_and(|s| s.kind == STT_FUNC);
            let before = there[..there.partition_point(|s| s.value <= at)].last();
            let holds = before.filter(|s| at - s.value < s.size);
            if let (R_CUDA_64, true, Some(variable)) = (kind, is_code, holds) {
                found.entry(variable.text()?).or_default().insert(at - variable.value);
            }
        }
    }
    Some(found)
}

/// The kernels that reach malloc by calls.
fn allocators(symbols: &[Symbol<'_>], graph: Option<&[u8]>) -> Allocators {
    let malloc =
        |s: &Symbol<'_>| s.section == SHN_UNDEF && s.kind == STT_FUNC && s.name == b"malloc";
    let Some(malloc) = symbols.iter().position(malloc) else { return Allocators::None };
    let Some(graph) = graph else { return Allocators::Any };
    let word = |bytes: &[u8]| bytes.try_into().map_or(u32::MAX, u32::from_le_bytes) as usize;
    let mut callers_of = HashMap::<usize, Vec<usize>>::new();
    for (from, to) in graph.chunks_exact(8).map(|pair| (word(&pair[..4]), word(&pair[4..]))) {
        callers_of.entry(to).or_default().push(from);
    }
    let (mut callers, mut next) = (BTreeSet::new(), vec![malloc]);
    while let Some(callee) = next.pop() {
        let new = callers_of.remove(&callee).unwrap_or_default();
        next.extend(new.into_iter().filter(|caller| callers.insert(*caller)));
    }
    // A function that is no kernel may be called through a pointer, by any kernel.
    let entry = |at: &usize| symbols.get(*at).filter(|s| s.other & STO_CUDA_ENTRY != 0);
    let kernels: Option<BTreeSet<String>> =
        callers.iter().map(|at| entry(at).and_then(Symbol::text)).collect();
    kernels.map_or(Allocators::Any, Allocators::These)
}

struct Symbol<'a> {
    name: &'a [u8],
    kind: u8,
    other: u8,
    section: u16,
    /// From the beginning of its section.
    value: u64,
    size: u64,
}

impl Symbol<'_> {
    fn text(&self) -> Option<String> {
        String::from_utf8(self.name.to_vec()).ok().filter(|name| !name.is_empty())
    }
}

#[derive(Clone, Copy)]
struct Section {
    name: u32,
    kind: u32,
    offset: u64,
    size: u64,
    link: u32,
    info: u32,
}

struct File<'a> {
    bytes: &'a [u8],
}

impl<'a> File<'a> {
    fn array<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.bytes.get(at..at.checked_add(N)?)?.try_into().ok()
    }

    fn u16(&self, at: usize) -> Option<u16> {
        self.array(at).map(u16::from_le_bytes)
    }

    fn u32(&self, at: usize) -> Option<u32> {
        self.array(at).map(u32::from_le_bytes)
    }

    fn u64(&self, at: usize) -> Option<u64> {
        self.array(at).map(u64::from_le_bytes)
    }

    fn sections(&self) -> Option<Vec<Section>> {
        let start = usize::try_from(self.u64(40)?).ok()?;
        if usize::from(self.u16(58)?) != SECTION_HEADER {
            return None;
        }
        // More sections than 16 bits can count: the number is in the first one's size.
        let count = match self.u16(60)? {
            0 => self.u64(start.checked_add(32)?)?,
            count => u64::from(count),
        };
        let count = usize::try_from(count).ok().filter(|n| *n <= self.bytes.len())?;
        (0..count)
            .map(|index| {
                let at = start.checked_add(index.checked_mul(SECTION_HEADER)?)?;
                Some(Section {
                    name: self.u32(at)?,
                    kind: self.u32(at + 4)?,
                    offset: self.u64(at + 24)?,
                    size: self.u64(at + 32)?,
                    link: self.u32(at + 40)?,
                    info: self.u32(at + 44)?,
                })
            })
            .collect()
    }

    fn content(&self, section: &Section) -> Option<&'a [u8]> {
        if section.kind == SHT_NOBITS {
            return Some(&[]);
        }
        let start = usize::try_from(section.offset).ok()?;
        let end = start.checked_add(usize::try_from(section.size).ok()?)?;
        self.bytes.get(start..end)
    }

    fn section_names(&self, sections: &[Section]) -> Option<Vec<&'a [u8]>> {
        let index = match self.u16(62)? {
            // SHN_XINDEX: it is in the first section's link.
            0xffff => sections.first()?.link as usize,
            index => usize::from(index),
        };
        let strings = self.content(sections.get(index)?)?;
        sections.iter().map(|section| string(strings, section.name)).collect()
    }

    fn symbols(&self, table: &Section, sections: &[Section]) -> Option<Vec<Symbol<'a>>> {
        let strings = self.content(sections.get(table.link as usize)?)?;
        let entries = self.content(table)?.chunks_exact(SYMBOL);
        if entries.len() > 16 * MAX_VARIABLES {
            return None;
        }
        entries
            .map(|entry| {
                let one = File { bytes: entry };
                Some(Symbol {
                    name: string(strings, one.u32(0)?)?,
                    kind: entry[4] & 15,
                    other: entry[5],
                    section: one.u16(6)?,
                    value: one.u64(8)?,
                    size: one.u64(16)?,
                })
            })
            .collect()
    }
}

/// The bytes from `at` up to a NUL.
fn string(strings: &[u8], at: u32) -> Option<&[u8]> {
    let rest = strings.get(at as usize..)?;
    Some(&rest[..rest.iter().position(|byte| *byte == 0)?])
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A file with a symbol table of (name, kind, other, section), two sections for variables and a
    /// call graph.
    fn cubin(symbols: &[(&str, u8, u8, u16)], calls: &[(u32, u32)]) -> Vec<u8> {
        let symbols: Vec<_> = symbols.iter().map(|(n, k, o, s)| (*n, *k, *o, *s, 0, 4)).collect();
        relocated(&symbols, calls, &[])
    }

    /// Symbols with values and sizes too; and relocations in the first section for variables:
    /// where, kind, symbol.
    pub(crate) fn relocated(
        symbols: &[(&str, u8, u8, u16, u64, u64)],
        calls: &[(u32, u32)],
        relocations: &[(u64, u32, u32)],
    ) -> Vec<u8> {
        let names = b"\0.nv.global.init\0.nv.constant3\0.nv.shared.k\0.nv.callgraph\0";
        let at = |name: &[u8]| names.windows(name.len()).position(|w| w == name).unwrap() as u32;
        let (mut strings, mut table) = (vec![0u8], vec![]);
        for (name, kind, other, section, value, size) in symbols {
            table.extend((strings.len() as u32).to_le_bytes());
            table.extend([*kind, *other]);
            table.extend(section.to_le_bytes());
            table.extend(value.to_le_bytes());
            table.extend(size.to_le_bytes());
            strings.extend(name.as_bytes());
            strings.push(0);
        }
        let graph: Vec<u8> =
            calls.iter().flat_map(|(a, b)| [a.to_le_bytes(), b.to_le_bytes()].concat()).collect();
        let entry = |(at, kind, symbol): &(u64, u32, u32)| {
            let mut bytes = at.to_le_bytes().to_vec();
            bytes.extend(kind.to_le_bytes());
            bytes.extend(symbol.to_le_bytes());
            bytes.extend([0; 8]);
            bytes
        };
        let relocations: Vec<u8> = relocations.iter().flat_map(entry).collect();
        let parts: [(u32, u32, u32, &[u8]); 9] = [
            (0, 0, 0, &[]),
            (at(b".nv.global"), 1, 0, &[0; 8]),
            (at(b".nv.constant3"), 1, 0, &[0; 8]),
            (at(b".nv.callgraph"), 0x7000_0001, 0, &graph),
            (0, SHT_SYMTAB, 5, &table),
            (0, 3, 0, &strings),
            (0, 3, 0, names),
            (at(b".nv.shared"), 1, 0, &[0; 8]),
            (0, SHT_RELA, 4, &relocations),
        ];
        let mut file = vec![0u8; 64];
        let mut headers = Vec::new();
        for (name, kind, link, content) in parts {
            headers.extend(name.to_le_bytes());
            headers.extend(kind.to_le_bytes());
            headers.extend([0; 16]);
            headers.extend((file.len() as u64).to_le_bytes());
            headers.extend((content.len() as u64).to_le_bytes());
            headers.extend(link.to_le_bytes());
            headers.extend(1u32.to_le_bytes());
            headers.extend([0; 16]);
            file.extend(content);
        }
        let start = file.len() as u64;
        file.extend(headers);
        file[..4].copy_from_slice(b"\x7fELF");
        file[40..48].copy_from_slice(&start.to_le_bytes());
        file[58..60].copy_from_slice(&64u16.to_le_bytes());
        file[60..62].copy_from_slice(&9u16.to_le_bytes());
        file[62..64].copy_from_slice(&6u16.to_le_bytes());
        file
    }

    #[test]
    fn objects_outside_of_kernels_are_variables() {
        let file = cubin(
            &[
                ("", 0, 0, 0),
                ("counter", 1, 0, 1),
                ("table", 13, 0, 2),
                ("code", 2, 0, 1),
                ("elsewhere", 1, 0, 0),
                ("tile", 1, 0, 7),
            ],
            &[],
        );
        let found = symbols(&file).unwrap();
        assert!(!found.prints);
        assert_eq!(found.variables.into_iter().collect::<Vec<_>>(), ["counter", "table"]);
        assert_eq!(found.allocators, Allocators::None);
    }

    #[test]
    fn words_that_begin_as_addresses_of_functions_are_found() {
        let all = [
            ("", 0, 0, 0, 0, 0),
            ("plain", 1, 0, 1, 0, 16),
            ("table", 1, 0, 1, 16, 24),
            ("f", 2, 0, 3, 0, 64),
            ("elsewhere", 1, 0, 2, 16, 24),
        ];
        // A function's address twice; a variable's; another kind; between variables; no symbol.
        let words = [(16, 2, 3), (32, 2, 3), (24, 2, 1), (0, 56, 3), (40, 2, 3), (8, 2, 99)];
        let found = symbols(&relocated(&all, &[], &words)).unwrap().code_words;
        let table = BTreeSet::from([0, 16]);
        assert_eq!(found, CodeWords::from([("table".to_owned(), table)]));
    }

    #[test]
    fn kernels_that_reach_malloc_are_named() {
        let entry = STO_CUDA_ENTRY;
        let all =
            [("", 0, 0, 0), ("malloc", 2, 0, 0), ("heap", 2, entry, 3), ("plain", 2, entry, 3)];
        let found = symbols(&cubin(&all, &[(0, u32::MAX), (2, 1)])).unwrap();
        assert_eq!(found.allocators, Allocators::These(["heap".to_owned()].into()));
        // Through a function whose address somebody may have.
        let all = [("", 0, 0, 0), ("malloc", 2, 0, 0), ("helper", 2, 0, 3), ("k", 2, entry, 3)];
        let found = symbols(&cubin(&all, &[(2, 1), (3, 2)])).unwrap();
        assert_eq!(found.allocators, Allocators::Any);
    }

    #[test]
    fn a_module_prints_where_it_names_a_printer() {
        for printer in PRINTERS {
            assert!(symbols(&cubin(&[("", 0, 0, 0), (printer, 2, 0, 0)], &[])).unwrap().prints);
        }
    }

    #[test]
    fn a_cut_or_changed_file_is_refused_or_read() {
        let file = cubin(&[("", 0, 0, 0), ("counter", 1, 0, 1)], &[(1, 1)]);
        for end in 0..file.len() {
            let _ = symbols(&file[..end]);
        }
        for at in 0..file.len() {
            let mut changed = file.clone();
            changed[at] = 0xff;
            let _ = symbols(&changed);
        }
        assert!(symbols(&file[..100]).is_err());
    }
}
