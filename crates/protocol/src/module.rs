//! Modules: how an image reaches the proxy, and what the client learns of it.

use crate::{Dim3, ModuleId};
use kedge_wire::{List, Text, wire};

wire! {
    /// Where a module's image lies in the client.
    #[derive(Debug, Clone, PartialEq)]
    pub struct ModuleImage {
        /// Address in the client; the client waits while the proxy reads it.
        pub addr: u64,
        /// Bytes: PTX text (with or without its NUL), a fatbin container or an ELF cubin.
        pub len: u64,
    }

    /// A kernel, or a device function that can be addressed, of a module.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct KernelRef {
        pub module: ModuleId,
        /// What `Call::Kernel` chose for it.
        pub index: u32,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct ParamInfo { pub offset: u32, pub size: u32 }

    #[derive(Debug, Clone, PartialEq)]
    pub struct KernelInfo {
        pub name: Text<65536>,
        pub params: List<ParamInfo, 4096>,
        /// Registers a thread (CU_FUNC_ATTRIBUTE_NUM_REGS).
        pub registers: u32,
        /// Static shared memory, bytes.
        pub shared_bytes: u32,
        /// Local memory a thread, bytes.
        pub local_bytes: u32,
        /// User constant memory, bytes.
        pub const_bytes: u32,
        pub max_threads_per_block: u32,
        /// `.reqntid` / `.maxnreg`-style cluster requirements; 0 where absent.
        pub required_cluster: [u32; 3],
        /// A launch must name its cluster (`.explicitcluster`).
        pub cluster_must_be_set: bool,
        /// The virtual architecture that the PTX is for: 90 for `compute_90`.
        pub ptx_version: u32,
        pub binary_version: u32,
        /// Why a launch fails with NOT_SUPPORTED: the instruction that the device lacks, and its
        /// line. Empty: it runs.
        pub unsupported: Text<1024>,
    }

    /// How much of a kernel fits on its device (cuOccupancy*). `shared`: dynamic shared memory,
    /// bytes.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Occupancy {
        /// Blocks of so many threads that a multiprocessor holds.
        ActiveBlocks = 1 { threads: u32, shared: u64 },
        /// Dynamic shared memory that each of so many blocks of a multiprocessor can have, bytes.
        DynamicShared = 2 { blocks: u32, threads: u32 },
        /// Clusters that the device holds; `cluster` in blocks.
        ActiveClusters = 3 { grid: Dim3, block: Dim3, shared: u32, cluster: Dim3 },
        /// Blocks of the largest cluster that can be launched.
        ClusterSize = 4 { grid: Dim3, block: Dim3, shared: u32 },
    }

    #[derive(Debug, Clone, PartialEq)]
    pub struct GlobalInfo {
        pub name: Text<65536>,
        pub addr: u64,
        pub size: u64,
        pub constant: bool,
        pub managed: bool,
    }

    /// Some of a module's kernels, by name; `more` says to ask again, from where these end.
    #[derive(Debug, Clone, PartialEq)]
    pub struct KernelNames {
        pub names: List<Text<65536>, 4096>,
        pub more: bool,
    }

    /// Why a module did not load.
    #[derive(Debug, Clone, PartialEq)]
    pub struct LoadError {
        /// CUresult.
        pub code: u32,
        /// For the caller's error log buffer and the job's log: instruction and line.
        pub message: Text<8192>,
    }
}
