//! Whether a program that has seen one device can go on with another. What it has been told it will
//! not ask again, so whatever it may rely on must hold: limits that are no lower, abilities that
//! are still there.

use kedge_cuda_types::attribute::{self as a, name};
use kedge_protocol::DeviceInfo;
use kedge_transport::ATTRIBUTE_FAR;
use std::cmp::Ordering;
use std::collections::HashMap;

/// What may differ: no program is wrong when they change under it.
const TELLS_OF_SPEED_OR_PLACE: &[u32] = &[
    a::CLOCK_RATE,
    a::MEMORY_CLOCK_RATE,
    a::GLOBAL_MEMORY_BUS_WIDTH,
    a::L2_CACHE_SIZE,
    a::MAX_PERSISTING_L2_CACHE_SIZE,
    a::MAX_ACCESS_POLICY_WINDOW_SIZE,
    a::ASYNC_ENGINE_COUNT,
    a::SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO,
    a::ECC_ENABLED,
    a::TCC_DRIVER,
    a::INTEGRATED,
    a::KERNEL_EXEC_TIMEOUT,
    a::COMPUTE_MODE,
    a::MPS_ENABLED,
    a::MULTI_GPU_BOARD,
    a::MULTI_GPU_BOARD_GROUP_ID,
    a::PCI_DOMAIN_ID,
    a::PCI_BUS_ID,
    a::PCI_DEVICE_ID,
    a::GPU_PCI_DEVICE_ID,
    a::GPU_PCI_SUBSYSTEM_ID,
    a::NUMA_CONFIG,
    a::NUMA_ID,
    a::HOST_NUMA_ID,
    a::GPU_DIRECT_RDMA_WRITES_ORDERING,
    a::LOCALITY_DOMAIN_COUNT,
    a::LOCALITY_DOMAIN_MULTIPROCESSOR_COUNT,
    ATTRIBUTE_FAR,
];
/// What may only shrink: the program has laid its data out by them.
const MAY_NOT_GROW: &[u32] = &[
    a::TEXTURE_ALIGNMENT,
    a::SURFACE_ALIGNMENT,
    a::TEXTURE_PITCH_ALIGNMENT,
    a::RESERVED_SHARED_MEMORY_PER_BLOCK,
    a::TENSOR_MAP_LARGE_TENSOR_MIN_SIZE,
];

/// What GPUs have and software devices lack, and no program that runs under kedge can have used:
/// functions that are refused, and hints.
const OF_NO_USE: &[u32] = &[
    a::CAN_FLUSH_REMOTE_WRITES,
    a::CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
    a::COOPERATIVE_MULTI_DEVICE_LAUNCH,
    a::D3D12_CIG_SUPPORTED,
    a::GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
    a::MEM_SYNC_DOMAIN_COUNT,
    a::TIMELINE_SEMAPHORE_INTEROP_SUPPORTED,
    a::VULKAN_CIG_SUPPORTED,
];

/// What software devices have, most GPUs lack, and programs under kedge have on both: managed
/// memory is one memory that host and device access, and the functions for streams' values are
/// there under their newer names.
const ALWAYS_SO: &[u32] = &[
    a::CAN_USE_64_BIT_STREAM_MEM_OPS_V1,
    a::CAN_USE_STREAM_MEM_OPS_V1,
    a::CAN_USE_STREAM_WAIT_VALUE_NOR_V1,
    a::DIRECT_MANAGED_MEM_ACCESS_FROM_HOST,
];

/// Why `here` cannot stand for `was`; `None` where it can. `software`: a software device is here.
pub(crate) fn difference(was: &DeviceInfo, here: &DeviceInfo, software: bool) -> Option<String> {
    let has: HashMap<u32, i32> = here.attributes.iter().copied().collect();
    let has = |attribute: u32| has.get(&attribute).copied().unwrap_or(0);
    was.attributes.iter().find_map(|&(attribute, value)| {
        let fits = fits(software, attribute, has(attribute).cmp(&value));
        let fits = fits || (was.exact && ALWAYS_SO.contains(&attribute));
        (!fits && !newer(was, has, attribute)).then(|| {
            let name = name(attribute).map_or_else(|| attribute.to_string(), str::to_lowercase);
            format!("its {name} is {}, not {value}", has(attribute))
        })
    })
}

/// `order`: of what is here to what was.
fn fits(software: bool, attribute: u32, order: Ordering) -> bool {
    match attribute {
        a::WARP_SIZE => order.is_eq(),
        // A software device runs all blocks of a cooperative grid, however few its cores.
        a::MULTIPROCESSOR_COUNT if software => true,
        _ if software && OF_NO_USE.contains(&attribute) => true,
        _ if TELLS_OF_SPEED_OR_PLACE.contains(&attribute) => true,
        _ if MAY_NOT_GROW.contains(&attribute) => order.is_le(),
        _ => order.is_ge(),
    }
}

/// A lower minor number belongs to a higher major one.
fn newer(was: &DeviceInfo, has: impl Fn(u32) -> i32, attribute: u32) -> bool {
    let major = was.attributes.iter().find(|(known, _)| *known == a::COMPUTE_CAPABILITY_MAJOR);
    attribute == a::COMPUTE_CAPABILITY_MINOR
        && major.is_some_and(|(_, major)| has(a::COMPUTE_CAPABILITY_MAJOR) > *major)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_wire::{List, Text};

    fn device(attributes: &[(u32, i32)]) -> DeviceInfo {
        DeviceInfo {
            name: Text::truncated("a device".into()),
            uuid: [0; 16],
            pci: [0; 3],
            total_memory: 1 << 30,
            exact: false,
            apart: false,
            attributes: List::new(attributes.to_vec()).unwrap(),
        }
    }

    const WAS: &[(u32, i32)] = &[
        (a::WARP_SIZE, 32),
        (a::COMPUTE_CAPABILITY_MAJOR, 9),
        (a::COMPUTE_CAPABILITY_MINOR, 5),
        (a::MULTIPROCESSOR_COUNT, 132),
        (a::TEXTURE_ALIGNMENT, 512),
        (a::CLOCK_RATE, 1_980_000),
        (a::MANAGED_MEMORY, 1),
    ];

    /// What differs once these attributes are changed.
    fn with(changes: &[(u32, i32)]) -> Option<String> {
        let change = |&(attribute, value): &(u32, i32)| {
            let new = changes.iter().find(|(changed, _)| *changed == attribute);
            (attribute, new.map_or(value, |(_, new)| *new))
        };
        let here: Vec<(u32, i32)> = WAS.iter().map(change).collect();
        difference(&device(WAS), &device(&here), false)
    }

    #[test]
    fn the_same_and_the_larger_will_do() {
        assert_eq!(with(&[]), None);
        assert_eq!(with(&[(a::MULTIPROCESSOR_COUNT, 148), (a::TEXTURE_ALIGNMENT, 256)]), None);
        assert_eq!(with(&[(a::CLOCK_RATE, 1)]), None);
        let newer = [(a::COMPUTE_CAPABILITY_MAJOR, 10), (a::COMPUTE_CAPABILITY_MINOR, 0)];
        assert_eq!(with(&newer), None);
    }

    #[test]
    fn what_the_program_may_rely_on_is_named() {
        for (attribute, value, said) in [
            (a::WARP_SIZE, 64, "warp_size is 64, not 32"),
            (a::COMPUTE_CAPABILITY_MINOR, 0, "compute_capability_minor is 0, not 5"),
            (a::MULTIPROCESSOR_COUNT, 114, "multiprocessor_count is 114, not 132"),
            (a::TEXTURE_ALIGNMENT, 1024, "texture_alignment is 1024, not 512"),
            (a::MANAGED_MEMORY, 0, "managed_memory is 0, not 1"),
        ] {
            let found = with(&[(attribute, value)]).unwrap_or_default();
            assert!(found.contains(said), "{found}");
        }
        let none = difference(&device(WAS), &device(&[]), false).unwrap_or_default();
        assert!(none.contains("warp_size is 0"), "{none}");
    }

    #[test]
    fn software_devices_may_have_fewer_cores() {
        let soft =
            |cores| DeviceInfo { exact: true, ..device(&[(a::MULTIPROCESSOR_COUNT, cores)]) };
        assert_eq!(difference(&soft(64), &soft(2), true), None);
        assert!(difference(&soft(64), &soft(2), false).is_some());
    }

    #[test]
    fn software_devices_stand_for_gpus() {
        let gpu = device(&[(a::MULTIPROCESSOR_COUNT, 132), (a::MEM_SYNC_DOMAIN_COUNT, 4)]);
        let soft = device(&[(a::MULTIPROCESSOR_COUNT, 2)]);
        assert_eq!(difference(&gpu, &soft, true), None);
        assert!(difference(&device(WAS), &soft, true).is_some(), "warps, for one");
        let managed = device(&[(a::DIRECT_MANAGED_MEM_ACCESS_FROM_HOST, 1)]);
        assert!(difference(&managed, &gpu, false).is_some());
        assert_eq!(difference(&DeviceInfo { exact: true, ..managed }, &gpu, false), None);
    }
}
