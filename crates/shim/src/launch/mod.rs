//! Launches: parameters packed, limits checked here so that what cannot run is told at once, and
//! one message posted.

mod api;
mod attribute;
mod check;
mod legacy;
mod params;

pub(crate) use api::*;
pub(crate) use attribute::Attributes;
pub(crate) use legacy::*;
pub(crate) use params::Params;

use crate::function::Function;
use kedge_cuda_types::CuError;
use kedge_protocol::{Dim3, Launch};
use kedge_wire::List;

/// A launch's shape, as the program gives it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) grid: Dim3,
    pub(crate) block: Dim3,
    /// Dynamic shared memory, bytes.
    pub(crate) shared_bytes: u32,
}

/// Everything that a launch, now or in a graph, is made of; checked.
///
/// # Safety
/// `params` are valid for the function's parameters.
pub(crate) unsafe fn prepare(
    function: &Function,
    shape: Shape,
    params: Params,
    attributes: &Attributes,
) -> Result<Launch, CuError> {
    let cluster = check::launch(function, shape, attributes)?;
    // SAFETY: `params` describe the function's parameters, by this function's contract.
    let params = unsafe { params.pack(function)? };
    let hints = List::new(attributes.hints.clone()).map_err(|_| CuError::INVALID_VALUE)?;
    Ok(Launch {
        kernel: function.kernel(),
        grid: shape.grid,
        block: shape.block,
        cluster,
        shared_bytes: shape.shared_bytes,
        cooperative: attributes.cooperative,
        params,
        hints,
    })
}
