//! A few of the driver's functions, called directly: what fills memory and looks at it must not be
//! what is measured.

use kedge_cuda_types::CuError;
use libloading::os::unix::Library;
use std::error::Error;
use std::ffi::{c_int, c_uint, c_void};

/// The library, and the context that was current when it was opened.
pub(crate) struct Cuda(Library, usize);

macro_rules! calls {
    ($($name:ident = $symbol:literal ($($arg:ident: $kind:ty),*);)*) => {
        impl Cuda {
            $(pub(crate) fn $name(&self, $($arg: $kind),*) -> Result<(), Box<dyn Error>> {
                // SAFETY: the symbol has this type by the CUDA Driver API reference; the callers in
                // this program pass live pointers.
                let status = unsafe {
                    let call = self.0.get::<unsafe extern "C" fn($($kind),*) -> u32>($symbol)?;
                    call($($arg),*)
                };
                if status == 0 { Ok(()) } else { Err(format!("{}: {}", stringify!($name), CuError(status)).into()) }
            })*
        }
    };
}

calls! {
    init = b"cuInit\0" (flags: c_uint);
    create_context = b"cuCtxCreate_v2\0" (out: *mut usize, flags: c_uint, device: c_int);
    current = b"cuCtxGetCurrent\0" (out: *mut usize);
    enter = b"cuCtxSetCurrent\0" (context: usize);
    register = b"cuMemHostRegister_v2\0" (at: *mut c_void, bytes: usize, flags: c_uint);
    allocate = b"cuMemAlloc_v2\0" (out: *mut u64, bytes: usize);
    copy_in = b"cuMemcpyHtoD_v2\0" (to: u64, from: *const c_void, bytes: usize);
    copy_out = b"cuMemcpyDtoH_v2\0" (to: *mut c_void, from: u64, bytes: usize);
    lock = b"cuCheckpointProcessLock\0" (pid: c_int, arguments: *mut c_void);
    checkpoint = b"cuCheckpointProcessCheckpoint\0" (pid: c_int, arguments: *mut c_void);
    restore = b"cuCheckpointProcessRestore\0" (pid: c_int, arguments: *mut c_void);
    unlock = b"cuCheckpointProcessUnlock\0" (pid: c_int, arguments: *mut c_void);
}

impl Cuda {
    pub(crate) fn open() -> Result<Cuda, Box<dyn Error>> {
        let path = std::env::var_os("KEDGE_DRIVER").unwrap_or_else(|| "libcuda.so.1".into());
        // SAFETY: the driver's initialisers run, as in any CUDA program.
        let mut cuda = Cuda(unsafe { Library::new(path) }?, 0);
        let mut context = 0;
        // Refused before the driver has started.
        if cuda.current(&mut context).is_ok() {
            cuda.1 = context;
        }
        Ok(cuda)
    }

    /// Makes copies from these bytes fast.
    pub(crate) fn pin(&self, bytes: &[u8]) -> Result<(), Box<dyn Error>> {
        self.register(bytes.as_ptr().cast_mut().cast(), bytes.len(), 1)
    }

    pub(crate) fn to_device(&self, to: u64, bytes: &[u8]) -> Result<(), Box<dyn Error>> {
        if self.1 != 0 {
            self.enter(self.1)?;
        }
        self.copy_in(to, bytes.as_ptr().cast(), bytes.len())
    }

    pub(crate) fn to_host(&self, out: &mut [u8], from: u64) -> Result<(), Box<dyn Error>> {
        if self.1 != 0 {
            self.enter(self.1)?;
        }
        self.copy_out(out.as_mut_ptr().cast(), from, out.len())
    }
}
