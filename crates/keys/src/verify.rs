//! What rustls asks about the other end's certificate and signature.

use crate::pins::{Pins, Refusal};
use crate::{Name, provider};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible,
    SignatureScheme,
};
use std::sync::{Arc, OnceLock};

impl From<&Refusal> for CertificateError {
    fn from(refusal: &Refusal) -> CertificateError {
        match refusal {
            Refusal::Unknown(_) => CertificateError::UnknownIssuer,
            Refusal::Revoked(_) => CertificateError::Revoked,
            Refusal::Expired { .. } => CertificateError::Expired,
            Refusal::Early { .. } => CertificateError::NotValidYet,
            Refusal::Another { .. } => CertificateError::ApplicationVerificationFailure,
        }
    }
}

/// The verifier of one handshake, which remembers what it has found.
#[derive(Debug)]
pub(crate) struct Verifier {
    pins: Arc<Pins>,
    expected: Option<Name>,
    algorithms: WebPkiSupportedAlgorithms,
    verdict: OnceLock<Result<Name, Refusal>>,
}

impl Verifier {
    /// Makes a verifier of whoever is pinned, or of the `expected` one alone.
    pub(crate) fn new(pins: Arc<Pins>, expected: Option<Name>) -> Verifier {
        let algorithms = provider().signature_verification_algorithms;
        Verifier { pins, expected, algorithms, verdict: OnceLock::new() }
    }

    /// Returns whose certificate was shown, or why it is refused; nothing if none was.
    pub(crate) fn verdict(&self) -> Option<&Result<Name, Refusal>> {
        self.verdict.get()
    }

    fn judge(&self, shown: &CertificateDer<'_>, now: UnixTime) -> Result<(), Error> {
        let judged = || self.pins.judge(shown, self.expected.as_ref(), now.as_secs());
        match self.verdict.get_or_init(judged) {
            Ok(_) => Ok(()),
            Err(refusal) => Err(Error::InvalidCertificate(refusal.into())),
        }
    }

    fn signature(
        &self,
        message: &[u8],
        of: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, of, signed, &self.algorithms)
    }
}

/// Refuses TLS 1.2, which is not spoken, so that nothing of it is ever to be verified.
fn no_older() -> Error {
    Error::PeerIncompatible(PeerIncompatible::Tls12NotOfferedOrEnabled)
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.judge(end_entity, now).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _of: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_older())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        of: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, of, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.judge(end_entity, now).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _of: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_older())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        of: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature(message, of, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
