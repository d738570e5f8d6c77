//! Declarations of variables and parameters.

use super::{Global, Parser, Result, types};
use crate::ast::{Linkage, Relocation, Space, Type, Variable};
use crate::lexer::Token;

/// Largest variable, in bytes: more than any device has.
const MAX_VARIABLE: u64 = 1 << 46;
const MAX_DIMENSIONS: usize = 16;

/// Type and attributes, which several declarators may share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    pub(super) ty: Type,
    pub(super) lanes: u32,
    align: Option<u32>,
    managed: bool,
}

impl<'a> Parser<'a> {
    /// Variables of one module-scope declaration; `texture`: the old `.tex` form.
    pub(super) fn module_variables(
        &mut self,
        space: Space,
        linkage: Linkage,
        texture: bool,
    ) -> Result<()> {
        let mut head = self.head()?;
        if texture {
            head.ty = Type::TexRef;
        }
        loop {
            let line = self.line;
            let name = self.identifier("a variable's name")?;
            let mut variable = self.declarator(head, space, name)?;
            variable.linkage = linkage;
            variable.line = line;
            if self.eat(b'=')? {
                self.initialiser(&mut variable)?;
            }
            self.declare_variable(name, variable)?;
            if !self.eat(b',')? {
                break;
            }
        }
        self.expect(b';')
    }

    /// Adds a module-scope variable; a definition replaces its external declaration.
    fn declare_variable(&mut self, name: &'a str, variable: Variable) -> Result<()> {
        match self.globals.get(name) {
            None => {
                self.globals.insert(name, Global::Variable(self.module.variables.len()));
                self.module.variables.push(variable);
            }
            Some(Global::Variable(index)) => {
                let known = &mut self.module.variables[*index];
                if known.linkage == Linkage::Extern {
                    *known = variable;
                } else if variable.linkage != Linkage::Extern {
                    return Err(self.error(format!("second definition of variable {name} before")));
                }
            }
            Some(Global::Function(_)) => {
                return Err(self.error(format!("variable {name} has a function's name, before")));
            }
        }
        Ok(())
    }

    /// `.align 8 .v2 .f32`, `.attribute(.managed)`, `.u64 .ptr .global .align 16`, in any order.
    pub(super) fn head(&mut self) -> Result<Head> {
        let mut ty = None;
        let mut head = Head { ty: Type::B8, lanes: 1, align: None, managed: false };
        let mut pointer = false;
        while let Token::Dot(word) = self.token {
            self.advance()?;
            match word {
                "align" => {
                    let align = self.constant_u32("an alignment")?;
                    if !align.is_power_of_two() || align > 1 << 20 {
                        return Err(self.error(format!("alignment {align} before this")));
                    }
                    // After `.ptr`, it is that of what the parameter points to.
                    if !pointer {
                        head.align = Some(align);
                    }
                }
                "attribute" => head.managed |= self.attributes()?,
                "ptr" => pointer = true,
                "const" | "global" | "local" | "shared" | "param" if pointer => {}
                _ => {
                    if let Some(lanes) = types::lanes(word) {
                        head.lanes = lanes;
                    } else if let Some(found) = types::fundamental(word) {
                        ty = Some(found);
                    } else {
                        return Err(self.error(format!("unknown type .{word} before this")));
                    }
                }
            }
        }
        head.ty = ty.ok_or_else(|| self.error("expected a type"))?;
        Ok(head)
    }

    /// `(.managed, .unified(1, 2))` after `.attribute`; whether `.managed` is among them.
    pub(super) fn attributes(&mut self) -> Result<bool> {
        let mut managed = false;
        self.expect(b'(')?;
        loop {
            let Token::Dot(word) = self.token else {
                return Err(self.error("expected an attribute"));
            };
            self.advance()?;
            match word {
                "managed" => managed = true,
                "unified" => self.skip_parenthesised()?,
                _ => return Err(self.error(format!("unknown attribute .{word} before this"))),
            }
            if !self.eat(b',')? {
                break;
            }
        }
        self.expect(b')')?;
        Ok(managed)
    }

    fn skip_parenthesised(&mut self) -> Result<()> {
        self.expect(b'(')?;
        while !self.eat(b')')? {
            if self.token == Token::End {
                return Err(self.error("expected ')'"));
            }
            self.advance()?;
        }
        Ok(())
    }

    /// What follows the name: array dimensions.
    pub(super) fn declarator(&mut self, head: Head, space: Space, name: &str) -> Result<Variable> {
        let natural = head.ty.size() * head.lanes;
        let mut variable = Variable {
            name: name.to_owned(),
            space,
            linkage: Linkage::Internal,
            ty: head.ty,
            lanes: head.lanes,
            align: head.align.unwrap_or(natural),
            dims: Vec::new(),
            managed: head.managed,
            in_register: None,
            init: Vec::new(),
            relocations: Vec::<Relocation>::new(),
            line: self.line,
        };
        while self.eat(b'[')? {
            let dim = if self.at(b']') { 0 } else { self.constant("an array dimension")? };
            self.expect(b']')?;
            let Ok(dim) = u64::try_from(dim) else {
                return Err(self.error("negative array dimension before this"));
            };
            variable.dims.push(dim);
            if variable.dims.len() > MAX_DIMENSIONS {
                return Err(self.error(format!("more than {MAX_DIMENSIONS} array dimensions")));
            }
        }
        if variable.size() > MAX_VARIABLE {
            return Err(self.error(format!("variable {name} is too large, before")));
        }
        Ok(variable)
    }
}
