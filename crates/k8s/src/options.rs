//! The plugin's command line, written by `kedge k8s plugin` and read here.

use crate::api::Mount;
use crate::offer::{By, Offer, OfferError};
use std::ffi::OsString;
use std::path::PathBuf;
use thiserror::Error;

/// What the plugin is told.
#[derive(Debug)]
pub struct Options {
    /// The kubelet's folder of device plugins, with its socket.
    pub folder: PathBuf,
    /// What pods ask for, such as `kedge.dev/gpu`.
    pub resource: String,
    pub offer: Offer,
}

#[derive(Debug, Error)]
pub enum OptionsError {
    #[error("unknown option {0:?}; kedge-k8s is started by `kedge k8s plugin`")]
    Unknown(OsString),
    #[error("option {0} needs a value")]
    NoValue(String),
    #[error("option {option}: {value:?} is no proper value")]
    BadValue { option: String, value: OsString },
    #[error("{0} is missing; kedge-k8s is started by `kedge k8s plugin`")]
    Missing(&'static str),
    #[error(transparent)]
    Offer(#[from] OfferError),
}

impl Options {
    /// Reads `--name value` pairs. `--mount` is given once a file, as `HOST=CONTAINER`.
    ///
    /// # Errors
    /// An option is unknown, lacks its value or has a wrong one, or one is missing.
    pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Options, OptionsError> {
        let mut args = args.into_iter();
        let (mut folder, mut resource, mut kind) = (None, None, None);
        let (mut devices, mut share) = (None, 1);
        let (mut mounts, mut environment) = (Vec::new(), Vec::new());
        while let Some(arg) = args.next() {
            let name = arg.to_string_lossy().into_owned();
            let known = ["--folder", "--resource", "--cdi", "--devices", "--share", "--mount"];
            if !known.contains(&&*name) && name != "--env" {
                return Err(OptionsError::Unknown(arg));
            }
            let value = args.next().ok_or_else(|| OptionsError::NoValue(name.clone()))?;
            let bad = || OptionsError::BadValue { option: name.clone(), value: value.clone() };
            let text = || value.to_str().ok_or_else(bad);
            match &*name {
                "--folder" => folder = Some(PathBuf::from(&value)),
                "--resource" => resource = Some(text()?.to_owned()),
                "--cdi" => kind = Some(text()?.to_owned()),
                "--devices" => devices = Some(text()?.parse().map_err(|_| bad())?),
                "--share" => share = text()?.parse().map_err(|_| bad())?,
                "--mount" => {
                    let (host, container) = text()?.split_once('=').ok_or_else(bad)?;
                    mounts.push(Mount {
                        host_path: host.to_owned(),
                        container_path: container.to_owned(),
                        read_only: true,
                    });
                }
                _ => {
                    let (name, value) = text()?.split_once('=').ok_or_else(bad)?;
                    environment.push((name.to_owned(), value.to_owned()));
                }
            }
        }
        let by = match kind {
            Some(kind) => By::Cdi(kind),
            None => By::Mounts { environment },
        };
        let devices = devices.ok_or(OptionsError::Missing("--devices"))?;
        Ok(Options {
            folder: folder.ok_or(OptionsError::Missing("--folder"))?,
            resource: resource.ok_or(OptionsError::Missing("--resource"))?,
            offer: Offer::new(devices, share, mounts, by)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &[&str]) -> Result<Options, String> {
        Options::parse(words.iter().map(OsString::from)).map_err(|error| error.to_string())
    }

    #[test]
    fn all_of_it_is_read() {
        let told = ["--folder", "/f", "--resource", "kedge.dev/gpu", "--devices", "2"];
        let options = parsed(&[&told[..], &["--mount", "/a=/b", "--env", "A=b=c"]].concat());
        let options = options.unwrap();
        assert_eq!((options.folder.to_str(), &*options.resource), (Some("/f"), "kedge.dev/gpu"));
        assert_eq!(options.offer.ids(), ["soft0", "soft1"]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (words, told) in [
            (vec!["--color", "red"], "--color"),
            (vec!["--folder"], "needs a value"),
            (vec!["--devices", "many"], "no proper value"),
            (vec!["--mount", "/a"], "no proper value"),
            (vec!["--folder", "/f", "--devices", "2"], "--resource is missing"),
            (vec!["--folder", "/f", "--resource", "a/b", "--devices", "17"], "1 to 16"),
        ] {
            let error = parsed(&words).unwrap_err();
            assert!(error.contains(told), "{error}");
        }
    }
}
