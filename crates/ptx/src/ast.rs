//! A parsed PTX module (PTX ISA reference, "Syntax", "State Spaces, Types, and Variables").
//!
//! The parser knows PTX's grammar and its declarations, not its instruction set: an instruction is
//! its dotted name and operands, and whoever executes it decides what they mean. Scopes are
//! resolved: registers, labels and variables of nested blocks have ids or unique names of their
//! function.

use std::sync::Arc;

/// PTX fundamental types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Type {
    B8,
    B16,
    B32,
    B64,
    B128,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    Tf32,
    F32,
    F64,
    Pred,
    /// Opaque: `.texref`, `.samplerref`, `.surfref`.
    TexRef,
    SamplerRef,
    SurfRef,
}

impl Type {
    /// The type that an instruction's part or a declaration names; opaque types are only declared.
    pub fn named(word: &str) -> Option<Self> {
        Some(match word {
            "b8" => Self::B8,
            "b16" => Self::B16,
            "b32" => Self::B32,
            "b64" => Self::B64,
            "b128" => Self::B128,
            "u8" => Self::U8,
            "u16" => Self::U16,
            "u32" => Self::U32,
            "u64" => Self::U64,
            "s8" => Self::S8,
            "s16" => Self::S16,
            "s32" => Self::S32,
            "s64" => Self::S64,
            "f16" => Self::F16,
            "f16x2" => Self::F16x2,
            "bf16" => Self::Bf16,
            "bf16x2" => Self::Bf16x2,
            "tf32" => Self::Tf32,
            "f32" => Self::F32,
            "f64" => Self::F64,
            "pred" => Self::Pred,
            _ => return None,
        })
    }

    /// Size in bytes; opaque types are 8, predicates 1.
    pub const fn size(self) -> u32 {
        match self {
            Self::B8 | Self::U8 | Self::S8 | Self::Pred => 1,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::Bf16 => 2,
            Self::B32
            | Self::U32
            | Self::S32
            | Self::F16x2
            | Self::Bf16x2
            | Self::Tf32
            | Self::F32 => 4,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 => 8,
            Self::B128 => 16,
            Self::TexRef | Self::SamplerRef | Self::SurfRef => 8,
        }
    }
}

/// Where a variable lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    Const,
    Global,
    Local,
    Param,
    Shared,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Linkage {
    /// No directive: the name is the module's own.
    Internal,
    Visible,
    Extern,
    Weak,
    Common,
}

/// A register of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegId(pub u32);

/// A label of a function: an index into `Body::labels`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LabelId(pub u32);

#[derive(Debug, Clone)]
pub struct Module {
    /// `.version` major, minor.
    pub version: (u32, u32),
    /// `.target sm_90a`: 90.
    pub sm: u32,
    /// `.target`'s suffix, `a` or `f`.
    pub sm_suffix: Option<char>,
    pub address_size: u32,
    pub functions: Vec<Function>,
    /// Module-scope `.global`, `.const` and `.shared` variables, in order of declaration.
    pub variables: Vec<Variable>,
    /// `.alias name, target`.
    pub aliases: Vec<(String, String)>,
}

#[derive(Debug, Clone)]
pub struct Function {
    pub name: String,
    /// `.entry`: a kernel.
    pub entry: bool,
    pub linkage: Linkage,
    pub noreturn: bool,
    /// Return parameters of a `.func`.
    pub returns: Vec<Variable>,
    pub params: Vec<Variable>,
    pub limits: Limits,
    /// None: a declaration.
    pub body: Option<Body>,
    pub line: u32,
    /// Its module's source files (`.file`), by their numbers.
    pub files: Arc<[(u32, String)]>,
}

/// Performance-tuning directives of a kernel; 0 where absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    pub max_threads: [u32; 3],
    pub required_threads: [u32; 3],
    pub min_blocks_per_sm: u32,
    pub max_registers: u32,
    pub required_cluster: [u32; 3],
    pub explicit_cluster: bool,
    pub max_cluster_rank: u32,
    /// `.blocksareclusters`: a launch's grid counts clusters.
    pub blocks_are_clusters: bool,
}

#[derive(Debug, Clone)]
pub struct Body {
    /// Type of each `RegId`. A vector register (`.v2`) is not used: its elements are, `v.x` and on.
    pub registers: Vec<Register>,
    /// Function-scope `.local`, `.shared`, `.param` (call arguments) and `.const` variables. Names
    /// are unique in the function: an inner scope's clash gets a suffix.
    pub variables: Vec<Variable>,
    /// Label names, for messages. `statements` says where each stands.
    pub labels: Vec<String>,
    /// `.callprototype` and `.calltargets` by label name.
    pub prototypes: Vec<(String, Prototype)>,
    /// `.branchtargets` by label name, for `brx.idx`.
    pub branch_targets: Vec<(String, Vec<LabelId>)>,
    pub statements: Vec<Statement>,
    /// `.loc`, in their order.
    pub locations: Vec<Location>,
}

/// The place in a source file that the instructions behind a line of PTX come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    /// The line of PTX.
    pub ptx_line: u32,
    /// A number of `Function::files`.
    pub file: u32,
    /// The line in that file; 0 where the compiler names none.
    pub line: u32,
    /// File and line into which that was inlined.
    pub inlined_at: Option<(u32, u32)>,
}

#[derive(Debug, Clone)]
pub struct Register {
    pub name: String,
    pub ty: Type,
    /// 1 in a parsed body; 2 or 4 of a vector register while it is read.
    pub lanes: u32,
}

#[derive(Debug, Clone, Default)]
pub struct Prototype {
    pub returns: Vec<Variable>,
    pub params: Vec<Variable>,
}

#[derive(Debug, Clone)]
pub struct Variable {
    pub name: String,
    pub space: Space,
    pub linkage: Linkage,
    pub ty: Type,
    /// `.v2`, `.v4`; 1 otherwise.
    pub lanes: u32,
    /// Alignment in bytes: as given, else natural.
    pub align: u32,
    /// Array dimensions; empty for a scalar; a 0 for an unsized (`extern .shared x[]`) one.
    pub dims: Vec<u64>,
    /// `.attribute(.managed)`.
    pub managed: bool,
    /// Parameters that live in a register (`.reg` parameters of old `.func` syntax).
    pub in_register: Option<RegId>,
    /// Initialiser: bytes (zero where a relocation goes), and where addresses go. Empty: zero.
    pub init: Vec<u8>,
    pub relocations: Vec<Relocation>,
    pub line: u32,
}

impl Variable {
    /// Bytes that the variable takes.
    pub fn size(&self) -> u64 {
        let unit = u64::from(self.ty.size()) * u64::from(self.lanes);
        self.dims.iter().fold(unit, |size, dim| size.saturating_mul(*dim))
    }
}

/// An address in an initialiser.
#[derive(Debug, Clone)]
pub struct Relocation {
    /// Byte offset in the variable.
    pub offset: u64,
    /// Bytes to store: usually 8; fewer with a mask such as `0xFF(sym)`.
    pub size: u32,
    /// Right shift of the address before its low `size` bytes are stored (`0xFF00(sym)`: 8).
    pub shift: u32,
    /// A variable or function.
    pub symbol: String,
    pub addend: i64,
    /// `generic(sym)`: the generic address; otherwise the address in the symbol's own space.
    pub generic: bool,
}

#[derive(Debug, Clone)]
pub enum Statement {
    Label(LabelId),
    Instruction(Instruction),
}

#[derive(Debug, Clone)]
pub struct Instruction {
    /// `@p` or `@!p`.
    pub guard: Option<Guard>,
    /// The dotted name in parts: `ld.global.v4.f32` is ["ld", "global", "v4", "f32"], and
    /// `ld.acquire.sys::cta…` keeps `::` inside a part.
    pub name: Vec<String>,
    /// In order of appearance. `call` is [returns: List?, target, args: List?, prototype: Symbol?]
    /// with `List` for each parenthesised group.
    pub operands: Vec<Operand>,
    /// Line in the PTX text.
    pub line: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guard {
    pub register: RegId,
    pub negated: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Operand {
    Register(RegId),
    /// `!p`.
    NotRegister(RegId),
    /// `-r`, where an operand may be negated.
    NegRegister(RegId),
    /// `d|p`, or `%r1|%p2`.
    Pair(Box<Operand>, Box<Operand>),
    /// `r.x` … `r.w`, `r.b0` … `r.b3`, `r.h0`, `r.h1` (video instructions).
    Component(RegId, String),
    /// An integer constant (already folded).
    Int(i64),
    /// An `0f…` constant's bits.
    F32(u32),
    /// An `0d…` or decimal constant's bits.
    F64(u64),
    /// `%tid.x`, `%laneid`, `%clock64`, `%envreg3` … with its `%`.
    Special(String),
    /// A variable's or function's name, with an offset (`sym+4`).
    Symbol(String, i64),
    Label(LabelId),
    /// `[base+offset]`.
    Address(AddressBase, i64),
    /// `{a, b, c, d}`.
    Vector(Vec<Operand>),
    /// `(a, b)`: a call's returns or arguments.
    List(Vec<Operand>),
    /// `[tex, {x, y}]`, `[tex, sampler, {x, y}]`, `[tensorMap, {…}], …`.
    Bracket(Vec<Operand>),
    /// `_`.
    Sink,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AddressBase {
    Register(RegId),
    Symbol(String),
    /// An absolute address: the offset alone.
    Absolute,
}
