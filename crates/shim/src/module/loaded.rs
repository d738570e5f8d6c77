//! A module in a context: what the proxy told of it, and the functions handed out.

use super::image::{Images, MAX_IMAGES};
use crate::context::Context;
use crate::function::{Function, Settings};
use crate::handle::{Kind, Table};
use crate::{log, memory, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUfunction, CUmodule};
use kedge_protocol::{
    Call, CtxId, GlobalInfo, KernelInfo, KernelRef, LoadError, ModuleId, ModuleImage, ModuleInfo,
    Post,
};
use kedge_wire::List;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

#[derive(Debug)]
pub(crate) struct Module {
    handle: usize,
    id: ModuleId,
    ctx: CtxId,
    device: u32,
    kernels: Vec<Arc<KernelInfo>>,
    kernel_index: HashMap<String, u32>,
    globals: Vec<GlobalInfo>,
    global_index: HashMap<String, usize>,
    functions: Vec<OnceLock<Arc<Function>>>,
}

static MODULES: Table<Module> = Table::new(Kind::Module);

/// Why a module did not load, for the program's log buffer.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) error: CuError,
    pub(crate) message: String,
}

impl From<CuError> for Refused {
    fn from(error: CuError) -> Self {
        Self { error, message: String::new() }
    }
}

impl From<Refused> for CuError {
    fn from(refused: Refused) -> Self {
        refused.error
    }
}

impl Module {
    /// Loads `images` into `ctx`, linked where there are several.
    pub(crate) fn load(ctx: &Context, images: &Images) -> Result<Arc<Self>, Refused> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let session = session::get()?;
        let module = ModuleId(NEXT.fetch_add(1, Ordering::Relaxed));
        let mut places = images.places();
        // Where the proxy cannot read this process's own memory, the images are lent to it in the
        // shared arena.
        let _staged = match session.client_memory {
            true => Vec::new(),
            false => stage(&mut places)?,
        };
        let link = images.needs_linking();
        let call = match places.pop() {
            Some(image) if !link => Call::ModuleLoad { ctx: ctx.id(), module, image },
            last => {
                places.extend(last);
                let images = List::<_, MAX_IMAGES>::new(places);
                let images = images.map_err(|_| CuError::INVALID_IMAGE)?;
                Call::ModuleLink { ctx: ctx.id(), module, images }
            }
        };
        let mut outcome = session.call::<Result<ModuleInfo, LoadError>>(&call)?;
        if outcome.as_ref().is_err_and(|error| CuError(error.code) == CuError::OUT_OF_MEMORY) {
            // What this process holds in reserve may be what the module needs.
            memory::surrender_reserve(ctx.ordinal())?;
            outcome = session.call(&call)?;
        }
        let info = outcome
            .map_err(|LoadError { code, message }| refused(CuError(code), message.into_inner()))?;
        let made = MODULES.insert_with(|handle| Self::new(handle, module, ctx, info));
        made.ok_or_else(|| CuError::OUT_OF_MEMORY.into())
    }

    fn new(handle: usize, id: ModuleId, ctx: &Context, info: ModuleInfo) -> Self {
        let kernels: Vec<Arc<KernelInfo>> =
            info.kernels.into_inner().into_iter().map(Arc::new).collect();
        let globals = info.globals.into_inner();
        memory::module_loaded(ctx, &globals);
        Self {
            handle,
            id,
            ctx: ctx.id(),
            device: ctx.ordinal(),
            kernel_index: (0..).zip(&kernels).map(|(i, k)| (k.name.to_string(), i)).collect(),
            global_index: globals
                .iter()
                .enumerate()
                .map(|(i, g)| (g.name.to_string(), i))
                .collect(),
            functions: kernels.iter().map(|_| OnceLock::new()).collect(),
            kernels,
            globals,
        }
    }

    pub(crate) fn handle(&self) -> CUmodule {
        CUmodule(self.handle)
    }

    pub(crate) fn ctx(&self) -> CtxId {
        self.ctx
    }

    /// Ordinal.
    pub(crate) fn device(&self) -> u32 {
        self.device
    }

    pub(crate) fn kernels(&self) -> &[Arc<KernelInfo>] {
        &self.kernels
    }

    /// The position of a kernel. NOT_FOUND where there is none of that name.
    pub(crate) fn kernel_named(&self, name: &str) -> Result<u32, CuError> {
        self.kernel_index.get(name).copied().ok_or(CuError::NOT_FOUND)
    }

    /// NOT_FOUND where there is none of that name.
    pub(crate) fn global(&self, name: &str) -> Result<&GlobalInfo, CuError> {
        let index = self.global_index.get(name).ok_or(CuError::NOT_FOUND)?;
        Ok(&self.globals[*index])
    }

    /// The function object of the kernel at `index`; the same each time.
    pub(crate) fn function(self: &Arc<Self>, index: u32) -> Result<Arc<Function>, CuError> {
        self.function_with(index, &Arc::default())
    }

    /// As [`Self::function`]; one that is made now keeps these settings.
    pub(crate) fn function_with(
        self: &Arc<Self>,
        index: u32,
        settings: &Arc<Settings>,
    ) -> Result<Arc<Function>, CuError> {
        let slot = self.functions.get(index as usize).ok_or(CuError::NOT_FOUND)?;
        if let Some(function) = slot.get() {
            return Ok(function.clone());
        }
        let kernel = KernelRef { module: self.id, index };
        let made = Function::create(kernel, self, settings.clone())?;
        let kept = slot.get_or_init(|| made.clone());
        if !Arc::ptr_eq(kept, &made) {
            made.forget();
        }
        Ok(kept.clone())
    }

    pub(crate) fn all_functions(self: &Arc<Self>) -> Result<Vec<CUfunction>, CuError> {
        (0..self.kernels.len() as u32).map(|i| Ok(self.function(i)?.handle())).collect()
    }

    /// Ends the lives of the module's handle and its functions', and unloads it.
    pub(crate) fn unload(&self) -> Result<(), CuError> {
        if MODULES.remove(self.handle).is_none() {
            return Err(CuError::INVALID_HANDLE);
        }
        self.forget_functions();
        memory::module_unloaded(&self.globals);
        session::get()?.post(&Post::ModuleUnload { module: self.id })
    }

    fn forget_functions(&self) {
        for function in self.functions.iter().filter_map(OnceLock::get) {
            function.forget();
        }
    }
}

/// A copy of an image in the shared arena.
#[derive(Debug)]
struct Staged(*mut c_void);

impl Drop for Staged {
    fn drop(&mut self) {
        // SAFETY: `stage` allocated it, and the proxy has read it. An error means that the proxy is
        // gone.
        let _ = unsafe { memory::cuMemFreeHost(self.0) };
    }
}

/// Copies images into the shared arena and tells where they are now.
fn stage(places: &mut [ModuleImage]) -> Result<Vec<Staged>, CuError> {
    let mut staged = Vec::with_capacity(places.len());
    for place in places {
        let mut copy = std::ptr::null_mut();
        // SAFETY: a live out pointer.
        unsafe { memory::cuMemHostAlloc(&mut copy, place.len as usize, 0)? };
        staged.push(Staged(copy));
        // SAFETY: the image was measured where it lies; its copy has as many bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(
                place.addr as *const u8,
                copy.cast::<u8>(),
                place.len as usize,
            );
        }
        place.addr = copy as u64;
    }
    Ok(staged)
}

#[cold]
fn refused(error: CuError, message: String) -> Refused {
    log::line(&format!("a module did not load, {error}: {message}"));
    Refused { error, message }
}

/// INVALID_HANDLE for what is no module.
pub(crate) fn by_handle(module: CUmodule) -> Result<Arc<Module>, CuError> {
    MODULES.get(module.0).ok_or(CuError::INVALID_HANDLE)
}

/// The function that launches a kernel, for those who know only its number.
pub(crate) fn function_of(kernel: KernelRef) -> Option<Arc<Function>> {
    let module = MODULES.all().into_iter().find(|module| module.id == kernel.module)?;
    module.function(kernel.index).ok()
}

/// Forgets the modules of a destroyed context; the proxy does the same.
pub(crate) fn context_destroyed(ctx: CtxId) {
    for module in MODULES.remove_where(|module| module.ctx == ctx) {
        module.forget_functions();
        memory::module_unloaded(&module.globals);
    }
}

/// A module that a function belongs to, while it is loaded.
pub(crate) type Owner = Weak<Module>;
