//! Memory that devices write. A read by O_DIRECT pins its pages and marks them as written when it
//! begins; what arrives later tells nothing. So such a page may change behind a look that has
//! protected it, and only in the pause, when all calls have returned, are its bytes those that
//! count.

use crate::proc;
use libc::pid_t;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Whether the process has a descriptor by which devices write into its memory. One that is closed
/// while it is being read by another thread is not found.
pub(super) fn is_written(pid: pid_t) -> bool {
    let at = proc::reach(pid);
    let descriptors = fs::read_dir(format!("/proc/{at}/fdinfo")).into_iter().flatten().flatten();
    descriptors.map(|entry| entry.path()).any(|info| {
        let direct = fs::read_to_string(&info).is_ok_and(|text| is_direct(&text));
        direct
            && info.file_name().is_some_and(|fd| {
                has_device(&Path::new("/proc").join(at.to_string()).join("fd").join(fd))
            })
    })
}

/// Whether the text of /proc/PID/fdinfo/FD has O_DIRECT among its flags.
fn is_direct(info: &str) -> bool {
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & libc::O_DIRECT != 0)
}

/// Whether it is a file or a disk: of pipes, O_DIRECT says something else.
fn has_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() || found.file_type().is_block_device())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn who_reads_files_directly_is_known() {
        let own = std::process::id() as pid_t;
        assert!(!is_written(own));
        let _pipe = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::DIRECT).unwrap();
        assert!(!is_written(own), "a pipe of messages");
        let path = std::env::temp_dir().join(format!("kedge-direct-{own}"));
        let mut options = fs::OpenOptions::new();
        let direct = options.write(true).create(true).custom_flags(libc::O_DIRECT).open(&path);
        assert!(direct.is_err() || is_written(own));
        drop(direct);
        assert!(!is_written(own));
        fs::remove_file(path).unwrap();
        assert!(!is_direct("") && !is_direct("flags:\tx") && !is_direct("flags:\t0100002"));
        assert!(is_direct("pos:\t0\nflags:\t0140002\n"));
    }
}
