//! Libraries: images that are loaded into each context when they are first needed there, and their
//! kernels, which need no context to be named.

mod api;

pub(crate) use api::*;

use crate::context::{self, Context};
use crate::function::{Function, Settings};
use crate::handle::{Kind, Table};
use crate::module::{Images, Module};
use crate::session;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUkernel, CUlibrary};
use kedge_protocol::{CtxId, KernelRef};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

#[derive(Debug)]
pub(crate) struct Library {
    handle: usize,
    images: Images,
    state: Mutex<State>,
    unloaded: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    modules: Vec<(CtxId, Arc<Module>)>,
    kernels: HashMap<Arc<str>, Arc<Kernel>>,
}

/// A kernel of a library, in every context.
#[derive(Debug)]
pub(crate) struct Kernel {
    handle: usize,
    library: Arc<Library>,
    /// The same wherever the image is loaded; each module numbers its kernels as they are used
    /// there.
    name: Arc<str>,
    /// One for each device.
    settings: Vec<Arc<Settings>>,
    /// Where it has been used: read by every launch.
    functions: RwLock<Vec<(CtxId, Arc<Function>)>>,
}

static LIBRARIES: Table<Library> = Table::new(Kind::Library);
static KERNELS: Table<Kernel> = Table::new(Kind::Kernel);

impl Library {
    fn create(images: Images) -> Result<Arc<Self>, CuError> {
        let made = LIBRARIES.insert_with(|handle| Self {
            handle,
            images,
            state: Mutex::default(),
            unloaded: AtomicBool::new(false),
        });
        made.ok_or(CuError::OUT_OF_MEMORY)
    }

    fn handle(&self) -> CUlibrary {
        CUlibrary(self.handle)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The library's module in `ctx`, loaded if it is not yet.
    fn module_in(&self, ctx: &Context) -> Result<Arc<Module>, CuError> {
        let mut state = self.state();
        let id = ctx.id();
        if let Some((_, module)) = state.modules.iter().find(|(at, _)| *at == id) {
            return Ok(module.clone());
        }
        // Another thread that needs the same module waits here; one that only posts does not.
        if self.unloaded.load(Ordering::Relaxed) {
            return Err(CuError::INVALID_HANDLE);
        }
        let module = Module::load(ctx, &self.images)?;
        state.modules.push((id, module.clone()));
        Ok(module)
    }

    /// The library's module wherever it is most easily had: to ask what is in it.
    fn any_module(&self) -> Result<Arc<Module>, CuError> {
        if let Ok(ctx) = context::current() {
            return self.module_in(&ctx);
        }
        if let Some((_, module)) = self.state().modules.first() {
            return Ok(module.clone());
        }
        // The runtime asks where managed variables are before it makes a context.
        match context::active().into_iter().find_map(context::by_id) {
            Some(ctx) => self.module_in(&ctx),
            None => self.module_in(&*context::retain(0)?),
        }
    }

    /// The kernel of that name; the same object each time. NOT_FOUND where there is none.
    fn kernel(self: &Arc<Self>, name: &str) -> Result<Arc<Kernel>, CuError> {
        if let Some(kernel) = self.state().kernels.get(name) {
            return Ok(kernel.clone());
        }
        self.any_module()?.check_kernel(name)?;
        let (devices, name) = (session::get()?.devices.len(), Arc::<str>::from(name));
        let mut state = self.state();
        if let Some(kernel) = state.kernels.get(&name) {
            return Ok(kernel.clone());
        }
        if self.unloaded.load(Ordering::Relaxed) {
            return Err(CuError::INVALID_HANDLE);
        }
        let made = KERNELS.insert_with(|handle| Kernel {
            handle,
            library: self.clone(),
            name: name.clone(),
            settings: (0..devices).map(|_| Arc::default()).collect(),
            functions: RwLock::default(),
        });
        let kernel = made.ok_or(CuError::OUT_OF_MEMORY)?;
        state.kernels.insert(name, kernel.clone());
        Ok(kernel)
    }

    fn unload(&self) -> Result<(), CuError> {
        LIBRARIES.remove(self.handle).ok_or(CuError::INVALID_HANDLE)?;
        self.unloaded.store(true, Ordering::Relaxed);
        let State { modules, kernels } = std::mem::take(&mut *self.state());
        for kernel in kernels.values() {
            KERNELS.remove(kernel.handle);
        }
        modules.iter().try_for_each(|(_, module)| module.unload())
    }
}

impl Kernel {
    fn handle(&self) -> CUkernel {
        CUkernel(self.handle)
    }

    /// The kernel's function in a context that the library is loaded in.
    fn known_in(&self, ctx: CtxId) -> Option<Arc<Function>> {
        let known = self.functions.read().unwrap_or_else(PoisonError::into_inner);
        known.iter().find(|(at, _)| *at == ctx).map(|(_, function)| function.clone())
    }

    /// The kernel's function in `ctx`, which loads the library there.
    fn function_in(&self, ctx: &Context) -> Result<Arc<Function>, CuError> {
        let id = ctx.id();
        if let Some(function) = self.known_in(id) {
            return Ok(function);
        }
        let module = self.library.module_in(ctx)?;
        let settings = self.settings.get(ctx.ordinal() as usize).ok_or(CuError::INVALID_DEVICE)?;
        let function = module.function_with(&self.name, settings)?;
        let mut known = self.functions.write().unwrap_or_else(PoisonError::into_inner);
        if known.iter().all(|(at, _)| *at != id) {
            known.push((id, function.clone()));
        }
        Ok(function)
    }

    /// The kernel's function on a device: in the current context if that is there, else in any.
    fn function_on(&self, device: i32) -> Result<Arc<Function>, CuError> {
        session::get()?.device(device)?;
        let current = context::current().ok().filter(|ctx| ctx.ordinal() as i32 == device);
        let ctx = current.or_else(|| {
            let mut active = context::active().into_iter().filter_map(context::by_id);
            active.find(|ctx| ctx.ordinal() as i32 == device)
        });
        self.function_in(&*ctx.ok_or(CuError::INVALID_CONTEXT)?)
    }
}

fn library(handle: CUlibrary) -> Result<Arc<Library>, CuError> {
    LIBRARIES.get(handle.0).ok_or(CuError::INVALID_HANDLE)
}

fn kernel(handle: CUkernel) -> Result<Arc<Kernel>, CuError> {
    KERNELS.get(handle.0).ok_or(CuError::INVALID_HANDLE)
}

/// What launching `handle` in a stream of the context `ctx` launches.
///
/// # Errors
/// `INVALID_HANDLE` for what is no kernel; what loading the library there fails with.
pub(crate) fn function_in(handle: CUkernel, ctx: CtxId) -> Result<Arc<Function>, CuError> {
    let kernel = kernel(handle)?;
    if let Some(function) = kernel.known_in(ctx) {
        return Ok(function);
    }
    kernel.function_in(&*context::by_id(ctx).ok_or(CuError::INVALID_CONTEXT)?)
}

/// `handle`'s function in the current context.
pub(crate) fn function_in_current(handle: CUkernel) -> Result<Arc<Function>, CuError> {
    let kernel = kernel(handle)?;
    let ctx = context::current()?;
    kernel.function_in(&ctx)
}

/// The library's kernel that a launch named, for graphs; NULL if a module's function was launched.
pub(crate) fn kernel_of(launched: KernelRef) -> CUkernel {
    let is_it = |kernel: &Kernel| {
        let known = kernel.functions.read().unwrap_or_else(PoisonError::into_inner);
        known.iter().any(|(_, function)| function.kernel() == launched)
    };
    CUkernel(KERNELS.handle_where(is_it).unwrap_or(0))
}

/// Forgets the modules of a destroyed context; the libraries stay.
pub(crate) fn context_destroyed(ctx: CtxId) {
    for library in LIBRARIES.all() {
        library.state().modules.retain(|(at, _)| *at != ctx);
    }
    for kernel in KERNELS.all() {
        let mut known = kernel.functions.write().unwrap_or_else(PoisonError::into_inner);
        known.retain(|(at, _)| *at != ctx);
    }
}
