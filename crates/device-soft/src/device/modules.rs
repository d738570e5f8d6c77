//! Loads modules: makes a program of an image's bytes, and places its variables in memory.

use super::arena::{Memory, Placed};
use crate::builtin::asks_for_work;
use crate::code::{Kernel, PlaceKind, Placement, Program};
use crate::exec::Level;
use crate::{lower, spec};
use kedge_cuda_types::CuError;
use kedge_protocol::{CtxId, GlobalInfo, KernelInfo, LoadError, ParamInfo};
use kedge_ptx::fatbin::{self, ImageKind};
use kedge_ptx::{ast, link};
use kedge_wire::{List, Text};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

/// Most kernels of one module that a client may number.
const MAX_NUMBERED: usize = 1 << 20;

/// A loaded module.
pub(super) struct Module {
    pub(super) ctx: CtxId,
    pub(super) program: Arc<Program>,
    /// Name → index in the program's kernels.
    kernels: HashMap<String, u32>,
    /// Name → index in the program's variables.
    globals: HashMap<String, usize>,
    /// The kernels by the client's numbers: each one's index in the program.
    numbered: Vec<u32>,
    /// Whether its kernels launch grids (dynamic parallelism).
    pub(super) nests: bool,
    /// Its variables, whose memory is freed with the module.
    variables: Variables,
    /// The variables whose addresses the client knows.
    asked: BTreeSet<String>,
    /// Why the module cannot move to another kind of device: what its code does that leaves forms
    /// of this device's own in memory.
    pub(super) bound: Option<&'static str>,
}

/// A module's variable.
pub(super) struct PlacedAs<'a> {
    pub(super) name: &'a str,
    pub(super) at: Placed,
    /// Whether the client knows its address.
    pub(super) asked: bool,
}

/// A module's variables as a checkpoint has them.
pub(super) struct Former {
    /// Each variable's name, place, and whether the client knows its address. The memory is
    /// allocated already.
    pub(super) variables: VecDeque<(Text<65536>, Placed, bool)>,
    /// Whether another kind of device had loaded the module: that places variables in another
    /// order, and lists only those whose content may differ from the image's.
    pub(super) foreign: bool,
}

impl Former {
    /// Describes a module of which another kind of device has listed no variable.
    pub(super) fn of_another_kind() -> Former {
        Former { variables: VecDeque::new(), foreign: true }
    }
}

impl Module {
    /// Loads one image, or links several. With `former`, the variables keep their addresses and
    /// contents.
    ///
    /// # Errors
    /// The errors of cuModuleLoadData, with a message that names the image, the line and the
    /// remedy.
    pub(super) fn load(
        ctx: CtxId,
        device: u32,
        memory: &Arc<Memory>,
        images: &[Vec<u8>],
        former: Option<Former>,
        log: impl Fn(&str),
    ) -> Result<Self, LoadError> {
        let (mut units, bound) = parse_all(images, log)?;
        if needs_grid_functions(&units) {
            units.push(parse(GRID)?);
        }
        if let Some(why) = bound.filter(|_| former.as_ref().is_some_and(|former| former.foreign)) {
            let what =
                format!("its code {why}, in forms that only the former kind of device reads");
            return Err(error(CuError::NOT_SUPPORTED, what));
        }
        let asked = former.iter().flat_map(|former| &former.variables).filter(|(.., asked)| *asked);
        let asked = asked.map(|(name, ..)| name.to_string()).collect();
        let linked = link::link(units).map_err(|e| error(CuError::INVALID_PTX, e.to_string()))?;
        let memory = Arc::clone(memory);
        let mut variables = Variables { memory, device, placed: Vec::new(), former, moved: None };
        let checker = variables.memory.checker.clone();
        let level = Level::detect();
        let program = lower::build_checked(&linked.module, &mut variables, level, checker)
            .map_err(|e| error(e.code, variables.moved.take().unwrap_or(e.message)))?;
        variables.check_all_found()?;
        let named = program.kernels.iter().map(|kernel| kernel.name.clone());
        let kernels = named.zip(0..).collect();
        let globals = program.globals.iter().map(|global| global.name.clone()).zip(0..).collect();
        let nests = linked.unresolved.iter().any(|name| asks_for_work(name));
        let (program, numbered) = (Arc::new(program), Vec::new());
        Ok(Self { ctx, program, kernels, globals, numbered, nests, variables, asked, bound })
    }

    /// Iterates over the variables, in the order in which they were placed.
    pub(super) fn variables(&self) -> impl Iterator<Item = PlacedAs<'_>> {
        let names = self.program.globals.iter().map(|global| global.name.as_str());
        names.zip(self.variables.placed.iter().copied()).map(|(name, at)| PlacedAs {
            name,
            at,
            asked: self.asked.contains(name),
        })
    }

    /// Gives the kernel `name` the client's number `index`, and returns what the client learns of
    /// it.
    ///
    /// # Errors
    /// NOT_FOUND for an unknown name; INVALID_VALUE for a number that is neither the next one nor
    /// this kernel's own.
    pub(super) fn number(&mut self, index: u32, name: &str) -> Result<KernelInfo, CuError> {
        let place = *self.kernels.get(name).ok_or(CuError::NOT_FOUND)?;
        let info = kernel_info(&self.program.kernels[place as usize])?;
        match self.numbered.get(index as usize) {
            Some(known) if *known == place => {}
            None if index as usize == self.numbered.len() && self.numbered.len() < MAX_NUMBERED => {
                self.numbered.push(place);
            }
            _ => return Err(CuError::INVALID_VALUE),
        }
        Ok(info)
    }

    /// Returns what the client learned of the kernel that it numbers `index`.
    ///
    /// # Errors
    /// INVALID_HANDLE if the client has given no kernel that number.
    pub(super) fn info(&self, index: u32) -> Result<KernelInfo, CuError> {
        let place = self.launched_by(index).ok_or(CuError::INVALID_HANDLE)?;
        kernel_info(&self.program.kernels[place as usize])
    }

    /// Returns the index in the program of the kernel that the client numbers `index`.
    pub(super) fn launched_by(&self, index: u32) -> Option<u32> {
        self.numbered.get(index as usize).copied()
    }

    pub(super) fn kernel_names(&self) -> Vec<String> {
        self.program.kernels.iter().map(|kernel| kernel.name.clone()).collect()
    }

    /// Returns the variable `name`, whose address the client knows from now on.
    ///
    /// # Errors
    /// NOT_FOUND for an unknown name.
    pub(super) fn global(&mut self, name: &str) -> Result<GlobalInfo, CuError> {
        let place = *self.globals.get(name).ok_or(CuError::NOT_FOUND)?;
        self.asked.insert(name.to_owned());
        let global = &self.program.globals[place];
        Ok(GlobalInfo {
            name: Text::new(global.name.clone()).map_err(|_| CuError::INVALID_IMAGE)?,
            addr: global.addr,
            size: global.size,
            constant: global.constant,
            managed: global.managed,
        })
    }
}

fn error(code: CuError, message: String) -> LoadError {
    LoadError { code: code.0, message: Text::truncated(message) }
}

/// Words of PTX that leave forms of a device's own in the client's memory, such as the addresses of
/// functions, and what they do.
const BINDING: [(&str, &str); 3] = [
    (".callprototype", "calls functions by pointers"),
    (".calltargets", "calls functions by pointers"),
    ("cp.async.bulk.tensor", "copies by tensor maps"),
];

/// Parses every image, and finds what binds them to this kind of device.
///
/// One of several images may lack PTX if the others need nothing of it: libcudadevrt is such an
/// image, whose functions this device has itself.
///
/// If all PTX is for newer GPUs than this device stands for, the oldest is taken. A GPU would
/// refuse it; here its instructions are known, or refused by name when a kernel is launched.
fn parse_all(images: &[Vec<u8>], log: impl Fn(&str)) -> Result<Parsed, LoadError> {
    match parse_for(images, Target::Own, &log) {
        Err(refusal) if refusal.code == CuError::NO_BINARY_FOR_GPU.0 => {
            let taken = parse_for(images, Target::Newer, &log).map_err(|_| refusal)?;
            let sm = taken.0.iter().map(|unit| unit.sm).max().unwrap_or(spec::SM);
            log(&format!("a module has PTX for sm_{sm} or newer alone: that is taken"));
            Ok(taken)
        }
        other => other,
    }
}

/// Which PTX of a fatbin is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    /// The newest that this device's compute capability can run.
    Own,
    /// The oldest, which is for a later one.
    Newer,
}

fn parse_for(images: &[Vec<u8>], target: Target, log: &impl Fn(&str)) -> Result<Parsed, LoadError> {
    let mut units = Vec::with_capacity(images.len());
    let (mut lacking, mut bound) = (None, None);
    for (index, image) in images.iter().enumerate() {
        match ptx_text(image, target) {
            Ok(text) => {
                units.push(parse(&text)?);
                let binds = BINDING.iter().find(|(word, _)| text.contains(word));
                bound = bound.or(binds.map(|(_, what)| *what));
            }
            Err(refusal) if refusal.code == CuError::NO_BINARY_FOR_GPU.0 => {
                if images.len() > 1 {
                    let count = images.len();
                    log(&format!("image {index} of {count} is left out: {}", &*refusal.message));
                }
                lacking.get_or_insert(refusal);
            }
            Err(refusal) => return Err(refusal),
        }
    }
    match lacking {
        // PTX for newer GPUs must be there for every image: otherwise libcudadevrt, which has such
        // PTX, would make a program of machine code look loadable.
        Some(refusal) if units.is_empty() || target == Target::Newer => Err(refusal),
        _ => Ok((units, bound)),
    }
}

/// PTX of the libcudadevrt functions that programs are linked with.
const GRID: &str = include_str!("grid.ptx");

/// Returns whether one of the modules calls [`GRID`]'s functions and none defines them:
/// libcudadevrt's own PTX is for newer devices.
fn needs_grid_functions(units: &[ast::Module]) -> bool {
    let own = ["cudaCGGetIntrinsicHandle", "cudaCGSynchronize"];
    let functions = units.iter().flat_map(|unit| &unit.functions);
    let mut named = functions.filter(|function| own.contains(&function.name.as_str())).peekable();
    named.peek().is_some() && named.all(|function| function.body.is_none())
}

type Parsed = (Vec<ast::Module>, Option<&'static str>);

fn parse(text: &str) -> Result<ast::Module, LoadError> {
    kedge_ptx::parse(text).map_err(|e| error(CuError::INVALID_PTX, format!("PTX: {e}")))
}

/// Returns the PTX of an image.
fn ptx_text(image: &[u8], target: Target) -> Result<String, LoadError> {
    match fatbin::classify(image) {
        fatbin::Kind::Ptx => {
            let end = image.iter().position(|byte| *byte == 0).unwrap_or(image.len());
            String::from_utf8(image[..end].to_vec())
                .map_err(|e| error(CuError::INVALID_PTX, format!("PTX: {e}")))
        }
        fatbin::Kind::Fatbin => {
            let damaged = |e: fatbin::FatbinError| error(CuError::INVALID_IMAGE, e.to_string());
            let images = fatbin::images(image).map_err(damaged)?;
            let sm = match target {
                Target::Own => spec::SM,
                Target::Newer => oldest_ptx(&images).unwrap_or(spec::SM),
            };
            match fatbin::select_ptx(&images, sm) {
                Some(entry) => entry.text().map_err(damaged),
                None => Err(no_ptx(&images)),
            }
        }
        fatbin::Kind::Elf => Err(only_machine_code("the image is a cubin")),
        fatbin::Kind::NvvmOrLto => Err(error(CuError::NOT_SUPPORTED, LTO_REFUSED.to_owned())),
        fatbin::Kind::Unknown => {
            let what = "the image is no fatbin, cubin or PTX text";
            Err(error(CuError::INVALID_IMAGE, what.to_owned()))
        }
    }
}

/// Returns the oldest architecture that the images have PTX for, as 90 for sm_90.
fn oldest_ptx(images: &[fatbin::Image<'_>]) -> Option<u32> {
    images.iter().filter(|image| image.kind == ImageKind::Ptx).map(|image| image.sm).min()
}

fn no_ptx(images: &[fatbin::Image<'_>]) -> LoadError {
    only_machine_code(&match oldest_ptx(images) {
        Some(sm) => format!("the fatbin's PTX is for sm_{sm} or newer"),
        None => "the fatbin holds machine code and no PTX".to_owned(),
    })
}

/// The message for an image in an intermediate form of NVIDIA's compilers.
const LTO_REFUSED: &str = "the image is LTO-IR or NVVM IR, which only NVIDIA's compilers read: \
                           have nvJitLink link it to PTX or a cubin (-lto), or compile to PTX";

fn only_machine_code(what: &str) -> LoadError {
    let sm = spec::SM;
    let remedy = format!(
        "{what}; the software device runs PTX up to sm_{sm}: \
         compile with -gencode arch=compute_{sm},code=compute_{sm}"
    );
    error(CuError::NO_BINARY_FOR_GPU, remedy)
}

/// Places a module's variables, and frees their memory when the module is unloaded.
struct Variables {
    memory: Arc<Memory>,
    device: u32,
    placed: Vec<Placed>,
    /// At a restart: the checkpoint's variables that are not placed yet.
    former: Option<Former>,
    /// The message for a variable that cannot have its old address.
    moved: Option<String>,
}

impl Variables {
    /// Places a variable where the checkpoint has it.
    ///
    /// # Errors
    /// INVALID_IMAGE if the checkpoint has no such variable, or another size, device or alignment.
    fn place_again(
        &mut self,
        name: &str,
        size: u64,
        align: u64,
        kind: PlaceKind,
    ) -> Result<Placed, CuError> {
        let shared = kind == PlaceKind::Managed && self.memory.is_exact();
        let device = (!shared).then_some(self.device);
        let Some(former) = &mut self.former else { return Err(CuError::ILLEGAL_STATE) };
        let known = former.variables.iter().position(|(was, ..)| **was == *name);
        if known.is_none() && former.foreign {
            return self.memory.place(self.device, size, align);
        }
        match known.and_then(|at| former.variables.remove(at)) {
            Some((_, placed, _))
                if (placed.device == device || placed.is_outside())
                    && placed.size == size.max(1)
                    && placed.addr.is_multiple_of(align.max(1)) =>
            {
                Ok(placed)
            }
            _ => {
                self.moved = Some(format!(
                    "variable {name} of {size} bytes is not where the checkpoint had it: restart with \
                     the version of kedge that took the checkpoint"
                ));
                Err(CuError::INVALID_IMAGE)
            }
        }
    }

    /// Checks that every variable of the checkpoint has been placed.
    fn check_all_found(&self) -> Result<(), LoadError> {
        match self.former.as_ref().and_then(|former| former.variables.front()) {
            Some((name, ..)) => {
                let what = format!("the module has lost variable {} of the checkpoint", &**name);
                Err(error(CuError::INVALID_IMAGE, what))
            }
            None => Ok(()),
        }
    }
}

impl Placement for Variables {
    fn place(
        &mut self,
        name: &str,
        size: u64,
        align: u64,
        kind: PlaceKind,
    ) -> Result<u64, CuError> {
        let placed = match kind {
            _ if self.former.is_some() => self.place_again(name, size, align, kind)?,
            PlaceKind::Managed if self.memory.is_exact() => {
                self.memory.place_managed(size, align)?
            }
            _ => self.memory.place(self.device, size, align)?,
        };
        self.placed.push(placed);
        Ok(placed.addr)
    }

    fn keeps_content(&self) -> bool {
        // Another kind of device lists only the variables that may have changed.
        self.former.as_ref().is_some_and(|former| !former.foreign)
    }
}

impl Drop for Variables {
    fn drop(&mut self) {
        for placed in self.placed.drain(..) {
            self.memory.unplace(placed);
        }
    }
}

/// Returns what the client learns of a kernel.
///
/// # Errors
/// INVALID_IMAGE if that does not fit into a message.
fn kernel_info(kernel: &Kernel) -> Result<KernelInfo, CuError> {
    let params = kernel.params.iter().map(|&(offset, size)| ParamInfo { offset, size });
    Ok(KernelInfo {
        name: Text::new(kernel.name.clone()).map_err(|_| CuError::INVALID_IMAGE)?,
        params: List::new(params.collect()).map_err(|_| CuError::INVALID_IMAGE)?,
        registers: kernel.registers,
        shared_bytes: kernel.shared_bytes,
        local_bytes: kernel.local_bytes,
        const_bytes: kernel.const_bytes,
        max_threads_per_block: kernel.max_threads,
        required_cluster: kernel.required_cluster,
        cluster_must_be_set: kernel.explicit_cluster,
        ptx_version: kernel.ptx_version,
        binary_version: spec::SM,
        unsupported: Text::truncated(kernel.unsupported.clone().unwrap_or_default()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(images: &[&[u8]]) -> LoadError {
        let images: Vec<Vec<u8>> = images.iter().map(|image| image.to_vec()).collect();
        parse_all(&images, |_| ()).unwrap_err()
    }

    const CUBIN: &[u8] = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0";
    const PTX: &[u8] = b".version 8.0\n.target sm_80\n.address_size 64\n\0";

    #[test]
    fn images_without_ptx_are_refused_by_name() {
        let cubin = refusal(&[CUBIN]);
        assert_eq!(cubin.code, CuError::NO_BINARY_FOR_GPU.0);
        assert!(cubin.message.contains("-gencode arch=compute_90,code=compute_90"));
        assert_eq!(refusal(&[b"\0\0\0\0rubbish"]).code, CuError::INVALID_IMAGE.0);
    }

    #[test]
    fn one_of_several_images_may_lack_ptx() {
        let logged = std::cell::RefCell::new(Vec::new());
        let log = |line: &str| logged.borrow_mut().push(line.to_owned());
        let (units, bound) = parse_all(&[CUBIN.to_vec(), PTX.to_vec()], log).unwrap();
        assert_eq!(bound, None);
        assert_eq!(units.len(), 1);
        assert!(logged.borrow()[0].starts_with("image 0 of 2 is left out"));
        assert_eq!(refusal(&[CUBIN, CUBIN]).code, CuError::NO_BINARY_FOR_GPU.0);
    }

    #[test]
    fn of_newer_ptx_all_is_needed() {
        let images = [CUBIN.to_vec(), PTX.to_vec()];
        let refused = parse_for(&images, Target::Newer, &|_: &str| ()).unwrap_err();
        assert_eq!(refused.code, CuError::NO_BINARY_FOR_GPU.0);
    }

    #[test]
    fn a_syntax_error_names_its_line() {
        let refused = refusal(&[b".version 8.0\n.target sm_80\n.address_size 64\n.entry k( {\n"]);
        assert_eq!(refused.code, CuError::INVALID_PTX.0);
        assert!(refused.message.contains('4'), "{}", &*refused.message);
    }
}
