//! The machine that an image is from, and whether this one will do.

use crate::EngineError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::PathBuf;

/// Features that a program can use by instructions of its own, by their names in /proc/cpuinfo. A
/// program decides at its start which it uses, so all that it saw must be there.
const FEATURES: &str = "fpu tsc cx8 cmov mmx fxsr sse sse2 ht syscall nx mmxext fxsr_opt pdpe1gb \
    rdtscp lm 3dnow 3dnowext pni pclmulqdq ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt aes xsave avx \
    f16c rdrand lahf_lm abm sse4a misalignsse 3dnowprefetch xop lwp fma4 tbm fsgsbase bmi1 hle avx2 \
    bmi2 erms rtm mpx avx512f avx512dq rdseed adx avx512ifma clflushopt clwb avx512pf avx512er \
    avx512cd sha_ni avx512bw avx512vl xsaveopt xsavec xgetbv1 avx_vnni avx512_bf16 clzero \
    avx512vbmi umip pku ospke waitpkg avx512_vbmi2 shstk gfni vaes vpclmulqdq avx512_vnni \
    avx512_bitalg tme avx512_vpopcntdq rdpid cldemote movdiri movdir64b enqcmd fsrm \
    avx512_vp2intersect serialize tsxldtrk amx_bf16 avx512_fp16 amx_tile amx_int8 avx_ifma \
    amx_fp16 cmpccxadd prefetchi amx_complex avx_vnni_int8 avx_ne_convert raoint";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) features: BTreeSet<String>,
    /// The kernel's release, for reports: what depends on it is compared by itself.
    pub(crate) kernel: String,
}

fn read(path: &str) -> Result<String, EngineError> {
    let failed = |source: io::Error| EngineError::File {
        path: PathBuf::from(path),
        what: "read it",
        source,
    };
    fs::read_to_string(path).map_err(failed)
}

impl Machine {
    pub(crate) fn this() -> Result<Machine, EngineError> {
        let known: BTreeSet<&str> = FEATURES.split_whitespace().collect();
        let cpuinfo = read("/proc/cpuinfo")?;
        let flags = cpuinfo.lines().find_map(|line| line.strip_prefix("flags"));
        let flags = flags.unwrap_or("").split_whitespace().filter(|flag| known.contains(flag));
        let features = flags.map(str::to_owned).collect();
        let kernel = read("/proc/sys/kernel/osrelease")?.trim().to_owned();
        Ok(Machine { features, kernel })
    }

    /// Whether a program from `self` can run on `here`.
    pub(crate) fn runs_on(&self, here: &Machine) -> Result<(), EngineError> {
        let missing: Vec<&str> =
            self.features.difference(&here.features).map(String::as_str).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let names = missing.join(", ");
        Err(EngineError::Machine(format!("its processor has no {names}: use one that has")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_feature_is_named() {
        let here = Machine::this().unwrap();
        assert!(here.features.contains("sse2"));
        here.runs_on(&here).unwrap();
        let mut other = here.clone();
        other.features.insert("amx_complex2".into());
        let error = other.runs_on(&here).unwrap_err().to_string();
        assert!(error.contains("amx_complex2"), "{error}");
    }
}
