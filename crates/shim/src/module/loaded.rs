//! A module in a context. What is in it is looked up by name when it is first asked for, and kept.

use super::advice;
use super::image::{Images, MAX_IMAGES};
use crate::context::Context;
use crate::function::{Function, Settings};
use crate::handle::{Kind, Table};
use crate::{log, memory, session};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUcontext, CUfunction, CUmodule};
use kedge_protocol::{
    Call, CtxId, GlobalInfo, KernelInfo, KernelNames, KernelRef, LoadError, ModuleId, ModuleImage,
    Post,
};
use kedge_wire::{List, Text};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

#[derive(Debug)]
pub(crate) struct Module {
    handle: usize,
    id: ModuleId,
    context: CUcontext,
    ctx: CtxId,
    device: u32,
    contents: Mutex<Contents>,
    /// The most registers that a thread is told to have, by kernel: what a compiler gave the cubin
    /// whose PTX runs instead.
    registers: Arc<HashMap<String, u32>>,
    /// The names of all its kernels, once somebody has wanted them.
    names: OnceLock<Vec<String>>,
}

/// What has been looked up in a module.
#[derive(Debug, Default)]
struct Contents {
    /// A kernel's place is its `KernelRef::index`.
    kernels: Vec<Looked>,
    by_name: HashMap<String, u32>,
    globals: HashMap<String, GlobalInfo>,
    /// The module is unloaded: nothing is looked up any more.
    gone: bool,
}

/// A kernel that the proxy knows by its number.
#[derive(Debug)]
struct Looked {
    info: Arc<KernelInfo>,
    function: Option<Arc<Function>>,
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

/// Has the proxy load the images at `places`, or link them.
fn ask(
    ctx: &Context,
    module: ModuleId,
    mut places: Vec<ModuleImage>,
    link: bool,
) -> Result<Result<(), LoadError>, CuError> {
    let session = session::get()?;
    // Where the proxy cannot read this process's own memory, the images are lent to it in the
    // shared arena.
    let _staged = match session.client_memory {
        true => Vec::new(),
        false => stage(&mut places)?,
    };
    let call = match places.pop() {
        Some(image) if !link => Call::ModuleLoad { ctx: ctx.id(), module, image },
        last => {
            places.extend(last);
            let images = List::<_, MAX_IMAGES>::new(places);
            let images = images.map_err(|_| CuError::INVALID_IMAGE)?;
            Call::ModuleLink { ctx: ctx.id(), module, images }
        }
    };
    let outcome = session.call::<Result<(), LoadError>>(&call)?;
    if outcome.as_ref().is_err_and(|error| CuError(error.code) == CuError::OUT_OF_MEMORY) {
        // What this process holds in reserve may be what the module needs.
        let _claim = memory::surrender_reserve(ctx.ordinal())?;
        return session.call(&call);
    }
    Ok(outcome)
}

impl Module {
    /// Loads `images` into `ctx`, linked where there are several.
    pub(crate) fn load(ctx: &Context, images: &Images) -> Result<Arc<Self>, Refused> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let session = session::get()?;
        let module = ModuleId(NEXT.fetch_add(1, Ordering::Relaxed));
        // What the compiler has linked fits the device, or not; a software device reads no machine
        // code.
        let exact = session.device(ctx.ordinal() as i32)?.exact;
        let linked = images.linked_places().filter(|_| !exact);
        let ask_for = |places: Vec<_>| {
            let link = places.len() > 1;
            ask(ctx, module, places, link)
        };
        let linked = linked.map(ask_for).transpose()?;
        let outcome = match linked {
            Some(Ok(())) => Ok(()),
            _ => ask(ctx, module, images.places(), images.needs_linking())?,
        };
        outcome.map_err(|error| refused(error, images))?;
        let made = MODULES.insert_with(|handle| Self {
            handle,
            id: module,
            context: ctx.handle(),
            ctx: ctx.id(),
            device: ctx.ordinal(),
            contents: Mutex::default(),
            registers: if exact { images.registers() } else { Arc::default() },
            names: OnceLock::new(),
        });
        made.ok_or_else(|| CuError::OUT_OF_MEMORY.into())
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// The names of all kernels.
    pub(crate) fn kernel_names(&self) -> Result<&[String], CuError> {
        if let Some(names) = self.names.get() {
            return Ok(names);
        }
        let session = session::get()?;
        let mut names = Vec::new();
        loop {
            let call = Call::KernelNames { module: self.id, first: names.len() as u32 };
            let page = session.call::<Result<KernelNames, u32>>(&call)?.map_err(CuError)?;
            // A page without names would be asked for again for ever.
            let more = page.more && !page.names.is_empty();
            names.extend(page.names.into_inner().into_iter().map(Text::into_inner));
            if !more {
                return Ok(self.names.get_or_init(|| names));
            }
        }
    }

    /// The variable of that name, looked up once. NOT_FOUND where there is none.
    pub(crate) fn global(&self, name: &str) -> Result<GlobalInfo, CuError> {
        let mut contents = self.contents();
        if let Some(known) = contents.globals.get(name) {
            return Ok(known.clone());
        }
        contents.check()?;
        let call = Call::Global { module: self.id, name: text(name)? };
        let found = session::get()?.call::<Result<GlobalInfo, u32>>(&call)?.map_err(CuError)?;
        memory::variable_found(self.context, self.ctx, self.device, &found)?;
        contents.globals.insert(name.to_owned(), found.clone());
        Ok(found)
    }

    /// The function object of the kernel of that name; the same each time. NOT_FOUND where there is
    /// none.
    pub(crate) fn function(self: &Arc<Self>, name: &str) -> Result<Arc<Function>, CuError> {
        self.function_with(name, &Arc::default())
    }

    /// As [`Self::function`]; one that is made now keeps these settings.
    pub(crate) fn function_with(
        self: &Arc<Self>,
        name: &str,
        settings: &Arc<Settings>,
    ) -> Result<Arc<Function>, CuError> {
        // Locked through the round trip, so that numbers are given in the order in which the proxy
        // hears of them. Launches do not come here.
        let mut contents = self.contents();
        let index = contents.kernel(self.id, name, &self.registers)?;
        let gone = contents.gone;
        let looked = &mut contents.kernels[index as usize];
        if let Some(function) = &looked.function {
            return Ok(function.clone());
        }
        if gone {
            return Err(CuError::INVALID_HANDLE);
        }
        let kernel = KernelRef { module: self.id, index };
        let made = Function::create(kernel, looked.info.clone(), self, settings.clone())?;
        looked.function = Some(made.clone());
        Ok(made)
    }

    /// Whether there is a kernel of that name: NOT_FOUND if not.
    pub(crate) fn check_kernel(&self, name: &str) -> Result<(), CuError> {
        self.contents().kernel(self.id, name, &self.registers).map(drop)
    }

    /// The first `most` functions.
    pub(crate) fn functions(self: &Arc<Self>, most: usize) -> Result<Vec<CUfunction>, CuError> {
        let names = self.kernel_names()?.iter().take(most);
        names.map(|name| Ok(self.function(name)?.handle())).collect()
    }

    /// Ends the lives of the module's handle and its functions', and unloads it.
    pub(crate) fn unload(&self) -> Result<(), CuError> {
        if MODULES.remove(self.handle).is_none() {
            return Err(CuError::INVALID_HANDLE);
        }
        self.forget_contents();
        session::get()?.post(&Post::ModuleUnload { module: self.id })
    }

    fn forget_contents(&self) {
        let mut contents = self.contents();
        contents.gone = true;
        for function in contents.kernels.iter().filter_map(|looked| looked.function.as_ref()) {
            function.forget();
        }
        memory::variables_gone(contents.globals.values());
    }
}

impl Contents {
    fn check(&self) -> Result<(), CuError> {
        if self.gone { Err(CuError::INVALID_HANDLE) } else { Ok(()) }
    }

    /// The number of the kernel of that name in this module, given now if it has none.
    fn kernel(
        &mut self,
        module: ModuleId,
        name: &str,
        registers: &HashMap<String, u32>,
    ) -> Result<u32, CuError> {
        if let Some(index) = self.by_name.get(name) {
            return Ok(*index);
        }
        self.check()?;
        let index = self.kernels.len() as u32;
        let call = Call::Kernel { module, index, name: text(name)? };
        let mut info = session::get()?.call::<Result<KernelInfo, u32>>(&call)?.map_err(CuError)?;
        info.registers =
            registers.get(name).map_or(info.registers, |most| info.registers.min(*most));
        self.kernels.push(Looked { info: Arc::new(info), function: None });
        self.by_name.insert(name.to_owned(), index);
        Ok(index)
    }
}

/// A name as a message carries it; nothing has a longer one.
fn text(name: &str) -> Result<Text<65536>, CuError> {
    Text::new(name.to_owned()).map_err(|_| CuError::NOT_FOUND)
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
fn refused(error: LoadError, images: &Images) -> Refused {
    let (error, mut message) = (CuError(error.code), error.message.into_inner());
    if error == CuError::NO_BINARY_FOR_GPU && images.have_unknown_cubin() {
        message = format!("{message}. {}", advice::on_unknown_cubin());
    }
    log::refused(&format!("a module did not load, {error}: {message}"));
    Refused { error, message }
}

/// INVALID_HANDLE for what is no module.
pub(crate) fn by_handle(module: CUmodule) -> Result<Arc<Module>, CuError> {
    MODULES.get(module.0).ok_or(CuError::INVALID_HANDLE)
}

/// The function that launches a kernel, for those who know only its number.
pub(crate) fn function_of(kernel: KernelRef) -> Option<Arc<Function>> {
    let module = MODULES.all().into_iter().find(|module| module.id == kernel.module)?;
    let contents = module.contents();
    contents.kernels.get(kernel.index as usize)?.function.clone()
}

/// Forgets the modules of a destroyed context; the proxy does the same.
pub(crate) fn context_destroyed(ctx: CtxId) {
    for module in MODULES.remove_where(|module| module.ctx == ctx) {
        module.forget_contents();
    }
}

/// A module that a function belongs to, while it is loaded.
pub(crate) type Owner = Weak<Module>;
