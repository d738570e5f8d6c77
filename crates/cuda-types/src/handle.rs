//! The driver API's opaque handles: one pointer-sized word each, chosen by the client.
//!
//! In C they are pointers to incomplete types. A program can only compare them and hand them back,
//! so they are kept as words: they can be shared between threads, and are never dereferenced.

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => { $(
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
        pub struct $name(pub usize);

        impl $name {
            pub const NULL: Self = Self(0);

            pub const fn is_null(self) -> bool {
                self.0 == 0
            }
        }
    )* };
}

handles! {
    CUcontext,
    CUmodule,
    CUlibrary,
    /// May hold a `CUkernel`: a launch accepts both.
    CUfunction,
    CUkernel,
    CUlinkState,
    /// NULL, `LEGACY` and `PER_THREAD` name default streams.
    CUstream,
    CUevent,
    CUarray,
    CUmipmappedArray,
    CUtexref,
    CUsurfref,
    CUgraph,
    CUgraphNode,
    CUgraphExec,
    CUuserObject,
    CUmemoryPool,
    CUexternalMemory,
    CUexternalSemaphore,
    CUgreenCtx,
    CUgraphicsResource,
}

impl CUstream {
    /// `CU_STREAM_LEGACY`: the current context's legacy default stream.
    pub const LEGACY: Self = Self(0x1);
    /// `CU_STREAM_PER_THREAD`: the calling thread's default stream in the current context.
    pub const PER_THREAD: Self = Self(0x2);
}

/// `CUdevice`: a device ordinal.
pub type CUdevice = i32;
/// `CUdeviceptr`.
pub type CUdeviceptr = u64;
/// `CUhostFn`.
pub type CUhostFn = unsafe extern "C" fn(user_data: *mut std::ffi::c_void);
/// `CUstreamCallback`; `status` is a `CUresult`.
pub type CUstreamCallback =
    unsafe extern "C" fn(stream: CUstream, status: u32, user_data: *mut std::ffi::c_void);
