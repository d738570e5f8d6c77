//! Which PTX texts a cubin was linked of.
//!
//! A linker (nvJitLink) tells the driver nothing of what it links, but of each of its inputs the
//! compiler has: the relocatable cubin and its PTX. A linker copies functions and variables and
//! fills in addresses, so that an input is known by its code: a text that was compiled before an
//! edit, or another program's function of the same name, is not taken for it.

use super::cubin::{Binding, Cubin, Symbol};
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

/// A text, and the relocatable cubin that was made of it.
#[derive(Debug, Clone)]
pub(super) struct Input {
    pub(super) ptx: Arc<[u8]>,
    pub(super) cubin: Arc<[u8]>,
}

/// Why it is not known what a cubin was linked of.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unknown {
    /// No text's code has this function.
    Nowhere(String),
    /// Two texts have it, which differ in what cannot be seen any more.
    Either(String),
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, why) = match self {
            Unknown::Nowhere(name) => (name, "was not compiled here"),
            Unknown::Either(name) => (name, "may be one of two that were compiled here"),
        };
        write!(f, "the PTX of a linked cubin is not known: its function {name} {why}")
    }
}

/// An input that may have been linked.
struct Candidate<'a> {
    ptx: &'a Arc<[u8]>,
    cubin: Cubin<'a>,
}

/// What a linked cubin has, by name.
type Linked<'a> = HashMap<&'a str, Vec<&'a Symbol<'a>>>;

fn has(linked: &Linked<'_>, symbol: &Symbol<'_>) -> bool {
    let there = linked.get(symbol.name).map_or(&[][..], Vec::as_slice);
    there.iter().any(|there| symbol.became(there))
}

impl Candidate<'_> {
    /// Whether what it has for all to see is there as it has it, or not at all, and a function is.
    fn may_be_in(&self, linked: &Linked<'_>, tables: &Linked<'_>) -> bool {
        let symbols = &self.cubin.symbols;
        let fits = |symbol: &Symbol<'_>| {
            symbol.binding != Binding::Global
                || !linked.contains_key(symbol.name)
                || has(linked, symbol)
        };
        // Of functions that kernels share, linkers make one table of several.
        let as_before = |table: &Symbol<'_>| {
            let there = tables.get(table.name).and_then(|there| there.first());
            there.is_none_or(|there| there.size != table.size || table.became(there))
        };
        symbols.iter().any(|symbol| has(linked, symbol))
            && symbols.iter().all(fits)
            && self.cubin.tables.iter().all(as_before)
    }

    /// Its symbol that became the linked cubin's of this name.
    fn that_became(&self, linked: &Linked<'_>, name: &str) -> Option<&Symbol<'_>> {
        self.cubin.symbols.iter().find(|symbol| symbol.name == name && has(linked, symbol))
    }

    /// Whether the same is linked of it as of `other`, where `name` and what else both have of the
    /// linked cubin is theirs. A function's tables say what its code means.
    fn is_like(&self, other: &Candidate<'_>, linked: &Linked<'_>, name: &str) -> bool {
        if self.ptx == other.ptx {
            return true;
        }
        let same = |symbol: &Symbol<'_>, others: &[Symbol<'_>], must: bool| {
            let mut others = others.iter().filter(|other| other.name == symbol.name).peekable();
            (others.peek().is_none() && !must) || others.any(|other| symbol.is_like(other))
        };
        let code = |symbol: &Symbol<'_>| {
            !has(linked, symbol) || same(symbol, &other.cubin.symbols, symbol.name == name)
        };
        let is_its = |table: &Symbol<'_>| {
            table.name.strip_suffix(name).is_some_and(|bank| bank.ends_with('.'))
        };
        let has_table = |table: &Symbol<'_>| same(table, &other.cubin.tables, is_its(table));
        let lacks = |table: &Symbol<'_>| {
            is_its(table) && !self.cubin.tables.iter().any(|own| own.name == table.name)
        };
        self.cubin.symbols.iter().all(code)
            && self.cubin.tables.iter().all(has_table)
            && !other.cubin.tables.iter().any(lacks)
    }

    /// How much of it is not there as it has it: an inline function, where another's came first.
    fn lost(&self, linked: &Linked<'_>) -> usize {
        self.cubin.symbols.iter().filter(|symbol| !has(linked, symbol)).count()
    }
}

/// Returns the texts that `cubin` was linked of, in an order in which the first of an inline
/// function's definitions is the one that was taken. Of `inputs` the newest is the last one;
/// `functions` are those to be found.
///
/// # Errors
/// The function that is in none of them, or in two that may mean different things.
pub(super) fn parts(
    cubin: &Cubin<'_>,
    functions: &[&str],
    inputs: &[Input],
) -> Result<Vec<Arc<[u8]>>, Unknown> {
    fn by_name<'a>(symbols: &'a [Symbol<'a>]) -> Linked<'a> {
        let mut names = Linked::new();
        symbols.iter().for_each(|symbol| names.entry(symbol.name).or_default().push(symbol));
        names
    }
    let (linked, tables) = (by_name(&cubin.symbols), by_name(&cubin.tables));
    let candidates = inputs.iter().filter_map(|input| {
        let cubin = Cubin::parse(&input.cubin).filter(|cubin| cubin.relocatable)?;
        Some(Candidate { ptx: &input.ptx, cubin })
    });
    let candidates: Vec<Candidate<'_>> =
        candidates.filter(|candidate| candidate.may_be_in(&linked, &tables)).collect();
    // Variables that no text has are another input's.
    let is_named = |symbol: &&Symbol<'_>| {
        !symbol.function
            && symbol.binding == Binding::Global
            && !symbol.name.starts_with(['.', '$'])
    };
    let variables = cubin.symbols.iter().filter(is_named).map(|symbol| symbol.name);
    let mut wanted: Vec<(&str, Vec<usize>)> = Vec::new();
    for (name, must) in
        functions.iter().map(|name| (*name, true)).chain(variables.map(|name| (name, false)))
    {
        let of = |at: &usize| candidates[*at].that_became(&linked, name).is_some();
        let who: Vec<usize> = (0..candidates.len()).filter(of).collect();
        match who.is_empty() {
            false => wanted.push((name, who)),
            true if must => return Err(Unknown::Nowhere(name.to_owned())),
            true => {}
        }
    }
    let mut picked = BTreeSet::new();
    // What one text only has tells of that text; the others' inline functions may be in it.
    let is_one = |who: &[usize]| who.iter().all(|at| candidates[*at].ptx == candidates[who[0]].ptx);
    wanted.sort_by_key(|(_, who)| !is_one(who));
    for (name, who) in &wanted {
        if who.iter().any(|at| picked.contains(at)) {
            continue;
        }
        let least = who.iter().map(|at| candidates[*at].lost(&linked)).min();
        let best = || who.iter().filter(|at| Some(candidates[**at].lost(&linked)) == least);
        let Some(&last) = best().next_back() else { continue };
        let like = |at: &usize| candidates[*at].is_like(&candidates[last], &linked, name);
        if !best().all(like) {
            return Err(Unknown::Either((*name).to_owned()));
        }
        picked.insert(last);
    }
    let mut picked: Vec<usize> = picked.into_iter().collect();
    picked.sort_by_key(|at| candidates[*at].lost(&linked));
    let mut texts: Vec<Arc<[u8]>> = Vec::new();
    for at in picked {
        if !texts.contains(candidates[at].ptx) {
            texts.push(candidates[at].ptx.clone());
        }
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::super::cubin::tests::{Made, make};
    use super::*;

    const GLOBAL: u8 = 1;
    const WEAK: u8 = 2;
    const LOCAL: u8 = 0;

    fn input(ptx: &str, functions: &[Made<'_>]) -> Input {
        Input { ptx: ptx.as_bytes().into(), cubin: make(true, functions).into() }
    }

    fn texts(linked: &[Made<'_>], inputs: &[Input]) -> Result<Vec<String>, Unknown> {
        let file = make(false, linked);
        let cubin = Cubin::parse(&file).expect("a cubin");
        let texts = parts(&cubin, &cubin.functions(), inputs)?;
        Ok(texts.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect())
    }

    fn found(texts: &[&str]) -> Result<Vec<String>, Unknown> {
        Ok(texts.iter().map(|text| (*text).to_owned()).collect())
    }

    /// As nvJitLink links a kernel with a function of another file.
    #[test]
    fn a_cubin_is_traced_to_all_its_parts() {
        let foo: Made<'_> = ("foo", GLOBAL, &[1; 32], &[(16, "bar")]);
        let bar: Made<'_> = ("bar", GLOBAL, &[2; 16], &[]);
        let inputs = [
            input("caller", &[foo]),
            input("callee", &[bar]),
            input("other", &[("other", GLOBAL, &[3; 16], &[])]),
            input("callee", &[bar]), // compiled again
        ];
        assert_eq!(texts(&[foo, bar], &inputs), found(&["caller", "callee"]));
        let unknown: Made<'_> = ("unknown", GLOBAL, &[2; 16], &[]);
        assert_eq!(texts(&[foo, unknown], &inputs), Err(Unknown::Nowhere("unknown".to_owned())));
    }

    #[test]
    fn an_edited_text_is_not_taken_for_the_one_before() {
        let foo: Made<'_> = ("foo", GLOBAL, &[1; 32], &[(16, "bar")]);
        let old: Made<'_> = ("bar", GLOBAL, &[2; 16], &[]);
        let new: Made<'_> = ("bar", GLOBAL, &[4; 16], &[]);
        let inputs = [input("foo", &[foo]), input("old", &[old]), input("new", &[new])];
        assert_eq!(texts(&[foo, old], &inputs), found(&["foo", "old"]));
        assert_eq!(texts(&[foo, new], &inputs), found(&["foo", "new"]));
        assert_eq!(texts(&[foo, new], &inputs[..2]), Err(Unknown::Nowhere("bar".to_owned())));
    }

    /// Told by what the linker has left, and not guessed without.
    #[test]
    fn texts_may_differ_in_what_they_call_alone() {
        let foo: Made<'_> = ("foo", GLOBAL, &[1; 32], &[(16, "bar")]);
        let other: Made<'_> = ("foo", GLOBAL, &[1; 32], &[(16, "baz")]);
        let filled: Made<'_> = ("foo", GLOBAL, &[1; 32], &[]);
        let bar: Made<'_> = ("bar", GLOBAL, &[2; 16], &[]);
        let baz: Made<'_> = ("baz", GLOBAL, &[5; 16], &[]);
        let inputs = [input("foo", &[foo]), input("other", &[other]), input("both", &[bar, baz])];
        assert_eq!(texts(&[foo, bar, baz], &inputs), found(&["foo", "both"]));
        assert_eq!(texts(&[other, bar, baz], &inputs), found(&["other", "both"]));
        assert_eq!(texts(&[filled, bar, baz], &inputs), Err(Unknown::Either("foo".to_owned())));
    }

    /// In an operand of the instruction that it fills, in what it adds, or in a table that it has
    /// made one of with others.
    #[test]
    fn texts_that_differ_in_what_a_linker_hides_are_not_guessed() {
        let foo: Made<'_> = ("foo", GLOBAL, &[1; 32], &[(16, "bar")]);
        let bar: Made<'_> = ("bar", GLOBAL, &[2; 16], &[]);
        let filled: Made<'_> = ("foo", GLOBAL, &[1; 32], &[]);
        let either = |name: &str| Err(Unknown::Either(name.to_owned()));
        let mut code = [1; 32];
        code[24] = 7;
        let others: [Made<'_>; 2] =
            [("foo", GLOBAL, &code, foo.3), ("foo", GLOBAL, foo.2, &[(16, "bar+8")])];
        for other in others {
            let inputs = [input("foo", &[foo]), input("other", &[other]), input("bar", &[bar])];
            assert_eq!(texts(&[filled, bar], &inputs), either("foo"));
        }
        let table =
            |values: &'static [u8]| -> Made<'static> { (".nv.constant2.bar", LOCAL, values, &[]) };
        let callees = [
            input("foo", &[foo]),
            input("bar", &[bar, table(&[1; 8])]),
            input("other", &[bar, table(&[2; 8])]),
            input("none", &[bar]),
        ];
        let linked: [Made<'_>; 3] = [foo, bar, (".nv.constant2.foo", LOCAL, &[1; 24], &[])];
        assert_eq!(texts(&linked, &callees[..2]), found(&["foo", "bar"]));
        assert_eq!(texts(&linked, &callees[..3]), either("bar"));
        let of = |at: usize| [callees[0].clone(), callees[at].clone(), callees[3].clone()];
        assert_eq!(texts(&linked, &of(1)), either("bar"));
        // The same text, compiled twice, is one.
        assert_eq!(
            texts(&linked, &[&callees[..2], &callees[1..2]].concat()),
            found(&["foo", "bar"])
        );
    }

    /// The linker takes the first; static functions are each file's own.
    #[test]
    fn texts_may_share_inline_and_static_functions() {
        let a: Made<'_> = ("a", GLOBAL, &[1; 16], &[]);
        let b: Made<'_> = ("b", GLOBAL, &[2; 16], &[]);
        let first: Made<'_> = ("inline", WEAK, &[3; 16], &[]);
        let second: Made<'_> = ("inline", WEAK, &[4; 16], &[]);
        let own: [Made<'_>; 2] =
            [("static", LOCAL, &[5; 16], &[]), ("static", LOCAL, &[6; 16], &[])];
        let inputs = [input("b", &[b, second, own[1]]), input("a", &[a, first, own[0]])];
        assert_eq!(texts(&[a, b, first, own[0], own[1]], &inputs), found(&["a", "b"]));
        assert_eq!(texts(&[a, b, second, own[0], own[1]], &inputs), found(&["b", "a"]));
    }
}
