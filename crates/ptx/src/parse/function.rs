//! Functions: their names, parameters and directives. Bodies are in `body`.

use super::scope::Names;
use super::{Global, Parser, Result};
use crate::ast::{Function, Limits, Linkage, Prototype, Space, Variable};
use crate::lexer::Token;
use std::sync::Arc;

impl<'a> Parser<'a> {
    /// What follows `.entry` or `.func`.
    pub(super) fn function(&mut self, entry: bool, linkage: Linkage) -> Result<()> {
        let line = self.line;
        let mut names = Names::new();
        while self.eat_dot("attribute")? {
            self.attributes()?;
        }
        let mut noreturn = self.eat_dot("noreturn")?;
        let returns = self.parameters(&mut names)?;
        let name = self.identifier("a function's name")?;
        let params = self.parameters(&mut names)?;
        let mut limits = Limits::default();
        while let Token::Dot(word) = self.token {
            self.advance()?;
            if word == "noreturn" {
                noreturn = true;
            } else {
                self.directive(word, &mut limits)?;
            }
        }
        let mut function = Function {
            name: name.to_owned(),
            entry,
            linkage,
            noreturn,
            returns,
            params,
            limits,
            body: None,
            line,
            files: Arc::default(),
        };
        if !self.at(b'{') {
            self.expect(b';')?;
            return self.declare_function(name, function).map(drop);
        }
        // Known before its body, which may call it.
        let index = self.declare_function(name, function.clone())?;
        if self.module.functions[index].body.is_some() {
            return Err(self.error(format!("second definition of function {name} before")));
        }
        function.body = Some(self.body(names)?);
        self.module.functions[index] = function;
        Ok(())
    }

    /// Makes a function known; where it is already, its first declaration stays.
    fn declare_function(&mut self, name: &'a str, function: Function) -> Result<usize> {
        match self.globals.get(name) {
            Some(Global::Function(index)) => Ok(*index),
            Some(Global::Variable(_)) => {
                Err(self.error(format!("function {name} has a variable's name, before")))
            }
            None => {
                let index = self.module.functions.len();
                self.globals.insert(name, Global::Function(index));
                self.module.functions.push(function);
                Ok(index)
            }
        }
    }

    /// `(.param .u64 a, .param .align 8 .b8 b[16])`, or nothing.
    fn parameters(&mut self, names: &mut Names<'a>) -> Result<Vec<Variable>> {
        let mut all = Vec::new();
        if !self.eat(b'(')? {
            return Ok(all);
        }
        while !self.eat(b')')? {
            all.push(self.parameter(Some(names))?);
            if !self.at(b')') {
                self.expect(b',')?;
            }
        }
        Ok(all)
    }

    /// One parameter. Without `names` it is one of a prototype, whose name means nothing.
    fn parameter(&mut self, names: Option<&mut Names<'a>>) -> Result<Variable> {
        let in_register = self.eat_dot("reg")?;
        if !in_register && !self.eat_dot("param")? {
            return Err(self.error("expected .param or .reg"));
        }
        let head = self.head()?;
        let name = self.identifier("a parameter's name")?;
        let mut variable = self.declarator(head, Space::Param, name)?;
        if let Some(names) = names {
            let declared = if in_register {
                names.declare_register(name, variable.ty, variable.lanes).map(|id| {
                    variable.in_register = Some(id);
                })
            } else {
                names.declare_symbol(name, name.to_owned(), super::unit(&variable)).map(drop)
            };
            declared.map_err(|what| self.error(what))?;
        }
        Ok(variable)
    }

    /// `.callprototype (returns) _ (params) .noreturn;` after its first word.
    pub(super) fn prototype(&mut self) -> Result<Prototype> {
        let returns = self.unnamed_parameters()?;
        if let Token::Ident(_) = self.token {
            self.advance()?;
        }
        let params = self.unnamed_parameters()?;
        while let Token::Dot(word) = self.token {
            self.advance()?;
            if word != "noreturn" {
                self.directive(word, &mut Limits::default())?;
            }
        }
        self.expect(b';')?;
        Ok(Prototype { returns, params })
    }

    fn unnamed_parameters(&mut self) -> Result<Vec<Variable>> {
        let mut all = Vec::new();
        if !self.eat(b'(')? {
            return Ok(all);
        }
        while !self.eat(b')')? {
            all.push(self.parameter(None)?);
            if !self.at(b')') {
                self.expect(b',')?;
            }
        }
        Ok(all)
    }

    /// One performance-tuning or ABI directive, whose name has been read.
    fn directive(&mut self, word: &str, limits: &mut Limits) -> Result<()> {
        match word {
            "maxntid" => limits.max_threads = self.extent()?,
            "reqntid" => limits.required_threads = self.extent()?,
            "reqnctapercluster" => limits.required_cluster = self.extent()?,
            "minnctapersm" => limits.min_blocks_per_sm = self.constant_u32("a block count")?,
            // Deprecated: the register allocator's business alone.
            "maxnctapersm" => drop(self.constant_u32("a block count")?),
            "maxnreg" => limits.max_registers = self.constant_u32("a register count")?,
            "maxclusterrank" => limits.max_cluster_rank = self.constant_u32("a cluster size")?,
            "explicitcluster" => limits.explicit_cluster = true,
            // `.blocksareclusters`: a launch's grid counts clusters.
            "blocksareclusters" => limits.blocks_are_clusters = true,
            "abi_preserve" | "abi_preserve_control" => {
                self.constant_u32("a register count")?;
            }
            "pragma" => {
                self.string()?;
                self.expect(b';')?;
            }
            _ => {
                let what = format!("unknown directive .{word} of a function, before");
                return Err(self.error(what));
            }
        }
        Ok(())
    }

    /// One to three sizes; those left out are 1.
    fn extent(&mut self) -> Result<[u32; 3]> {
        let mut extent = [self.constant_u32("a size")?, 1, 1];
        for size in &mut extent[1..] {
            if !self.eat(b',')? {
                break;
            }
            *size = self.constant_u32("a size")?;
        }
        Ok(extent)
    }

    /// A variable of a function's body, after its space's word.
    pub(super) fn local_variables(
        &mut self,
        names: &mut Names<'a>,
        space: Space,
        linkage: Linkage,
        all: &mut Vec<Variable>,
    ) -> Result<()> {
        let head = self.head()?;
        loop {
            let line = self.line;
            let name = self.identifier("a variable's name")?;
            let count = self.range_count()?;
            let mut variable = self.declarator(head, space, name)?;
            variable.linkage = linkage;
            variable.line = line;
            if let Some(count) = count {
                names.declare_variables(name, variable, count).map_err(|what| self.error(what))?;
                if self.eat(b',')? {
                    continue;
                }
                break;
            }
            let unique = names.unique(name, |name| self.globals.contains_key(name));
            variable.name.clone_from(&unique);
            names
                .declare_symbol(name, unique, super::unit(&variable))
                .map_err(|what| self.error(what))?;
            if self.eat(b'=')? {
                self.initialiser(&mut variable)?;
            }
            all.push(variable);
            if !self.eat(b',')? {
                break;
            }
        }
        self.expect(b';')
    }

    /// `.reg .b32 %r<100>, %x;` after its first word.
    pub(super) fn registers(&mut self, names: &mut Names<'a>) -> Result<()> {
        let head = self.head()?;
        loop {
            let name = self.identifier("a register's name")?;
            let declared = match self.range_count()? {
                Some(count) => names.declare_range(name, head.ty, head.lanes, count),
                None => names.declare_register(name, head.ty, head.lanes).map(drop),
            };
            declared.map_err(|what| self.error(what))?;
            if !self.eat(b',')? {
                return self.expect(b';');
            }
        }
    }

    /// `<100>` behind a name: so many of it. A plain number, since an expression would take the `>`
    /// for an operator.
    fn range_count(&mut self) -> Result<Option<u32>> {
        if !self.eat(b'<')? {
            return Ok(None);
        }
        let Token::Number(text) = self.token else {
            return Err(self.error("expected a number of names"));
        };
        let count = text.parse().ok().filter(|count| *count <= super::MAX_REGISTERS);
        let Some(count) = count else {
            let most = super::MAX_REGISTERS;
            return Err(self.error(format!("expected a number of names up to {most}")));
        };
        self.advance()?;
        self.expect(b'>')?;
        Ok(Some(count))
    }

    /// `.calltargets f, g;`: the first one's signature, which all share.
    pub(super) fn call_targets(&mut self) -> Result<Prototype> {
        let mut prototype = None;
        loop {
            let line = self.line;
            let name = self.identifier("a function's name")?;
            if let Some(Global::Function(index)) = self.globals.get(name) {
                let function = &self.module.functions[*index];
                prototype.get_or_insert_with(|| Prototype {
                    returns: function.returns.clone(),
                    params: function.params.clone(),
                });
            }
            self.undeclared.push((name, line));
            if !self.eat(b',')? {
                break;
            }
        }
        self.expect(b';')?;
        prototype.ok_or_else(|| self.error("no call target is declared, before"))
    }
}
