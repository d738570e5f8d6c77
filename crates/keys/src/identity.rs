//! This user's own key pair.

use crate::certificate::{Certificate, Validity, date};
use crate::error::KeyError;
use crate::provider;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PKCS_ED25519};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use std::sync::Arc;
use std::time::Duration;
use x509_cert::der::pem::{LineEnding, encode_string};
use zeroize::{Zeroize, Zeroizing};

/// The last second that a certificate can name: 9999-12-31T23:59:59Z.
const LAST: u64 = 253_402_300_799;

/// A private key and its certificate, ready for handshakes.
#[derive(Debug, Clone)]
pub struct Identity {
    certificate: Certificate,
    /// Shows the certificate and signs, whatever the other end asks for.
    resolver: Arc<SingleCertAndKey>,
}

impl Identity {
    /// Makes a key pair (Ed25519) and a certificate that it signs itself, and returns them as PEM.
    ///
    /// `label` is what the certificate says of its owner. It is valid `from` and `until` those
    /// seconds since 1970.
    ///
    /// # Errors
    /// The system gives no random numbers, or the times are no dates.
    pub(crate) fn make(label: &str, from: u64, until: u64) -> Result<Zeroizing<String>, KeyError> {
        let failed = |why: String| KeyError::NotMade { why };
        if until > LAST {
            return Err(failed("it would last beyond the year 9999".into()));
        }
        let mut key = KeyPair::generate_for(&PKCS_ED25519).map_err(|it| failed(it.to_string()))?;
        let mut asked = CertificateParams::default();
        asked.distinguished_name = DistinguishedName::new();
        asked.distinguished_name.push(DnType::CommonName, label);
        let epoch = rcgen::date_time_ymd(1970, 1, 1);
        asked.not_before = epoch + Duration::from_secs(from);
        asked.not_after = epoch + Duration::from_secs(until);
        let certificate = asked.self_signed(&key).map_err(|error| failed(error.to_string()))?;
        let pem = |label, bytes: &[u8]| {
            encode_string(label, LineEnding::LF, bytes).map_err(|error| failed(error.to_string()))
        };
        let private = Zeroizing::new(pem("PRIVATE KEY", key.serialized_der())?);
        key.zeroize();
        let public = pem("CERTIFICATE", certificate.der())?;
        Ok(Zeroizing::new(public + &private))
    }

    /// Reads what [`Identity::make`] has written.
    ///
    /// # Errors
    /// There is not one certificate and the private key of it; with what is wrong.
    pub(crate) fn from_pem(text: &[u8]) -> Result<Identity, String> {
        let mut found = CertificateDer::pem_slice_iter(text);
        let first = found.next().ok_or("there is no certificate in it")?;
        let der = first.map_err(|error| error.to_string())?.into_owned();
        let key = PrivateKeyDer::from_pem_slice(text).map_err(|error| error.to_string())?;
        let certificate = Certificate::from_der(der)?;
        let chain = vec![certificate.der().clone()];
        let certified = CertifiedKey::from_der(chain, key, &provider());
        let certified = certified.map_err(|error| error.to_string())?;
        Ok(Identity { certificate, resolver: Arc::new(certified.into()) })
    }

    /// Returns what others may see of it.
    pub fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    pub(crate) fn resolver(&self) -> Arc<SingleCertAndKey> {
        self.resolver.clone()
    }

    /// Checks that others will take it at `now`, in seconds since 1970.
    pub(crate) fn check(&self, now: u64) -> Result<(), String> {
        match self.certificate.validity(now) {
            Validity::Valid => Ok(()),
            Validity::Early => {
                let from = date(self.certificate.valid_from());
                Err(format!("is valid from {from} only: is this machine's clock right?"))
            }
            Validity::Expired => {
                let on = date(self.certificate.valid_until());
                Err(format!("has expired on {on}: `kedge keys new --replace` makes another"))
            }
        }
    }
}
