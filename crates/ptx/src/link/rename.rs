//! New names for symbols, wherever a module mentions them.

use std::collections::{HashMap, HashSet};

use super::{Alias, Public};
use crate::ast::{AddressBase, Body, Function, Operand, Statement, Variable};

/// A module's names that change.
pub(super) type Renames = HashMap<String, String>;

/// Makes references to aliases references to their functions: in their own module, and in the
/// others where the alias is what the name stands for.
pub(super) fn add_aliases(renames: &mut [Renames], aliases: &[Vec<Alias>], public: &Public) {
    let mut everywhere = Vec::new();
    for (module, own) in aliases.iter().enumerate() {
        for alias in own {
            let target = renames[module].get(&alias.target).unwrap_or(&alias.target).clone();
            if public.get(&alias.name).is_some_and(|best| best.module == module) {
                everywhere.push((alias.name.clone(), target.clone()));
            }
            renames[module].insert(alias.name.clone(), target);
        }
    }
    for (name, target) in everywhere {
        for module in &mut *renames {
            module.entry(name.clone()).or_insert_with(|| target.clone());
        }
    }
}

pub(super) fn variable(variable: &mut Variable, renames: &Renames) {
    if renames.is_empty() {
        return;
    }
    change(&mut variable.name, renames);
    for relocation in &mut variable.relocations {
        change(&mut relocation.symbol, renames);
    }
}

pub(super) fn function(function: &mut Function, renames: &Renames) {
    if renames.is_empty() {
        return;
    }
    change(&mut function.name, renames);
    let Some(body) = &mut function.body else { return };
    let parameters = function.returns.iter().chain(&function.params);
    let hidden: HashSet<String> = parameters
        .chain(&body.variables)
        .map(|variable| variable.name.clone())
        .chain(body.prototypes.iter().map(|(name, _)| name.clone()))
        .chain(body.branch_targets.iter().map(|(name, _)| name.clone()))
        .collect();
    references(body, &|name| {
        if !hidden.contains(name.as_str()) {
            change(name, renames);
        }
    });
}

fn change(name: &mut String, renames: &Renames) {
    if let Some(new) = renames.get(name) {
        name.clone_from(new);
    }
}

/// Visits every symbol that a body mentions.
fn references(body: &mut Body, visit: &impl Fn(&mut String)) {
    for variable in &mut body.variables {
        for relocation in &mut variable.relocations {
            visit(&mut relocation.symbol);
        }
    }
    for statement in &mut body.statements {
        if let Statement::Instruction(instruction) = statement {
            instruction.operands.iter_mut().for_each(|operand| operand_symbols(operand, visit));
        }
    }
}

fn operand_symbols(operand: &mut Operand, visit: &impl Fn(&mut String)) {
    match operand {
        Operand::Symbol(name, _) | Operand::Address(AddressBase::Symbol(name), _) => visit(name),
        Operand::Pair(left, right) => {
            operand_symbols(left, visit);
            operand_symbols(right, visit);
        }
        Operand::Vector(all) | Operand::List(all) | Operand::Bracket(all) => {
            all.iter_mut().for_each(|operand| operand_symbols(operand, visit));
        }
        _ => {}
    }
}
