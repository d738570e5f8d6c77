//! Kernel nodes.

use super::{Payload, world};
use crate::launch::{self, Attributes, Params, Shape};
use crate::{context, ffi, function, library};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::{
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
    CU_LAUNCH_ATTRIBUTE_IGNORE, CUDA_KERNEL_NODE_PARAMS_v1, CUDA_KERNEL_NODE_PARAMS_v2,
    CUlaunchAttributeValue,
};
use kedge_cuda_types::handle::{CUcontext, CUfunction, CUgraphNode, CUkernel};
use kedge_protocol::{Dim3, Launch, LaunchHint, StreamOp};
use kedge_wire::List;
use std::ffi::c_void;
use std::ptr::null_mut;

/// A kernel launch in a graph.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// As the program named it: one of the two is NULL. None for a captured launch.
    given: Option<(CUfunction, CUkernel)>,
    launch: Launch,
    /// Addresses of the parameters in `launch.params`, made when the program asks for them: words,
    /// because the node is not bound to a thread.
    pointers: Vec<usize>,
}

impl Clone for Kernel {
    fn clone(&self) -> Self {
        Self {
            given: self.given,
            launch: self.launch.clone(),
            // They point into the original's buffer.
            pointers: Vec::new(),
        }
    }
}

/// The second form of a kernel node's parameters says all that the first does.
pub(super) fn second_form(v1: CUDA_KERNEL_NODE_PARAMS_v1) -> CUDA_KERNEL_NODE_PARAMS_v2 {
    CUDA_KERNEL_NODE_PARAMS_v2 { v1, kern: CUkernel::NULL, ctx: CUcontext::NULL }
}

impl Kernel {
    pub(crate) fn from_launch(launch: Launch) -> Self {
        Self { given: None, launch, pointers: Vec::new() }
    }

    /// Checks and packs a launch as `cuLaunchKernel` does.
    ///
    /// # Safety
    /// `kernelParams` or `extra` are valid for the function's parameters.
    pub(crate) unsafe fn from_params(params: &CUDA_KERNEL_NODE_PARAMS_v2) -> Result<Self, CuError> {
        let CUDA_KERNEL_NODE_PARAMS_v2 { v1, kern, ctx } = params;
        let shape = Shape {
            grid: Dim3 { x: v1.gridDimX, y: v1.gridDimY, z: v1.gridDimZ },
            block: Dim3 { x: v1.blockDimX, y: v1.blockDimY, z: v1.blockDimZ },
            shared_bytes: v1.sharedMemBytes,
        };
        let pointers = Params { kernel_params: v1.kernelParams, extra: v1.extra };
        let function = if v1.func.is_null() { CUfunction(kern.0) } else { v1.func };
        let function = if ctx.is_null() {
            function::resolve(function)?
        } else {
            function::resolve_in(function, context::by_handle(*ctx)?.id())?
        };
        // SAFETY: the parameters are as the kernel takes them, by this function's contract.
        let launch =
            unsafe { launch::prepare(&function, shape, pointers, &Attributes::default()) }?;
        Ok(Self { given: Some((v1.func, *kern)), ..Self::from_launch(launch) })
    }

    pub(crate) fn op(&self) -> StreamOp {
        StreamOp::Launch { launch: self.launch.clone() }
    }

    pub(crate) fn launch(&self) -> &Launch {
        &self.launch
    }

    /// What `cuGraphKernelNodeGetParams` tells. The parameters it points to are this node's.
    pub(crate) fn params(&mut self) -> CUDA_KERNEL_NODE_PARAMS_v2 {
        let own = function::handle_of(self.launch.kernel);
        let (func, kern) = self.given.unwrap_or((own, library::kernel_of(self.launch.kernel)));
        if self.pointers.is_empty()
            && let Ok(function) = function::resolve(own)
        {
            let base = self.launch.params.as_ptr() as usize;
            let params = function.info().params.iter();
            self.pointers = params.map(|param| base + param.offset as usize).collect();
        }
        let Launch { grid, block, .. } = self.launch;
        let none = self.pointers.is_empty();
        let v1 = CUDA_KERNEL_NODE_PARAMS_v1 {
            func,
            gridDimX: grid.x,
            gridDimY: grid.y,
            gridDimZ: grid.z,
            blockDimX: block.x,
            blockDimY: block.y,
            blockDimZ: block.z,
            sharedMemBytes: self.launch.shared_bytes,
            kernelParams: if none {
                null_mut()
            } else {
                self.pointers.as_mut_ptr().cast::<*mut c_void>()
            },
            extra: null_mut(),
        };
        CUDA_KERNEL_NODE_PARAMS_v2 { v1, kern, ctx: CUcontext::NULL }
    }

    fn attribute(&self, id: u32) -> Result<CUlaunchAttributeValue, CuError> {
        let Launch { cluster, cooperative, .. } = self.launch;
        match id {
            CU_LAUNCH_ATTRIBUTE_IGNORE => Err(CuError::INVALID_VALUE),
            CU_LAUNCH_ATTRIBUTE_COOPERATIVE => {
                Ok(CUlaunchAttributeValue::from_words(&[cooperative.into()]))
            }
            CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION => {
                Ok(CUlaunchAttributeValue::from_words(&[cluster.x, cluster.y, cluster.z]))
            }
            _ => {
                Attributes::default().apply(id, &CUlaunchAttributeValue::ZERO)?;
                let hint = self.launch.hints.iter().find(|hint| hint.id == id);
                let value = hint.map(|hint| CUlaunchAttributeValue { bytes: hint.value });
                Ok(value.unwrap_or(CUlaunchAttributeValue::ZERO))
            }
        }
    }

    fn set_attribute(&mut self, id: u32, value: CUlaunchAttributeValue) -> Result<(), CuError> {
        match id {
            // Zero, as it comes from a node without one, is none.
            CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION if value == CUlaunchAttributeValue::ZERO => {
                self.launch.cluster = Dim3::default();
                return Ok(());
            }
            CU_LAUNCH_ATTRIBUTE_IGNORE => return Err(CuError::INVALID_VALUE),
            _ => {}
        }
        let zero = value == CUlaunchAttributeValue::ZERO;
        let mut asked = Attributes::default();
        asked.apply(id, &value)?;
        match id {
            CU_LAUNCH_ATTRIBUTE_COOPERATIVE => self.launch.cooperative = asked.cooperative,
            CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION => {
                self.launch.cluster = asked.cluster.unwrap_or_default();
            }
            _ => asked.hints.into_iter().try_for_each(|hint| self.set_hint(hint, zero))?,
        }
        Ok(())
    }

    fn set_hint(&mut self, hint: LaunchHint, none: bool) -> Result<(), CuError> {
        let mut hints = std::mem::take(&mut self.launch.hints).into_inner();
        hints.retain(|known| known.id != hint.id);
        hints.extend((!none).then_some(hint));
        self.launch.hints = List::new(hints).map_err(|_| CuError::INVALID_VALUE)?;
        Ok(())
    }

    /// Takes over another node's attributes.
    pub(crate) fn copy_attributes(&mut self, from: &Self) -> Result<(), CuError> {
        self.launch.cooperative = from.launch.cooperative;
        self.launch.cluster = from.launch.cluster;
        self.launch.hints = from.launch.hints.clone();
        Ok(())
    }
}

fn with_kernel<T>(
    node: CUgraphNode,
    f: impl FnOnce(&mut Kernel) -> Result<T, CuError>,
) -> Result<T, CuError> {
    world::ask(|graphs| match graphs.payload_mut(node)? {
        Payload::Kernel(kernel) => f(kernel),
        _ => Err(CuError::INVALID_VALUE),
    })
}

pub(crate) unsafe fn cuGraphKernelNodeGetAttribute(
    node: CUgraphNode,
    id: u32,
    value: *mut CUlaunchAttributeValue,
) -> Result<(), CuError> {
    let found = with_kernel(node, |kernel| kernel.attribute(id))?;
    // SAFETY: the caller's out pointer.
    unsafe { ffi::write(value, found) }
}

pub(crate) unsafe fn cuGraphKernelNodeSetAttribute(
    node: CUgraphNode,
    id: u32,
    value: *const CUlaunchAttributeValue,
) -> Result<(), CuError> {
    // SAFETY: the caller's value.
    let value = unsafe { ffi::read(value) }?;
    with_kernel(node, |kernel| kernel.set_attribute(id, value))
}

pub(crate) unsafe fn cuGraphKernelNodeCopyAttributes(
    target: CUgraphNode,
    source: CUgraphNode,
) -> Result<(), CuError> {
    let from = with_kernel(source, |kernel| Ok(kernel.clone()))?;
    with_kernel(target, |kernel| kernel.copy_attributes(&from))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_cuda_types::graph::CU_LAUNCH_ATTRIBUTE_PRIORITY;
    use kedge_protocol::{KernelRef, ModuleId};
    use kedge_wire::Bytes;

    fn kernel() -> Kernel {
        let one = Dim3 { x: 1, y: 1, z: 1 };
        Kernel::from_launch(Launch {
            kernel: KernelRef { module: ModuleId(1), index: 0 },
            grid: one,
            block: one,
            cluster: Dim3::default(),
            shared_bytes: 0,
            cooperative: false,
            params: Bytes::default(),
            hints: List::default(),
        })
    }

    #[test]
    fn attributes_reach_the_launch_or_are_kept() {
        let mut node = kernel();
        let words = CUlaunchAttributeValue::from_words;
        node.set_attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, words(&[2, 1, 1])).unwrap();
        node.set_attribute(CU_LAUNCH_ATTRIBUTE_COOPERATIVE, words(&[1])).unwrap();
        node.set_attribute(CU_LAUNCH_ATTRIBUTE_PRIORITY, words(&[3])).unwrap();
        assert_eq!(node.launch().cluster, Dim3 { x: 2, y: 1, z: 1 });
        assert!(node.launch().cooperative);
        let mut other = kernel();
        other.copy_attributes(&node).unwrap();
        assert_eq!(other.attribute(CU_LAUNCH_ATTRIBUTE_PRIORITY).unwrap().word(0), 3);
        assert!(other.launch().cooperative);
    }

    #[test]
    fn zero_attributes_can_be_written_back() {
        let mut node = kernel();
        for id in 1..=10 {
            let value = node.attribute(id).unwrap();
            node.set_attribute(id, value).unwrap();
        }
        assert_eq!(node.launch(), kernel().launch());
    }
}
