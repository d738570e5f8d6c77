//! Linking several PTX modules into one, as nvlink and the driver do.
//!
//! **What a program brings** (nvcc 13.5, seen in its binaries). Without `-rdc`, one wrapper of
//! version 1 and one container, in which each PTX entry is a whole program. With `-rdc=true`, the
//! host registers a wrapper of version 2: its `data` is a container with the linked cubin alone,
//! and no PTX; its other pointer is a NULL-terminated array, filled before main, of pointers to one
//! container per translation unit (in `__nv_relfatbin`), each with a relocatable cubin and PTX
//! whose options are `--compile-only`. So PTX is chosen in each of the array's containers and
//! linked here.
//!
//! In such PTX, functions and variables of a unit are `.visible`, those of others `.extern`,
//! template instances `.weak` (declared and defined in every unit that uses them), statics and
//! string literals (`$str`) have no directive and clash between units. `extern __shared__ T s[]` is
//! `.extern .shared .b8 s[]` in each, perhaps with different alignments.
//!
//! **Dynamic parallelism.** Device code calls `__cudaCDP2GetParameterBufferV2` and
//! `__cudaCDP2LaunchDeviceV2` (with `__cudaCDP2StreamCreateWithFlags` and others for the rest of
//! the device runtime's API), all `.extern`; libcudadevrt.a is one more container in the array. Its
//! PTX is for the newest architecture only (`sm_121`, 172 functions) and needs the driver's own
//! system calls, so a module that defines `__cudaCDP2LaunchDeviceV2` is left out, and its functions
//! stay unresolved: the software device provides them, like `vprintf` and `malloc`.

mod rename;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::ast::{Function, Linkage, Module, Space, Variable};
use rename::Renames;

/// What only libcudadevrt defines.
const DEVICE_RUNTIME: &str = "__cudaCDP2LaunchDeviceV2";

/// One program: every name is defined once, apart from `unresolved`.
#[derive(Debug, Clone)]
pub struct Linked {
    /// Aliases are replaced by what they stand for. Each unresolved function is still declared.
    pub module: Module,
    /// Functions that are declared and defined nowhere: the device runtime's own, such as
    /// `vprintf`, `malloc` and `__assertfail`.
    pub unresolved: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    #[error("no PTX module to link")]
    Empty,
    #[error("'{0}' is defined in more than one module")]
    Duplicate(String),
    #[error("'{0}' is a function in one module and a variable in another")]
    Kinds(String),
    #[error("variable '{0}' is declared as external and defined in no module")]
    Undefined(String),
    #[error("modules of {0} and {1} bits cannot be linked")]
    AddressSize(u32, u32),
    #[error("alias '{0}' stands for itself")]
    AliasLoop(String),
}

/// How much a definition counts against others of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Declared,
    /// The larger one counts more.
    Common(u64),
    Weak,
    Strong,
}

/// Where a public name's best definition is.
#[derive(Debug, Clone, Copy)]
struct Best {
    module: usize,
    function: bool,
    rank: Rank,
    /// The strictest of all declarations of a variable.
    align: u32,
}

impl Best {
    fn function(module: usize, rank: Rank) -> Self {
        Self { module, function: true, rank, align: 1 }
    }
}

type Public = HashMap<String, Best>;

/// Links modules: a name that is visible in one and external in the others becomes one; names that
/// are internal stay apart.
///
/// # Errors
/// [`LinkError`] names the symbol and what clashes.
pub fn link(mut modules: Vec<Module>) -> Result<Linked, LinkError> {
    if modules.len() > 1 {
        modules.retain(|module| !is_device_runtime(module));
    }
    let mut merged = frame(&modules)?;
    let aliases = modules.iter_mut().map(take_aliases).collect::<Result<Vec<_>, _>>()?;
    let public = public_names(&modules, &aliases)?;
    let mut renames = private_renames(&modules, &public)?;
    rename::add_aliases(&mut renames, &aliases, &public);
    for (index, module) in modules.into_iter().enumerate() {
        merge(&mut merged, module, index, &public, &renames[index]);
    }
    // Every definition is in place: what is public, declared and not there is unresolved.
    let unresolved = merged.functions.iter().filter(|function| function.body.is_none());
    let unresolved = unresolved.map(|function| function.name.clone()).collect();
    if let Some(missing) = merged.variables.iter().find(|variable| is_missing(variable)) {
        return Err(LinkError::Undefined(missing.name.clone()));
    }
    Ok(Linked { module: merged, unresolved })
}

/// Whether a module is libcudadevrt's.
fn is_device_runtime(module: &Module) -> bool {
    module
        .functions
        .iter()
        .any(|function| function.name == DEVICE_RUNTIME && function.body.is_some())
}

/// An external variable that no launch provides, unlike dynamic shared memory.
fn is_missing(variable: &Variable) -> bool {
    variable.linkage == Linkage::Extern && variable.space != Space::Shared
}

/// An empty module with the properties that the modules share.
fn frame(modules: &[Module]) -> Result<Module, LinkError> {
    let newest = modules.iter().max_by_key(|module| module.sm).ok_or(LinkError::Empty)?;
    for module in modules {
        if module.address_size != newest.address_size {
            return Err(LinkError::AddressSize(newest.address_size, module.address_size));
        }
    }
    Ok(Module {
        version: modules.iter().map(|module| module.version).max().unwrap_or_default(),
        sm: newest.sm,
        sm_suffix: newest.sm_suffix,
        address_size: newest.address_size,
        functions: Vec::new(),
        variables: Vec::new(),
        aliases: Vec::new(),
    })
}

/// An alias and the function of its module that it stands for in the end, with its linkage.
#[derive(Debug, Clone)]
struct Alias {
    name: String,
    target: String,
    linkage: Linkage,
}

/// A module's aliases, each directly to its function. Their declarations go, since references to
/// them will.
fn take_aliases(module: &mut Module) -> Result<Vec<Alias>, LinkError> {
    let direct: BTreeMap<_, _> = std::mem::take(&mut module.aliases).into_iter().collect();
    if direct.is_empty() {
        return Ok(Vec::new());
    }
    let mut aliases = Vec::with_capacity(direct.len());
    for (name, target) in &direct {
        let mut target = target;
        let mut steps = 0;
        while let Some(next) = direct.get(target) {
            target = next;
            steps += 1;
            if steps > direct.len() {
                return Err(LinkError::AliasLoop(name.clone()));
            }
        }
        let declared = module.functions.iter().find(|function| function.name == *name);
        let linkage = declared.map_or(Linkage::Internal, |function| function.linkage);
        aliases.push(Alias { name: name.clone(), target: target.clone(), linkage });
    }
    module.functions.retain(|function| !direct.contains_key(&function.name));
    Ok(aliases)
}

fn function_rank(function: &Function) -> Rank {
    match (function.body.is_some(), function.linkage) {
        (false, _) => Rank::Declared,
        (true, Linkage::Weak) => Rank::Weak,
        (true, _) => Rank::Strong,
    }
}

fn variable_rank(variable: &Variable) -> Rank {
    match variable.linkage {
        Linkage::Extern => Rank::Declared,
        Linkage::Common => Rank::Common(variable.size()),
        Linkage::Weak => Rank::Weak,
        Linkage::Internal | Linkage::Visible => Rank::Strong,
    }
}

/// Whether a name is its module's own: no directive, and defined.
fn is_private(linkage: Linkage, rank: Rank) -> bool {
    linkage == Linkage::Internal && rank != Rank::Declared
}

/// The best definition of each name that is not its module's own.
fn public_names(modules: &[Module], aliases: &[Vec<Alias>]) -> Result<Public, LinkError> {
    let mut public = Public::new();
    for (module, parsed) in modules.iter().enumerate() {
        for function in &parsed.functions {
            let rank = function_rank(function);
            if !is_private(function.linkage, rank) {
                offer(&mut public, &function.name, Best::function(module, rank))?;
            }
        }
        for variable in &parsed.variables {
            let rank = variable_rank(variable);
            if !is_private(variable.linkage, rank) {
                let align = variable.align;
                offer(&mut public, &variable.name, Best { module, function: false, rank, align })?;
            }
        }
        for alias in &aliases[module] {
            let rank = match alias.linkage {
                Linkage::Internal => continue,
                Linkage::Weak => Rank::Weak,
                _ => Rank::Strong,
            };
            offer(&mut public, &alias.name, Best::function(module, rank))?;
        }
    }
    Ok(public)
}

fn offer(public: &mut Public, name: &str, candidate: Best) -> Result<(), LinkError> {
    let Some(known) = public.get_mut(name) else {
        public.insert(name.to_owned(), candidate);
        return Ok(());
    };
    if known.function != candidate.function {
        return Err(LinkError::Kinds(name.to_owned()));
    }
    if known.rank == Rank::Strong && candidate.rank == Rank::Strong {
        return Err(LinkError::Duplicate(name.to_owned()));
    }
    let align = known.align.max(candidate.align);
    if candidate.rank > known.rank {
        *known = candidate;
    }
    known.align = align;
    Ok(())
}

/// New names for what is a module's own and has another's name.
fn private_renames(modules: &[Module], public: &Public) -> Result<Vec<Renames>, LinkError> {
    let mut taken: HashSet<String> = public.keys().cloned().collect();
    let mut all = Vec::with_capacity(modules.len());
    for (index, module) in modules.iter().enumerate() {
        let mut renames = Renames::default();
        let functions = module.functions.iter().filter_map(|function| {
            let private = is_private(function.linkage, function_rank(function));
            private.then_some((&function.name, function.entry))
        });
        let variables = module.variables.iter().filter_map(|variable| {
            let private = is_private(variable.linkage, variable_rank(variable));
            private.then_some((&variable.name, false))
        });
        for (name, entry) in functions.chain(variables) {
            if taken.insert(name.clone()) {
                continue;
            }
            // The host looks kernels up by their names.
            if entry {
                return Err(LinkError::Duplicate(name.clone()));
            }
            let unique = (0u32..)
                .map(|attempt| format!("{name}$unit{index}${attempt}"))
                .find(|unique| !taken.contains(unique));
            if let Some(unique) = unique {
                taken.insert(unique.clone());
                renames.insert(name.clone(), unique);
            }
        }
        all.push(renames);
    }
    Ok(all)
}

/// Adds what counts of a module to the result, under its new names.
fn merge(merged: &mut Module, module: Module, index: usize, public: &Public, renames: &Renames) {
    let best = |name: &str, rank| {
        public.get(name).filter(|best| best.module == index && best.rank == rank)
    };
    for mut function in module.functions {
        let rank = function_rank(&function);
        if is_private(function.linkage, rank) || best(&function.name, rank).is_some() {
            rename::function(&mut function, renames);
            merged.functions.push(function);
        }
    }
    for mut variable in module.variables {
        let rank = variable_rank(&variable);
        if !is_private(variable.linkage, rank) {
            let Some(best) = best(&variable.name, rank) else { continue };
            variable.align = best.align;
        }
        rename::variable(&mut variable, renames);
        merged.variables.push(variable);
    }
}
