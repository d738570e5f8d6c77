//! Where kedge's other parts lie.

use std::path::{Path, PathBuf};
use thiserror::Error;

/// The libraries and the proxy that belong to this `kedge`.
#[derive(Debug)]
pub struct Parts {
    pub shim: PathBuf,
    pub proxy: PathBuf,
    /// NVIDIA's management library as jobs find it; programs do without it.
    pub nvml: Option<PathBuf>,
}

const SHIM: &str = "libkedge_cuda.so";
const NVML: &str = "libkedge_nvml.so";
const PROXY: &str = "kedge-proxy";
const PLUGIN: &str = "kedge-k8s";
const PRELOAD: &str = "libkedge_cache_preload.so";

#[derive(Debug, Error)]
pub enum PartsError {
    #[error("{file} is not in {places}: run `make build`, or set KEDGE_LIB_DIR to its folder")]
    NotFound { file: &'static str, places: String },
}

impl Parts {
    /// In `KEDGE_LIB_DIR`, else beside this executable, else in `lib/kedge` or `lib` next to its
    /// folder.
    pub fn find() -> Result<Parts, PartsError> {
        let places = places();
        let nvml = find_in(&places, NVML).ok();
        Ok(Parts { shim: find_in(&places, SHIM)?, proxy: find_in(&places, PROXY)?, nvml })
    }

    /// The device plugin for Kubernetes, in the same places.
    ///
    /// # Errors
    /// It is in none of them.
    pub fn plugin() -> Result<PathBuf, PartsError> {
        find_in(&places(), PLUGIN)
    }

    /// The library that has programs write into a cache's memory by themselves, in the same places.
    ///
    /// # Errors
    /// It is in none of them.
    pub fn preload() -> Result<PathBuf, PartsError> {
        find_in(&places(), PRELOAD)
    }
}

fn places() -> Vec<PathBuf> {
    if let Some(dir) = std::env::var_os("KEDGE_LIB_DIR") {
        return vec![PathBuf::from(dir)];
    }
    let exe = std::env::current_exe().and_then(|exe| exe.canonicalize()).unwrap_or_default();
    let bin = exe.parent().unwrap_or(Path::new("/")).to_owned();
    let prefix = bin.parent().unwrap_or(Path::new("/")).to_owned();
    vec![bin, prefix.join("lib/kedge"), prefix.join("lib")]
}

fn find_in(places: &[PathBuf], file: &'static str) -> Result<PathBuf, PartsError> {
    // Absolute, because links to it lie elsewhere.
    let found = places.iter().find_map(|dir| dir.join(file).canonicalize().ok());
    found.ok_or_else(|| {
        let places: Vec<_> = places.iter().map(|dir| dir.display().to_string()).collect();
        PartsError::NotFound { file, places: places.join(", ") }
    })
}
