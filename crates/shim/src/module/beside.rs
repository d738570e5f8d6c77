//! PTX that stands beside its cubin in Triton's cache.
//!
//! Triton has `ptxas` make its cubins, a program that asks no driver, and keeps each step of a
//! compilation in a folder of its cache: `KERNEL.ptx` beside `KERNEL.cubin`, in
//! `$TRITON_CACHE_DIR/*`, else `$TRITON_HOME/.triton/cache/*`, else `~/.triton/cache/*`. PyTorch's
//! compiler has such a cache of its own, and sets the variable.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Most folders that are looked at.
const MAX_FOLDERS: usize = 65536;
/// Longest PTX, in bytes.
const MAX_PTX: u64 = 64 << 20;

/// Returns the PTX beside this cubin, which has these kernels. The cubin there is the same, byte
/// for byte.
pub(super) fn find(cubin: &[u8], kernels: &[&str]) -> Option<Vec<u8>> {
    find_in(&cache()?, cubin, kernels)
}

fn cache() -> Option<PathBuf> {
    // Read each time: a program may set it.
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(cache) = variable("TRITON_CACHE_DIR") {
        return Some(cache.into());
    }
    let home = variable("TRITON_HOME").or_else(|| variable("HOME"))?;
    Some(Path::new(&home).join(".triton/cache"))
}

fn find_in(cache: &Path, cubin: &[u8], kernels: &[&str]) -> Option<Vec<u8>> {
    let folders = fs::read_dir(cache).ok()?.take(MAX_FOLDERS).flatten();
    for folder in folders {
        for kernel in kernels.iter().filter(|name| is_file_name(name)) {
            let path = folder.path().join(format!("{kernel}.cubin"));
            let there = read(&path, cubin.len() as u64);
            if there.is_some_and(|there| there == cubin) {
                return read(&path.with_extension("ptx"), MAX_PTX);
            }
        }
    }
    None
}

/// A cubin names its kernels as it likes.
fn is_file_name(name: &str) -> bool {
    !name.is_empty() && name.len() < 200 && !name.contains(['/', '\0', '.'])
}

/// Returns what is in a regular file of this user's, of `most` bytes at most.
fn read(path: &Path, most: u64) -> Option<Vec<u8>> {
    // A FIFO is not waited for.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    if !is_own_file(&file, most) {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= most).then_some(bytes)
}

fn is_own_file(file: &File, most: u64) -> bool {
    // SAFETY: geteuid takes nothing and cannot fail.
    let own = unsafe { libc::geteuid() };
    file.metadata().is_ok_and(|data| data.is_file() && data.uid() == own && data.len() <= most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_cubin_s_ptx_is_taken() {
        let cache = std::env::temp_dir().join(format!("kedge-beside-{}", std::process::id()));
        let _ = fs::remove_dir_all(&cache);
        for (folder, cubin, ptx) in [("a", "other", "no"), ("b", "same", "yes"), ("c", "", "no")] {
            fs::create_dir_all(cache.join(folder)).unwrap();
            fs::write(cache.join(folder).join("k.cubin"), cubin).unwrap();
            fs::write(cache.join(folder).join("k.ptx"), ptx).unwrap();
        }
        fs::write(cache.join("no-folder"), "x").unwrap();
        let found = |cubin: &str, kernels: &[&str]| find_in(&cache, cubin.as_bytes(), kernels);
        assert_eq!(found("same", &["j", "k"]).as_deref(), Some(&b"yes"[..]));
        assert_eq!(found("else", &["k"]), None);
        assert_eq!(found("same", &["../b/k", "", "b/k"]), None);
        fs::remove_file(cache.join("b/k.ptx")).unwrap();
        assert_eq!(found("same", &["k"]), None);
        fs::remove_dir_all(&cache).unwrap();
        assert_eq!(found("same", &["k"]), None);
    }
}
