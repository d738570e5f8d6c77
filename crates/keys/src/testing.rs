//! What the tests of this crate share.

use crate::{Certificate, Identity, Keys, Name};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

pub(crate) const DAY: Duration = Duration::from_secs(86_400);

/// A folder that goes with its value.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) path: PathBuf,
}

impl Place {
    pub(crate) fn new(name: &str) -> Place {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let unique = format!("kedge-keys-{name}-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(unique);
        std::fs::create_dir(&path).expect("a folder for temporary files");
        Place { path }
    }

    pub(crate) fn keys(&self) -> Keys {
        Keys::at(self.path.join("keys"))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// A new key pair, valid from and until these seconds since 1970.
pub(crate) fn identity(label: &str, from: u64, until: u64) -> Identity {
    let text = Identity::make(label, from, until).expect("a key");
    Identity::from_pem(text.as_bytes()).expect("what was made")
}

/// Its certificate.
pub(crate) fn certificate(label: &str, from: u64, until: u64) -> Certificate {
    identity(label, from, until).certificate().clone()
}

/// A name that is one.
pub(crate) fn name(text: &str) -> Name {
    text.parse().expect("a name")
}
