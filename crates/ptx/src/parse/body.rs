//! Bodies of functions: scopes, declarations, labels and instructions.

use super::scope::{MAX_SCOPES, Name, Names, Target};
use super::{Parser, Result, types, vectors};
use crate::ParseError;
use crate::ast::{
    Body, Guard, Instruction, LabelId, Linkage, Location, Operand, Prototype, Statement, Variable,
};
use crate::lexer::Token;

/// A body while it is read.
pub(super) struct Builder<'a> {
    pub(super) names: Names<'a>,
    variables: Vec<Variable>,
    prototypes: Vec<(String, Prototype)>,
    branch_targets: Vec<(String, Vec<LabelId>)>,
    statements: Vec<Statement>,
    locations: Vec<Location>,
}

impl<'a> Parser<'a> {
    /// `{ … }` of a function; `names` knows its parameters.
    pub(super) fn body(&mut self, names: Names<'a>) -> Result<Body> {
        let mut builder = Builder {
            names,
            variables: Vec::new(),
            prototypes: Vec::new(),
            branch_targets: Vec::new(),
            statements: Vec::new(),
            locations: Vec::new(),
        };
        self.expect(b'{')?;
        loop {
            match self.token {
                Token::Punct(b'}') => {
                    self.advance()?;
                    if builder.names.leave() {
                        return self.finish(builder);
                    }
                }
                Token::Punct(b'{') => {
                    if !builder.names.enter() {
                        return Err(self.error(format!("more than {MAX_SCOPES} nested scopes")));
                    }
                    self.advance()?;
                }
                Token::Punct(b';') => self.advance()?,
                Token::Punct(b'@') => {
                    let guard = self.guard(&mut builder)?;
                    self.instruction(&mut builder, Some(guard))?;
                }
                Token::Dot(word) => self.body_directive(&mut builder, word)?,
                Token::Ident(_) => self.instruction(&mut builder, None)?,
                _ => return Err(self.error("expected a statement")),
            }
        }
    }

    fn body_directive(&mut self, builder: &mut Builder<'a>, word: &str) -> Result<()> {
        if word == "loc" {
            let location = self.location()?;
            builder.locations.push(location);
            return Ok(());
        }
        if self.skip_debug_directive(word)? {
            return Ok(());
        }
        let mut linkage = Linkage::Internal;
        let mut word = word;
        if let Some(found) = types::linkage(word) {
            linkage = found;
            self.advance()?;
            let Token::Dot(next) = self.token else {
                return Err(self.error("expected a state space"));
            };
            word = next;
        }
        if word == "reg" {
            self.advance()?;
            return self.registers(&mut builder.names);
        }
        let Some(space) = types::space(word) else {
            return Err(self.error("unknown directive of a body"));
        };
        self.advance()?;
        self.local_variables(&mut builder.names, space, linkage, &mut builder.variables)
    }

    /// `@p` or `@!p`.
    fn guard(&mut self, builder: &mut Builder<'a>) -> Result<Guard> {
        self.expect(b'@')?;
        let negated = self.eat(b'!')?;
        let Token::Ident(name) = self.token else {
            return Err(self.error("expected a predicate"));
        };
        let Some(Name::Register(register)) = builder.names.look_up(name) else {
            return Err(self.error("undeclared predicate"));
        };
        self.advance()?;
        Ok(Guard { register, negated })
    }

    /// An instruction, or a label before one.
    fn instruction(&mut self, builder: &mut Builder<'a>, guard: Option<Guard>) -> Result<()> {
        let line = self.line;
        let word = self.identifier("an instruction")?;
        if guard.is_none() && self.eat(b':')? {
            return self.label(builder, word);
        }
        let mut name = Vec::with_capacity(4);
        name.push(word.to_owned());
        while let Token::Dot(part) = self.token {
            name.push(part.to_owned());
            self.advance()?;
        }
        let mut operands = Vec::with_capacity(4);
        if !self.at(b';') {
            loop {
                operands.push(self.operand(&mut builder.names, word)?);
                if !self.eat(b',')? {
                    break;
                }
            }
        }
        self.expect(b';')?;
        let instruction = Instruction { guard, name, operands, line };
        builder.statements.push(Statement::Instruction(instruction));
        Ok(())
    }

    /// What stands after `name:`.
    fn label(&mut self, builder: &mut Builder<'a>, name: &'a str) -> Result<()> {
        let names = &mut builder.names;
        let Token::Dot(word @ ("callprototype" | "calltargets" | "branchtargets")) = self.token
        else {
            let id = names.declare_label(name).map_err(|what| self.error(what))?;
            builder.statements.push(Statement::Label(id));
            return Ok(());
        };
        self.advance()?;
        let unique = names.unique(name, |name| self.globals.contains_key(name));
        names.declare_symbol(name, unique.clone(), 1).map_err(|what| self.error(what))?;
        match word {
            "callprototype" => builder.prototypes.push((unique, self.prototype()?)),
            "calltargets" => builder.prototypes.push((unique, self.call_targets()?)),
            _ => {
                let labels = self.branch_targets(names)?;
                builder.branch_targets.push((unique, labels));
            }
        }
        Ok(())
    }

    /// `L1, L2;`
    fn branch_targets(&mut self, names: &mut Names<'a>) -> Result<Vec<LabelId>> {
        let mut labels = Vec::new();
        loop {
            let line = self.line;
            let name = self.identifier("a label")?;
            labels.push(match names.look_up(name) {
                Some(Name::Label(id)) => id,
                _ => names.forward(name, line, true),
            });
            if !self.eat(b',')? {
                break;
            }
        }
        self.expect(b';')?;
        Ok(labels)
    }

    /// Puts in place what forward uses turned out to be.
    fn finish(&mut self, mut builder: Builder<'a>) -> Result<Body> {
        for undeclared in builder.names.undeclared() {
            if undeclared.label {
                return Err(ParseError::new(undeclared.line, "undefined label", undeclared.name));
            }
            self.undeclared.push((undeclared.name, undeclared.line));
        }
        builder.variables.append(&mut builder.names.take_ranged());
        if builder.names.has_forward() {
            for statement in &mut builder.statements {
                if let Statement::Instruction(instruction) = statement {
                    instruction
                        .operands
                        .iter_mut()
                        .for_each(|operand| patch(&builder.names, operand));
                }
            }
            for label in builder.branch_targets.iter_mut().flat_map(|(_, labels)| labels) {
                if let Some(Target::Label(id)) = builder.names.resolve(*label) {
                    *label = id;
                }
            }
        }
        let mut body = Body {
            registers: builder.names.registers,
            variables: builder.variables,
            labels: builder.names.labels,
            prototypes: builder.prototypes,
            branch_targets: builder.branch_targets,
            statements: builder.statements,
            locations: builder.locations,
        };
        vectors::split(&mut body)?;
        Ok(body)
    }
}

fn patch(names: &Names<'_>, operand: &mut Operand) {
    match operand {
        Operand::Label(label) => match names.resolve(*label) {
            Some(Target::Label(id)) => *label = id,
            Some(Target::Symbol(name)) => *operand = Operand::Symbol(name.to_owned(), 0),
            None => {}
        },
        Operand::Pair(left, right) => {
            patch(names, left);
            patch(names, right);
        }
        Operand::Vector(all) | Operand::List(all) | Operand::Bracket(all) => {
            all.iter_mut().for_each(|operand| patch(names, operand));
        }
        _ => {}
    }
}
