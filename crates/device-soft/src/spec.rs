//! What this device claims to be, in one place.

/// Threads of a warp.
pub const WARP: usize = 32;
/// Compute capability × 10.
pub const SM: u32 = kedge_ptx::SOFTWARE_DEVICE_SM;
/// PTX ISA × 10 that the parser and the instruction set follow.
pub const PTX_VERSION: u32 = 95;
pub const MAX_THREADS_PER_BLOCK: u32 = 1024;
pub const MAX_BLOCK_DIM: [u32; 3] = [1024, 1024, 64];
pub const MAX_GRID_DIM: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
/// Shared memory of a block without an opt-in, bytes.
pub const SHARED_PER_BLOCK: u32 = 48 << 10;
/// Shared memory of a block with the opt-in attribute, bytes.
pub const SHARED_PER_BLOCK_OPTIN: u32 = 227 << 10;
/// Shared memory of a multiprocessor, bytes.
pub const SHARED_PER_SM: u32 = 228 << 10;
/// Shared memory is given to a block in whole units of this size, bytes (PTX ISA,
/// `%total_smem_size`, of sm_8x and later).
pub const SHARED_UNIT: u64 = 128;
/// An allocation's memory, and a kernel's parameters, can be accessed in whole units of this size,
/// bytes: as large as the widest access, which compilers make of narrower ones and mask (`.pragma
/// "used_bytes_mask"`). Hardware's units are larger.
pub const GLOBAL_UNIT: u64 = 32;
/// Of each block's shared memory, what the system keeps, bytes.
pub const SHARED_RESERVED: u32 = 1 << 10;
pub const REGISTERS_PER_BLOCK: u32 = 65_536;
pub const THREADS_PER_SM: u32 = 2048;
pub const BLOCKS_PER_SM: u32 = 32;
/// Blocks of a cluster, portable or not.
pub const MAX_CLUSTER: u32 = 16;
/// Barriers of a block (`bar.sync 0` … `15`).
pub const BARRIERS: usize = 16;
/// Shared memory of a block that is reserved for what compilers and headers do, where a kernel asks
/// for it, bytes.
pub const RESERVED_SHARED: u32 = 1024;
/// Threads of a warpgroup, and the most warpgroups of a block.
pub const WARPGROUP: u32 = 128;
pub const WARPGROUPS: usize = (MAX_THREADS_PER_BLOCK / WARPGROUP) as usize;
/// CU_LIMIT_STACK_SIZE's default, bytes a thread.
pub const DEFAULT_STACK: u32 = 1024;
/// Largest local memory of a thread, bytes.
pub const MAX_LOCAL: u32 = 512 << 10;
/// `%clock64` and `%globaltimer` run at 1 GHz.
pub const CLOCK_KHZ: u32 = 1_000_000;
