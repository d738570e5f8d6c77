//! Functions: a kernel in a context, and how it may be launched.

mod api;
mod attribute;

pub(crate) use api::*;
pub(crate) use attribute::{Settings, get as attribute, required_cluster, set as set_attribute};

use crate::handle::{Kind, Table};
use crate::module::{Module, Owner};
use crate::occupancy::Answers;
use crate::session::{self, Device};
use crate::{library, module};
use kedge_cuda_types::CuError;
use kedge_cuda_types::attribute as attr;
use kedge_cuda_types::handle::{CUfunction, CUkernel};
use kedge_protocol::{CtxId, KernelInfo, KernelRef, Post};
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Function {
    handle: usize,
    kernel: KernelRef,
    ctx: CtxId,
    info: Arc<KernelInfo>,
    device: &'static Device,
    module: Owner,
    settings: Arc<Settings>,
    occupancy: Answers,
    /// Bytes of the parameter buffer.
    param_bytes: u32,
    /// Threads a block that registers, launch bounds and the device allow.
    max_threads: u32,
}

static FUNCTIONS: Table<Function> = Table::new(Kind::Function);

impl Function {
    pub(crate) fn create(
        kernel: KernelRef,
        info: Arc<KernelInfo>,
        module: &Arc<Module>,
        settings: Arc<Settings>,
    ) -> Result<Arc<Self>, CuError> {
        let device = session::get()?.device(module.device() as i32)?;
        let end = |p: &kedge_protocol::ParamInfo| p.offset.saturating_add(p.size);
        let param_bytes = info.params.iter().map(end).max().unwrap_or(0);
        let made = FUNCTIONS.insert_with(|handle| Self {
            handle,
            kernel,
            ctx: module.ctx(),
            max_threads: max_threads(device, &info),
            param_bytes,
            info,
            device,
            module: Arc::downgrade(module),
            settings,
            occupancy: Answers::default(),
        });
        let made = made.ok_or(CuError::OUT_OF_MEMORY)?;
        // A library's kernel keeps what was set for it in the next context too.
        made.settings.each_set(|attribute, value| made.post_attribute(attribute, value))?;
        Ok(made)
    }

    /// Ends the handle's life: the module is gone.
    pub(crate) fn forget(&self) {
        FUNCTIONS.remove(self.handle);
    }

    pub(crate) fn handle(&self) -> CUfunction {
        CUfunction(self.handle)
    }

    pub(crate) fn kernel(&self) -> KernelRef {
        self.kernel
    }

    pub(crate) fn ctx(&self) -> CtxId {
        self.ctx
    }

    pub(crate) fn info(&self) -> &KernelInfo {
        &self.info
    }

    pub(crate) fn device(&self) -> &'static Device {
        self.device
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn occupancy(&self) -> &Answers {
        &self.occupancy
    }

    /// Tells the device what the program has set for the kernel's launches.
    fn post_attribute(&self, attribute: u32, value: i32) -> Result<(), CuError> {
        session::get()?.post(&Post::KernelAttribute { kernel: self.kernel, attribute, value })
    }

    pub(crate) fn param_bytes(&self) -> u32 {
        self.param_bytes
    }

    pub(crate) fn max_threads(&self) -> u32 {
        self.max_threads
    }

    /// Dynamic shared memory that a launch may ask for, bytes.
    pub(crate) fn max_dynamic_shared(&self) -> u32 {
        self.settings.max_dynamic_shared().unwrap_or(self.default_dynamic_shared())
    }

    /// Dynamic shared memory of a launch without the opt-in attribute, bytes.
    fn default_dynamic_shared(&self) -> u32 {
        let default = self.device.limit(attr::MAX_SHARED_MEMORY_PER_BLOCK, 48 << 10);
        default.saturating_sub(self.info.shared_bytes)
    }

    /// Dynamic shared memory that occupancy may promise, bytes: all that the device has for a block
    /// once the function has opted in, as in NVIDIA's cuda_occupancy.h.
    pub(crate) fn most_dynamic_shared(&self) -> u32 {
        let default = self.default_dynamic_shared();
        let opted_in = self.settings.max_dynamic_shared().is_some_and(|set| set > default);
        if opted_in { u32::MAX } else { default }
    }
}

fn max_threads(device: &Device, info: &KernelInfo) -> u32 {
    let limit = device.limit(attr::MAX_THREADS_PER_BLOCK, 1024);
    let warp = device.limit(attr::WARP_SIZE, 32).max(1);
    let registers = device.limit(attr::MAX_REGISTERS_PER_BLOCK, 65536);
    let by_registers = registers / info.registers.max(1) / warp * warp;
    let bounds = if info.max_threads_per_block == 0 { limit } else { info.max_threads_per_block };
    limit.min(bounds).min(by_registers.max(warp))
}

/// The function that a handle launches: a CUfunction, or a CUkernel in the current context.
/// INVALID_HANDLE for anything else.
#[inline]
pub(crate) fn resolve(function: CUfunction) -> Result<Arc<Function>, CuError> {
    match FUNCTIONS.get(function.0) {
        Some(function) => Ok(function),
        None => library::function_in_current(CUkernel(function.0)),
    }
}

/// What a handle launches in a stream of the context `ctx`: a CUfunction, whatever context it is
/// of, or a CUkernel there. INVALID_HANDLE for anything else.
#[inline]
pub(crate) fn resolve_in(function: CUfunction, ctx: CtxId) -> Result<Arc<Function>, CuError> {
    match FUNCTIONS.get(function.0) {
        Some(function) => Ok(function),
        None => library::function_in(CUkernel(function.0), ctx),
    }
}

/// The handle that launches a kernel; NULL once its module is unloaded.
pub(crate) fn handle_of(kernel: KernelRef) -> CUfunction {
    module::function_of(kernel).map_or(CUfunction::NULL, |function| function.handle())
}
