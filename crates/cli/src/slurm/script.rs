//! Batch scripts.

use rustix::fs::OFlags;
use rustix::process::geteuid;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Longest script, in bytes; Slurm itself takes 4 MiB unless it is told otherwise.
const MAX_SCRIPT_LEN: u64 = 64 << 20;

/// Reads a batch script.
///
/// # Errors
/// It cannot be read, or is longer than any script.
pub(super) fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_of(&File::open(path)?)
}

fn read_of(file: &File) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    file.take(MAX_SCRIPT_LEN + 1).read_to_end(&mut text)?;
    if text.len() as u64 > MAX_SCRIPT_LEN {
        let words = format!("a script of more than {MAX_SCRIPT_LEN} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, words));
    }
    Ok(text)
}

/// Whether the script starts steps, as far as it says so itself: the word `srun` stands in it,
/// outside of lines that are comments.
pub(super) fn has_steps(text: &[u8]) -> bool {
    let is_of_a_word = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    let lines = text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii_start);
    lines.filter(|line| !line.starts_with(b"#")).any(|line| {
        let words = line.split(|byte| !is_of_a_word(*byte));
        words.into_iter().any(|word| word == b"srun")
    })
}

/// Puts the script beside the job's images, and returns where: Slurm's own copy is at another path
/// on another node, and a shell reads on in its script after a restart. What is there already is
/// left as it is where it is the same, and nobody else can change it.
///
/// # Errors
/// The folder or the file cannot be written, or others could put a script of theirs in its place.
pub(super) fn keep(folder: &Path, job: &str, text: &[u8]) -> io::Result<PathBuf> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    is_own(folder)?;
    let path = folder.join(format!(".{job}.script"));
    if there(&path).is_ok_and(|there| there.as_deref() == Some(text)) {
        return Ok(path);
    }
    let new = folder.join(format!(".{job}.script.{}", std::process::id()));
    let mut options = OpenOptions::new();
    let written = options.write(true).create_new(true).mode(0o700).open(&new).and_then(|mut to| {
        to.write_all(text)?;
        to.sync_all()?;
        fs::rename(&new, &path)
    });
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written.map(|()| path)
}

/// Fails where others may exchange files of a folder: what is kept there is run.
fn is_own(folder: &Path) -> io::Result<()> {
    let found = fs::metadata(folder)?;
    let is_own = [0, geteuid().as_raw()].contains(&found.uid());
    let (others_write, sticky) = (found.mode() & 0o022 != 0, found.mode() & 0o1000 != 0);
    if is_own && (!others_write || sticky) {
        return Ok(());
    }
    let why = "others may put files of theirs in the place of those in this folder, and the \
               script is run from there: give ckpt-dir=FOLDER of your own, or the option steps";
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// The text that is there already, unless another user has put it there, or can change it: it would
/// be run as it is then.
fn there(path: &Path) -> io::Result<Option<Vec<u8>>> {
    // Of a FIFO nobody may write to.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
    let found = file.metadata()?;
    let is_own = found.uid() == geteuid().as_raw() && found.mode() & 0o022 == 0;
    if !found.is_file() || !is_own {
        return Ok(None);
    }
    read_of(&file).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn scripts_with_steps_are_told_from_others() {
        for with in [
            "#!/bin/sh\nsrun ./sim\n",
            "  srun\t-n 2 ./sim",
            "exec /usr/bin/srun ./sim",
            "x=$(srun hostname)",
            "if true; then srun ./a; fi",
            "time srun",
        ] {
            assert!(has_steps(with.as_bytes()), "{with}");
        }
        for without in [
            "#!/bin/sh\n#SBATCH --srun\n./sim\n",
            "  # srun ./sim",
            "./srun.sh",
            "mysrun ./a",
            "srun_it",
            "./sim > srun.log",
            "",
        ] {
            assert!(!has_steps(without.as_bytes()), "{without}");
        }
    }

    #[test]
    fn a_script_is_kept_once_and_not_through_a_link() {
        let folder = std::env::temp_dir().join(format!("kedge-script-{}", std::process::id()));
        let images = folder.join("images");
        let path = keep(&images, "c-7", b"#!/bin/sh\n").unwrap();
        let inode = || fs::metadata(&path).unwrap().ino();
        let first = inode();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        keep(&images, "c-7", b"#!/bin/sh\n").unwrap();
        assert_eq!(inode(), first);
        let other = folder.join("other");
        fs::write(&other, "#!/bin/sh\n").unwrap();
        fs::remove_file(&path).unwrap();
        symlink(&other, &path).unwrap();
        keep(&images, "c-7", b"another\n").unwrap();
        let all = (fs::read(&path).unwrap(), fs::read(&other).unwrap());
        let left = fs::read_dir(&images).unwrap().count();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(all, (b"another\n".to_vec(), b"#!/bin/sh\n".to_vec()));
        assert_eq!(left, 1);
    }

    #[test]
    fn nothing_is_kept_where_others_exchange_files() {
        let folder = std::env::temp_dir().join(format!("kedge-shared-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let mut kept = Vec::new();
        for mode in [0o2770, 0o757, 0o1777, 0o755] {
            fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).unwrap();
            kept.push(keep(&folder, "c-7", b"#!/bin/sh\n").map_err(|error| error.kind()).is_ok());
        }
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(kept, [false, false, true, true]);
    }

    #[test]
    fn what_another_user_can_change_is_not_run() {
        let folder = std::env::temp_dir().join(format!("kedge-own-{}", std::process::id()));
        let text = b"#!/bin/sh\n";
        let path = keep(&folder, "c-7", text).unwrap();
        let kept = || {
            keep(&folder, "c-7", text).unwrap();
            let found = fs::symlink_metadata(&path).unwrap();
            (found.is_file(), found.uid(), found.mode() & 0o777)
        };
        let own = (true, geteuid().as_raw(), 0o700);
        let mut all = Vec::new();
        for mode in [0o720, 0o702, 0o777] {
            fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            all.push(kept());
        }
        if geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
            all.push(kept());
        }
        fs::remove_file(&path).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap();
        all.push(kept());
        fs::remove_dir_all(&folder).unwrap();
        assert!(all.iter().all(|kept| *kept == own), "{all:?}");
    }
}
