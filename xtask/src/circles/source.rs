//! What of a crate's modules stands in its source: which there are, what each defines, brings into
//! scope and names. Not a compiler's view: macros are read as they stand, and what only tests have
//! is left out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A module's names from its crate's root: none for the root itself.
pub(super) type Place = Vec<String>;

/// A path as it stands in the source, and the line it stands in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) path: Vec<String>,
    pub(super) line: usize,
}

/// What one module says.
#[derive(Debug, Default)]
pub(super) struct Module {
    pub(super) file: PathBuf,
    pub(super) children: BTreeSet<String>,
    /// Functions, types, constants and macros.
    pub(super) items: BTreeSet<String>,
    /// What its own `use` declarations bring into scope, and from where.
    pub(super) brought: BTreeMap<String, Vec<String>>,
    /// Modules of which everything comes into scope.
    pub(super) globs: Vec<Vec<String>>,
    pub(super) named: Vec<Named>,
}

pub(super) type Modules = BTreeMap<Place, Module>;

/// Reads the crate whose root is the file `root`, all modules that it has outside of tests.
pub(super) fn read(root: &Path) -> Result<Modules, String> {
    let mut modules = Modules::new();
    let folder = root.parent().unwrap_or(root).to_owned();
    read_file(root, &folder, &Place::new(), &mut modules)?;
    Ok(modules)
}

/// Reads a module's file; the files of its children lie in `folder`.
fn read_file(
    file: &Path,
    folder: &Path,
    place: &Place,
    modules: &mut Modules,
) -> Result<(), String> {
    let text = std::fs::read_to_string(file);
    let text = text.map_err(|error| format!("{}: {error}", file.display()))?;
    let found = parse(&text, place, file);
    for (place, module) in found.modules {
        modules.insert(place, module);
    }
    for Elsewhere { place: child, path } in found.elsewhere {
        let Some(name) = child.last() else { continue };
        let within = &child[place.len()..child.len() - 1];
        let beside = within.iter().fold(folder.to_owned(), |folder, name| folder.join(name));
        let (single, own) = (beside.join(format!("{name}.rs")), beside.join(name).join("mod.rs"));
        let file = match path {
            Some(path) => file.with_file_name(path),
            None if single.exists() => single,
            None => own,
        };
        read_file(&file, &beside.join(name), &child, modules)?;
    }
    Ok(())
}

/// A module whose text is in another file, and the file's name where an attribute says it.
#[derive(Debug)]
struct Elsewhere {
    place: Place,
    path: Option<String>,
}

#[derive(Debug, Default)]
struct Found {
    modules: Modules,
    elsewhere: Vec<Elsewhere>,
}

fn parse(text: &str, place: &Place, file: &Path) -> Found {
    let tokens = tokens(text);
    let mut found = Found::default();
    Parser { tokens: &tokens, at: 0, file, found: &mut found }.module(place.clone());
    found
}

#[derive(Debug, Clone, Copy)]
struct Token<'a> {
    text: &'a str,
    line: usize,
}

struct Parser<'a> {
    tokens: &'a [Token<'a>],
    at: usize,
    file: &'a Path,
    found: &'a mut Found,
}

impl<'a> Parser<'a> {
    fn peek(&self, ahead: usize) -> &'a str {
        self.tokens.get(self.at + ahead).map_or("", |token| token.text)
    }

    fn line(&self) -> usize {
        self.tokens.get(self.at).map_or(0, |token| token.line)
    }

    fn next(&mut self) -> &'a str {
        let text = self.peek(0);
        self.at += 1;
        text
    }

    /// Reads a module to the brace that ends it, or to the end of the file.
    fn module(&mut self, place: Place) {
        let mut module = Module { file: self.file.to_owned(), ..Module::default() };
        let (mut depth, mut path) = (0_usize, None);
        while self.at < self.tokens.len() {
            match self.peek(0) {
                "#" => match self.attribute() {
                    Attribute::TestsAll => {
                        self.at = self.tokens.len();
                        module = Module { file: self.file.to_owned(), ..Module::default() };
                    }
                    Attribute::Tests => self.skip_item(),
                    Attribute::Path(to) => path = Some(to),
                    Attribute::Other => {}
                },
                "mod" if is_name(self.peek(1)) && [";", "{"].contains(&self.peek(2)) => {
                    let name = self.peek(1).to_owned();
                    let child = [place.clone(), vec![name.clone()]].concat();
                    module.children.insert(name);
                    let inline = self.peek(2) == "{";
                    self.at += 3;
                    if inline {
                        self.module(child);
                    } else {
                        self.found.elsewhere.push(Elsewhere { place: child, path: path.take() });
                    }
                }
                "use" => {
                    self.at += 1;
                    self.declaration(&mut module, depth == 0);
                }
                "{" => {
                    depth += 1;
                    self.at += 1;
                }
                "}" if depth == 0 => {
                    self.at += 1;
                    break;
                }
                "}" => {
                    depth -= 1;
                    self.at += 1;
                }
                word => {
                    if depth == 0 {
                        module.items.extend(self.defined(word).map(ToOwned::to_owned));
                    }
                    self.path(&mut module);
                }
            }
        }
        self.found.modules.insert(place, module);
    }

    /// The name of what is defined here, if something is.
    fn defined(&self, word: &str) -> Option<&'a str> {
        let name = match word {
            "macro_rules" => self.peek(2),
            "static" if self.peek(1) == "mut" => self.peek(2),
            "fn" | "struct" | "enum" | "union" | "trait" | "type" | "const" | "static" => {
                self.peek(1)
            }
            _ => "",
        };
        is_name(name).then_some(name)
    }

    /// Reads a path, or whatever one token is here.
    fn path(&mut self, module: &mut Module) {
        let line = self.line();
        let first = self.next();
        if !is_name(first) || self.peek(0) != "::" {
            return;
        }
        let mut path = vec![first.to_owned()];
        while self.peek(0) == "::" && is_name(self.peek(1)) {
            path.push(self.peek(1).to_owned());
            self.at += 2;
        }
        module.named.push(Named { path, line });
    }

    /// Reads an attribute.
    fn attribute(&mut self) -> Attribute {
        self.at += 1;
        let inner = self.peek(0) == "!";
        self.at += usize::from(inner);
        if self.peek(0) != "[" {
            return Attribute::Other;
        }
        let begin = self.at + 1;
        self.skip_group();
        let words: Vec<&str> =
            self.tokens[begin..self.at - 1].iter().map(|token| token.text).collect();
        match words.as_slice() {
            ["cfg", "(", "test", ")"] | ["cfg", "(", "all", "(", "test", ..] if inner => {
                Attribute::TestsAll
            }
            ["cfg", "(", "test", ")"] | ["cfg", "(", "all", "(", "test", ..] => Attribute::Tests,
            ["path", "=", path] => Attribute::Path(path.trim_matches('"').to_owned()),
            _ => Attribute::Other,
        }
    }

    /// Goes past a bracket and what it encloses.
    fn skip_group(&mut self) {
        let mut depth = 0_usize;
        while self.at < self.tokens.len() {
            match self.next() {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => {
                    depth -= 1;
                    if depth == 0 {
                        return;
                    }
                }
                _ => {}
            }
        }
    }

    /// Goes past the item, statement, field or arm that an attribute is of.
    fn skip_item(&mut self) {
        while self.peek(0) == "#" {
            self.attribute();
        }
        if self.peek(0) == "pub" {
            self.at += 1;
            if self.peek(0) == "(" {
                self.skip_group();
            }
        }
        let first = self.peek(0);
        let to_semicolon =
            ["use", "let", "const", "static", "type"].contains(&first) && self.peek(1) != "fn";
        let item = to_semicolon
            || ["fn", "mod", "struct", "enum", "impl", "trait", "unsafe", "const", "extern"]
                .contains(&first)
            || self.peek(1) == "!";
        while self.at < self.tokens.len() {
            match self.peek(0) {
                "{" => {
                    self.skip_group();
                    if !to_semicolon {
                        return;
                    }
                }
                "(" | "[" => self.skip_group(),
                ";" => {
                    self.at += 1;
                    return;
                }
                "," if !item => {
                    self.at += 1;
                    return;
                }
                "}" => return,
                _ => self.at += 1,
            }
        }
    }

    /// Reads a `use` declaration after that word. Its names are the module's where it is the
    /// module's own and not a block's.
    fn declaration(&mut self, module: &mut Module, own: bool) {
        self.tree(&[], module, own);
        if self.peek(0) == ";" {
            self.at += 1;
        }
    }

    fn tree(&mut self, before: &[String], module: &mut Module, own: bool) {
        let line = self.line();
        let mut path = before.to_vec();
        loop {
            match self.next() {
                "::" => {}
                "{" => {
                    while !["}", ""].contains(&self.peek(0)) {
                        self.tree(&path, module, own);
                        self.at += usize::from(self.peek(0) == ",");
                    }
                    self.at += 1;
                    return;
                }
                "*" => {
                    module.named.push(Named { path: path.clone(), line });
                    if own {
                        module.globs.push(path);
                    }
                    return;
                }
                name if is_name(name) => {
                    // `a::{self}` brings `a`.
                    if name != "self" || path.is_empty() {
                        path.push(name.to_owned());
                    }
                    if self.peek(0) == "::" {
                        continue;
                    }
                    let mut brought = path.last().cloned().unwrap_or_default();
                    if self.peek(0) == "as" {
                        brought = self.peek(1).to_owned();
                        self.at += 2;
                    }
                    module.named.push(Named { path: path.clone(), line });
                    if own {
                        module.brought.insert(brought, path);
                    }
                    return;
                }
                _ => return,
            }
        }
    }
}

enum Attribute {
    /// The whole file is tests'.
    TestsAll,
    Tests,
    Path(String),
    Other,
}

fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Words, strings and `::`, and every other character by itself. Comments are left out.
fn tokens(text: &str) -> Vec<Token<'_>> {
    let (mut found, mut at, mut line) = (Vec::new(), 0, 1);
    while let Some(first) = text[at..].chars().next() {
        let rest = &text[at..];
        let length = token(rest, first);
        let token = &rest[..length];
        if let Some(raw) = token.strip_prefix("r#").filter(|raw| is_name(raw)) {
            found.push(Token { text: raw, line });
        } else if !first.is_whitespace() && !token.starts_with("//") && !token.starts_with("/*") {
            found.push(Token { text: token, line });
        }
        line += token.matches('\n').count();
        at += length;
    }
    found
}

/// The length of what `rest` begins with.
fn token(rest: &str, first: char) -> usize {
    let word = |text: &str| {
        let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_'));
        end.unwrap_or(text.len())
    };
    let to_line_end = || rest.find('\n').unwrap_or(rest.len());
    match first {
        '/' if rest.starts_with("//") => to_line_end(),
        '/' if rest.starts_with("/*") => comment(rest),
        ':' if rest.starts_with("::") => 2,
        '"' => string(rest, 0),
        '\'' => character(rest, word),
        'b' | 'c' | 'r' if is_string(rest) => {
            let quote = rest.find('"').unwrap_or_default();
            if rest[..quote].contains('r') { raw(rest, quote) } else { string(rest, quote) }
        }
        'b' if rest.starts_with("b'") => 1 + character(&rest[1..], word),
        'r' if rest.starts_with("r#") => 2 + word(&rest[2..]),
        _ if first.is_alphanumeric() || first == '_' => word(rest),
        _ => first.len_utf8(),
    }
}

/// Whether a string with a prefix begins here: `b"`, `c"`, `r#"`, `br"`.
fn is_string(rest: &str) -> bool {
    let after = rest.trim_start_matches(['b', 'c', 'r']);
    let bare = after.trim_start_matches('#');
    let prefix = rest.len() - after.len();
    prefix <= 2
        && bare.starts_with('"')
        && (after.len() == bare.len() || rest[..prefix].contains('r'))
}

/// Comments nest.
fn comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    let bytes = rest.as_bytes();
    while at + 1 < bytes.len() {
        match &bytes[at..at + 2] {
            b"/*" => (depth, at) = (depth + 1, at + 2),
            b"*/" => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

/// A string whose first quote is at `quote`.
fn string(rest: &str, quote: usize) -> usize {
    let mut escaped = false;
    for (at, byte) in rest.bytes().enumerate().skip(quote + 1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

fn raw(rest: &str, quote: usize) -> usize {
    let end = format!("\"{}", "#".repeat(rest[..quote].matches('#').count()));
    rest[quote + 1..].find(&end).map_or(rest.len(), |at| quote + 1 + at + end.len())
}

/// A character, or a lifetime.
fn character(rest: &str, word: impl Fn(&str) -> usize) -> usize {
    let mut following = rest.char_indices().skip(1);
    match following.next() {
        Some((_, '\\')) => {
            following.next();
            following.find(|(_, c)| *c == '\'').map_or(rest.len(), |(at, _)| at + 1)
        }
        Some((at, c)) => {
            let after = at + c.len_utf8();
            if rest[after..].starts_with('\'') { after + 1 } else { (1 + word(&rest[1..])).max(1) }
        }
        None => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(text: &str) -> Module {
        parse(text, &Place::new(), Path::new("lib.rs")).modules.remove(&Place::new()).unwrap()
    }

    fn named(text: &str) -> Vec<String> {
        module(text).named.iter().map(|named| named.path.join("::")).collect()
    }

    #[test]
    fn trees_of_use_become_paths() {
        let found = module("use crate::{a::{self, B as C}, d::*};\npub(crate) use super::e::F;");
        let paths: Vec<String> = found.named.iter().map(|named| named.path.join("::")).collect();
        assert_eq!(paths, ["crate::a", "crate::a::B", "crate::d", "super::e::F"]);
        assert_eq!(found.named[3].line, 2);
        assert_eq!(found.brought["C"].join("::"), "crate::a::B");
        assert_eq!(found.brought["a"].join("::"), "crate::a");
        assert_eq!(found.brought["F"].join("::"), "super::e::F");
        assert_eq!(found.globs, [["crate", "d"]]);
    }

    #[test]
    fn paths_in_code_count_and_those_in_text_do_not() {
        let text = r##"
            // crate::a::b
            /* crate::a /* crate::b */ crate::c */
            fn f<'a>(x: &'a crate::d::D) -> char {
                let s = "crate::e::f"; let r = r#"crate::g " crate::h"#; let b = b"\"crate::i";
                let c = ('"', '\'', '\\', b'"');
                crate::j::k::<crate::l::M>(s);
                'x'
            }
        "##;
        assert_eq!(named(text), ["crate::d::D", "crate::j::k", "crate::l::M"]);
    }

    #[test]
    fn what_only_tests_have_is_left_out() {
        let text = "#[cfg(test)]\nmod tests { use crate::a::B; }\n\
                    #[cfg(test)]\n#[allow(x)]\npub(crate) fn f(a: [u8; 2]) { crate::c::d() }\n\
                    #[cfg(test)]\nuse crate::{e, f};\n\
                    struct S { #[cfg(test)] g: crate::g::G, h: crate::h::H }\n\
                    #[cfg(all(test, unix))] const X: u8 = { crate::i::J };\n\
                    #[cfg(not(test))]\nfn k() { crate::k::l() }\n";
        assert_eq!(named(text), ["crate::h::H", "crate::k::l"]);
        assert!(named("#![cfg(test)]\nuse crate::a::B;").is_empty());
    }

    #[test]
    fn modules_are_inline_or_in_files() {
        let text = "mod a { mod b; use super::c::D; fn e() {} }\n#[path = \"x.rs\"] mod f;\nmod g;";
        let found = parse(text, &vec!["top".to_owned()], Path::new("lib.rs"));
        let inline = &found.modules[&vec!["top".to_owned(), "a".to_owned()]];
        assert_eq!(inline.named[0].path.join("::"), "super::c::D");
        assert!(inline.items.contains("e"));
        let elsewhere: Vec<_> =
            found.elsewhere.iter().map(|one| (one.place.join("::"), one.path.as_deref())).collect();
        let expected = [("top::a::b", None), ("top::f", Some("x.rs")), ("top::g", None)];
        assert_eq!(elsewhere, expected.map(|(place, path)| (place.to_owned(), path)));
    }

    #[test]
    fn only_a_modules_own_names_are_its_items() {
        let found = module("pub const A: u8 = 1; fn b() { const C: u8 = 2; use crate::d::E; }");
        assert!(found.items.contains("A") && found.items.contains("b"));
        assert!(!found.items.contains("C") && !found.brought.contains_key("E"));
        assert_eq!(found.named.len(), 1);
    }
}
