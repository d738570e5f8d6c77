//! `cargo xtask layering`: the crates' dependencies against the layers that ARCHITECTURE.md draws,
//! the crates that must be free of unsafe code, and circles of modules inside crates.

use crate::circles;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;
use std::path::Path;

/// Codecs, parsers, contracts, the command line, tests.
const WITHOUT_UNSAFE: [&str; 19] = [
    "bench",
    "cache",
    "cli",
    "control",
    "coordinator",
    "device",
    "gpu-image",
    "holder",
    "image",
    "k8s",
    "kernel-cache",
    "pages",
    "pmi",
    "protocol",
    "ptx",
    "remote",
    "server",
    "tests",
    "wire",
];

/// What supervises jobs and the command link no device, directly or through others: a device may be
/// on another host.
const WITHOUT_DEVICES: [&str; 3] = ["bench", "cli", "supervisor"];
const DEVICES: [&str; 4] = ["proxy", "device", "device-nvidia", "device-soft"];

/// What is loaded into programs links no `tracing`, directly or through others: its state would be
/// the program's.
const IN_PROGRAMS: [&str; 4] = ["shim", "nvml", "cache-client", "cache-preload"];

/// Fails with every arrow that points up or sideways, and every crate that has no layer.
pub(crate) fn check(root: &Path) -> Result<(), String> {
    let read = |path: &str| {
        std::fs::read_to_string(root.join(path)).map_err(|error| format!("{path}: {error}"))
    };
    let layers = layers(&read("ARCHITECTURE.md")?);
    let mut wrong = String::new();
    let (mut needs, mut with_tracing) = (BTreeMap::new(), Vec::new());
    let packages = packages(root)?;
    for (name, folder) in &packages {
        let Some(own) = layers.get(name.as_str()) else {
            let _ = writeln!(wrong, "{name} has no row in ARCHITECTURE.md's table of layers");
            continue;
        };
        let manifest = read(&format!("{folder}/Cargo.toml"))?;
        if manifest.lines().any(|line| line.starts_with("tracing")) {
            with_tracing.push(name.clone());
        }
        let needed = dependencies(&manifest);
        needs.insert(name.clone(), needed.clone());
        for needed in needed {
            match layers.get(needed.as_str()) {
                Some(below) if below < own => {}
                Some(below) => {
                    let _ =
                        writeln!(wrong, "{name} (layer {own}) depends on {needed} (layer {below})");
                }
                None => {
                    let _ = writeln!(wrong, "{name} depends on {needed}, which has no layer");
                }
            }
        }
        let forbids = |file: &str| {
            read(&format!("{folder}/src/{file}"))
                .is_ok_and(|text| text.contains("#![forbid(unsafe_code)]"))
        };
        if WITHOUT_UNSAFE.contains(&name.as_str()) && !forbids("lib.rs") && !forbids("main.rs") {
            let _ = writeln!(wrong, "{name} lacks #![forbid(unsafe_code)]");
        }
    }
    for name in WITHOUT_DEVICES {
        if let Some(chain) = chain(&needs, name, &DEVICES) {
            let _ = writeln!(wrong, "{name} must link no device: {}", chain.join(" → "));
        }
    }
    let with_tracing: Vec<&str> = with_tracing.iter().map(String::as_str).collect();
    for name in IN_PROGRAMS {
        if let Some(chain) = chain(&needs, name, &with_tracing) {
            let _ = writeln!(wrong, "{name} must link no tracing: {}", chain.join(" → "));
        }
    }
    wrong += &circles::check(root, &packages)?;
    if wrong.is_empty() { Ok(()) } else { Err(format!("layering:\n{wrong}")) }
}

/// Crate name → layer, from rows such as ``| 0 | `wire`, `cuda-types` | … |``.
fn layers(architecture: &str) -> BTreeMap<String, u32> {
    let mut layers = BTreeMap::new();
    for line in architecture.lines() {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        let (Some(layer), Some(names)) = (cells.next(), cells.next()) else { continue };
        let Ok(layer) = layer.parse() else { continue };
        for name in names.split(',') {
            layers.insert(name.trim().trim_matches('`').to_owned(), layer);
        }
    }
    layers
}

/// (name, folder) of every package but xtask.
fn packages(root: &Path) -> Result<Vec<(String, String)>, String> {
    let mut packages = vec![("tests".to_owned(), "tests".to_owned())];
    let crates = root.join("crates");
    let read = |error| format!("{}: {error}", crates.display());
    for entry in std::fs::read_dir(&crates).map_err(read)? {
        let name = entry.map_err(read)?.file_name().to_string_lossy().into_owned();
        let folder = format!("crates/{name}");
        packages.push((name, folder));
    }
    packages.sort();
    Ok(packages)
}

/// kedge's own crates among a manifest's ordinary dependencies.
fn dependencies(manifest: &str) -> Vec<String> {
    let mut section = "";
    let mut found = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line.trim();
        } else if section == "[dependencies]"
            && let Some(rest) = line.strip_prefix("kedge-")
            && let Some(end) = rest.find(|c: char| !(c.is_alphanumeric() || c == '-'))
        {
            found.push(rest[..end].to_owned());
        }
    }
    found
}

/// The shortest way from the crate `from` to one of `ends`, along dependencies.
fn chain(needs: &BTreeMap<String, Vec<String>>, from: &str, ends: &[&str]) -> Option<Vec<String>> {
    let mut ways = VecDeque::from([vec![from.to_owned()]]);
    let mut seen = BTreeSet::new();
    while let Some(way) = ways.pop_front() {
        let last = way.last()?;
        if ends.contains(&last.as_str()) {
            return Some(way);
        }
        for next in needs.get(last).into_iter().flatten() {
            if seen.insert(next.clone()) {
                ways.push_back(way.iter().chain([next]).cloned().collect());
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_come_from_the_table() {
        let layers = layers(
            "| layer | crate |\n|---|---|\n| 4 | `shim` | x |\n| 0 | `wire`, `cuda-types` | y |\n",
        );
        assert_eq!(layers.get("shim"), Some(&4));
        assert_eq!(layers.get("cuda-types"), Some(&0));
        assert_eq!(layers.len(), 3);
    }

    #[test]
    fn devices_are_found_behind_other_crates() {
        let mut needs = BTreeMap::from([
            ("cli".to_owned(), vec!["control".to_owned(), "supervisor".to_owned()]),
            ("supervisor".to_owned(), vec!["control".to_owned(), "process".to_owned()]),
            ("control".to_owned(), vec!["wire".to_owned()]),
            ("proxy".to_owned(), vec!["control".to_owned(), "device-soft".to_owned()]),
        ]);
        assert_eq!(chain(&needs, "cli", &DEVICES), None);
        needs.insert("process".to_owned(), vec!["device-soft".to_owned()]);
        let found = chain(&needs, "cli", &DEVICES).unwrap();
        assert_eq!(found, ["cli", "supervisor", "process", "device-soft"]);
        assert_eq!(chain(&needs, "supervisor", &DEVICES).unwrap().len(), 3);
        assert_eq!(chain(&needs, "control", &DEVICES), None);
        needs.insert("supervisor".to_owned(), vec!["proxy".to_owned()]);
        assert_eq!(chain(&needs, "supervisor", &DEVICES).unwrap(), ["supervisor", "proxy"]);
    }

    #[test]
    fn only_ordinary_dependencies_count() {
        let manifest = "[dependencies]\nkedge-wire.workspace = true\nlibc.workspace = true\n\
                        [dev-dependencies]\nkedge-proxy.workspace = true\n";
        assert_eq!(dependencies(manifest), ["wire"]);
    }
}
