//! A specification of the Container Device Interface (CDI), as far as kedge's has parts of it, and
//! its rules for names.

use super::tree::Tree;
use kedge_cuda_types::granted;
use serde::Serialize;

/// The oldest version that has all that is used here: container tools refuse newer ones than they
/// know. Podman 4.3 knows 0.5.0.
const VERSION: &str = "0.5.0";

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Spec {
    cdi_version: &'static str,
    kind: String,
    devices: Vec<Device>,
    container_edits: Edits,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    name: String,
    container_edits: Edits,
}

/// What is added to a container.
#[derive(Debug, Default, Serialize)]
struct Edits {
    env: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mounts: Vec<Mount>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Mount {
    host_path: String,
    container_path: String,
    options: [&'static str; 4],
}

impl Spec {
    /// The specification of `devices` software devices of this kind, which are what lies in `tree`.
    pub(crate) fn new(kind: &Kind, devices: u32, tree: &Tree) -> Spec {
        let device = |number| {
            let (name, value) = granted::variable(number);
            let container_edits =
                Edits { env: vec![format!("{name}={value}")], mounts: Vec::new() };
            Device { name: format!("soft{number}"), container_edits }
        };
        let mount = |(host_path, container_path)| {
            let options = ["bind", "ro", "nosuid", "nodev"];
            Mount { host_path, container_path, options }
        };
        let env = tree.environment().into_iter().map(|(name, value)| format!("{name}={value}"));
        let container_edits =
            Edits { env: env.collect(), mounts: tree.mounts().into_iter().map(mount).collect() };
        let devices = (0..devices).map(device).collect();
        Spec { cdi_version: VERSION, kind: kind.0.clone(), devices, container_edits }
    }
}

/// A kind of devices, `VENDOR/CLASS`; Kubernetes' names of resources have the same form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kind(String);

impl Kind {
    pub(crate) fn name(&self) -> &str {
        &self.0
    }

    /// The name of its specification's file: what identifies it among others'.
    pub(crate) fn file(&self) -> String {
        format!("{}.json", self.0.replace('/', "-"))
    }
}

impl std::str::FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Kind, String> {
        let inner = |c: char, more: &str| c.is_ascii_alphanumeric() || more.contains(c);
        let word = |word: &str, more: &str| {
            word.len() <= 63
                && word.starts_with(|c: char| c.is_ascii_alphabetic())
                && word.ends_with(|c: char| c.is_ascii_alphanumeric())
                && word.chars().all(|c| inner(c, more))
        };
        match text.split_once('/') {
            Some((vendor, class)) if word(vendor, "_-.") && word(class, "_-") => {
                Ok(Kind(text.to_owned()))
            }
            _ => Err(format!(
                "`{text}` is no kind of devices: give VENDOR/CLASS, each of letters, digits, - and \
                 _, such as kedge.dev/gpu"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn kinds_have_cdi_s_form() {
        for good in ["kedge.dev/gpu", "a/b", "example.com/soft-gpu", "K9/c_1"] {
            assert!(good.parse::<Kind>().is_ok(), "{good}");
        }
        let long = format!("{}/gpu", "a".repeat(64));
        for bad in ["", "gpu", "/gpu", "a/", "a/b/c", "9a/b", "a./b", "a/b.c", "a b/c", &*long] {
            assert!(bad.parse::<Kind>().is_err(), "{bad}");
        }
        let kind: Kind = "kedge.dev/gpu".parse().unwrap();
        assert_eq!(kind.file(), "kedge.dev-gpu.json");
    }

    /// The rules of CDI's schema for what is there: each field's type, no field without a name in
    /// it, absolute paths, names and variables in their forms.
    #[test]
    fn the_specification_keeps_the_schema_s_rules() {
        let spec = Spec::new(&"kedge.dev/gpu".parse().unwrap(), 2, &Tree::below(Path::new("/p")));
        let json = serde_json::to_value(&spec).unwrap();
        let keys = |value: &serde_json::Value| {
            value.as_object().unwrap().keys().map(String::clone).collect::<Vec<_>>()
        };
        assert_eq!(keys(&json), ["cdiVersion", "containerEdits", "devices", "kind"]);
        assert_eq!(
            (&json["cdiVersion"], &json["kind"]),
            (&"0.5.0".into(), &"kedge.dev/gpu".into())
        );
        let variable = |value: &serde_json::Value| {
            let (name, value) = value.as_str().unwrap().split_once('=').unwrap();
            !name.is_empty() && !value.is_empty()
        };
        for (number, device) in json["devices"].as_array().unwrap().iter().enumerate() {
            assert_eq!(keys(device), ["containerEdits", "name"]);
            assert_eq!(device["name"], format!("soft{number}"));
            assert_eq!(keys(&device["containerEdits"]), ["env"]);
            assert!(device["containerEdits"]["env"].as_array().unwrap().iter().all(variable));
        }
        assert_eq!(json["devices"].as_array().unwrap().len(), 2);
        assert_eq!(keys(&json["containerEdits"]), ["env", "mounts"]);
        assert!(json["containerEdits"]["env"].as_array().unwrap().iter().all(variable));
        for mount in json["containerEdits"]["mounts"].as_array().unwrap() {
            assert_eq!(keys(mount), ["containerPath", "hostPath", "options"]);
            let absolute = |name: &str| mount[name].as_str().unwrap().starts_with('/');
            assert!(absolute("containerPath") && absolute("hostPath"));
            assert!(mount["options"].as_array().unwrap().iter().all(serde_json::Value::is_string));
        }
    }
}
