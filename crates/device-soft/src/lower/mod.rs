//! From a linked PTX module to a [`Program`].

use crate::code::{BuildError, Placement, Program};
use kedge_cuda_types::CuError;
use kedge_ptx::ast;

/// Lowers every function of `module` and places its variables.
///
/// Functions with an instruction that this device lacks make the kernels that reach them unusable
/// ([`crate::code::Kernel::unsupported`]), and not the whole module.
pub fn build(module: &ast::Module, placement: &mut dyn Placement) -> Result<Program, BuildError> {
    let _ = (module, placement);
    Err(BuildError { code: CuError::NOT_SUPPORTED, message: "lowering is not there yet".into() })
}
