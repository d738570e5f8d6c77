//! Where the driver's library and the GPUs' device nodes lie, found without opening any.

use crate::diagnosis::Installation;
use crate::driver::DriverError;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The library's name, as programs load it.
pub(crate) const LIBRARY: &str = "libcuda.so.1";

/// Where drivers lie that the loader's own search does not find.
pub(crate) const USUAL_PLACES: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/usr/local/nvidia/lib/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
];

/// The library that a proxy would open: `KEDGE_DRIVER`, else what the loader would find, else one
/// in the usual places. kedge's own library, which jobs find under the same name, does not count.
pub fn driver_path() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("KEDGE_DRIVER") {
        return Some(PathBuf::from(path)).filter(|path| path.exists());
    }
    let searched = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let searched = std::env::split_paths(&searched).filter(|dir| dir.is_absolute());
    let cache = fs::read("/etc/ld.so.cache").unwrap_or_default();
    let mut places = searched.map(|dir| dir.join(LIBRARY)).collect::<Vec<_>>();
    places.extend(cached(&cache));
    places.extend(USUAL_PLACES.iter().map(PathBuf::from));
    places.into_iter().find(|path| path.exists() && !is_ours(path))
}

/// One line: what stands in the way of this machine's GPUs, as far as files tell, and what mends
/// it. Nothing is opened; a driver that `KEDGE_DRIVER` names is believed to need none of them.
pub fn obstacle() -> Option<String> {
    if std::env::var_os("KEDGE_DRIVER").is_some() {
        return None;
    }
    match driver_path() {
        Some(_) => Installation::look_without_opening().obstacle(),
        None => Some(DriverError::Missing("there is none".into()).to_string()),
    }
}

/// The paths of the library in the loader's cache, whose strings end with NUL (ldconfig(8)).
fn cached(cache: &[u8]) -> Vec<PathBuf> {
    let strings = cache.split(|&byte| byte == 0);
    let paths = strings.map(|bytes| Path::new(OsStr::from_bytes(bytes)));
    let ours = paths.filter(|path| path.is_absolute() && path.ends_with(LIBRARY));
    ours.map(Path::to_path_buf).collect()
}

/// Jobs find kedge's library by a link that has the driver's name.
fn is_ours(path: &Path) -> bool {
    let target = fs::canonicalize(path).unwrap_or_default();
    target.file_name().is_some_and(|name| name.as_bytes().starts_with(b"libkedge_cuda"))
}

/// The device nodes of GPUs: /dev/nvidia0 and so on, in no order; /dev/dxg stands for the GPUs of a
/// Windows host (WSL 2).
pub fn gpu_nodes() -> Vec<PathBuf> {
    let entries = fs::read_dir("/dev").into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| is_gpu(path)).collect()
}

fn is_gpu(path: &Path) -> bool {
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let number = name.strip_prefix("nvidia").unwrap_or_default();
    name == "dxg" || (!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_read() {
        let cache = b"junk\0libcuda.so.1\0/lib/x/libcuda.so.1\0/lib/libcuda.so.11\0/a/libcuda.so.1";
        let found = cached(cache);
        assert_eq!(found, [Path::new("/lib/x/libcuda.so.1"), Path::new("/a/libcuda.so.1")]);
    }

    #[test]
    fn device_nodes_of_gpus_have_numbers() {
        let gpu = |name: &str| is_gpu(&Path::new("/dev").join(name));
        assert!(gpu("nvidia0") && gpu("nvidia15") && gpu("dxg"));
        assert!(!gpu("nvidiactl") && !gpu("nvidia-uvm") && !gpu("nvidia") && !gpu("null"));
    }
}
