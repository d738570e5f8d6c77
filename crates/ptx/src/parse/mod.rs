//! The PTX parser: recursive descent over one token of look-ahead (PTX ISA reference, "Syntax").
//!
//! It knows declarations and the shape of statements, not the instruction set. Work and memory are
//! proportional to the text: registers get ids when they are first used, so that a range as
//! `.reg .b32 %r<1000>` costs nothing until then, and names resolve through hash maps.

mod body;
mod expression;
mod function;
mod initialiser;
mod number;
mod operand;
mod scope;
#[cfg(test)]
mod tests;
mod types;
mod variable;
mod vectors;

use std::collections::HashMap;
use std::sync::Arc;

use crate::ParseError;
use crate::ast::{Linkage, Location, Module, Space, Variable};
use crate::lexer::{Lexer, Token};

/// Nested parentheses, braces and scopes: bounds the parser's stack.
const MAX_DEPTH: u32 = 64;
/// Bytes of all initialisers of a module.
const MAX_INITIALISED: u64 = 1 << 30;
/// Largest `.reg .b32 %r<N>`, and `.param .b64 %p<N>`.
const MAX_REGISTERS: u32 = 1 << 22;
/// Longest text; lines and ids stay far below `u32`.
const MAX_TEXT: usize = 1 << 30;

type Result<T> = std::result::Result<T, ParseError>;

/// Parses one PTX module.
///
/// The text ends at its end or at its first NUL.
///
/// # Errors
/// The first construct that is not PTX, or that exceeds a bound, with its line.
pub fn parse(text: &str) -> Result<Module> {
    if text.len() > MAX_TEXT {
        return Err(ParseError::new(1, "PTX text above 1 GiB", "a longer one"));
    }
    let mut parser = Parser::new(text);
    parser.advance()?;
    parser.module()?;
    Ok(parser.module)
}

/// Bytes of a variable's element, which an index counts in.
fn unit(variable: &Variable) -> u32 {
    variable.ty.size() * variable.lanes
}

/// What a module-scope name stands for: an index into the module's list.
#[derive(Debug, Clone, Copy)]
enum Global {
    Function(usize),
    Variable(usize),
}

struct Parser<'a> {
    lexer: Lexer<'a>,
    /// The token that is looked at, and its line.
    token: Token<'a>,
    line: u32,
    depth: u32,
    /// Bytes of initialisers so far.
    initialised: u64,
    module: Module,
    globals: HashMap<&'a str, Global>,
    /// `.file`, by number.
    files: Vec<(u32, String)>,
    /// Names that were used before a declaration, with the line: checked at the end.
    undeclared: Vec<(&'a str, u32)>,
}

impl<'a> Parser<'a> {
    fn new(text: &'a str) -> Self {
        Self {
            lexer: Lexer::new(text),
            token: Token::End,
            line: 1,
            depth: 0,
            initialised: 0,
            module: Module {
                version: (0, 0),
                sm: 0,
                sm_suffix: None,
                // Before `.address_size` existed, addresses had 32 bits.
                address_size: 32,
                functions: Vec::new(),
                variables: Vec::new(),
                aliases: Vec::new(),
            },
            globals: HashMap::new(),
            files: Vec::new(),
            undeclared: Vec::new(),
        }
    }

    fn advance(&mut self) -> Result<()> {
        self.token = self.lexer.next()?;
        self.line = self.lexer.line();
        Ok(())
    }

    /// The error that `what` is wrong at the token that is looked at.
    fn error(&self, what: impl Into<String>) -> ParseError {
        ParseError::new(self.line, what, &self.token.shown())
    }

    fn at(&self, byte: u8) -> bool {
        self.token == Token::Punct(byte)
    }

    fn eat(&mut self, byte: u8) -> Result<bool> {
        let found = self.at(byte);
        if found {
            self.advance()?;
        }
        Ok(found)
    }

    fn expect(&mut self, byte: u8) -> Result<()> {
        if self.eat(byte)? {
            return Ok(());
        }
        Err(self.error(format!("expected '{}'", byte as char)))
    }

    fn eat_dot(&mut self, word: &str) -> Result<bool> {
        let found = self.token == Token::Dot(word);
        if found {
            self.advance()?;
        }
        Ok(found)
    }

    fn identifier(&mut self, what: &str) -> Result<&'a str> {
        let Token::Ident(word) = self.token else {
            return Err(self.error(format!("expected {what}")));
        };
        self.advance()?;
        Ok(word)
    }

    fn string(&mut self) -> Result<&'a str> {
        let Token::Str(text) = self.token else {
            return Err(self.error("expected a string"));
        };
        self.advance()?;
        Ok(text)
    }

    /// Runs `inner` one level deeper, within the bound.
    fn nested<T>(&mut self, inner: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.depth == MAX_DEPTH {
            return Err(self.error(format!("nested deeper than {MAX_DEPTH} levels")));
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    fn module(&mut self) -> Result<()> {
        loop {
            match self.token {
                Token::End => {
                    // They stand at the text's end.
                    let files: Arc<[_]> = std::mem::take(&mut self.files).into();
                    self.module.functions.iter_mut().for_each(|it| it.files = files.clone());
                    return self.check_undeclared();
                }
                Token::Punct(b';') => self.advance()?,
                Token::Dot(word) => self.module_directive(word)?,
                _ => return Err(self.error("expected a directive")),
            }
        }
    }

    fn module_directive(&mut self, word: &'a str) -> Result<()> {
        match word {
            "version" => self.version(),
            "target" => self.target(),
            "address_size" => self.address_size(),
            "alias" => self.alias(),
            _ if self.skip_debug_directive(word)? => Ok(()),
            _ => self.declaration(),
        }
    }

    /// A variable or function with its linkage.
    fn declaration(&mut self) -> Result<()> {
        let mut linkage = Linkage::Internal;
        while let Token::Dot(word) = self.token {
            let Some(found) = types::linkage(word) else { break };
            linkage = found;
            self.advance()?;
        }
        let Token::Dot(word) = self.token else {
            return Err(self.error("expected a declaration"));
        };
        match word {
            "entry" | "func" => {
                self.advance()?;
                self.function(word == "entry", linkage)
            }
            // `.tex .u32 name;` is the old form of `.global .texref name;`.
            "tex" => {
                self.advance()?;
                self.module_variables(Space::Global, linkage, true)
            }
            "reg" => Err(self.error("registers at module scope are not supported")),
            _ => match types::space(word) {
                Some(Space::Param) | None => Err(self.error("unknown directive")),
                Some(space) => {
                    self.advance()?;
                    self.module_variables(space, linkage, false)
                }
            },
        }
    }

    fn version(&mut self) -> Result<()> {
        self.advance()?;
        let parsed = match self.token {
            Token::Number(text) => text.split_once('.').and_then(|(major, minor)| {
                Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
            }),
            _ => None,
        };
        let Some(version) = parsed else { return Err(self.error("expected a PTX version")) };
        self.module.version = version;
        self.advance()
    }

    /// `.target sm_90a, debug, …`. Options beside the architecture do not change what code means.
    fn target(&mut self) -> Result<()> {
        self.advance()?;
        loop {
            let word = self.identifier("a target")?;
            if let Some(name) = word.strip_prefix("sm_").or(word.strip_prefix("compute_")) {
                let digits = name.trim_end_matches(['a', 'f']);
                let Ok(sm) = digits.parse() else {
                    return Err(ParseError::new(self.line, "unknown target", word));
                };
                self.module.sm = sm;
                self.module.sm_suffix = name[digits.len()..].chars().next();
            }
            if !self.eat(b',')? {
                return Ok(());
            }
        }
    }

    fn address_size(&mut self) -> Result<()> {
        self.advance()?;
        let size = self.constant_u32("an address size")?;
        if size != 32 && size != 64 {
            return Err(self.error("address size is neither 32 nor 64"));
        }
        self.module.address_size = size;
        Ok(())
    }

    fn alias(&mut self) -> Result<()> {
        self.advance()?;
        let name = self.identifier("an alias")?;
        self.expect(b',')?;
        let line = self.line;
        let target = self.identifier("an aliased function")?;
        self.expect(b';')?;
        self.undeclared.push((target, line));
        self.module.aliases.push((name.to_owned(), target.to_owned()));
        Ok(())
    }

    /// Reads a directive that only debuggers and optimisers read; false where it is another one.
    fn skip_debug_directive(&mut self, word: &str) -> Result<bool> {
        match word {
            "loc" => drop(self.location()?),
            "file" => self.file()?,
            "section" => self.skip_section()?,
            "pragma" => {
                self.advance()?;
                self.string()?;
                while self.eat(b',')? {
                    self.string()?;
                }
                self.expect(b';')?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// `.loc 1 20 5 [, function_name $L__info_string0 [+ 4] [, inlined_at 1 3 9]]`: no semicolon
    /// ends it.
    fn location(&mut self) -> Result<Location> {
        let ptx_line = self.line;
        self.advance()?;
        let [file, line] = [self.number_or_zero()?, self.number_or_zero()?];
        self.skip_numbers()?;
        let mut inlined_at = None;
        while self.eat(b',')? {
            match self.identifier("function_name or inlined_at")? {
                "function_name" => {
                    self.identifier("a label")?;
                    if self.eat(b'+')? {
                        self.skip_numbers()?;
                    }
                }
                "inlined_at" => {
                    inlined_at = Some((self.number_or_zero()?, self.number_or_zero()?));
                    self.skip_numbers()?;
                }
                _ => return Err(self.error("unknown attribute of .loc before this")),
            }
        }
        Ok(Location { ptx_line, file, line, inlined_at })
    }

    /// A decimal number; 0 where there is none, or one that is too large.
    fn number_or_zero(&mut self) -> Result<u32> {
        let Token::Number(digits) = self.token else { return Ok(0) };
        self.advance()?;
        Ok(digits.parse().unwrap_or(0))
    }

    fn skip_numbers(&mut self) -> Result<()> {
        while let Token::Number(_) = self.token {
            self.advance()?;
        }
        Ok(())
    }

    /// `.file 1 "name" [, timestamp, size]`.
    fn file(&mut self) -> Result<()> {
        self.advance()?;
        let number = self.number_or_zero()?;
        self.skip_numbers()?;
        let name = self.string()?;
        self.files.push((number, name.to_owned()));
        while self.eat(b',')? {
            self.skip_numbers()?;
        }
        Ok(())
    }

    /// `.section .debug_info { … }`.
    fn skip_section(&mut self) -> Result<()> {
        while !self.at(b'{') {
            if self.token == Token::End {
                return Err(self.error("expected '{' of a section"));
            }
            self.advance()?;
        }
        let mut open = 0u32;
        loop {
            match self.token {
                Token::Punct(b'{') => open += 1,
                Token::Punct(b'}') => open -= 1,
                Token::End => return Err(self.error("section without an end")),
                _ => {}
            }
            self.advance()?;
            if open == 0 {
                return Ok(());
            }
        }
    }

    /// Every name that was used has a declaration by now.
    fn check_undeclared(&self) -> Result<()> {
        for (name, line) in &self.undeclared {
            if !self.globals.contains_key(name) {
                return Err(ParseError::new(*line, "undeclared name", name));
            }
        }
        Ok(())
    }
}
