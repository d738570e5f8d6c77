//! Modules: from an image's bytes to a program with its variables in memory.

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

/// Kernels that a client may have numbered in one module.
const MAX_NUMBERED: usize = 1 << 20;

pub(super) struct Module {
    pub(super) ctx: CtxId,
    pub(super) program: Arc<Program>,
    /// Name → place in the program.
    kernels: HashMap<String, u32>,
    globals: HashMap<String, usize>,
    /// The client's numbers of kernels: each one's place in the program.
    numbered: Vec<u32>,
    /// Kernels of it launch grids themselves.
    pub(super) nests: bool,
    /// Where its variables lie; they go with the module.
    variables: Variables,
    /// The variables whose addresses the client knows.
    asked: BTreeSet<String>,
    /// Why what it leaves in memory means nothing to another kind of device.
    pub(super) bound: Option<&'static str>,
}

/// A variable, where it lies, and whether the client knows that.
pub(super) struct PlacedAs<'a> {
    pub(super) name: &'a str,
    pub(super) at: Placed,
    pub(super) asked: bool,
}

/// What a module had when a checkpoint was taken.
pub(super) struct Former {
    /// Each variable's name and place, and whether the client knew that; the memory is taken
    /// already.
    pub(super) variables: VecDeque<(Text<65536>, Placed, bool)>,
    /// It was loaded on another kind of device, which places in another order, and does not tell of
    /// variables that are as the image has them.
    pub(super) foreign: bool,
}

impl Former {
    /// A module of which another kind of device has told nothing.
    pub(super) fn of_another_kind() -> Former {
        Former { variables: VecDeque::new(), foreign: true }
    }
}

impl Module {
    /// Loads one image, or links several. With `former`, the variables lie where they lay and keep
    /// what is there.
    ///
    /// # Errors
    /// What cuModuleLoadData returns, with a message that names the image, the line, the remedy.
    pub(super) fn load(
        ctx: CtxId,
        device: u32,
        memory: &Arc<Memory>,
        images: &[Vec<u8>],
        former: Option<Former>,
        log: impl Fn(&str),
    ) -> Result<Self, LoadError> {
        let (mut units, bound) = parse_all(images, log)?;
        if ask_for_grid(&units) {
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

    /// Name and place of each variable, in the order in which they were placed.
    pub(super) fn variables(&self) -> impl Iterator<Item = PlacedAs<'_>> {
        let names = self.program.globals.iter().map(|global| global.name.as_str());
        names.zip(self.variables.placed.iter().copied()).map(|(name, at)| PlacedAs {
            name,
            at,
            asked: self.asked.contains(name),
        })
    }

    /// The kernel of that name, which the client numbers `index`.
    ///
    /// # Errors
    /// NOT_FOUND for an unknown name; INVALID_VALUE for a number that is neither the next nor this
    /// kernel's own.
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

    /// What the client was told of the kernel that it has given a number.
    pub(super) fn info(&self, index: u32) -> Result<KernelInfo, CuError> {
        let place = self.launched_by(index).ok_or(CuError::INVALID_HANDLE)?;
        kernel_info(&self.program.kernels[place as usize])
    }

    /// The place in the program of the kernel that the client has given a number.
    pub(super) fn launched_by(&self, index: u32) -> Option<u32> {
        self.numbered.get(index as usize).copied()
    }

    pub(super) fn kernel_names(&self) -> Vec<String> {
        self.program.kernels.iter().map(|kernel| kernel.name.clone()).collect()
    }

    /// The variable of that name, which the client knows from now on; NOT_FOUND where there is
    /// none.
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

/// What code may do that leaves a device's own forms in the client's memory, and the word that
/// tells of it.
const BINDING: [(&str, &str); 3] = [
    (".callprototype", "calls functions by pointers"),
    (".calltargets", "calls functions by pointers"),
    ("cp.async.bulk.tensor", "copies by tensor maps"),
];

/// Every image as a PTX module, and what binds them to a kind of device. One of several may lack
/// PTX, if what the others need is not in it: libcudadevrt is such an image, and its functions are
/// this device's own.
///
/// Where all PTX is for newer GPUs than this device stands for, the oldest is taken: its
/// instructions are known, or refused by name when a kernel is launched. A GPU would refuse it, but
/// here that helps nobody.
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

/// What PTX is taken of a fatbin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    /// The newest that this device's compute capability can run.
    Own,
    /// The oldest for a later one.
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
        // Of newer PTX all is needed: libcudadevrt, which has nothing else, makes no program of
        // machine code.
        Some(refusal) if units.is_empty() || target == Target::Newer => Err(refusal),
        _ => Ok((units, bound)),
    }
}

/// Functions of libcudadevrt that are linked to what calls them.
const GRID: &str = include_str!("grid.ptx");

/// Whether one of these calls [`GRID`]'s functions, and none has them: libcudadevrt's own PTX is
/// for newer devices.
fn ask_for_grid(units: &[ast::Module]) -> bool {
    let own = ["cudaCGGetIntrinsicHandle", "cudaCGSynchronize"];
    let functions = units.iter().flat_map(|unit| &unit.functions);
    let mut named = functions.filter(|function| own.contains(&function.name.as_str())).peekable();
    named.peek().is_some() && named.all(|function| function.body.is_none())
}

type Parsed = (Vec<ast::Module>, Option<&'static str>);

fn parse(text: &str) -> Result<ast::Module, LoadError> {
    kedge_ptx::parse(text).map_err(|e| error(CuError::INVALID_PTX, format!("PTX: {e}")))
}

/// The PTX of an image.
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
        fatbin::Kind::NvvmOrLto => Err(error(CuError::NOT_SUPPORTED, COMPILERS_OWN.to_owned())),
        fatbin::Kind::Unknown => {
            let what = "the image is no fatbin, cubin or PTX text";
            Err(error(CuError::INVALID_IMAGE, what.to_owned()))
        }
    }
}

/// The oldest architecture of which there is PTX.
fn oldest_ptx(images: &[fatbin::Image<'_>]) -> Option<u32> {
    images.iter().filter(|image| image.kind == ImageKind::Ptx).map(|image| image.sm).min()
}

fn no_ptx(images: &[fatbin::Image<'_>]) -> LoadError {
    only_machine_code(&match oldest_ptx(images) {
        Some(sm) => format!("the fatbin's PTX is for sm_{sm} or newer"),
        None => "the fatbin holds machine code and no PTX".to_owned(),
    })
}

/// Of an image that is in a form between compilers.
const COMPILERS_OWN: &str = "the image is LTO-IR or NVVM IR, which only NVIDIA's compilers read: \
                             have nvJitLink link it to PTX or a cubin (-lto), or compile to PTX";

fn only_machine_code(what: &str) -> LoadError {
    let sm = spec::SM;
    let remedy = format!(
        "{what}; the software device runs PTX up to sm_{sm}: \
         compile with -gencode arch=compute_{sm},code=compute_{sm}"
    );
    error(CuError::NO_BINARY_FOR_GPU, remedy)
}

/// Places a module's variables, and takes their memory back when the module goes.
struct Variables {
    memory: Arc<Memory>,
    device: u32,
    placed: Vec<Placed>,
    /// What is still to be placed where it was.
    former: Option<Former>,
    /// Why a variable cannot lie where it was.
    moved: Option<String>,
}

impl Variables {
    /// A variable of a module that was loaded before a checkpoint.
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
        // Another kind of device tells only of what may have changed.
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

/// What the client learns of a kernel; INVALID_IMAGE where that does not fit into a message.
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
