//! The installed driver: `libcuda.so.1`, opened when a proxy starts and never linked.
//!
//! One table names every function that kedge calls, with its signature (CUDA Driver API reference).
//! A driver that lacks one is refused with the function's name, except for those marked optional.

use crate::presence::{LIBRARY, USUAL_PLACES};
use kedge_cuda_types::CuError;
use kedge_cuda_types::abi::CUipcEventHandle;
use kedge_cuda_types::graph::{
    CUDA_BATCH_MEM_OP_NODE_PARAMS, CUDA_HOST_NODE_PARAMS_v1, CUDA_KERNEL_NODE_PARAMS_v2,
    CUDA_MEMSET_NODE_PARAMS_v1, CUgraphEdgeData, CUgraphNodeParams, CUlaunchAttributeValue,
    CUlaunchConfig,
};
use kedge_cuda_types::handle::*;
use kedge_cuda_types::memory::{
    CUDA_ARRAY3D_DESCRIPTOR, CUDA_MEMCPY3D, CUDA_RESOURCE_DESC, CUDA_RESOURCE_VIEW_DESC,
    CUDA_TEXTURE_DESC, CUmemAccessDesc, CUmemAllocationProp,
};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};

/// Why the driver cannot be used. Each says what mends it.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error(
        "no NVIDIA driver: libcuda.so.1 cannot be opened ({0}); install NVIDIA's driver, or use --gpu soft"
    )]
    Missing(String),
    #[error(
        "{path} is kedge's own library, not NVIDIA's driver; set KEDGE_DRIVER to the driver's libcuda.so.1"
    )]
    OurOwn { path: String },
    #[error("the NVIDIA driver lacks {0}; kedge needs driver 525 (CUDA 12.0) or newer")]
    TooOld(&'static str),
}

macro_rules! driver {
    ($(fn $name:ident($($arg:ty),* $(,)?);)*  optional: $(fn $opt:ident($($oarg:ty),* $(,)?);)*) => {
        /// The driver's functions, by their exported names.
        #[allow(non_snake_case, reason = "the driver's names")]
        pub(crate) struct Driver {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) -> u32,)*
            $(pub(crate) $opt: Option<unsafe extern "C" fn($($oarg),*) -> u32>,)*
            pub(crate) _library: Library,
        }

        impl Driver {
            fn resolve(library: Library) -> Result<Driver, DriverError> {
                // SAFETY: each symbol is read as a function of the type that the reference gives
                // it, and the library stays open as long as the table lives.
                unsafe {
                    Ok(Driver {
                        $($name: *library
                            .get(concat!(stringify!($name), "\0").as_bytes())
                            .map_err(|_| DriverError::TooOld(stringify!($name)))?,)*
                        $($opt: library
                            .get(concat!(stringify!($opt), "\0").as_bytes())
                            .ok()
                            .map(|symbol| *symbol),)*
                        _library: library,
                    })
                }
            }

            /// A driver that refuses everything, for tests to put functions of their own into.
            #[cfg(test)]
            pub(crate) fn refusing() -> Driver {
                Driver {
                    $($name: {
                        unsafe extern "C" fn refuse($(_: $arg),*) -> u32 { CuError::NOT_SUPPORTED.0 }
                        refuse
                    },)*
                    $($opt: None,)*
                    _library: Library::this(),
                }
            }
        }
    };
}

driver! {
    fn cuInit(c_uint);
    fn cuDriverGetVersion(*mut c_int);
    fn cuDeviceGetCount(*mut c_int);
    fn cuDeviceGet(*mut CUdevice, c_int);
    fn cuDeviceGetName(*mut c_char, c_int, CUdevice);
    fn cuDeviceGetUuid_v2(*mut [u8; 16], CUdevice);
    fn cuDeviceTotalMem_v2(*mut usize, CUdevice);
    fn cuDeviceGetAttribute(*mut c_int, c_uint, CUdevice);
    fn cuDeviceCanAccessPeer(*mut c_int, CUdevice, CUdevice);
    fn cuCtxCreate_v2(*mut CUcontext, c_uint, CUdevice);
    fn cuCtxDestroy_v2(CUcontext);
    fn cuCtxSetCurrent(CUcontext);
    fn cuCtxSynchronize();
    fn cuCtxSetLimit(c_uint, usize);
    fn cuCtxGetLimit(*mut usize, c_uint);
    fn cuMemGetInfo_v2(*mut usize, *mut usize);
    fn cuMemAddressReserve(*mut CUdeviceptr, usize, usize, CUdeviceptr, u64);
    fn cuMemAddressFree(CUdeviceptr, usize);
    fn cuMemCreate(*mut u64, usize, *const CUmemAllocationProp, u64);
    fn cuMemRelease(u64);
    fn cuMemMap(CUdeviceptr, usize, usize, u64, u64);
    fn cuMemUnmap(CUdeviceptr, usize);
    fn cuMemSetAccess(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    fn cuMemExportToShareableHandle(*mut c_void, u64, c_uint, u64);
    fn cuMemImportFromShareableHandle(*mut u64, *mut c_void, c_uint);
    fn cuMemGetAllocationPropertiesFromHandle(*mut CUmemAllocationProp, u64);
    fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
    fn cuMemFreeHost(*mut c_void);
    fn cuMemHostRegister_v2(*mut c_void, usize, c_uint);
    fn cuMemHostUnregister(*mut c_void);
    fn cuMemHostGetDevicePointer_v2(*mut CUdeviceptr, *mut c_void, c_uint);
    fn cuMemGetAddressRange_v2(*mut CUdeviceptr, *mut usize, CUdeviceptr);
    fn cuPointerGetAttribute(*mut c_void, c_uint, CUdeviceptr);
    fn cuMemcpyAsync(CUdeviceptr, CUdeviceptr, usize, CUstream);
    fn cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
    fn cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
    fn cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
    fn cuMemcpy3DAsync_v2(*const CUDA_MEMCPY3D, CUstream);
    fn cuMemsetD8Async(CUdeviceptr, u8, usize, CUstream);
    fn cuMemsetD16Async(CUdeviceptr, u16, usize, CUstream);
    fn cuMemsetD32Async(CUdeviceptr, u32, usize, CUstream);
    fn cuMemsetD2D8Async(CUdeviceptr, usize, u8, usize, usize, CUstream);
    fn cuMemsetD2D16Async(CUdeviceptr, usize, u16, usize, usize, CUstream);
    fn cuMemsetD2D32Async(CUdeviceptr, usize, u32, usize, usize, CUstream);
    fn cuArray3DCreate_v2(*mut CUarray, *const CUDA_ARRAY3D_DESCRIPTOR);
    fn cuArrayDestroy(CUarray);
    fn cuMipmappedArrayCreate(*mut CUmipmappedArray, *const CUDA_ARRAY3D_DESCRIPTOR, c_uint);
    fn cuMipmappedArrayGetLevel(*mut CUarray, CUmipmappedArray, c_uint);
    fn cuMipmappedArrayDestroy(CUmipmappedArray);
    fn cuTexObjectCreate(
        *mut u64,
        *const CUDA_RESOURCE_DESC,
        *const CUDA_TEXTURE_DESC,
        *const CUDA_RESOURCE_VIEW_DESC,
    );
    fn cuTexObjectDestroy(u64);
    fn cuSurfObjectCreate(*mut u64, *const CUDA_RESOURCE_DESC);
    fn cuSurfObjectDestroy(u64);
    fn cuModuleLoadDataEx(*mut CUmodule, *const c_void, c_uint, *mut c_uint, *mut *mut c_void);
    fn cuModuleUnload(CUmodule);
    fn cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
    fn cuModuleGetGlobal_v2(*mut CUdeviceptr, *mut usize, CUmodule, *const c_char);
    fn cuLinkCreate_v2(c_uint, *mut c_uint, *mut *mut c_void, *mut CUlinkState);
    fn cuLinkAddData_v2(
        CUlinkState,
        c_uint,
        *mut c_void,
        usize,
        *const c_char,
        c_uint,
        *mut c_uint,
        *mut *mut c_void,
    );
    fn cuLinkComplete(CUlinkState, *mut *mut c_void, *mut usize);
    fn cuLinkDestroy(CUlinkState);
    fn cuFuncGetAttribute(*mut c_int, c_uint, CUfunction);
    fn cuFuncSetAttribute(CUfunction, c_uint, c_int);
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, CUfunction, c_int, usize);
    fn cuLaunchKernel(
        CUfunction,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        CUstream,
        *mut *mut c_void,
        *mut *mut c_void,
    );
    fn cuLaunchKernelEx(*const CUlaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void);
    fn cuLaunchHostFunc(CUstream, Option<CUhostFn>, *mut c_void);
    fn cuStreamCreateWithPriority(*mut CUstream, c_uint, c_int);
    fn cuStreamDestroy_v2(CUstream);
    fn cuStreamSynchronize(CUstream);
    fn cuStreamQuery(CUstream);
    fn cuStreamWaitEvent(CUstream, CUevent, c_uint);
    fn cuStreamWriteValue32_v2(CUstream, CUdeviceptr, u32, c_uint);
    fn cuStreamWriteValue64_v2(CUstream, CUdeviceptr, u64, c_uint);
    fn cuStreamWaitValue32_v2(CUstream, CUdeviceptr, u32, c_uint);
    fn cuStreamWaitValue64_v2(CUstream, CUdeviceptr, u64, c_uint);
    fn cuEventCreate(*mut CUevent, c_uint);
    fn cuEventDestroy_v2(CUevent);
    fn cuEventRecord(CUevent, CUstream);
    fn cuEventSynchronize(CUevent);
    fn cuEventQuery(CUevent);
    fn cuIpcGetEventHandle(*mut CUipcEventHandle, CUevent);
    fn cuIpcOpenEventHandle(*mut CUevent, CUipcEventHandle);
    fn cuEventElapsedTime(*mut f32, CUevent, CUevent);
    fn cuGraphCreate(*mut CUgraph, c_uint);
    fn cuGraphDestroy(CUgraph);
    fn cuGraphAddDependencies(CUgraph, *const CUgraphNode, *const CUgraphNode, usize);
    fn cuGraphAddEmptyNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize);
    fn cuGraphAddKernelNode_v2(
        *mut CUgraphNode,
        CUgraph,
        *const CUgraphNode,
        usize,
        *const CUDA_KERNEL_NODE_PARAMS_v2,
    );
    fn cuGraphKernelNodeSetAttribute(CUgraphNode, c_uint, *const CUlaunchAttributeValue);
    fn cuGraphAddMemcpyNode(
        *mut CUgraphNode,
        CUgraph,
        *const CUgraphNode,
        usize,
        *const CUDA_MEMCPY3D,
        CUcontext,
    );
    fn cuGraphAddMemsetNode(
        *mut CUgraphNode,
        CUgraph,
        *const CUgraphNode,
        usize,
        *const CUDA_MEMSET_NODE_PARAMS_v1,
        CUcontext,
    );
    fn cuGraphAddHostNode(
        *mut CUgraphNode,
        CUgraph,
        *const CUgraphNode,
        usize,
        *const CUDA_HOST_NODE_PARAMS_v1,
    );
    fn cuGraphAddEventRecordNode(
        *mut CUgraphNode,
        CUgraph,
        *const CUgraphNode,
        usize,
        CUevent,
    );
    fn cuGraphAddEventWaitNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, CUevent);
    fn cuGraphAddBatchMemOpNode(
        *mut CUgraphNode,
        CUgraph,
        *const CUgraphNode,
        usize,
        *const CUDA_BATCH_MEM_OP_NODE_PARAMS,
    );
    fn cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, u64);
    fn cuGraphExecDestroy(CUgraphExec);
    fn cuGraphLaunch(CUgraphExec, CUstream);
    fn cuGraphNodeSetEnabled(CUgraphExec, CUgraphNode, c_uint);
    fn cuGraphExecKernelNodeSetParams_v2(
        CUgraphExec,
        CUgraphNode,
        *const CUDA_KERNEL_NODE_PARAMS_v2,
    );
    fn cuGraphExecMemcpyNodeSetParams(CUgraphExec, CUgraphNode, *const CUDA_MEMCPY3D, CUcontext);
    fn cuGraphExecMemsetNodeSetParams(
        CUgraphExec,
        CUgraphNode,
        *const CUDA_MEMSET_NODE_PARAMS_v1,
        CUcontext,
    );
    fn cuGraphExecHostNodeSetParams(CUgraphExec, CUgraphNode, *const CUDA_HOST_NODE_PARAMS_v1);
    fn cuGraphExecEventRecordNodeSetEvent(CUgraphExec, CUgraphNode, CUevent);
    fn cuGraphExecEventWaitNodeSetEvent(CUgraphExec, CUgraphNode, CUevent);
    fn cuGraphExecBatchMemOpNodeSetParams(
        CUgraphExec,
        CUgraphNode,
        *const CUDA_BATCH_MEM_OP_NODE_PARAMS,
    );
    optional:
    fn cuTensorMapEncodeTiled(
        *mut c_void,
        c_uint,
        c_uint,
        *mut c_void,
        *const u64,
        *const u64,
        *const u32,
        *const u32,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
    );
    fn cuTensorMapEncodeIm2col(
        *mut c_void,
        c_uint,
        c_uint,
        *mut c_void,
        *const u64,
        *const u64,
        *const c_int,
        *const c_int,
        c_uint,
        c_uint,
        *const u32,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
    );
    fn cuTensorMapReplaceAddress(*mut c_void, *mut c_void);
    fn cuOccupancyAvailableDynamicSMemPerBlock(*mut usize, CUfunction, c_int, c_int);
    fn cuOccupancyMaxActiveClusters(*mut c_int, CUfunction, *const CUlaunchConfig);
    fn cuOccupancyMaxPotentialClusterSize(*mut c_int, CUfunction, *const CUlaunchConfig);
    fn cuFuncGetParamInfo(CUfunction, usize, *mut usize, *mut usize);
    fn cuGraphConditionalHandleCreate(*mut u64, CUgraph, CUcontext, c_uint, c_uint);
    fn cuGraphAddNode_v2(
        *mut CUgraphNode,
        CUgraph,
        *const CUgraphNode,
        *const CUgraphEdgeData,
        usize,
        *mut CUgraphNodeParams,
    );
    fn cuModuleGetFunctionCount(*mut c_uint, CUmodule);
    fn cuModuleEnumerateFunctions(*mut CUfunction, c_uint, CUmodule);
    fn cuFuncGetName(*mut *const c_char, CUfunction);
}

/// What a driver function returned.
#[inline]
pub(crate) fn check(status: u32) -> Result<(), CuError> {
    if status == 0 { Ok(()) } else { Err(CuError(status)) }
}

impl Driver {
    /// Opens the driver: `KEDGE_DRIVER` if it is set, else what the loader finds, else the usual
    /// places.
    pub(crate) fn open() -> Result<Driver, DriverError> {
        if let Some(path) = std::env::var_os("KEDGE_DRIVER") {
            return Driver::open_at(Path::new(&path));
        }
        let mut first = match Driver::open_at(Path::new(LIBRARY)) {
            Ok(driver) => return Ok(driver),
            Err(error) => error,
        };
        for place in USUAL_PLACES.iter().map(PathBuf::from).filter(|place| place.exists()) {
            match Driver::open_at(&place) {
                Ok(driver) => return Ok(driver),
                Err(error) => first = error,
            }
        }
        Err(first)
    }

    fn open_at(path: &Path) -> Result<Driver, DriverError> {
        // SAFETY: the driver's initialisers run, as in any CUDA program.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let library = library.map_err(|error| DriverError::Missing(error.to_string()))?;
        // A job's own library path leads to kedge's shim, which would have to ask this process.
        // SAFETY: the symbol is only looked for.
        let ours = unsafe { library.get::<*const c_void>(b"kedge_shim\0") }.is_ok();
        if ours {
            return Err(DriverError::OurOwn { path: path.display().to_string() });
        }
        Driver::resolve(library)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A library with none of the driver's functions, and this table of one without the newer ones.
    #[test]
    fn an_old_driver_is_refused_by_the_name_of_what_it_lacks_or_does_without() {
        let error = Driver::resolve(Library::this()).err().map(|error| error.to_string());
        let error = error.unwrap_or_default();
        assert!(error.contains("lacks cuInit;") && error.contains("driver 525"), "{error}");
        let old = Driver::refusing();
        assert!(old.cuTensorMapEncodeTiled.is_none() && old.cuOccupancyMaxActiveClusters.is_none());
    }
}
