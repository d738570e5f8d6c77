//! Certificates: read, named by their fingerprints, and within their time or not.

use crate::error::KeyError;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::ParsedCertificate;
use sha2::{Digest, Sha256};
use std::fmt;
use std::time::Duration;
use x509_cert::der::pem::{LineEnding, encode_string};
use x509_cert::der::{DateTime, Decode};

/// Longest certificate, bytes.
const MAX: usize = 8 << 10;
/// Longest subject that is shown, in characters.
const MAX_SUBJECT: usize = 128;

/// The SHA-256 of a certificate: what people compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Returns the fingerprint of a certificate's bytes.
    pub(crate) fn of(der: &[u8]) -> Fingerprint {
        Fingerprint(Sha256::digest(der).into())
    }

    /// Returns it as one word of hexadecimal digits.
    pub(crate) fn word(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs: Vec<String> = self.0.iter().map(|byte| format!("{byte:02X}")).collect();
        write!(f, "SHA256:{}", pairs.join(":"))
    }
}

/// How a moment lies to a certificate's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Validity {
    Early,
    Valid,
    Expired,
}

/// A certificate that has been read: its bytes count, the rest is for people and for the clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    der: CertificateDer<'static>,
    subject: String,
    /// Seconds since 1970.
    from: u64,
    until: u64,
}

impl Certificate {
    /// Reads a certificate's bytes.
    ///
    /// # Errors
    /// They are no certificate, or one that TLS cannot use; with what is wrong.
    pub(crate) fn from_der(der: CertificateDer<'static>) -> Result<Certificate, String> {
        if der.len() > MAX {
            return Err(format!("a certificate of {} bytes: {MAX} at most", der.len()));
        }
        let read = x509_cert::Certificate::from_der(&der);
        let tbs = read.map_err(|error| format!("no certificate ({error})"))?.tbs_certificate;
        // What checks signatures later must be able to read it as well.
        ParsedCertificate::try_from(&der).map_err(|error| format!("no use for TLS ({error})"))?;
        let is_shown = |c: char| if c.is_control() { ' ' } else { c };
        let subject = tbs.subject.to_string().chars().map(is_shown).take(MAX_SUBJECT).collect();
        let from = tbs.validity.not_before.to_unix_duration().as_secs();
        let until = tbs.validity.not_after.to_unix_duration().as_secs();
        Ok(Certificate { der, subject, from, until })
    }

    /// Reads the one certificate of a PEM text.
    ///
    /// # Errors
    /// There is none, there are several, or a private key is with it.
    pub fn from_pem(text: &[u8]) -> Result<Certificate, KeyError> {
        let bad = |why: String| KeyError::NoCertificate { why };
        // Who hands over a private key has made it public; it must not be copied any further.
        if contains(text, b"PRIVATE KEY-----") {
            return Err(KeyError::PrivateInside);
        }
        let mut found = CertificateDer::pem_slice_iter(text);
        let first = found.next().ok_or_else(|| bad("there is no certificate in it".into()))?;
        let first = first.map_err(|error| bad(error.to_string()))?;
        if found.next().is_some() {
            return Err(bad("there is more than one certificate in it".into()));
        }
        Certificate::from_der(first.into_owned()).map_err(bad)
    }

    /// Returns it as PEM text.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn to_pem(&self) -> Result<String, KeyError> {
        encode_string("CERTIFICATE", LineEnding::LF, &self.der)
            .map_err(|error| KeyError::NotMade { why: error.to_string() })
    }

    /// Returns its bytes.
    pub fn der(&self) -> &CertificateDer<'static> {
        &self.der
    }

    /// Returns what it says of its owner, shortened, without control characters. Nobody has checked
    /// it.
    pub fn subject(&self) -> &str {
        &self.subject
    }

    /// Returns its fingerprint.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.der)
    }

    /// Returns from when it is valid, in seconds since 1970.
    pub fn valid_from(&self) -> u64 {
        self.from
    }

    /// Returns the last second of its validity, in seconds since 1970.
    pub fn valid_until(&self) -> u64 {
        self.until
    }

    /// Returns whether it has expired at `now`, in seconds since 1970.
    pub fn has_expired(&self, now: u64) -> bool {
        self.validity(now) == Validity::Expired
    }

    pub(crate) fn validity(&self, now: u64) -> Validity {
        match now {
            _ if now < self.from => Validity::Early,
            _ if now > self.until => Validity::Expired,
            _ => Validity::Valid,
        }
    }
}

/// Returns a moment in seconds since 1970 as a date and time of UTC.
pub fn date(seconds: u64) -> String {
    match DateTime::from_unix_duration(Duration::from_secs(seconds)) {
        Ok(date) => date.to_string(),
        Err(_) => "the end of time".to_owned(),
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}
