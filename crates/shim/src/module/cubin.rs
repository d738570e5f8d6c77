//! What is in a cubin, an ELF file: its functions and variables, and what they refer to.
//!
//! Cubins come from compilers, but from files of the program's too: every place is checked.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// An ELF file's kind: relocatable.
const RELOCATABLE: usize = 1;
/// Kinds of sections: relocations with and without addends, and what holds no bytes.
const RELA: usize = 4;
const NO_BITS: usize = 8;
const REL: usize = 9;
/// CUDA's kind of a section of variables without bytes.
const GLOBAL_NO_BITS: usize = 0x7000_0007;
/// Bytes of a symbol, and of a section's header.
const SYMBOL: usize = 24;
const HEADER: usize = 64;
/// Kinds of symbols.
const OBJECT: u8 = 1;
const FUNCTION: u8 = 2;
/// In `.nv.info`: the form of entries that say their length, and the registers of a function.
const SIZED: usize = 4;
const REGISTERS: usize = 0x2F;
/// Bytes of an instruction, since compute capability 7.0, and of what is filled of a variable.
const INSTRUCTION: usize = 16;
const WORD: usize = 4;

/// No name is longer.
const MAX_NAME: usize = 64 << 10;
/// What is read of a file: bytes of names and symbols, and the holes in them. Compilers' symbols do
/// not overlap, so that a file has less than this by far; those of hostile ones may.
const MAX_WORK: usize = 256 << 20;

/// Whose a symbol is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Binding {
    /// Its file's alone.
    Local,
    Global,
    /// The first file's of those that have it, as an inline function's.
    Weak,
}

/// A place that the linker or loader fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hole<'a> {
    /// Of the symbol's bytes.
    at: usize,
    /// Of what name; nothing where that is its file's own.
    to: &'a str,
    /// What is filled in, and what is added to it.
    kind: usize,
    addend: usize,
}

/// The holes of a part of a section.
#[derive(Debug, Clone)]
struct Holes<'a> {
    /// The section's, by their place.
    all: Arc<[Hole<'a>]>,
    range: Range<usize>,
    /// Where the part begins.
    from: usize,
}

impl<'a> Holes<'a> {
    fn iter(&self) -> impl Iterator<Item = Hole<'a>> {
        let from = self.from;
        self.all[self.range.clone()].iter().map(move |hole| Hole { at: hole.at - from, ..*hole })
    }
}

/// What is left of [`MAX_WORK`].
struct Budget(Cell<usize>);

impl Budget {
    fn spend(&self, work: usize) -> Option<()> {
        self.0.set(self.0.get().checked_sub(work)?);
        Some(())
    }

    /// The text at `at`, which a NUL ends.
    fn text<'a>(&self, bytes: &'a [u8], at: usize) -> Option<&'a str> {
        let bytes = bytes.get(at..)?;
        let bytes = &bytes[..bytes.len().min(MAX_NAME)];
        let len = bytes.iter().position(|byte| *byte == 0);
        self.spend(len.unwrap_or(bytes.len()) + 1)?;
        std::str::from_utf8(&bytes[..len?]).ok()
    }
}

/// A function or variable.
#[derive(Debug, Clone)]
pub(super) struct Symbol<'a> {
    pub(super) name: &'a str,
    pub(super) binding: Binding,
    pub(super) function: bool,
    pub(super) size: usize,
    /// Empty for a variable without a value of its own.
    bytes: &'a [u8],
    holes: Holes<'a>,
}

impl Symbol<'_> {
    /// Whether a linker may have made `linked` of it: the same bytes but where it fills them, and
    /// there the same names, as far as they are still told.
    pub(super) fn became(&self, linked: &Symbol<'_>) -> bool {
        let (a, b) = (self, linked);
        if (a.function, a.size, a.bytes.len()) != (b.function, b.size, b.bytes.len()) {
            return false;
        }
        let unit = if a.function { INSTRUCTION } else { WORD };
        let filled: HashSet<usize> = a.holes.iter().map(|hole| hole.at / unit).collect();
        let units = a.bytes.chunks(unit).zip(b.bytes.chunks(unit)).enumerate();
        let same = units.filter(|(at, _)| !filled.contains(at)).all(|(_, (a, b))| a == b);
        let told: HashMap<usize, &str> = b.holes.iter().map(|hole| (hole.at, hole.to)).collect();
        let names = |hole: Hole<'_>| match told.get(&hole.at) {
            Some(to) => hole.to.is_empty() || to.is_empty() || hole.to == *to,
            None => true,
        };
        same && a.holes.iter().all(names)
    }

    /// Whether a linker makes the same of both: what it does not overwrite of an instruction that
    /// it fills counts too.
    pub(super) fn is_like(&self, other: &Symbol<'_>) -> bool {
        let (a, b) = (self, other);
        (a.function, a.size, a.bytes) == (b.function, b.size, b.bytes)
            && a.holes.iter().eq(b.holes.iter())
    }
}

#[derive(Debug)]
pub(super) struct Cubin<'a> {
    pub(super) relocatable: bool,
    pub(super) symbols: Vec<Symbol<'a>>,
    /// What compilers keep of functions beside their code, by its section's name.
    pub(super) tables: Vec<Symbol<'a>>,
    /// The registers of a thread, by its function's name.
    pub(super) registers: HashMap<&'a str, u32>,
}

struct Section<'a> {
    name: &'a str,
    kind: usize,
    /// What is in the file of it.
    bytes: &'a [u8],
    link: usize,
}

/// The little-endian number of `len` bytes at `at`.
fn number(bytes: &[u8], at: usize, len: usize) -> Option<usize> {
    let bytes = bytes.get(at..at.checked_add(len)?)?;
    Some(bytes.iter().rev().fold(0, |n, byte| n << 8 | usize::from(*byte)))
}

fn sections<'a>(file: &'a [u8], budget: &Budget) -> Option<Vec<Section<'a>>> {
    let (table, size) = (number(file, 0x28, 8)?, number(file, 0x3A, 2)?);
    let (count, names) = (number(file, 0x3C, 2)?, number(file, 0x3E, 2)?);
    if size < HEADER {
        return None;
    }
    let header = |index: usize| file.get(table.checked_add(index.checked_mul(size)?)?..);
    let bytes = |header: &[u8]| {
        let (at, len) = (number(header, 0x18, 8)?, number(header, 0x20, 8)?);
        file.get(at..at.checked_add(len)?)
    };
    let names = bytes(header(names)?)?;
    let section = |index| {
        let header = header(index)?;
        let kind = number(header, 4, 4)?;
        let empty = kind == NO_BITS || kind == GLOBAL_NO_BITS;
        Some(Section {
            name: budget.text(names, number(header, 0, 4)?)?,
            kind,
            bytes: if empty { &[] } else { bytes(header)? },
            link: number(header, 0x28, 4)?,
        })
    };
    (0..count).map(section).collect()
}

/// Reads what compilers note of functions: entries of a form, a kind and a length or value.
fn registers<'a>(
    mut notes: &[u8],
    name: impl Fn(usize) -> Option<&'a str>,
) -> HashMap<&'a str, u32> {
    let mut registers = HashMap::new();
    while let (Some(form), Some(kind), Some(len)) =
        (number(notes, 0, 1), number(notes, 1, 1), number(notes, 2, 2))
    {
        let len = if form == SIZED { len } else { 0 };
        let Some(payload) = notes.get(4..4 + len) else { break };
        if kind == REGISTERS
            && let (Some(symbol), Some(count)) = (number(payload, 0, 4), number(payload, 4, 4))
            && let Some(name) = name(symbol)
        {
            registers.insert(name, count as u32);
        }
        notes = &notes[4 + len..];
    }
    registers
}

impl<'a> Cubin<'a> {
    pub(super) fn parse(file: &'a [u8]) -> Option<Self> {
        if !file.starts_with(b"\x7fELF\x02") {
            return None;
        }
        let budget = Budget(Cell::new(MAX_WORK));
        let text = |bytes, at| budget.text(bytes, at);
        let sections = sections(file, &budget)?;
        let table = sections.iter().find(|section| section.name == ".symtab")?;
        let names = sections.get(table.link)?.bytes;
        // A symbol's name, if other files may know it.
        let shared = |index: usize| {
            let entry = table.bytes.get(index.checked_mul(SYMBOL)?..)?;
            let shared = *entry.get(4)? >> 4 != 0;
            shared.then(|| text(names, number(entry, 0, 4)?)).flatten()
        };
        let mut holes: HashMap<&str, Vec<Hole<'a>>> = HashMap::new();
        for section in &sections {
            let (prefix, size) = match section.kind {
                RELA => (".rela", 24),
                REL => (".rel", 16),
                _ => continue,
            };
            let Some(of) = section.name.strip_prefix(prefix) else { continue };
            let holes = holes.entry(of).or_default();
            for entry in section.bytes.chunks_exact(size) {
                let (at, symbol) = (number(entry, 0, 8)?, number(entry, 12, 4)?);
                let (kind, addend) = (number(entry, 8, 4)?, number(entry, 16, 8).unwrap_or(0));
                holes.push(Hole { at, to: shared(symbol).unwrap_or_default(), kind, addend });
            }
        }
        let sort = |(name, mut holes): (_, Vec<Hole<'a>>)| {
            holes.sort_by_key(|hole| hole.at);
            (name, Arc::from(holes))
        };
        let holes: HashMap<&str, Arc<[Hole<'a>]>> = holes.into_iter().map(sort).collect();
        let none: Arc<[Hole<'a>]> = Arc::default();
        let holes_in = |section: &Section<'a>, from: usize, to: usize| {
            let all = holes.get(section.name).unwrap_or(&none).clone();
            let place = |at| all.partition_point(|hole| hole.at < at);
            let range = place(from)..place(to);
            budget.spend(range.len())?;
            Some(Holes { all, range, from })
        };
        let mut symbols = Vec::new();
        for entry in table.bytes.chunks_exact(SYMBOL) {
            let (name, info) = (text(names, number(entry, 0, 4)?)?, entry[4]);
            let binding = match info >> 4 {
                0 => Binding::Local,
                2 => Binding::Weak,
                _ => Binding::Global,
            };
            // Section 0 is for what others have.
            let index = number(entry, 6, 2).filter(|index| *index != 0);
            let section = index.and_then(|index| sections.get(index));
            let (OBJECT | FUNCTION, Some(section)) = (info & 15, section) else { continue };
            let (value, size) = (number(entry, 8, 8)?, number(entry, 16, 8)?);
            let end = value.checked_add(size)?;
            let bytes =
                if section.bytes.is_empty() { &[] } else { section.bytes.get(value..end)? };
            budget.spend(bytes.len())?;
            let (function, holes) = (info & 15 == FUNCTION, holes_in(section, value, end)?);
            symbols.push(Symbol { name, binding, function, size, bytes, holes });
        }
        let is_table = |section: &&Section<'a>| {
            let rest = section.name.strip_prefix(".nv.constant").and_then(|rest| rest.get(..2));
            // Bank 0 is for the arguments, banks without a function for variables.
            rest.is_some_and(|rest| rest.ends_with('.') && rest != "0.")
        };
        let as_symbol = |section: &Section<'a>| {
            budget.spend(section.bytes.len())?;
            Some(Symbol {
                name: section.name,
                binding: Binding::Local,
                function: false,
                size: section.bytes.len(),
                bytes: section.bytes,
                holes: holes_in(section, 0, section.bytes.len())?,
            })
        };
        let tables = sections.iter().filter(is_table).map(as_symbol).collect::<Option<_>>()?;
        let name = |index: usize| {
            let entry = table.bytes.get(index.checked_mul(SYMBOL)?..)?;
            text(names, number(entry, 0, 4)?)
        };
        let notes = sections.iter().find(|section| section.name == ".nv.info");
        let registers = registers(notes.map_or(&[], |notes| notes.bytes), name);
        let relocatable = number(file, 0x10, 2)? == RELOCATABLE;
        Some(Self { relocatable, symbols, tables, registers })
    }

    /// The names of its kernels and functions.
    pub(super) fn functions(&self) -> Vec<&'a str> {
        self.symbols.iter().filter(|symbol| symbol.function).map(|symbol| symbol.name).collect()
    }

    /// The names of those that other files may know.
    pub(super) fn shared_functions(&self) -> Vec<&'a str> {
        let symbols = self.symbols.iter();
        let shared = symbols.filter(|symbol| symbol.function && symbol.binding != Binding::Local);
        shared.map(|symbol| symbol.name).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A function of a made-up cubin: its name, binding, code, and what it calls in which of its
    /// instructions, where `NAME+8` is for an addend. A name of `.nv.constant2.` is a table's.
    pub(in crate::module) type Made<'a> = (&'a str, u8, &'a [u8], &'a [(usize, &'a str)]);

    /// An ELF file with these functions, each in a section of its own.
    pub(in crate::module) fn make(relocatable: bool, functions: &[Made<'_>]) -> Vec<u8> {
        let mut names = vec![0];
        let mut name = |text: &str| {
            let at = names.len() as u32;
            names.extend(text.bytes().chain([0]));
            at
        };
        let symbol = |name: u32, info: u8, section: usize, size: usize| {
            let mut entry = name.to_le_bytes().to_vec();
            entry.extend([info, 0]);
            entry.extend((section as u16).to_le_bytes());
            entry.extend(0u64.to_le_bytes());
            entry.extend((size as u64).to_le_bytes());
            entry
        };
        let section_of = |text: &str| match text.starts_with('.') {
            true => text.to_owned(),
            false => format!(".text.{text}"),
        };
        // Sections: none, names, symbols, and of each function its code and relocations.
        let mut sections: Vec<(u32, u32, Vec<u8>)> = vec![(0, 0, Vec::new())];
        let tables = [name(".strtab"), name(".symtab")];
        let mut symbols = vec![symbol(0, 0, 0, 0)];
        let mut code = Vec::new();
        for (index, (text, binding, bytes, _)) in functions.iter().enumerate() {
            let (name, section) = (name(text), name(&section_of(text)));
            let kind = if text.starts_with('.') { 0 } else { FUNCTION };
            symbols.push(symbol(name, binding << 4 | kind, 3 + 2 * index, bytes.len()));
            code.push((section, bytes.to_vec()));
        }
        let mut relocations = Vec::new();
        for (text, _, _, calls) in functions {
            let mut entries = Vec::new();
            for (at, to) in *calls {
                let (to, addend) = to.split_once('+').unwrap_or((to, "0"));
                let known = functions.iter().position(|(name, ..)| *name == to);
                let index = known.map_or(symbols.len(), |at| at + 1);
                if known.is_none() {
                    symbols.push(symbol(name(to), 0x12, 0, 0));
                }
                entries.extend((*at as u64).to_le_bytes());
                entries.extend([1, 0, 0, 0]);
                entries.extend((index as u32).to_le_bytes());
                entries.extend(addend.parse::<u64>().unwrap().to_le_bytes());
            }
            relocations.push((name(&format!(".rela{}", section_of(text))), entries));
        }
        sections.push((tables[0], 3, names));
        sections.push((tables[1], 2, symbols.concat()));
        for ((text, bytes), (rela, entries)) in code.into_iter().zip(relocations) {
            sections.push((text, 1, bytes));
            sections.push((rela, RELA as u32, entries));
        }
        let mut file = b"\x7fELF\x02".to_vec();
        file.resize(0x10, 0);
        file.extend([if relocatable { 1 } else { 2 }, 0]);
        file.resize(0x40, 0);
        let table = 0x40u64;
        let mut at = table as usize + sections.len() * HEADER;
        let mut bytes = Vec::new();
        for (name, kind, content) in &sections {
            let mut header = name.to_le_bytes().to_vec();
            header.extend(kind.to_le_bytes());
            header.resize(0x18, 0);
            header.extend((at as u64).to_le_bytes());
            header.extend((content.len() as u64).to_le_bytes());
            header.extend(1u32.to_le_bytes());
            header.resize(HEADER, 0);
            file.extend(header);
            bytes.extend_from_slice(content);
            at += content.len();
        }
        file[0x28..0x30].copy_from_slice(&table.to_le_bytes());
        file[0x3A..0x3C].copy_from_slice(&(HEADER as u16).to_le_bytes());
        file[0x3C..0x3E].copy_from_slice(&(sections.len() as u16).to_le_bytes());
        file[0x3E..0x40].copy_from_slice(&1u16.to_le_bytes());
        file.extend(bytes);
        file
    }

    #[test]
    fn functions_are_read_with_what_they_call() {
        let file =
            make(true, &[("f", 1, &[7; 32], &[(16, "g"), (20, "h")]), ("g", 2, &[8; 16], &[])]);
        let cubin = Cubin::parse(&file).expect("a cubin");
        assert!(cubin.relocatable);
        assert_eq!(cubin.functions(), ["f", "g"]);
        let f = &cubin.symbols[0];
        assert_eq!(
            (f.binding, f.bytes, f.holes.iter().count()),
            (Binding::Global, &[7; 32][..], 2)
        );
        assert_eq!(f.holes.iter().nth(1), Some(Hole { at: 20, to: "h", kind: 1, addend: 0 }));
        assert_eq!(cubin.symbols[1].binding, Binding::Weak);
    }

    #[test]
    fn what_a_linker_fills_may_differ() {
        let symbol = |bytes: &'static [u8], holes: Vec<Hole<'static>>| {
            let (binding, size) = (Binding::Global, bytes.len());
            let holes = Holes { range: 0..holes.len(), all: holes.into(), from: 0 };
            Symbol { name: "f", binding, function: true, size, bytes, holes }
        };
        let hole = |to| vec![Hole { at: 20, to, kind: 1, addend: 0 }];
        let (before, after) = (&[7; 48], &{
            let mut after = [7; 48];
            after[17] = 1;
            after
        });
        let after: &'static [u8] = Box::leak(Box::new(*after));
        assert!(symbol(before, hole("g")).became(&symbol(after, hole("g"))));
        assert!(symbol(before, hole("g")).became(&symbol(after, Vec::new())));
        assert!(!symbol(before, hole("g")).became(&symbol(after, hole("h"))));
        assert!(!symbol(before, Vec::new()).became(&symbol(after, Vec::new())));
        assert!(!symbol(before, hole("g")).became(&symbol(&[7; 32], hole("g"))));
    }

    #[test]
    fn registers_are_noted_by_function() {
        // As ptxas writes them: the stack and registers of symbol 12, a value, symbol 99's.
        let notes = [
            4, 0x11, 8, 0, 12, 0, 0, 0, 0, 0, 0, 0, 4, 0x2f, 8, 0, 12, 0, 0, 0, 24, 0, 0, 0, 3,
            0x2f, 7, 0, 4, 0x2f, 8, 0, 99, 0, 0, 0, 38, 0, 0, 0, 4, 0x2f, 9, 0, 12,
        ];
        let name = |index| (index == 12).then_some("foo");
        assert_eq!(registers(&notes, name), HashMap::from([("foo", 24)]));
        assert_eq!(registers(&notes[..20], name), HashMap::new());
    }

    /// Names without an end, and symbols that all are the same bytes.
    #[test]
    fn hostile_files_are_given_up() {
        let long = "f".repeat(MAX_NAME);
        assert!(Cubin::parse(&make(true, &[(&long, 1, &[7; 16], &[])])).is_none());
        assert!(Cubin::parse(&make(true, &[(&long[..MAX_NAME - 32], 1, &[7; 16], &[])])).is_some());
        let budget = Budget(Cell::new(10));
        assert_eq!(budget.text(b"abc\0d", 0), Some("abc"));
        assert_eq!(budget.text(b"abc\0d", 4), None);
        assert_eq!((budget.text(b"abc\0d", 1), budget.text(b"abc\0d", 1)), (Some("bc"), None));
        // Each of many functions has the code of the first one.
        let code = vec![7; 1 << 20];
        let names: Vec<String> = (0..300).map(|number| format!("f{number}")).collect();
        let mut functions: Vec<Made<'_>> =
            names.iter().map(|name| (name.as_str(), 1, &[7; 16][..], &[][..])).collect();
        functions[0].2 = &code;
        let mut file = make(true, &functions);
        assert!(Cubin::parse(&file).is_some());
        let symbols = number(&file, 0x40 + 2 * HEADER + 0x18, 8).unwrap();
        let first = file[symbols + SYMBOL..][..SYMBOL].to_vec();
        for at in 1..functions.len() {
            file[symbols + (at + 1) * SYMBOL..][..SYMBOL].copy_from_slice(&first);
        }
        assert!(Cubin::parse(&file).is_none());
    }

    /// Cut anywhere, with any byte changed: no panic.
    #[test]
    fn damaged_files_are_none() {
        let file = make(true, &[("f", 1, &[7; 32], &[(16, "g")])]);
        for at in 0..file.len() {
            let _ = Cubin::parse(&file[..at]);
            for value in [0, 1, 0x7f, 0xff] {
                let mut damaged = file.clone();
                damaged[at] = value;
                let _ = Cubin::parse(&damaged);
            }
        }
        assert!(Cubin::parse(b"\x7fELF").is_none());
    }
}
