//! What a handshake leaves: the keys of both directions, for whoever carries the bytes.

use crate::provider;
use crate::records::{Opener, RecordError, Sealer};
use kedge_wire::wire;
use rustls::{
    CipherSuite, ConnectionTrafficSecrets, ExtractedSecrets, SupportedCipherSuite, Tls13CipherSuite,
};
use std::fmt;
use zeroize::{Zeroize, ZeroizeOnDrop};

wire! {
    /// The secrets of a connection, which are wiped when they are dropped.
    ///
    /// They can be sent to another process, which goes on with the connection in place of this one:
    /// of two that both did, each would use up nonces of the other.
    #[derive(PartialEq, Eq, Zeroize, ZeroizeOnDrop)]
    pub struct Secrets {
        /// The cipher suite, by its number in TLS.
        pub suite: u16,
        pub send: TrafficKey,
        pub receive: TrafficKey,
    }

    /// The secrets of one direction.
    #[derive(PartialEq, Eq, Zeroize, ZeroizeOnDrop)]
    pub struct TrafficKey {
        pub key: [u8; 32],
        pub iv: [u8; 12],
        /// The number of the next record.
        pub sequence: u64,
    }
}

/// Shows nothing that is secret.
impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secrets").field("suite", &self.suite).finish_non_exhaustive()
    }
}

/// Shows nothing that is secret.
impl fmt::Debug for TrafficKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrafficKey").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}

impl Secrets {
    /// Returns what seals and opens the records of the connection.
    ///
    /// # Errors
    /// The suite is none of kedge's: another version's, or nonsense.
    pub fn records(mut self) -> Result<(Sealer, Opener), RecordError> {
        let suite = suite(self.suite).ok_or(RecordError::Suite(self.suite))?;
        Ok((Sealer::new(suite, self.send.take()), Opener::new(suite, self.receive.take())))
    }

    /// Returns the secrets of what seals and opens, as far as it has come.
    ///
    /// Of what has arrived of a record nothing is kept.
    pub(crate) fn of(sealer: Sealer, opener: Opener) -> Secrets {
        let (suite, send) = sealer.into_key();
        Secrets { suite: suite.common.suite.into(), send, receive: opener.into_key() }
    }

    /// Takes them over from rustls.
    pub(crate) fn taken(suite: SupportedCipherSuite, taken: ExtractedSecrets) -> Option<Secrets> {
        let (send, receive) = (TrafficKey::taken(taken.tx)?, TrafficKey::taken(taken.rx)?);
        Some(Secrets { suite: suite.suite().into(), send, receive })
    }
}

impl TrafficKey {
    /// Takes it out, so that there is no copy of it.
    pub(crate) fn take(&mut self) -> TrafficKey {
        std::mem::replace(self, TrafficKey { key: [0; 32], iv: [0; 12], sequence: 0 })
    }

    fn taken((sequence, secrets): (u64, ConnectionTrafficSecrets)) -> Option<TrafficKey> {
        use ConnectionTrafficSecrets::{Aes256Gcm, Chacha20Poly1305};
        let (Aes256Gcm { key, iv } | Chacha20Poly1305 { key, iv }) = secrets else { return None };
        let (key, iv) = (key.as_ref().try_into().ok()?, iv.as_ref().try_into().ok()?);
        Some(TrafficKey { key, iv, sequence })
    }
}

/// Returns one of kedge's suites by its number.
fn suite(number: u16) -> Option<&'static Tls13CipherSuite> {
    let mut suites = provider().cipher_suites.into_iter();
    suites.find(|suite| u16::from(suite.suite()) == number)?.tls13()
}

/// Returns the suite of those who have agreed on one beforehand.
pub(crate) fn agreed_suite() -> Result<&'static Tls13CipherSuite, RecordError> {
    let number = CipherSuite::TLS13_AES_256_GCM_SHA384.into();
    suite(number).ok_or(RecordError::Suite(number))
}
