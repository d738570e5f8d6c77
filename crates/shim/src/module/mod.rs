//! Modules, and the kernels and globals in them.

mod advice;
mod api;
mod beside;
mod cubin;
mod image;
mod jit;
mod link;
mod linked;
mod loaded;
mod peek;
pub(crate) mod sources;

pub(crate) use api::*;
pub(crate) use image::Images;
pub(crate) use link::*;
pub(crate) use loaded::{Module, Owner, by_handle, function_of};

use kedge_protocol::CtxId;

/// Forgets the modules of a destroyed context.
pub(crate) fn context_destroyed(ctx: CtxId) {
    crate::library::context_destroyed(ctx);
    loaded::context_destroyed(ctx);
}

/// Every function of a module.
#[cfg(feature = "private-tables")]
pub(crate) fn functions_of(
    module: kedge_cuda_types::handle::CUmodule,
) -> Result<Vec<kedge_cuda_types::handle::CUfunction>, kedge_cuda_types::CuError> {
    by_handle(module)?.functions(usize::MAX)
}
