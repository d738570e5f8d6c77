//! Operands of instructions (PTX ISA, "Instruction Operands").

use super::number::Number;
use super::scope::{Name, Names};
use super::{Global, Parser, Result, types, unit};
use crate::ast::{AddressBase, Operand};
use crate::lexer::Token;

/// What a name in an operand stands for.
enum Meaning {
    Operand(Operand),
    /// A variable or function, with the bytes of its element.
    Symbol(String, u32),
}

fn literal(value: Number) -> Operand {
    match value {
        Number::Int { bits, .. } => Operand::Int(bits as i64),
        Number::F32(bits) => Operand::F32(bits),
        Number::F64(bits) => Operand::F64(bits),
    }
}

impl<'a> Parser<'a> {
    /// One operand of the instruction `opcode`, with `d|p` pairs.
    pub(super) fn operand(&mut self, names: &mut Names<'a>, opcode: &str) -> Result<Operand> {
        let left = self.single(names, opcode)?;
        if !self.eat(b'|')? {
            return Ok(left);
        }
        let right = self.single(names, opcode)?;
        Ok(Operand::Pair(Box::new(left), Box::new(right)))
    }

    fn single(&mut self, names: &mut Names<'a>, opcode: &str) -> Result<Operand> {
        match self.token {
            Token::Ident("WARP_SZ") => self.expression().map(literal),
            Token::Ident(name) => self.named(names, opcode, name),
            Token::Punct(b'[') => self.address(names, opcode),
            Token::Punct(b'{') => {
                self.advance()?;
                Ok(Operand::Vector(self.list(names, opcode, b'}')?))
            }
            Token::Punct(b'(') if opcode == "call" => {
                self.advance()?;
                Ok(Operand::List(self.list(names, opcode, b')')?))
            }
            Token::Punct(b'!') => {
                self.advance()?;
                match self.register(names)? {
                    Some(Operand::Register(id)) => Ok(Operand::NotRegister(id)),
                    _ => Err(self.error("expected a predicate after '!', before")),
                }
            }
            Token::Punct(b'-') => {
                self.advance()?;
                if let Some(Operand::Register(id)) = self.register(names)? {
                    return Ok(Operand::NegRegister(id));
                }
                self.negative_expression().map(literal)
            }
            _ => self.expression().map(literal),
        }
    }

    /// Operands up to a closing bracket.
    fn list(&mut self, names: &mut Names<'a>, opcode: &str, close: u8) -> Result<Vec<Operand>> {
        let mut all = Vec::new();
        while !self.eat(close)? {
            all.push(self.nested(|parser| parser.operand(names, opcode))?);
            if !self.at(close) {
                self.expect(b',')?;
            }
        }
        Ok(all)
    }

    /// A register that is looked at; None, and nothing read, where it is something else.
    fn register(&mut self, names: &mut Names<'a>) -> Result<Option<Operand>> {
        let Token::Ident(name) = self.token else { return Ok(None) };
        let Some(Name::Register(id)) = names.look_up(name) else { return Ok(None) };
        self.advance()?;
        Ok(Some(Operand::Register(id)))
    }

    fn named(&mut self, names: &mut Names<'a>, opcode: &str, name: &'a str) -> Result<Operand> {
        if let Some(Operand::Register(id)) = self.register(names)? {
            let Token::Dot(part) = self.token else { return Ok(Operand::Register(id)) };
            self.advance()?;
            return Ok(Operand::Component(id, part.to_owned()));
        }
        let line = self.line;
        match self.meaning(names, opcode, name, line)? {
            Meaning::Operand(operand) => Ok(operand),
            Meaning::Symbol(symbol, unit) => self.symbol_with_offset(opcode, symbol, unit),
        }
    }

    /// What a name is that is no register, after reading it.
    fn meaning(
        &mut self,
        names: &mut Names<'a>,
        opcode: &str,
        name: &'a str,
        line: u32,
    ) -> Result<Meaning> {
        let branch = matches!(opcode, "bra" | "brx");
        match names.look_up(name) {
            Some(Name::Label(id)) => {
                self.advance()?;
                return Ok(Meaning::Operand(Operand::Label(id)));
            }
            Some(Name::Symbol(index)) => {
                self.advance()?;
                let (unique, unit) = names.symbol(index);
                return Ok(Meaning::Symbol(unique.to_owned(), unit));
            }
            _ => {}
        }
        if name == "_" {
            self.advance()?;
            return Ok(Meaning::Operand(Operand::Sink));
        }
        if !branch && let Some(global) = self.globals.get(name) {
            let unit = match global {
                Global::Variable(index) => unit(&self.module.variables[*index]),
                Global::Function(_) => 1,
            };
            self.advance()?;
            return Ok(Meaning::Symbol(name.to_owned(), unit));
        }
        if name.starts_with('%') {
            return self.special(name).map(Meaning::Operand);
        }
        self.advance()?;
        // `brx.idx` names a list, whatever stands in it; `bra` a label.
        let label = names.forward(name, line, opcode == "bra");
        Ok(Meaning::Operand(Operand::Label(label)))
    }

    fn special(&mut self, name: &str) -> Result<Operand> {
        if !types::is_special(name) {
            return Err(self.error("undeclared register"));
        }
        self.advance()?;
        let Token::Dot(part) = self.token else { return Ok(Operand::Special(name.to_owned())) };
        if !matches!(part, "x" | "y" | "z" | "w") {
            return Err(self.error("unknown component of a special register"));
        }
        self.advance()?;
        Ok(Operand::Special(format!("{name}.{part}")))
    }

    /// `sym`, `sym+4`, and `sym[2]`: the element's address or, for a load or store, the element.
    fn symbol_with_offset(&mut self, opcode: &str, symbol: String, unit: u32) -> Result<Operand> {
        if !self.eat(b'[')? {
            return Ok(Operand::Symbol(symbol, self.addend()?));
        }
        let index = self.constant("an index")?;
        self.expect(b']')?;
        let offset = index.wrapping_mul(i64::from(unit));
        Ok(match opcode {
            "ld" | "st" | "ldu" | "atom" | "red" | "prefetch" => {
                Operand::Address(AddressBase::Symbol(symbol), offset)
            }
            _ => Operand::Symbol(symbol, offset),
        })
    }

    /// `[base]`, `[base+offset]`, `[8]`, `[tex, {x, y}]`.
    fn address(&mut self, names: &mut Names<'a>, opcode: &str) -> Result<Operand> {
        self.expect(b'[')?;
        let (base, offset) = self.base(names)?;
        if self.eat(b']')? {
            return Ok(Operand::Address(base, offset));
        }
        let mut all = vec![match (base, offset) {
            (AddressBase::Register(id), 0) => Operand::Register(id),
            (AddressBase::Symbol(symbol), offset) => Operand::Symbol(symbol, offset),
            (AddressBase::Absolute, offset) => Operand::Int(offset),
            (base, offset) => Operand::Address(base, offset),
        }];
        self.expect(b',')?;
        all.append(&mut self.list(names, opcode, b']')?);
        Ok(Operand::Bracket(all))
    }

    fn base(&mut self, names: &mut Names<'a>) -> Result<(AddressBase, i64)> {
        let name = match self.token {
            Token::Ident(name) if name != "WARP_SZ" => name,
            _ => return Ok((AddressBase::Absolute, self.constant("an address")?)),
        };
        let base = match names.look_up(name) {
            Some(Name::Register(id)) => AddressBase::Register(id),
            Some(Name::Symbol(index)) => AddressBase::Symbol(names.symbol(index).0.to_owned()),
            Some(Name::Label(_)) => return Err(self.error("a label is no address")),
            None if name.starts_with('%') => return Err(self.error("undeclared register")),
            None => {
                if !self.globals.contains_key(name) {
                    self.undeclared.push((name, self.line));
                }
                AddressBase::Symbol(name.to_owned())
            }
        };
        self.advance()?;
        Ok((base, self.addend()?))
    }
}
