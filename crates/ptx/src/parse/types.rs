//! Words of declarations.

use crate::ast::{Linkage, Space, Type};

pub(super) fn fundamental(word: &str) -> Option<Type> {
    Some(match word {
        "texref" => Type::TexRef,
        "samplerref" => Type::SamplerRef,
        "surfref" => Type::SurfRef,
        _ => return Type::named(word),
    })
}

/// The space that a directive of a declaration names.
pub(super) fn space(word: &str) -> Option<Space> {
    Some(match word {
        "const" => Space::Const,
        "global" => Space::Global,
        "local" => Space::Local,
        "param" => Space::Param,
        "shared" => Space::Shared,
        _ => return None,
    })
}

pub(super) fn linkage(word: &str) -> Option<Linkage> {
    Some(match word {
        "visible" => Linkage::Visible,
        "extern" => Linkage::Extern,
        "weak" => Linkage::Weak,
        "common" => Linkage::Common,
        _ => return None,
    })
}

/// Elements of a `.v2` … vector type.
pub(super) fn lanes(word: &str) -> Option<u32> {
    match word {
        "v2" => Some(2),
        "v4" => Some(4),
        "v8" => Some(8),
        _ => None,
    }
}

/// Whether a `%` name that nothing declares is a special register (PTX ISA, "Special Registers").
pub(super) fn is_special(name: &str) -> bool {
    let Some(word) = name.strip_prefix('%') else { return false };
    let numbered = |prefix: &str, below: u32| {
        word.strip_prefix(prefix)
            .and_then(|digits| digits.parse::<u32>().ok())
            .is_some_and(|number| number < below)
    };
    matches!(
        word,
        "tid"
            | "ntid"
            | "ctaid"
            | "nctaid"
            | "gridid"
            | "laneid"
            | "warpid"
            | "nwarpid"
            | "smid"
            | "nsmid"
            | "clusterid"
            | "nclusterid"
            | "cluster_ctaid"
            | "cluster_nctaid"
            | "cluster_ctarank"
            | "cluster_nctarank"
            | "is_explicit_cluster"
            | "lanemask_eq"
            | "lanemask_le"
            | "lanemask_lt"
            | "lanemask_ge"
            | "lanemask_gt"
            | "clock"
            | "clock_hi"
            | "clock64"
            | "globaltimer"
            | "globaltimer_lo"
            | "globaltimer_hi"
            | "total_smem_size"
            | "aggr_smem_size"
            | "dynamic_smem_size"
            | "reserved_smem_offset_begin"
            | "reserved_smem_offset_end"
            | "reserved_smem_offset_cap"
            | "current_graph_exec"
    ) || numbered("reserved_smem_offset_", 8)
        || numbered("envreg", 32)
        || numbered("pm", 8)
        || word
            .strip_suffix("_64")
            .is_some_and(|pm| matches!(pm.as_bytes(), [b'p', b'm', b'0'..=b'7']))
}
