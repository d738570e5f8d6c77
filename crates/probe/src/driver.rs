//! The driver's functions, found as a program finds them: in the library that the loader names
//! `libcuda.so.1`.

use crate::ProbeError;
use libloading::Library;
use std::ffi::{CStr, c_char, c_void};

/// CUresult.
pub(crate) type Code = i32;

macro_rules! driver {
    ($($field:ident = $symbol:literal ($($argument:ty),* $(,)?);)*) => {
        /// Function pointers that live as long as the library beside them.
        pub(crate) struct Driver {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> Code,)*
            _library: Library,
        }

        impl Driver {
            pub(crate) fn open() -> Result<Driver, ProbeError> {
                // SAFETY: a driver's initialisers are safe to run, as in every CUDA program.
                let library = unsafe { Library::new("libcuda.so.1") }?;
                Ok(Driver {
                    $($field: {
                        // SAFETY: cuda.h gives this name this type.
                        *unsafe { library.get($symbol.as_bytes()) }?
                    },)*
                    _library: library,
                })
            }
        }
    };
}

driver! {
    init = "cuInit"(u32);
    driver_version = "cuDriverGetVersion"(*mut i32);
    error_name = "cuGetErrorName"(Code, *mut *const c_char);
    device_count = "cuDeviceGetCount"(*mut i32);
    device_get = "cuDeviceGet"(*mut i32, i32);
    device_name = "cuDeviceGetName"(*mut c_char, i32, i32);
    device_uuid = "cuDeviceGetUuid_v2"(*mut [u8; 16], i32);
    device_pci_bus_id = "cuDeviceGetPCIBusId"(*mut c_char, i32, i32);
    device_total_memory = "cuDeviceTotalMem_v2"(*mut usize, i32);
    device_attribute = "cuDeviceGetAttribute"(*mut i32, i32, i32);
    primary_retain = "cuDevicePrimaryCtxRetain"(*mut *mut c_void, i32);
    ctx_set_current = "cuCtxSetCurrent"(*mut c_void);
    ctx_get_device = "cuCtxGetDevice"(*mut i32);
    ctx_synchronize = "cuCtxSynchronize"();
    module_load_data = "cuModuleLoadData"(*mut *mut c_void, *const c_void);
    module_get_function = "cuModuleGetFunction"(*mut *mut c_void, *mut c_void, *const c_char);
    launch_kernel = "cuLaunchKernel"(
        *mut c_void, u32, u32, u32, u32, u32, u32, u32, *mut c_void, *mut *mut c_void,
        *mut *mut c_void,
    );
    event_create = "cuEventCreate"(*mut *mut c_void, u32);
    event_record = "cuEventRecord"(*mut c_void, *mut c_void);
    mem_get_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);
    mem_alloc = "cuMemAlloc_v2"(*mut u64, usize);
    mem_alloc_managed = "cuMemAllocManaged"(*mut u64, usize, u32);
    mem_free = "cuMemFree_v2"(u64);
    mem_host_alloc = "cuMemHostAlloc"(*mut *mut c_void, usize, u32);
    mem_free_host = "cuMemFreeHost"(*mut c_void);
    memset_d32 = "cuMemsetD32_v2"(u64, u32, usize);
    copy_to_device = "cuMemcpyHtoD_v2"(u64, *const c_void, usize);
    copy_to_host = "cuMemcpyDtoH_v2"(*mut c_void, u64, usize);
    copy_on_device = "cuMemcpyDtoD_v2"(u64, u64, usize);
}

impl Driver {
    /// What `function` returned, as a result.
    #[inline]
    pub(crate) fn check(&self, function: &'static str, code: Code) -> Result<(), ProbeError> {
        if code == 0 { Ok(()) } else { Err(self.error(function, code)) }
    }

    #[cold]
    fn error(&self, function: &'static str, code: Code) -> ProbeError {
        let mut name = std::ptr::null();
        // SAFETY: the driver stores a pointer to a static string, or null.
        let name = unsafe {
            (self.error_name)(code, &mut name);
            (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
        };
        ProbeError::Cuda { function, code, name }
    }
}
