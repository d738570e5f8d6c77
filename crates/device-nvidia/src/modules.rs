//! Modules: loaded and linked by the driver; kernels and variables looked up when first asked for,
//! so that the driver can load lazily.

use crate::context::Context;
use crate::driver::{Driver, check};
use crate::steer::{Known, Placed};
use crate::symbols::Symbols;
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUfunction, CUlinkState, CUmodule};
use kedge_device::Code;
use kedge_protocol::{GlobalInfo, KernelInfo, LoadError, ParamInfo};
use kedge_ptx::fatbin::{self, Kind};
use kedge_wire::{List, Text};
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_uint, c_void};
use std::ptr;
use std::sync::{Arc, OnceLock};

/// Kernels that a module may have looked up.
const MAX_KERNELS: u32 = 1 << 20;
/// Parameters of one kernel.
const MAX_PARAMS: usize = 4096;

/// CUjit_option.
const ERROR_LOG_BUFFER: c_uint = 5;
const ERROR_LOG_BUFFER_SIZE: c_uint = 6;
const LOG_BYTES: usize = 8000;

/// CUfunction_attribute.
const MAX_THREADS_PER_BLOCK: c_uint = 0;
const SHARED_SIZE_BYTES: c_uint = 1;
const CONST_SIZE_BYTES: c_uint = 2;
const LOCAL_SIZE_BYTES: c_uint = 3;
const NUM_REGS: c_uint = 4;
const PTX_VERSION: c_uint = 5;
const BINARY_VERSION: c_uint = 6;
const CLUSTER_SIZE_MUST_BE_SET: c_uint = 10;
const REQUIRED_CLUSTER: [c_uint; 3] = [11, 12, 13];

/// CU_POINTER_ATTRIBUTE_IS_MANAGED.
const IS_MANAGED: c_uint = 8;

pub(crate) struct Module {
    raw: CUmodule,
    pub(crate) ctx: Arc<Context>,
    driver: Arc<Driver>,
    kernels: Vec<Kernel>,
    /// What its images name, once that has been read.
    symbols: Arc<OnceLock<Result<Symbols, String>>>,
    /// Variables whose addresses the client knows.
    asked: BTreeSet<String>,
    variables: Option<Vec<Variable>>,
}

impl Placed for Module {
    fn elsewhere<'a>(&self, known: &'a [Known]) -> Option<(&'a Known, u64)> {
        let place = |variable: &'a Known| Some((variable, self.place(&variable.name).ok()?.0));
        known.iter().filter_map(place).find(|(variable, at)| variable.addr != *at)
    }
}

/// Room for one variable: a module of ours that has nothing else.
pub(crate) struct Room {
    raw: CUmodule,
    driver: Arc<Driver>,
}

/// Variables with values lie elsewhere than those without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RoomKind {
    Empty,
    Filled,
}

impl Room {
    /// In the current context; and where it lies.
    pub(crate) fn take(
        driver: &Arc<Driver>,
        bytes: u64,
        kind: RoomKind,
    ) -> Result<(u64, Room), CuError> {
        let value = if kind == RoomKind::Filled { " = {1}" } else { "" };
        let text = format!(
            ".version 7.0\n.target sm_70\n.address_size 64\n.visible .global .align 256 .b8 kedge_room[{bytes}]{value};\n\0"
        );
        let raw = load(driver, text.as_ptr().cast()).map_err(|error| CuError(error.code))?;
        let room = Room { raw, driver: Arc::clone(driver) };
        Ok((place(driver, raw, c"kedge_room")?.0, room))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // SAFETY: a module that only this knows, unloaded once. If its context is gone, so is it.
        unsafe { (self.driver.cuModuleUnload)(self.raw) };
    }
}

/// A kernel that the client has named.
pub(crate) struct Kernel {
    pub(crate) raw: CUfunction,
    name: String,
}

/// A variable, where the driver has placed it.
#[derive(Debug, Clone)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
}

impl Kernel {
    pub(crate) fn set_attribute(
        &self,
        driver: &Driver,
        attribute: u32,
        value: i32,
    ) -> Result<(), CuError> {
        // SAFETY: a function of a loaded module.
        check(unsafe { (driver.cuFuncSetAttribute)(self.raw, attribute, value) })
    }
}

impl Module {
    /// Loads or links `code`, whose images end with a NUL more, into `ctx`.
    pub(crate) fn load(
        driver: &Arc<Driver>,
        ctx: &Arc<Context>,
        code: &Code<Vec<u8>>,
    ) -> Result<Module, LoadError> {
        ctx.enter().map_err(|error| load_error(error, String::new()))?;
        let raw = match code {
            Code::Whole(image) => load(driver, image.as_ptr().cast())?,
            Code::Parts(images) => link(driver, images)?,
        };
        let (ctx, driver) = (Arc::clone(ctx), Arc::clone(driver));
        let (kernels, symbols, asked, variables) = Default::default();
        Ok(Module { raw, ctx, driver, kernels, symbols, asked, variables })
    }

    /// Where what its images name is to be put.
    pub(crate) fn symbols(&self) -> Arc<OnceLock<Result<Symbols, String>>> {
        Arc::clone(&self.symbols)
    }

    /// A kernel that the client may have launched and that allocates memory on the device.
    pub(crate) fn allocator(&self) -> Option<&str> {
        let Some(Ok(symbols)) = self.symbols.get() else { return None };
        let mut names = self.kernels.iter().map(|kernel| &*kernel.name);
        names.find(|name| symbols.allocators.has(name))
    }

    /// Whether the client knows a variable's address.
    pub(crate) fn was_asked_for(&self, variable: &str) -> bool {
        self.asked.contains(variable)
    }

    /// The variables that may have changed since the module was loaded: none, before the client has
    /// asked for anything of the module's.
    ///
    /// # Errors
    /// In words, why they are not known.
    pub(crate) fn variables(&mut self) -> Result<&[Variable], String> {
        if self.kernels.is_empty() && self.asked.is_empty() {
            return Ok(&[]);
        }
        if self.variables.is_none() {
            let symbols = Arc::clone(&self.symbols);
            let symbols = symbols.get().ok_or("its images are still being read")?;
            let names = &symbols.as_ref().map_err(Clone::clone)?.variables;
            self.ctx.enter().map_err(|error| error.to_string())?;
            let names: BTreeSet<&String> = names.iter().chain(&self.asked).collect();
            let mut found = Vec::new();
            for name in names {
                match self.place(name) {
                    Ok((addr, bytes)) => found.push(Variable { name: name.clone(), addr, bytes }),
                    Err(CuError::NOT_FOUND) => {}
                    Err(error) => return Err(format!("{name}: {error}")),
                }
            }
            self.variables = Some(found);
        }
        Ok(self.variables.as_deref().unwrap_or_default())
    }

    /// The client knows a variable's address.
    pub(crate) fn knows(&mut self, variable: &str) {
        if self.asked.insert(variable.to_owned()) {
            // It may be one that the images do not name.
            self.variables = None;
        }
    }

    /// A variable's address and size.
    pub(crate) fn locate(&self, name: &str) -> Result<(u64, u64), CuError> {
        let known = self.variables.iter().flatten().find(|variable| variable.name == name);
        if let Some(variable) = known {
            return Ok((variable.addr, variable.bytes));
        }
        self.ctx.enter()?;
        self.place(name)
    }

    /// As the driver says. The module's context is current.
    fn place(&self, name: &str) -> Result<(u64, u64), CuError> {
        let c_name = CString::new(name).map_err(|_| CuError::NOT_FOUND)?;
        place(&self.driver, self.raw, &c_name)
    }

    pub(crate) fn unload(&self) -> Result<(), CuError> {
        self.ctx.enter()?;
        // SAFETY: a loaded module, unloaded once.
        check(unsafe { (self.driver.cuModuleUnload)(self.raw) })
    }

    /// The kernel that launches name by `index`.
    #[inline]
    pub(crate) fn kernel(&self, index: u32) -> Result<&Kernel, CuError> {
        self.kernels.get(index as usize).ok_or(CuError::INVALID_HANDLE)
    }

    /// Finds a kernel, which launches call `index` from now on.
    pub(crate) fn find(&mut self, index: u32, name: &str) -> Result<KernelInfo, CuError> {
        self.ctx.enter()?;
        let c_name = CString::new(name).map_err(|_| CuError::NOT_FOUND)?;
        let mut raw = CUfunction::NULL;
        // SAFETY: live pointers; the name is NUL-terminated.
        check(unsafe { (self.driver.cuModuleGetFunction)(&mut raw, self.raw, c_name.as_ptr()) })?;
        let info = describe(&self.driver, raw, name)?;
        match self.kernels.get(index as usize) {
            Some(known) if known.raw == raw => {}
            None if index as usize == self.kernels.len() && index < MAX_KERNELS => {
                self.kernels.push(Kernel { raw, name: name.to_owned() });
            }
            _ => return Err(CuError::INVALID_VALUE),
        }
        Ok(info)
    }

    /// The names of all kernels.
    pub(crate) fn names(&self) -> Result<Vec<String>, CuError> {
        let driver = &self.driver;
        let (Some(count_of), Some(enumerate), Some(name_of)) = (
            driver.cuModuleGetFunctionCount,
            driver.cuModuleEnumerateFunctions,
            driver.cuFuncGetName,
        ) else {
            return Err(CuError::CALL_REQUIRES_NEWER_DRIVER);
        };
        self.ctx.enter()?;
        let mut count = 0;
        // SAFETY: a live out pointer.
        check(unsafe { count_of(&mut count, self.raw) })?;
        let mut functions = vec![CUfunction::NULL; count as usize];
        // SAFETY: an array of the length that is given.
        check(unsafe { enumerate(functions.as_mut_ptr(), count, self.raw) })?;
        let name = |function: &CUfunction| {
            let mut name = ptr::null();
            // SAFETY: a function that the driver just gave; the name it returns is a C string that
            // lives as long as the module.
            unsafe {
                check(name_of(&mut name, *function))?;
                Ok(CStr::from_ptr(name).to_string_lossy().into_owned())
            }
        };
        functions.iter().map(name).collect()
    }

    pub(crate) fn global(&mut self, name: &str) -> Result<GlobalInfo, CuError> {
        self.ctx.enter()?;
        let (addr, size) = self.place(name)?;
        self.knows(name);
        let mut managed: u32 = 0;
        // SAFETY: the attribute's value is a 32-bit word. A refusal leaves it 0.
        unsafe {
            (self.driver.cuPointerGetAttribute)(
                ptr::from_mut(&mut managed).cast(),
                IS_MANAGED,
                addr,
            )
        };
        let name = Text::new(name.to_owned()).map_err(|_| CuError::INVALID_VALUE)?;
        Ok(GlobalInfo { name, addr, size, constant: false, managed: managed != 0 })
    }
}

/// A variable's address and size. Its module's context is current.
fn place(driver: &Driver, module: CUmodule, name: &CStr) -> Result<(u64, u64), CuError> {
    let (mut addr, mut size) = (0, 0);
    // SAFETY: live pointers; the name is NUL-terminated.
    check(unsafe { (driver.cuModuleGetGlobal_v2)(&mut addr, &mut size, module, name.as_ptr()) })?;
    Ok((addr, size as u64))
}

fn function_attribute(driver: &Driver, function: CUfunction, id: c_uint) -> Result<u32, CuError> {
    let mut value = 0;
    // SAFETY: a live out pointer and a function of a loaded module.
    check(unsafe { (driver.cuFuncGetAttribute)(&mut value, id, function) })?;
    Ok(u32::try_from(value).unwrap_or(0))
}

fn describe(driver: &Driver, function: CUfunction, name: &str) -> Result<KernelInfo, CuError> {
    let get = |id| function_attribute(driver, function, id);
    // Drivers older than clusters do not know these.
    let cluster = REQUIRED_CLUSTER.map(|id| get(id).unwrap_or(0));
    Ok(KernelInfo {
        name: Text::new(name.to_owned()).map_err(|_| CuError::INVALID_VALUE)?,
        params: List::new(params(driver, function)?).map_err(|_| CuError::NOT_SUPPORTED)?,
        registers: get(NUM_REGS)?,
        shared_bytes: get(SHARED_SIZE_BYTES)?,
        local_bytes: get(LOCAL_SIZE_BYTES)?,
        const_bytes: get(CONST_SIZE_BYTES)?,
        max_threads_per_block: get(MAX_THREADS_PER_BLOCK)?,
        required_cluster: cluster,
        cluster_must_be_set: get(CLUSTER_SIZE_MUST_BE_SET).is_ok_and(|set| set != 0),
        ptx_version: get(PTX_VERSION)?,
        binary_version: get(BINARY_VERSION)?,
        unsupported: Text::default(),
    })
}

/// Offset and size of each parameter: the client packs them into one buffer.
fn params(driver: &Driver, function: CUfunction) -> Result<Vec<ParamInfo>, CuError> {
    let info = driver.cuFuncGetParamInfo.ok_or(CuError::CALL_REQUIRES_NEWER_DRIVER)?;
    let mut all = Vec::new();
    while all.len() < MAX_PARAMS {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: live out pointers. The first index beyond the last is an error.
        if check(unsafe { info(function, all.len(), &mut offset, &mut size) }).is_err() {
            break;
        }
        all.push(ParamInfo { offset: offset as u32, size: size as u32 });
    }
    Ok(all)
}

pub(crate) fn load_error(code: CuError, message: String) -> LoadError {
    LoadError { code: code.0, message: Text::truncated(message) }
}

/// A buffer for the compiler's errors, and the options that name it.
struct Log {
    text: Vec<u8>,
    options: [c_uint; 2],
    values: [*mut c_void; 2],
}

impl Log {
    fn new() -> Log {
        let mut text = vec![0; LOG_BYTES];
        let values = [text.as_mut_ptr().cast(), ptr::without_provenance_mut(LOG_BYTES)];
        Log { text, options: [ERROR_LOG_BUFFER, ERROR_LOG_BUFFER_SIZE], values }
    }

    fn error(&self, code: CuError) -> LoadError {
        let end = self.text.iter().position(|byte| *byte == 0).unwrap_or(self.text.len());
        load_error(code, String::from_utf8_lossy(&self.text[..end]).into_owned())
    }
}

fn load(driver: &Driver, image: *const c_void) -> Result<CUmodule, LoadError> {
    let mut log = Log::new();
    let mut raw = CUmodule::NULL;
    // SAFETY: the image is whole, with a NUL behind it; options and values match and outlive the
    // call, as does the buffer that they name.
    let status = unsafe {
        (driver.cuModuleLoadDataEx)(
            &mut raw,
            image,
            2,
            log.options.as_mut_ptr(),
            log.values.as_mut_ptr(),
        )
    };
    check(status).map_err(|error| log.error(error))?;
    Ok(raw)
}

/// What the linker is told that an image is: CUjitInputType.
fn input_type(image: &[u8]) -> c_uint {
    match fatbin::classify(image) {
        Kind::Ptx => 1,
        Kind::Fatbin => 2,
        _ => 0,
    }
}

fn link(driver: &Driver, images: &[Vec<u8>]) -> Result<CUmodule, LoadError> {
    let mut log = Log::new();
    let mut state = CUlinkState::NULL;
    // SAFETY: the options and their values are as many as is said, and the log's buffer outlives
    // the linker's state.
    check(unsafe {
        (driver.cuLinkCreate_v2)(2, log.options.as_mut_ptr(), log.values.as_mut_ptr(), &mut state)
    })
    .map_err(|error| log.error(error))?;
    let result = link_into(driver, state, images);
    // SAFETY: the state that was just made; the linked image is loaded by now.
    unsafe { (driver.cuLinkDestroy)(state) };
    result.map_err(|error| if log.text[0] == 0 { error } else { log.error(CuError(error.code)) })
}

fn link_into(
    driver: &Driver,
    state: CUlinkState,
    images: &[Vec<u8>],
) -> Result<CUmodule, LoadError> {
    let plain = |error| load_error(error, String::new());
    for (index, image) in images.iter().enumerate() {
        let name = CString::new(format!("image {index}")).unwrap_or_default();
        // Text keeps its NUL; the others end before it.
        let kind = input_type(image);
        let len = if kind == 1 { image.len() } else { image.len() - 1 };
        // SAFETY: an image of that length; the linker copies it.
        check(unsafe {
            (driver.cuLinkAddData_v2)(
                state,
                kind,
                image.as_ptr().cast_mut().cast(),
                len,
                name.as_ptr() as *const c_char,
                0,
                ptr::null_mut(),
                ptr::null_mut(),
            )
        })
        .map_err(plain)?;
    }
    let (mut cubin, mut size) = (ptr::null_mut(), 0);
    // SAFETY: live out pointers; the image belongs to the linker's state.
    check(unsafe { (driver.cuLinkComplete)(state, &mut cubin, &mut size) }).map_err(plain)?;
    load(driver, cubin)
}
