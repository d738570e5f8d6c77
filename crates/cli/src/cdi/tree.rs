//! kedge's files on the host, and where a container gets them.

use crate::Failure;
use kedge_supervisor::Parts;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Where containers have kedge: a folder that nearly every image's PATH has, so that no variable of
/// the image's is replaced.
const PREFIX: &str = "/usr/local";
/// Where the loader looks for libraries without being told, in Debian's family and in Red Hat's.
const LIBRARIES: [&str; 2] = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64"];

/// The files of one installation.
#[derive(Debug)]
pub(crate) struct Tree {
    command: PathBuf,
    proxy: PathBuf,
    shim: PathBuf,
    nvml: Option<PathBuf>,
}

impl Tree {
    /// Those of this `kedge`.
    ///
    /// # Errors
    /// The parts are not there, or have names that no specification can hold.
    pub(crate) fn own() -> Result<Tree, Failure> {
        let Parts { shim, proxy, nvml } = Parts::find()?;
        let command = std::env::current_exe().and_then(|exe| exe.canonicalize())?;
        let tree = Tree { command, proxy, shim, nvml };
        let odd = |path: &Path| path.to_str().is_none_or(|text| text.contains(['=', ':', '\n']));
        if let Some((path, _)) = tree.files().into_iter().find(|(path, _)| odd(path)) {
            return Err(Failure::new(format!(
                "{}: a container's mount cannot have this name: install kedge in a folder whose \
                 name has no = and no :",
                path.display()
            )));
        }
        Ok(tree)
    }

    /// Those of an installation below `prefix`, which may be another machine's or another
    /// container's folder.
    pub(crate) fn below(prefix: &Path) -> Tree {
        let library = |name| prefix.join("lib/kedge").join(name);
        Tree {
            command: prefix.join("bin/kedge"),
            proxy: library("kedge-proxy"),
            shim: library("libkedge_cuda.so"),
            nvml: Some(library("libkedge_nvml.so")),
        }
    }

    fn files(&self) -> Vec<(&Path, &'static str)> {
        let nvml = self.nvml.as_deref().map(|nvml| (nvml, "lib/kedge/libkedge_nvml.so"));
        let all = [
            (&*self.command, "bin/kedge"),
            (&*self.proxy, "lib/kedge/kedge-proxy"),
            (&*self.shim, "lib/kedge/libkedge_cuda.so"),
        ];
        all.into_iter().chain(nvml).collect()
    }

    /// Checks that root gives containers no file that others can change: whoever is given a device
    /// runs it. What is not here, and is on the machine of the containers, is that machine's.
    ///
    /// # Errors
    /// Another user can change one of the files, or a folder above it.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        let all = self.files();
        let above = all.iter().flat_map(|(path, _)| path.ancestors());
        for path in above.filter(|path| path.is_absolute()) {
            let Ok(meta) = path.symlink_metadata() else { continue };
            // In a folder like /tmp, others cannot replace what is root's.
            let is_sticky = meta.is_dir() && meta.mode() & 0o1000 != 0;
            let is_open = !meta.is_symlink() && meta.mode() & 0o002 != 0 && !is_sticky;
            if meta.uid() != 0 || is_open {
                return Err(Failure::new(format!(
                    "{}: another user can change it, and so what containers run: install kedge \
                     where only root can write (make install)",
                    path.display()
                )));
            }
        }
        Ok(())
    }

    /// The files and their places in a container. The management library is among kedge's own
    /// parts alone: it answers under `kedge run`, and a program that finds it elsewhere would take
    /// its driver for broken.
    pub(crate) fn mounts(&self) -> Vec<(String, String)> {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let parts = self.files().into_iter();
        let parts = parts.map(|(host, place)| (text(host), format!("{PREFIX}/{place}")));
        let driver = LIBRARIES.map(|folder| (text(&self.shim), format!("{folder}/libcuda.so.1")));
        parts.chain(driver).collect()
    }

    /// The variables that programs in a container need.
    pub(crate) fn environment(&self) -> Vec<(String, String)> {
        vec![("KEDGE_LIB_DIR".to_owned(), format!("{PREFIX}/lib/kedge"))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_is_where_loaders_look() {
        let mounts = Tree::below(Path::new("/opt/kedge")).mounts();
        let of = |place: &str| mounts.iter().find(|(_, to)| to == place).map(|(from, _)| &**from);
        assert_eq!(of("/usr/local/bin/kedge"), Some("/opt/kedge/bin/kedge"));
        let driver = Some("/opt/kedge/lib/kedge/libkedge_cuda.so");
        assert_eq!(of("/usr/lib/x86_64-linux-gnu/libcuda.so.1"), driver);
        assert_eq!(of("/usr/lib64/libcuda.so.1"), driver);
        assert_eq!(mounts.len(), 6);
    }
}
