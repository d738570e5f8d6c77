//! NVIDIA's management library (NVML), which programs open by themselves, beside the devices.

use kedge_process::plugins::{Capture, Found, PluginError, World};
use std::fs::File;

/// The driver's device file that a process has opened by itself: NVIDIA's management library (NVML) does, which
/// frameworks ask for the number of GPUs.
pub(crate) fn path(file: &Found) -> Option<String> {
    let path = file.link.to_str().filter(|path| path.starts_with("/dev/nvidia"))?;
    (file.stat.mode & libc::S_IFMT == libc::S_IFCHR).then(|| path.to_owned())
}

/// What of it processes have open: descriptions and paths.
pub(crate) fn save(capture: &mut Capture, mine: &[usize]) -> Vec<(u32, String)> {
    let open = |index: &usize| Some((*index as u32, self::path(capture.file(*index))?));
    let found: Vec<(u32, String)> = mine.iter().filter_map(open).collect();
    if let Some((index, _)) = found.first() {
        let (pid, _) = capture.job.holder(capture.file(*index as usize));
        capture.warnings.push(format!(
            "process {pid} uses NVIDIA's management library (NVML): after a restart its calls fail until \
             it starts the library again"
        ));
    }
    found
}

/// Opens the file anew, which knows nothing of what was asked through the old one; where it is not there,
/// something that answers nothing.
pub(crate) fn reopen(description: u32, path: &str, world: &mut World) -> Result<(), PluginError> {
    let open = |path: &str| File::options().read(true).write(true).open(path);
    let named = Some(path).filter(|path| path.starts_with("/dev/nvidia") && !path.contains(".."));
    let file = named.and_then(|path| open(path).ok());
    let file = file
        .map_or_else(|| open("/dev/null"), Ok)
        .map_err(|source| PluginError::System { what: "open /dev/null".to_owned(), source })?;
    world.made(description, file)
}
