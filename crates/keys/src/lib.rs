//! Who may connect over a network.
//!
//! [`Keys`] is a folder with a user's own key pair and the certificates of others that he has
//! pinned. A certificate is believed only if it is, byte for byte, a pinned one.
#![forbid(unsafe_code)]

mod certificate;
mod error;
mod folder;
mod identity;
mod name;
mod pins;
mod store;
#[cfg(test)]
mod testing;

pub use certificate::{Certificate, Fingerprint, date};
pub use error::KeyError;
pub use identity::Identity;
pub use name::{BadName, Name};
pub use pins::{Pins, Refusal};
pub use store::{Keys, Standing};

use rustls::crypto::{CryptoProvider, ring};

/// Returns what both ends speak.
///
/// The two suites have keys of 256 bits, of which alone rustls makes ciphers from extracted
/// secrets.
fn provider() -> CryptoProvider {
    use ring::cipher_suite::{TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256};
    CryptoProvider {
        cipher_suites: vec![TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256],
        ..ring::default_provider()
    }
}
