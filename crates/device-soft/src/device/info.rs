//! What the program is told of a software device.
//!
//! Limits are those of compute capability 9.0 (CUDA programming guide, "Technical Specifications
//! per Compute Capability") where the interpreter honours them; capabilities that it lacks are 0.

use super::start::SoftConfig;
use kedge_cuda_types::attribute as a;
use kedge_cuda_types::memory::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
use kedge_protocol::DeviceInfo;
use kedge_wire::{List, Text};

/// CUDA 13.0: the oldest that the 13.x runtimes accept.
pub const DRIVER_VERSION: u32 = 13_000;

/// Describes device `index` of those that `config` makes.
pub(super) fn describe(index: u32, config: &SoftConfig) -> DeviceInfo {
    let pci = [PCI_DOMAIN, index as i32, 0];
    let mut values: Vec<(u32, i32)> = FIXED.to_vec();
    values.extend([
        (a::MULTIPROCESSOR_COUNT, i32::try_from(config.workers).unwrap_or(i32::MAX)),
        // A program that divides cycles by it gets seconds.
        (a::CLOCK_RATE, crate::spec::CLOCK_KHZ as i32),
        (a::PCI_DOMAIN_ID, pci[0]),
        (a::PCI_BUS_ID, pci[1]),
        (a::PCI_DEVICE_ID, pci[2]),
        (a::MULTI_GPU_BOARD_GROUP_ID, index as i32),
        // Managed memory is one memfd that both processes map, so both may use it at once; or it
        // lies in the device's memory, and pages cannot move under a kernel. A GPU takes either.
        (a::CONCURRENT_MANAGED_ACCESS, i32::from(!config.apart || !config.exact)),
        (a::DIRECT_MANAGED_MEM_ACCESS_FROM_HOST, i32::from(!config.apart)),
    ]);
    // What is not named is a capability that this device does not have.
    for &attribute in a::ALL {
        if !values.iter().any(|(named, _)| *named == attribute) {
            values.push((attribute, 0));
        }
    }
    values.sort_unstable();
    DeviceInfo {
        name: Text::truncated("kedge software device".to_owned()),
        uuid: uuid(index),
        pci,
        total_memory: config.memory_per_device,
        exact: config.exact,
        apart: config.apart,
        attributes: List::new(values).unwrap_or_default(),
    }
}

/// Domain "kd": no real device's address can be meant.
const PCI_DOMAIN: i32 = 0x6b64;

/// The same for one index everywhere, and legible in a dump: "kedge-soft", then the index.
fn uuid(index: u32) -> [u8; 16] {
    let mut uuid = *b"kedge-soft\0\0\0\0\0\0";
    uuid[12..].copy_from_slice(&index.to_be_bytes());
    uuid
}

/// The number in a device's UUID.
pub(super) fn number(info: &DeviceInfo) -> u32 {
    let [.., a, b, c, d] = info.uuid;
    u32::from_be_bytes([a, b, c, d])
}

const FIXED: &[(u32, i32)] = &[
    (a::COMPUTE_CAPABILITY_MAJOR, 9),
    (a::COMPUTE_CAPABILITY_MINOR, 0),
    (a::WARP_SIZE, 32),
    (a::MAX_THREADS_PER_BLOCK, 1024),
    (a::MAX_BLOCK_DIM_X, 1024),
    (a::MAX_BLOCK_DIM_Y, 1024),
    (a::MAX_BLOCK_DIM_Z, 64),
    (a::MAX_GRID_DIM_X, i32::MAX),
    (a::MAX_GRID_DIM_Y, 65_535),
    (a::MAX_GRID_DIM_Z, 65_535),
    (a::MAX_THREADS_PER_MULTIPROCESSOR, 2048),
    (a::MAX_BLOCKS_PER_MULTIPROCESSOR, 32),
    (a::MAX_SHARED_MEMORY_PER_BLOCK, 48 << 10),
    (a::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 227 << 10),
    (a::MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 228 << 10),
    (a::RESERVED_SHARED_MEMORY_PER_BLOCK, 1 << 10),
    (a::MAX_REGISTERS_PER_BLOCK, 65_536),
    (a::MAX_REGISTERS_PER_MULTIPROCESSOR, 65_536),
    (a::TOTAL_CONSTANT_MEMORY, 64 << 10),
    (a::MAX_PITCH, i32::MAX),
    (a::TEXTURE_ALIGNMENT, 512),
    (a::TEXTURE_PITCH_ALIGNMENT, 32),
    (a::SURFACE_ALIGNMENT, 512),
    (a::MEMORY_CLOCK_RATE, 1_600_000),
    (a::GLOBAL_MEMORY_BUS_WIDTH, 128),
    (a::L2_CACHE_SIZE, 32 << 20),
    (a::GPU_OVERLAP, 1),
    (a::ASYNC_ENGINE_COUNT, 2),
    (a::CONCURRENT_KERNELS, 1),
    (a::STREAM_PRIORITIES_SUPPORTED, 1),
    (a::COMPUTE_PREEMPTION_SUPPORTED, 1),
    (a::COOPERATIVE_LAUNCH, 1),
    (a::CLUSTER_LAUNCH, 1),
    (a::TENSOR_MAP_ACCESS_SUPPORTED, 1),
    (a::SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO, 2),
    (a::GLOBAL_L1_CACHE_SUPPORTED, 1),
    (a::LOCAL_L1_CACHE_SUPPORTED, 1),
    (a::UNIFIED_FUNCTION_POINTERS, 1),
    (a::MEM_SYNC_DOMAIN_COUNT, 1),
    // Memory.
    (a::CAN_MAP_HOST_MEMORY, 1),
    (a::UNIFIED_ADDRESSING, 1),
    (a::MANAGED_MEMORY, 1),
    (a::HOST_REGISTER_SUPPORTED, 1),
    (a::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1),
    (a::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1),
    (a::IPC_EVENT_SUPPORTED, 1),
    (a::MEMORY_POOLS_SUPPORTED, 1),
    (a::MEMPOOL_SUPPORTED_HANDLE_TYPES, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR as i32),
    (a::CAN_USE_64_BIT_STREAM_MEM_OPS, 1),
    (a::CAN_USE_STREAM_WAIT_VALUE_NOR, 1),
    (a::CAN_USE_64_BIT_STREAM_MEM_OPS_V1, 1),
    (a::CAN_USE_STREAM_MEM_OPS_V1, 1),
    (a::CAN_USE_STREAM_WAIT_VALUE_NOR_V1, 1),
    (a::NUMA_ID, -1),
    (a::HOST_NUMA_ID, -1),
    // Textures and surfaces: the interpreter's own limits are wider; these are sm_90's.
    (a::MAXIMUM_TEXTURE1D_WIDTH, 131_072),
    (a::MAXIMUM_TEXTURE1D_LINEAR_WIDTH, 268_435_456),
    (a::MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH, 32_768),
    (a::MAXIMUM_TEXTURE1D_LAYERED_WIDTH, 32_768),
    (a::MAXIMUM_TEXTURE1D_LAYERED_LAYERS, 2048),
    (a::MAXIMUM_TEXTURE2D_WIDTH, 131_072),
    (a::MAXIMUM_TEXTURE2D_HEIGHT, 65_536),
    (a::MAXIMUM_TEXTURE2D_LINEAR_WIDTH, 131_072),
    (a::MAXIMUM_TEXTURE2D_LINEAR_HEIGHT, 65_000),
    (a::MAXIMUM_TEXTURE2D_LINEAR_PITCH, 2_097_120),
    (a::MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH, 32_768),
    (a::MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT, 32_768),
    (a::MAXIMUM_TEXTURE2D_LAYERED_WIDTH, 32_768),
    (a::MAXIMUM_TEXTURE2D_LAYERED_HEIGHT, 32_768),
    (a::MAXIMUM_TEXTURE2D_LAYERED_LAYERS, 2048),
    (a::CAN_TEX2D_GATHER, 1),
    (a::MAXIMUM_TEXTURE2D_GATHER_WIDTH, 32_768),
    (a::MAXIMUM_TEXTURE2D_GATHER_HEIGHT, 32_768),
    (a::MAXIMUM_TEXTURE3D_WIDTH, 16_384),
    (a::MAXIMUM_TEXTURE3D_HEIGHT, 16_384),
    (a::MAXIMUM_TEXTURE3D_DEPTH, 16_384),
    (a::MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE, 8192),
    (a::MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE, 8192),
    (a::MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE, 32_768),
    (a::MAXIMUM_TEXTURECUBEMAP_WIDTH, 32_768),
    (a::MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH, 32_768),
    (a::MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS, 2046),
    (a::MAXIMUM_SURFACE1D_WIDTH, 32_768),
    (a::MAXIMUM_SURFACE1D_LAYERED_WIDTH, 32_768),
    (a::MAXIMUM_SURFACE1D_LAYERED_LAYERS, 2048),
    (a::MAXIMUM_SURFACE2D_WIDTH, 131_072),
    (a::MAXIMUM_SURFACE2D_HEIGHT, 65_536),
    (a::MAXIMUM_SURFACE2D_LAYERED_WIDTH, 32_768),
    (a::MAXIMUM_SURFACE2D_LAYERED_HEIGHT, 32_768),
    (a::MAXIMUM_SURFACE2D_LAYERED_LAYERS, 2048),
    (a::MAXIMUM_SURFACE3D_WIDTH, 16_384),
    (a::MAXIMUM_SURFACE3D_HEIGHT, 16_384),
    (a::MAXIMUM_SURFACE3D_DEPTH, 16_384),
    (a::MAXIMUM_SURFACECUBEMAP_WIDTH, 32_768),
    (a::MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH, 32_768),
    (a::MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS, 2046),
];

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: SoftConfig = SoftConfig {
        devices: 1,
        memory_per_device: 1 << 30,
        workers: 2,
        exact: true,
        apart: false,
        check: None,
    };

    #[test]
    fn every_attribute_is_answered_once() {
        let info = describe(1, &CONFIG);
        let ids: Vec<u32> = info.attributes.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, a::ALL);
        let value = |id| info.attributes.iter().find(|(i, _)| *i == id).map(|(_, v)| *v);
        assert_eq!(value(a::MULTIPROCESSOR_COUNT), Some(2));
        assert_eq!(value(a::MULTICAST_SUPPORTED), Some(0));
        assert_eq!(value(a::PCI_BUS_ID), Some(1));
        assert!(value(a::CLOCK_RATE) > Some(0));
    }

    #[test]
    fn uuids_differ_and_spell_kedge() {
        assert_ne!(uuid(0), uuid(1));
        assert_eq!(number(&describe(7, &CONFIG)), 7);
        assert!(uuid(0).starts_with(b"kedge-soft"));
    }
}
