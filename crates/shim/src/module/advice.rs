//! What a program is told whose machine code no software device can run: how the framework that
//! keeps it on disk compiles it anew.

use std::fs;

/// A framework: a part of the paths of its libraries, its name, and what has it compile again.
const FRAMEWORKS: [(&str, &str, &str); 5] = [
    ("/cupy", "CuPy", "set CUPY_CACHE_DIR to an empty folder, or CUPY_CACHE_IN_MEMORY=1"),
    (
        "/warp/bin/",
        "Warp",
        "set WARP_CACHE_PATH to an empty folder, or call wp.clear_kernel_cache()",
    ),
    ("/triton/", "Triton", "set TRITON_CACHE_DIR to an empty folder, or TRITON_ALWAYS_COMPILE=1"),
    ("/jaxlib/", "JAX", "set JAX_ENABLE_COMPILATION_CACHE=false"),
    ("/numba/", "Numba", "set NUMBA_CACHE_DIR to an empty folder"),
];

/// Returns what to do about a cubin whose PTX is not known.
pub(super) fn on_unknown_cubin() -> String {
    // No text file: a path may be any bytes.
    let maps = fs::read("/proc/self/maps").unwrap_or_default();
    advice(&String::from_utf8_lossy(&maps))
}

fn advice(maps: &str) -> String {
    let begin = "The PTX of this cubin is not known: it is not in the kernel cache (`kedge \
                 kernel-cache ls`), because it was compiled without kedge or too long ago, or it \
                 was linked of several inputs";
    let is_loaded = |part: &str| maps.lines().any(|line| line.contains(part));
    let loaded = FRAMEWORKS.iter().filter(|(part, ..)| is_loaded(part));
    let ways: Vec<String> = loaded.map(|(_, name, way)| format!("{name}: {way}")).collect();
    match ways.is_empty() {
        true => format!("{begin}; compile it again under kedge, or to PTX"),
        false => format!("{begin}; to compile it again, {}", ways.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_framework_s_switch_is_named() {
        let line = |path| format!("7f00-7f01 r-xp 00000000 00:01 7  /usr/lib/python3/{path}\n");
        let cupy = advice(&line("cupy_backends/cuda/libs/nvrtc.so"));
        assert!(cupy.contains("CuPy: set CUPY_CACHE_DIR") && !cupy.contains("NUMBA"), "{cupy}");
        let both = advice(&(line("numba/_helperlib.so") + &line("warp/bin/warp.so")));
        assert!(both.contains("NUMBA_CACHE_DIR") && both.contains("WARP_CACHE_PATH"), "{both}");
        assert!(advice(&line("libc.so.6")).ends_with("compile it again under kedge, or to PTX"));
    }
}
