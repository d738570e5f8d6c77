//! Names in PTX text. Only what stands outside of functions is looked at, word by word: this must
//! read text of every PTX version, also where kedge's own parser does not know its instructions.

use super::{Allocators, PRINTERS, Symbols};

/// The variables and the use of malloc in a PTX module.
pub(super) fn symbols(text: &str) -> Symbols {
    let mut found = Symbols::default();
    let mut words = Words { rest: text }.peekable();
    let mut depth = 0u32;
    let mut external = false;
    while let Some(word) = words.next() {
        match word {
            "{" => depth += 1,
            "}" => {
                depth = depth.saturating_sub(1);
                external = false;
            }
            ";" => external = false,
            _ if depth > 0 => {}
            ".extern" => external = true,
            "malloc" if external => found.allocators = Allocators::Any,
            printer if PRINTERS.contains(&printer) => found.prints = true,
            ".global" | ".const" if !external => {
                found.variables.extend(declared(&mut words));
            }
            _ => {}
        }
    }
    found
}

/// The names of one declaration, up to its semicolon.
fn declared<'a>(words: &mut impl Iterator<Item = &'a str>) -> Vec<String> {
    let (mut names, mut nested, mut expected) = (Vec::new(), 0u32, true);
    for word in words {
        match word {
            ";" => break,
            "{" | "(" | "[" => nested += 1,
            "}" | ")" | "]" => nested = nested.saturating_sub(1),
            "," if nested == 0 => expected = true,
            _ if nested == 0 && expected && names_something(word) => {
                names.push(word.to_owned());
                expected = false;
            }
            _ => {}
        }
    }
    names
}

fn names_something(word: &str) -> bool {
    word.starts_with(|first: char| first.is_ascii_alphabetic() || "_$%".contains(first))
}

/// Words and punctuation, without comments.
struct Words<'a> {
    rest: &'a str,
}

impl<'a> Iterator for Words<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        loop {
            self.rest = self.rest.trim_start_matches(|c: char| c.is_whitespace() || c == '\0');
            let skip = match self.rest {
                rest if rest.starts_with("//") => rest.find('\n'),
                rest if rest.starts_with("/*") => rest.find("*/").map(|at| at + 2),
                rest if rest.starts_with('"') => rest[1..].find('"').map(|at| at + 2),
                _ => break,
            };
            self.rest = &self.rest[skip.unwrap_or(self.rest.len())..];
        }
        let part = |c: char| c.is_alphanumeric() || "._$%".contains(c);
        let end = match self.rest.find(|c| !part(c)) {
            Some(0) => self.rest.chars().next()?.len_utf8(),
            Some(end) => end,
            None => self.rest.len(),
        };
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        (!word.is_empty()).then_some(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        .version 8.7 // .global .u32 no;
        .target sm_90 /* .const .u32 neither; */
        .extern .global .u32 elsewhere;
        .global .align 8 .u64 _ZTV6Square[3] = {0, 0, area};
        .visible .global .attribute(.managed) .align 4 .u32 word = 5;
        .const .align 4 .b8 table[64] = {0, 0, 128};
        .global .v4 .f32 a, b[2] = {1, 2}, $c;
        .file 1 "a;.global .u32 x;"
        .visible .entry bump(.param .u64 p)
        { .reg .b32 %r<3>; ld.global.u32 %r1, [word]; { .shared .u32 s; } }
    "#;

    #[test]
    fn variables_of_the_module_are_found() {
        let found = symbols(TEXT);
        let names: Vec<_> = found.variables.iter().map(String::as_str).collect();
        assert_eq!(names, ["$c", "_ZTV6Square", "a", "b", "table", "word"]);
        assert_eq!(found.allocators, Allocators::None);
        assert!(
            !found.prints
                && symbols(".extern .func (.param .b32 r) vprintf (.param .b64 a);").prints
        );
    }

    #[test]
    fn malloc_is_an_external_function() {
        let text =
            ".extern .func (.param .b64 r) malloc (.param .b64 n) ;\n.visible .entry k() { }";
        assert_eq!(symbols(text).allocators, Allocators::Any);
        let own = ".visible .func (.param .b64 r) malloc (.param .b64 n) { ret; }";
        assert_eq!(symbols(own).allocators, Allocators::None);
    }

    #[test]
    fn any_bytes_end() {
        for text in ["{", "\"", "/*", ".global", ".global é = {", "é", "}}}}", ".const ,,,("] {
            symbols(text);
        }
    }
}
