//! Who may connect over a network, and TLS 1.3 between those who may.
//!
//! [`Keys`] is a folder with a user's own key pair and the certificates of others that he has
//! pinned. [`accept`] and [`connect`] shake hands on a connection: each end shows its certificate,
//! and takes the other's only if it is, byte for byte, a pinned one. What comes of it is
//! [`Secrets`], which another process may be given; [`Secrets::records`] makes the [`Sealer`] and
//! the [`Opener`] of them. [`PskChannel`] has them of a secret that two ends share already. All
//! cryptography is that of rustls and ring.
#![forbid(unsafe_code)]

mod certificate;
mod connection;
mod error;
mod folder;
mod handshake;
#[cfg(test)]
mod handshake_tests;
mod identity;
mod limits;
mod name;
mod owner;
mod pins;
mod psk;
#[cfg(test)]
mod psk_tests;
mod records;
#[cfg(test)]
mod records_tests;
mod secrets;
mod store;
#[cfg(test)]
mod testing;
mod verify;

pub use certificate::{Certificate, Fingerprint, date};
pub use connection::Connection;
pub use error::KeyError;
pub use handshake::{HandshakeError, accept, connect};
pub use identity::Identity;
pub use limits::{BadLimits, Limits, MAX_DEVICES, MIN_BANDWIDTH};
pub use name::{BadName, Name};
pub use owner::{Whose, whose};
pub use pins::{Pins, Refusal};
pub use psk::{PSK_BYTES, PskChannel, PskEnd, PskError, new_psk};
pub use records::{Opener, RecordError, Sealer, Told};
pub use secrets::{Secrets, TrafficKey};
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
