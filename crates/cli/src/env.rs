//! `kedge env`: what compilers and linkers need to build for the CUDA driver where none is
//! installed.

use crate::{Failure, output};
use clap::{Args, ValueEnum};
use kedge_supervisor::Parts;
use serde::Serialize;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

const AFTER_HELP: &str = "\
A program that calls the driver API is linked with -lcuda, which NVIDIA's driver brings. Where \
there is no driver, kedge's stands in for it: LIBRARY_PATH names a folder in which GCC, Clang and \
nvcc find it, CMAKE_LIBRARY_PATH the same for CMake (CUDA::cuda_driver). The program needs \
libcuda.so.1 as ever, so that it runs under `kedge run` here and on NVIDIA's driver elsewhere. \
Headers are the toolkit's.

Examples:
  eval \"$(kedge env)\" && make && kedge run -- ./program
  kedge env --format plain >> \"$GITHUB_ENV\"     for the later steps of a CI job (docs/ci.md)
  kedge env --format fish | source";

/// Print what compilers need for -lcuda on a machine without a driver
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct EnvArgs {
    /// The form of what is printed
    #[arg(long, value_enum, default_value = "sh", conflicts_with = "json")]
    format: Format,
    /// Print a JSON object: folder, variables (an object: names, and values as they are to be)
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For sh, bash and zsh
    Sh,
    /// For fish
    Fish,
    /// For csh and tcsh
    Csh,
    /// NAME=value, for files of variables
    Plain,
}

/// Where linkers look for libraries.
const VARIABLES: [&str; 2] = ["LIBRARY_PATH", "CMAKE_LIBRARY_PATH"];

#[derive(Debug, Serialize)]
struct Told {
    folder: PathBuf,
    variables: serde_json::Map<String, serde_json::Value>,
}

pub(crate) fn run(args: &EnvArgs) -> Result<(), Failure> {
    let parts = Parts::find()?;
    let folder = kedge_kernel_cache::folder("link")?;
    let shown = listable(&folder)?;
    link(&folder.join("libcuda.so"), &parts.shim)?;
    if let Some(nvml) = &parts.nvml {
        link(&folder.join("libnvidia-ml.so"), nvml)?;
    }
    let values = VARIABLES.map(|name| {
        let before = std::env::var(name).unwrap_or_default();
        (name, with(shown, &before))
    });
    if args.json {
        let variables = values.map(|(name, value)| (name.to_owned(), value.into()));
        let variables = variables.into_iter().collect();
        return Ok(output::json(&Told { folder, variables })?);
    }
    let lines = values.map(|(name, value)| line(args.format, name, &value));
    Ok(output::print(&lines.concat())?)
}

/// A folder's name as it can stand in a list of folders.
fn listable(folder: &Path) -> Result<&str, Failure> {
    let name = folder.to_str().filter(|name| !name.contains([':', ';', '\n']));
    name.ok_or_else(|| {
        let text = "no list of folders can name it: set XDG_CACHE_HOME to one without : and ;";
        format!("{}: {text}", folder.display()).into()
    })
}

/// Points `name` at the library, whatever it was before.
fn link(name: &Path, library: &Path) -> Result<(), Failure> {
    if std::fs::read_link(name).is_ok_and(|leads_to| leads_to == library) {
        return Ok(());
    }
    // Another process may do the same now: each has a name of its own, and replaces the link whole.
    let new = name.with_extension(format!("{}.new", std::process::id()));
    let failed = |source: io::Error| format!("{}: {source}", name.display());
    let _ = std::fs::remove_file(&new);
    symlink(library, &new).and_then(|()| std::fs::rename(&new, name)).map_err(failed)?;
    Ok(())
}

/// The list `before` with `folder` in front, once.
fn with(folder: &str, before: &str) -> String {
    let others = before.split(':').filter(|other| !other.is_empty() && *other != folder);
    [folder].into_iter().chain(others).collect::<Vec<_>>().join(":")
}

fn line(format: Format, name: &str, value: &str) -> String {
    match format {
        Format::Sh => format!("export {name}={}\n", quoted(value, "'\\''")),
        Format::Fish => format!("set -gx {name} {}\n", quoted(&value.replace('\\', "\\\\"), "\\'")),
        Format::Csh => format!("setenv {name} {}\n", quoted(&value.replace('!', "\\!"), "'\\''")),
        Format::Plain => format!("{name}={value}\n"),
    }
}

/// `value` in single quotes, its own ones as `quote`.
fn quoted(value: &str, quote: &str) -> String {
    format!("'{}'", value.replace('\'', quote))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_comes_first_and_once() {
        assert_eq!(with("/a/link", ""), "/a/link");
        assert_eq!(with("/a/link", "/b:/c"), "/a/link:/b:/c");
        // Called twice in one shell.
        assert_eq!(with("/a/link", "/a/link:/b::"), "/a/link:/b");
    }

    #[test]
    fn each_shell_reads_its_own_form() {
        let told = |format| line(format, "LIBRARY_PATH", r"/it's a\b!");
        assert_eq!(told(Format::Sh), "export LIBRARY_PATH='/it'\\''s a\\b!'\n");
        assert_eq!(told(Format::Fish), "set -gx LIBRARY_PATH '/it\\'s a\\\\b!'\n");
        assert_eq!(told(Format::Csh), "setenv LIBRARY_PATH '/it'\\''s a\\b\\!'\n");
        assert_eq!(told(Format::Plain), "LIBRARY_PATH=/it's a\\b!\n");
    }

    #[test]
    fn what_no_list_can_name_is_told() {
        assert!(listable(Path::new("/home/me/.cache")).is_ok());
        for name in ["/a:b", "/a;b", "/a\nb"] {
            assert!(listable(Path::new(name)).is_err(), "{name}");
        }
    }
}
