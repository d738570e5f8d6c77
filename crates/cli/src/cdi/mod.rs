//! `kedge cdi`: software devices for containers, by the Container Device Interface.

mod spec;
mod tree;

pub(crate) use spec::{Kind, Spec};
pub(crate) use tree::Tree;

use crate::{Failure, output};
use clap::Args;
use kedge_control::gpu::GpuSpec;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

const AFTER_HELP: &str = "\
A container that is given a device finds kedge's libcuda.so.1 where its loader looks, and its \
programs run on software devices without `kedge run`; `kedge run` is there too, for jobs that are \
to be checkpointed. A container that is given several devices has as many.

Examples:
  kedge cdi --gpu soft:4 --write           as root, once
  podman run --device kedge.dev/gpu=soft0 IMAGE ./program
  kedge cdi --write --folder ~/.cdi        for tools that are told of a folder";

/// Where container tools look for specifications that stay.
const FOLDER: &str = "/etc/cdi";

/// Print or write a CDI specification: software devices for containers
///
/// Podman, Docker, containerd and CRI-O read it, and add to a container what it says of a device.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct CdiArgs {
    #[command(flatten)]
    devices: DevicesArgs,
    /// Write it into a file of the folder, instead of printing it
    #[arg(long)]
    write: bool,
    /// Where it is written [default: /etc/cdi]
    #[arg(long, value_name = "DIR", requires = "write")]
    folder: Option<PathBuf>,
    /// The kind of the devices, VENDOR/CLASS
    #[arg(long, value_name = "KIND", default_value = "kedge.dev/gpu")]
    kind: Kind,
}

/// Which devices, and whose kedge; `kedge k8s plugin` takes the same.
#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// How many software devices there are: soft or soft:N
    #[arg(long, value_name = "soft:N", default_value = "soft", value_parser = soft)]
    gpu: u32,
    /// The installation that containers get, by its folder on the host, with bin and lib [default:
    /// this kedge]
    #[arg(long, value_name = "DIR", value_parser = prefix)]
    prefix: Option<PathBuf>,
}

impl DevicesArgs {
    pub(crate) fn count(&self) -> u32 {
        self.gpu
    }

    /// The files that containers get.
    ///
    /// # Errors
    /// Those of this kedge are not there.
    pub(crate) fn tree(&self) -> Result<Tree, Failure> {
        self.prefix.as_deref().map_or_else(Tree::own, |prefix| Ok(Tree::below(prefix)))
    }
}

/// `soft` or `soft:N`: how many.
fn soft(text: &str) -> Result<u32, String> {
    match text.parse::<GpuSpec>().map_err(|error| error.to_string())? {
        GpuSpec::Soft { devices, apart: false } => Ok(devices),
        _ => Err(format!("containers get software devices: give soft or soft:N, not {text}")),
    }
}

/// An absolute folder, whose name can stand in a mount.
fn prefix(text: &str) -> Result<PathBuf, String> {
    if !text.starts_with('/') || text.contains(['=', ':', '\n']) {
        return Err("give the folder's whole path on the host, without = and :".to_owned());
    }
    Ok(PathBuf::from(text))
}

pub(crate) fn run(args: &CdiArgs) -> Result<(), Failure> {
    let tree = args.devices.tree()?;
    let spec = Spec::new(&args.kind, args.devices.count(), &tree);
    if !args.write {
        return Ok(output::json(&spec)?);
    }
    tree.check()?;
    let folder = args.folder.as_deref().unwrap_or(Path::new(FOLDER));
    let file = write(&spec, &args.kind, folder)?;
    Ok(output::print(&format!("{}\n", file.display()))?)
}

/// Writes the specification as a whole in the place of one that was there; returns its file.
///
/// # Errors
/// The folder cannot be made or written to.
pub(crate) fn write(spec: &Spec, kind: &Kind, folder: &Path) -> Result<PathBuf, Failure> {
    let file = folder.join(kind.file());
    let failed = |source: io::Error| {
        let hint = match source.kind() {
            io::ErrorKind::PermissionDenied => "; write it as root, or give --folder",
            _ => "",
        };
        Failure::new(format!("{}: {source}{hint}", file.display()))
    };
    let text = serde_json::to_string_pretty(spec).map_err(|error| failed(error.into()))?;
    fs::create_dir_all(folder).map_err(failed)?;
    // Tools read files that end in .json or .yaml.
    let new = folder.join(format!(".{}.{}", kind.file(), std::process::id()));
    let _ = fs::remove_file(&new);
    let made = fs::OpenOptions::new().write(true).create_new(true).mode(0o644).open(&new);
    let written = made.and_then(|mut made| {
        made.write_all(format!("{text}\n").as_bytes())?;
        // Whatever the umask: users' tools read it, too.
        made.set_permissions(fs::Permissions::from_mode(0o644))?;
        made.sync_all()?;
        fs::rename(&new, &file)?;
        fs::File::open(folder)?.sync_all()
    });
    if written.is_err() {
        let _ = fs::remove_file(&new);
    }
    written.map_err(failed)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_software_devices() {
        assert_eq!((soft("soft"), soft("soft:3")), (Ok(1), Ok(3)));
        for bad in ["local", "soft:0", "soft:17", "soft:2:apart", "host/0", "soft,host/0", ""] {
            assert!(soft(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn prefixes_are_whole_paths() {
        assert!(prefix("/opt/kedge").is_ok());
        for bad in ["opt", "/a:b", "/a=b", ""] {
            assert!(prefix(bad).is_err(), "{bad}");
        }
    }
}
