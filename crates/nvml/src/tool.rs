//! nvidia-smi, which speaks private interfaces of NVIDIA's library beside NVML: it is given
//! NVIDIA's own.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

const TOOL: &str = "nvidia-smi";
const SEARCHED: &str = "LD_LIBRARY_PATH";

/// Runs as the library is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = step_aside;

/// Starts the tool once more in its own place, without the job's folder among those where libraries
/// are looked for. Where that cannot be, it goes on with this library.
extern "C" fn step_aside() {
    let exe = std::env::current_exe().unwrap_or_default();
    if exe.file_name() != Some(OsStr::new(TOOL)) {
        return;
    }
    let socket = std::env::var_os("KEDGE_SOCKET").unwrap_or_default();
    let ours = Path::new(&socket).with_file_name("lib");
    let searched = std::env::var_os(SEARCHED).unwrap_or_default();
    let Some(others) = without(&searched, &ours) else { return };
    let mut words = std::env::args_os();
    let mut command = Command::new(exe);
    command.arg0(words.next().unwrap_or_else(|| TOOL.into())).args(words);
    if others.is_empty() {
        command.env_remove(SEARCHED);
    } else {
        command.env(SEARCHED, others);
    }
    // It returns only if it fails.
    let _ = command.exec();
}

/// The folders of a search path but for `ours`; `None` if that is not among them: nothing would be
/// different.
fn without(searched: &OsStr, ours: &Path) -> Option<OsString> {
    let all: Vec<_> = std::env::split_paths(searched).collect();
    let others: Vec<_> = all.iter().filter(|folder| *folder != ours).collect();
    if others.len() == all.len() { None } else { std::env::join_paths(others).ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_folder_is_taken_out_of_a_search_path() {
        let without = |searched: &str| without(searched.as_ref(), "/job/lib".as_ref());
        assert_eq!(without("/job/lib:/a:/b"), Some("/a:/b".into()));
        assert_eq!(without("/a:/job/lib"), Some("/a".into()));
        assert_eq!(without("/job/lib"), Some("".into()));
        assert_eq!(without("/a:/b"), None);
        assert_eq!(without(""), None);
    }
}
