//! Device 0 with its primary context: the few safe operations that the measurements need.

use crate::ProbeError;
use crate::driver::Driver;
use std::ffi::{CString, c_void};
use std::ptr::null_mut;

/// CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT.
const MULTIPROCESSOR_COUNT: i32 = 16;
/// CU_MEM_ATTACH_GLOBAL.
const ATTACH_GLOBAL: u32 = 1;

/// An open device. Measurements use it from one thread, where its context is current.
pub(crate) struct Device {
    driver: Driver,
    ordinal: i32,
}

/// A kernel of a module that stays loaded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernel(*mut c_void);

/// An event that stays.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event(*mut c_void);

/// Device memory, freed when dropped.
pub(crate) struct Buffer<'d> {
    device: &'d Device,
    pub(crate) address: u64,
    pub(crate) size: usize,
}

/// Pinned host memory, freed when dropped.
pub(crate) struct Pinned<'d> {
    device: &'d Device,
    bytes: *mut u8,
    size: usize,
}

/// Managed memory, freed when dropped. The host reads and writes words of it while no kernel runs.
pub(crate) struct Managed<'d> {
    device: &'d Device,
    pub(crate) address: u64,
    pub(crate) size: usize,
}

impl Device {
    pub(crate) fn open() -> Result<Device, ProbeError> {
        let driver = Driver::open()?;
        let (mut ordinal, mut context) = (0, null_mut());
        // SAFETY: all calls store into live locals, and use what the ones before gave; the context
        // is never released.
        unsafe {
            driver.check("cuInit", (driver.init)(0))?;
            driver.check("cuDeviceGet", (driver.device_get)(&mut ordinal, 0))?;
            let code = (driver.primary_retain)(&mut context, ordinal);
            driver.check("cuDevicePrimaryCtxRetain", code)?;
            driver.check("cuCtxSetCurrent", (driver.ctx_set_current)(context))?;
        }
        Ok(Device { driver, ordinal })
    }

    /// What the device calls multiprocessors; on a software device, the cores that it uses.
    pub(crate) fn multiprocessors(&self) -> Result<u32, ProbeError> {
        let mut count = 0;
        // SAFETY: the driver stores one int.
        let code = unsafe {
            (self.driver.device_attribute)(&mut count, MULTIPROCESSOR_COUNT, self.ordinal)
        };
        self.driver.check("cuDeviceGetAttribute", code)?;
        Ok(u32::try_from(count).unwrap_or(0).max(1))
    }

    /// The current device: a call that needs no device.
    #[inline]
    pub(crate) fn current(&self) -> Result<i32, ProbeError> {
        let mut ordinal = 0;
        // SAFETY: the driver stores one int.
        let code = unsafe { (self.driver.ctx_get_device)(&mut ordinal) };
        self.driver.check("cuCtxGetDevice", code)?;
        Ok(ordinal)
    }

    /// Bytes free: a call that must ask the device.
    #[inline]
    pub(crate) fn free_memory(&self) -> Result<usize, ProbeError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver stores two sizes.
        let code = unsafe { (self.driver.mem_get_info)(&mut free, &mut total) };
        self.driver.check("cuMemGetInfo", code)?;
        Ok(free)
    }

    #[inline]
    pub(crate) fn synchronize(&self) -> Result<(), ProbeError> {
        // SAFETY: no arguments.
        self.driver.check("cuCtxSynchronize", unsafe { (self.driver.ctx_synchronize)() })
    }

    /// Loads PTX text and finds the kernel `name` in it.
    pub(crate) fn kernel(&self, ptx: &str, name: &str) -> Result<Kernel, ProbeError> {
        let text = CString::new(ptx).unwrap_or_default();
        let name = CString::new(name).unwrap_or_default();
        let (mut module, mut function) = (null_mut(), null_mut());
        // SAFETY: both strings are terminated and outlive the calls, which store one handle each.
        unsafe {
            let code = (self.driver.module_load_data)(&mut module, text.as_ptr().cast());
            self.driver.check("cuModuleLoadData", code)?;
            let code = (self.driver.module_get_function)(&mut function, module, name.as_ptr());
            self.driver.check("cuModuleGetFunction", code)?;
        }
        Ok(Kernel(function))
    }

    /// Launches `grid` × `block` threads in the legacy stream. Each parameter is 8 bytes of which
    /// the kernel takes as many as it declares.
    #[inline]
    pub(crate) fn launch(
        &self,
        kernel: Kernel,
        grid: [u32; 2],
        block: [u32; 2],
        parameters: &[u64],
    ) -> Result<(), ProbeError> {
        let mut pointers = [null_mut::<c_void>(); 8];
        for (pointer, value) in pointers.iter_mut().zip(parameters) {
            *pointer = std::ptr::from_ref(value).cast_mut().cast();
        }
        let ([gx, gy], [bx, by]) = (grid, block);
        // SAFETY: the kernel is loaded; the driver copies the parameters, of 8 bytes at most each,
        // before it returns, and only reads them.
        let code = unsafe {
            (self.driver.launch_kernel)(
                kernel.0,
                gx,
                gy,
                1,
                bx,
                by,
                1,
                0,
                null_mut(),
                pointers.as_mut_ptr(),
                null_mut(),
            )
        };
        self.driver.check("cuLaunchKernel", code)
    }

    pub(crate) fn event(&self) -> Result<Event, ProbeError> {
        let mut event = null_mut();
        // SAFETY: the driver stores one handle.
        let code = unsafe { (self.driver.event_create)(&mut event, 0) };
        self.driver.check("cuEventCreate", code)?;
        Ok(Event(event))
    }

    /// Records in the legacy stream.
    #[inline]
    pub(crate) fn record(&self, event: Event) -> Result<(), ProbeError> {
        // SAFETY: events are never destroyed.
        let code = unsafe { (self.driver.event_record)(event.0, null_mut()) };
        self.driver.check("cuEventRecord", code)
    }

    #[inline]
    pub(crate) fn alloc(&self, size: usize) -> Result<Buffer<'_>, ProbeError> {
        let mut address = 0;
        // SAFETY: the driver stores one address.
        let code = unsafe { (self.driver.mem_alloc)(&mut address, size) };
        self.driver.check("cuMemAlloc", code)?;
        Ok(Buffer { device: self, address, size })
    }

    pub(crate) fn managed(&self, size: usize) -> Result<Managed<'_>, ProbeError> {
        let mut address = 0;
        // SAFETY: the driver stores one address.
        let code = unsafe { (self.driver.mem_alloc_managed)(&mut address, size, ATTACH_GLOBAL) };
        self.driver.check("cuMemAllocManaged", code)?;
        Ok(Managed { device: self, address, size })
    }

    pub(crate) fn pinned(&self, size: usize) -> Result<Pinned<'_>, ProbeError> {
        let mut bytes = null_mut();
        // SAFETY: the driver stores one pointer.
        let code = unsafe { (self.driver.mem_host_alloc)(&mut bytes, size, 0) };
        self.driver.check("cuMemHostAlloc", code)?;
        let mut pinned = Pinned { device: self, bytes: bytes.cast(), size };
        pinned.as_mut_slice().fill(1);
        Ok(pinned)
    }
}

impl Buffer<'_> {
    /// Sets every 32-bit word.
    pub(crate) fn fill(&self, word: u32) -> Result<(), ProbeError> {
        let driver = &self.device.driver;
        // SAFETY: the words lie within the buffer, which is alive.
        let code = unsafe { (driver.memset_d32)(self.address, word, self.size / 4) };
        driver.check("cuMemsetD32", code)
    }

    /// Copies `bytes` to the buffer's beginning; what does not fit is left out.
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<(), ProbeError> {
        let driver = &self.device.driver;
        let size = bytes.len().min(self.size);
        // SAFETY: `size` bytes are within both.
        let code = unsafe { (driver.copy_to_device)(self.address, bytes.as_ptr().cast(), size) };
        driver.check("cuMemcpyHtoD", code)
    }

    /// Copies the buffer's beginning to `bytes`.
    pub(crate) fn read(&self, bytes: &mut [u8]) -> Result<(), ProbeError> {
        let driver = &self.device.driver;
        let size = bytes.len().min(self.size);
        // SAFETY: `size` bytes are within both.
        let code = unsafe { (driver.copy_to_host)(bytes.as_mut_ptr().cast(), self.address, size) };
        driver.check("cuMemcpyDtoH", code)
    }

    /// Copies this buffer's beginning to `to`'s.
    pub(crate) fn copy_to(&self, to: &Buffer<'_>, size: usize) -> Result<(), ProbeError> {
        let driver = &self.device.driver;
        let size = size.min(self.size).min(to.size);
        // SAFETY: `size` bytes are within both.
        let code = unsafe { (driver.copy_on_device)(to.address, self.address, size) };
        driver.check("cuMemcpyDtoD", code)
    }

    /// The buffer as floats.
    pub(crate) fn floats(&self) -> Result<Vec<f32>, ProbeError> {
        let mut bytes = vec![0; self.size];
        self.read(&mut bytes)?;
        let word = |four: &[u8]| f32::from_ne_bytes([four[0], four[1], four[2], four[3]]);
        Ok(bytes.chunks_exact(4).map(word).collect())
    }

    /// Frees the buffer and says whether that worked.
    #[inline]
    pub(crate) fn free(self) -> Result<(), ProbeError> {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: freed once, since the buffer is not dropped.
        let code = unsafe { (this.device.driver.mem_free)(this.address) };
        this.device.driver.check("cuMemFree", code)
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        // SAFETY: nothing uses the buffer after this.
        unsafe { (self.device.driver.mem_free)(self.address) };
    }
}

impl Pinned<'_> {
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: the driver gave `size` bytes, initialised when allocated.
        unsafe { std::slice::from_raw_parts(self.bytes, self.size) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the driver gave `size` bytes, which `self` lends for writing; fresh pinned memory
        // reads as some bytes.
        unsafe { std::slice::from_raw_parts_mut(self.bytes, self.size) }
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        // SAFETY: nothing uses the memory after this.
        unsafe { (self.device.driver.mem_free_host)(self.bytes.cast()) };
    }
}

impl Managed<'_> {
    /// Reads the word at a byte offset; 0 behind the end.
    #[inline]
    pub(crate) fn read(&self, at: usize) -> u64 {
        match self.has(at) {
            // SAFETY: the driver gave these bytes, aligned; no kernel runs meanwhile.
            true => unsafe { ((self.address + at as u64) as *const u64).read_volatile() },
            false => 0,
        }
    }

    /// Writes the word at a byte offset; nothing behind the end.
    #[inline]
    pub(crate) fn write(&mut self, at: usize, word: u64) {
        if self.has(at) {
            // SAFETY: the driver gave these bytes, aligned, and `self` is borrowed for writing; no
            // kernel runs meanwhile.
            unsafe { ((self.address + at as u64) as *mut u64).write_volatile(word) };
        }
    }

    #[inline]
    fn has(&self, at: usize) -> bool {
        at.is_multiple_of(8) && at < self.size && self.size - at >= 8
    }
}

impl Drop for Managed<'_> {
    fn drop(&mut self) {
        // SAFETY: nothing uses the memory after this.
        unsafe { (self.device.driver.mem_free)(self.address) };
    }
}
