//! Names of a function's body: nested scopes, and labels that are used before they stand.

use std::collections::{HashMap, HashSet};

use crate::ast::{LabelId, RegId, Register, Type, Variable};

/// Deepest nesting of `{ }` in a body.
pub(super) const MAX_SCOPES: usize = 64;
/// Marks a `LabelId` that is an index into `Names::forward` until the function ends.
const FORWARD: u32 = 1 << 31;

/// What a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Name {
    Register(RegId),
    /// A variable, parameter, prototype or branch-target list: an index into `Names::symbols`.
    Symbol(u32),
    Label(LabelId),
}

/// A name of the function outside registers and labels.
#[derive(Debug)]
struct Symbol {
    /// Unique in the function.
    name: String,
    /// Bytes of an element, which `name[i]` counts in.
    unit: u32,
}

/// `.reg .b32 %r<100>`, `.param .b64 %p<2>`.
#[derive(Debug, Clone, Copy)]
struct Range {
    of: RangeOf,
    count: u32,
}

#[derive(Debug, Clone, Copy)]
enum RangeOf {
    Registers {
        ty: Type,
        lanes: u32,
    },
    /// Variables like one of `Names::templates`.
    Variables(usize),
}

#[derive(Debug, Default)]
struct Scope<'a> {
    names: HashMap<&'a str, Name>,
    ranges: HashMap<&'a str, Range>,
    /// Uses of names that this scope does not declare so far: indices into `Names::forward`.
    forward: HashMap<&'a str, u32>,
}

/// A name that was used before its declaration.
#[derive(Debug)]
struct Forward<'a> {
    name: &'a str,
    line: u32,
    /// A branch uses it, so it can be nothing but a label.
    label: bool,
    resolved: Option<Resolved>,
}

#[derive(Debug, Clone, Copy)]
enum Resolved {
    Name(Name),
    /// The same name's use in an outer scope.
    Same(u32),
}

/// What a forward use turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Target<'n> {
    Label(LabelId),
    Symbol(&'n str),
}

/// A use that nothing in the function declares.
#[derive(Debug)]
pub(super) struct Undeclared<'a> {
    pub(super) name: &'a str,
    pub(super) line: u32,
    pub(super) label: bool,
}

#[derive(Debug)]
pub(super) struct Names<'a> {
    scopes: Vec<Scope<'a>>,
    pub(super) registers: Vec<Register>,
    pub(super) labels: Vec<String>,
    symbols: Vec<Symbol>,
    /// What the variables of ranges are like.
    templates: Vec<Variable>,
    /// Variables of ranges that are used.
    ranged: Vec<Variable>,
    taken: HashSet<String>,
    /// The suffix to try next for a name that is taken.
    suffixes: HashMap<&'a str, u32>,
    forward: Vec<Forward<'a>>,
}

impl<'a> Names<'a> {
    pub(super) fn new() -> Self {
        Self {
            scopes: vec![Scope::default()],
            registers: Vec::new(),
            labels: Vec::new(),
            symbols: Vec::new(),
            templates: Vec::new(),
            ranged: Vec::new(),
            taken: HashSet::new(),
            suffixes: HashMap::new(),
            forward: Vec::new(),
        }
    }

    /// Enters a `{`; false where it would nest too deeply.
    pub(super) fn enter(&mut self) -> bool {
        let fits = self.scopes.len() < MAX_SCOPES;
        if fits {
            self.scopes.push(Scope::default());
        }
        fits
    }

    /// Leaves a `}`: uses that the scope did not declare become uses of the scope around it. True
    /// where that was the function's own.
    pub(super) fn leave(&mut self) -> bool {
        let Some(scope) = self.scopes.pop() else { return true };
        let last = self.scopes.is_empty();
        for (name, index) in scope.forward {
            let resolved = match (scope.names.get(name), self.scopes.last_mut()) {
                (Some(found), _) => Some(Resolved::Name(*found)),
                (None, Some(outer)) => {
                    let same = *outer.forward.entry(name).or_insert(index);
                    (same != index).then_some(Resolved::Same(same))
                }
                (None, None) => None,
            };
            self.forward[index as usize].resolved = resolved;
            // A branch in an inner scope makes the outer use a label too.
            if let Some(Resolved::Same(same)) = resolved
                && self.forward[index as usize].label
            {
                self.forward[same as usize].label = true;
            }
        }
        last
    }

    fn declare(&mut self, name: &'a str, what: Name) -> Result<(), String> {
        let Some(scope) = self.scopes.last_mut() else { return Ok(()) };
        match scope.names.insert(name, what) {
            None => Ok(()),
            Some(_) => Err(format!("second declaration of {name} in one scope, before")),
        }
    }

    pub(super) fn declare_register(
        &mut self,
        name: &'a str,
        ty: Type,
        lanes: u32,
    ) -> Result<RegId, String> {
        let id = RegId(self.registers.len() as u32);
        self.declare(name, Name::Register(id))?;
        self.registers.push(Register { name: name.to_owned(), ty, lanes });
        Ok(id)
    }

    pub(super) fn declare_range(
        &mut self,
        prefix: &'a str,
        ty: Type,
        lanes: u32,
        count: u32,
    ) -> Result<(), String> {
        self.range(prefix, Range { of: RangeOf::Registers { ty, lanes }, count })
    }

    /// Declares `count` variables like `template`, which exist once they are used.
    pub(super) fn declare_variables(
        &mut self,
        prefix: &'a str,
        template: Variable,
        count: u32,
    ) -> Result<(), String> {
        self.templates.push(template);
        self.range(prefix, Range { of: RangeOf::Variables(self.templates.len() - 1), count })
    }

    fn range(&mut self, prefix: &'a str, range: Range) -> Result<(), String> {
        let Some(scope) = self.scopes.last_mut() else { return Ok(()) };
        match scope.ranges.insert(prefix, range) {
            None => Ok(()),
            Some(_) => Err(format!("second declaration of {prefix}<> in one scope, before")),
        }
    }

    /// Declares a name in this scope under its unique name in the function.
    pub(super) fn declare_symbol(
        &mut self,
        name: &'a str,
        unique: String,
        unit: u32,
    ) -> Result<u32, String> {
        let index = self.symbols.len() as u32;
        self.declare(name, Name::Symbol(index))?;
        self.taken.insert(unique.clone());
        self.symbols.push(Symbol { name: unique, unit });
        Ok(index)
    }

    pub(super) fn declare_label(&mut self, name: &'a str) -> Result<LabelId, String> {
        let id = LabelId(self.labels.len() as u32);
        self.declare(name, Name::Label(id))?;
        self.labels.push(name.to_owned());
        Ok(id)
    }

    /// A name that no other variable has: its own, or with a number after it.
    pub(super) fn unique(&mut self, name: &'a str, global: impl Fn(&str) -> bool) -> String {
        if !self.taken.contains(name) && !global(name) {
            return name.to_owned();
        }
        let suffix = self.suffixes.entry(name).or_insert(0);
        loop {
            *suffix += 1;
            let unique = format!("{name}${suffix}");
            if !self.taken.contains(&unique) && !global(&unique) {
                return unique;
            }
        }
    }

    /// What a name stands for here, if that is known yet. A label counts only in its own scope: an
    /// inner one of the same name may still come.
    pub(super) fn look_up(&mut self, name: &'a str) -> Option<Name> {
        let last = self.scopes.len() - 1;
        for index in (0..=last).rev() {
            match self.scopes[index].names.get(name) {
                Some(Name::Label(_)) if index != last => return None,
                Some(found) => return Some(*found),
                None => {}
            }
            if let Some(range) = range_of(&self.scopes[index].ranges, name) {
                let found = self.of_range(range, name);
                self.scopes[index].names.insert(name, found);
                return Some(found);
            }
        }
        None
    }

    /// The register or variable `name` of a range, at its first use.
    fn of_range(&mut self, range: Range, name: &'a str) -> Name {
        match range.of {
            RangeOf::Registers { ty, lanes } => {
                let id = RegId(self.registers.len() as u32);
                self.registers.push(Register { name: name.to_owned(), ty, lanes });
                Name::Register(id)
            }
            RangeOf::Variables(template) => {
                let index = self.symbols.len() as u32;
                // As no name of the text is, so that no variable of the module has it.
                let unique = format!("{name}<{}>", self.ranged.len());
                let variable = Variable { name: unique, ..self.templates[template].clone() };
                let unit = super::unit(&variable);
                self.symbols.push(Symbol { name: variable.name.clone(), unit });
                self.ranged.push(variable);
                Name::Symbol(index)
            }
        }
    }

    /// Takes the variables of ranges that were used.
    pub(super) fn take_ranged(&mut self) -> Vec<Variable> {
        std::mem::take(&mut self.ranged)
    }

    /// A label to stand for a name that is not declared yet; `finish` says what became of it.
    pub(super) fn forward(&mut self, name: &'a str, line: u32, label: bool) -> LabelId {
        let next = self.forward.len() as u32;
        let Some(scope) = self.scopes.last_mut() else { return LabelId(next | FORWARD) };
        let index = *scope.forward.entry(name).or_insert(next);
        if index == next {
            self.forward.push(Forward { name, line, label, resolved: None });
        } else if label {
            self.forward[index as usize].label = true;
        }
        LabelId(index | FORWARD)
    }

    /// The unique name and the element size of a symbol.
    pub(super) fn symbol(&self, index: u32) -> (&str, u32) {
        let symbol = &self.symbols[index as usize];
        (&symbol.name, symbol.unit)
    }

    /// Whether operands hold forward uses at all.
    pub(super) fn has_forward(&self) -> bool {
        !self.forward.is_empty()
    }

    /// What a label of an operand is, once the function's last scope is left. None: it was one all
    /// along.
    pub(super) fn resolve(&self, label: LabelId) -> Option<Target<'_>> {
        if label.0 & FORWARD == 0 {
            return None;
        }
        let mut index = label.0 & !FORWARD;
        loop {
            let forward = &self.forward[index as usize];
            return Some(match forward.resolved {
                // Outer uses are at most `MAX_SCOPES` steps away.
                Some(Resolved::Same(outer)) => {
                    index = outer;
                    continue;
                }
                Some(Resolved::Name(Name::Label(id))) => Target::Label(id),
                Some(Resolved::Name(Name::Symbol(index))) => Target::Symbol(self.symbol(index).0),
                Some(Resolved::Name(Name::Register(_))) | None => Target::Symbol(forward.name),
            });
        }
    }

    /// The uses that nothing in the function declares.
    pub(super) fn undeclared(&self) -> impl Iterator<Item = Undeclared<'a>> {
        self.forward.iter().filter_map(|forward| match forward.resolved {
            Some(Resolved::Name(Name::Label(_)) | Resolved::Same(_)) => None,
            Some(Resolved::Name(Name::Symbol(_))) if !forward.label => None,
            _ => Some(Undeclared { name: forward.name, line: forward.line, label: forward.label }),
        })
    }
}

/// The range that holds a register's name: `%r12` is number 12 of `%r<>` or 2 of `%r1<>`.
fn range_of(ranges: &HashMap<&str, Range>, name: &str) -> Option<Range> {
    if ranges.is_empty() {
        return None;
    }
    let digits = name.bytes().rev().take_while(u8::is_ascii_digit).take(8).count();
    (name.len() - digits..name.len()).find_map(|at| {
        let (prefix, number) = name.split_at(at);
        // `%r01` is none of `%r<>`.
        if number.len() > 1 && number.starts_with('0') {
            return None;
        }
        let range = *ranges.get(prefix)?;
        (number.parse::<u32>().ok()? < range.count).then_some(range)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_resolve_with_digits_in_their_prefix() {
        let mut names = Names::new();
        names.declare_range("%r", Type::B32, 1, 5).unwrap();
        names.declare_range("%r1", Type::B64, 1, 3).unwrap();
        let Some(Name::Register(low)) = names.look_up("%r4") else { panic!() };
        let Some(Name::Register(high)) = names.look_up("%r12") else { panic!() };
        assert_eq!(names.registers[low.0 as usize].ty, Type::B32);
        assert_eq!(names.registers[high.0 as usize].ty, Type::B64);
        assert_eq!(names.look_up("%r5"), None);
        assert_eq!(names.look_up("%r13"), None);
        assert_eq!(names.look_up("%r01"), None);
        assert_eq!(names.registers.len(), 2, "only used registers exist");
    }

    #[test]
    fn an_inner_scope_hides_and_is_forgotten() {
        let mut names = Names::new();
        let outer = names.declare_register("a", Type::B32, 1).unwrap();
        assert!(names.enter());
        let inner = names.declare_register("a", Type::F32, 1).unwrap();
        assert_eq!(names.look_up("a"), Some(Name::Register(inner)));
        names.leave();
        assert_eq!(names.look_up("a"), Some(Name::Register(outer)));
        assert!(names.declare_register("a", Type::B32, 1).is_err());
    }

    #[test]
    fn a_forward_label_belongs_to_the_innermost_scope_that_has_it() {
        let mut names = Names::new();
        let outer = names.declare_label("again").unwrap();
        names.enter();
        let inner_use = names.forward("again", 1, true);
        let outer_use = names.forward("done", 2, true);
        let inner = names.declare_label("again").unwrap();
        names.leave();
        let done = names.declare_label("done").unwrap();
        assert!(names.leave());
        assert_ne!(outer, inner);
        assert_eq!(names.resolve(inner_use), Some(Target::Label(inner)));
        assert_eq!(names.resolve(outer_use), Some(Target::Label(done)));
        assert_eq!(names.undeclared().count(), 0);
    }

    #[test]
    fn uses_of_several_scopes_meet() {
        let mut names = Names::new();
        names.enter();
        let first = names.forward("end", 1, true);
        names.leave();
        names.enter();
        let second = names.forward("end", 2, false);
        names.leave();
        let end = names.declare_label("end").unwrap();
        names.leave();
        for label in [first, second] {
            assert_eq!(names.resolve(label), Some(Target::Label(end)));
        }
    }

    #[test]
    fn what_nothing_declares_is_reported_once() {
        let mut names = Names::new();
        let label = names.forward("nowhere", 7, true);
        names.forward("nowhere", 8, false);
        names.leave();
        assert_eq!(names.resolve(label), Some(Target::Symbol("nowhere")));
        let all: Vec<_> = names.undeclared().collect();
        assert_eq!((all.len(), all[0].line, all[0].label), (1, 7, true));
    }

    #[test]
    fn clashing_variables_get_a_number() {
        let mut names = Names::new();
        for expected in ["param0", "param0$2", "param0$3"] {
            names.enter();
            let unique = names.unique("param0", |name| name == "param0$1");
            assert_eq!(unique, expected);
            names.declare_symbol("param0", unique, 1).unwrap();
            names.leave();
        }
    }
}
