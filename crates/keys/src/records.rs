//! Records of TLS 1.3 (RFC 8446, section 5) from a handshake's secrets.
//!
//! rustls encrypts and decrypts; here records are counted, cut and put together.

use crate::secrets::TrafficKey;
use rustls::crypto::cipher::{
    InboundOpaqueMessage, MessageDecrypter, MessageEncrypter, OutboundChunks, OutboundPlainMessage,
};
use rustls::{AlertDescription, ContentType, ProtocolVersion, Tls13CipherSuite};
use std::fmt;
use thiserror::Error;

/// Longest plain text of a record, bytes.
const MAX_PLAIN: usize = 1 << 14;
/// Longest body of a record that is sealed: a text, its type, padding and tag.
const MAX_SEALED: usize = MAX_PLAIN + 256;
/// Bytes in front of a record's body: its type, a version, its length.
const HEAD: usize = 5;
/// The bytes that the head of every sealed record begins with.
const BEGIN: [u8; 3] = [23, 3, 3];
/// So many records before a key is used up no more data is sealed with it: alerts still are.
const SPARE: u64 = 16;

/// Why a connection's records are of no more use. The connection is to be given up.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RecordError {
    #[error(
        "cipher suite {0:#06x} is none of this version of kedge: install the same on both ends"
    )]
    Suite(u16),
    #[error("the connection's key has sealed {0} records, as many as it may: connect anew")]
    UsedUp(u64),
    #[error("what arrives is no record of TLS 1.3")]
    NoRecord,
    #[error("a record was changed, lost or repeated on its way, or has another key")]
    Changed,
    #[error("a record of a kind that is not spoken here ({0})")]
    Kind(u8),
    #[error("{0}")]
    Refused(Told),
    #[error("an earlier record was bad: nothing later can be trusted")]
    Dead,
}

/// What the other end says by an alert, in place of data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Told(pub(crate) AlertDescription);

impl Told {
    /// Returns why it refuses, and what to do.
    pub fn why(&self) -> String {
        use AlertDescription as Alert;
        let why = match self.0 {
            Alert::UnknownCA => {
                "it has not pinned your certificate: give it what `kedge keys show` prints \
                 (`kedge keys add` there)"
            }
            Alert::CertificateRevoked => "your certificate has been revoked there",
            Alert::CertificateExpired => {
                "your certificate has expired or is not valid yet by its clock: `kedge keys list` \
                 shows its time, `kedge keys new --replace` makes another"
            }
            Alert::CertificateRequired => {
                "it wants a certificate: `kedge keys new` makes one, which it must be given"
            }
            Alert::AccessDenied => "your certificate is not the one that it knows you by",
            Alert::BadCertificate | Alert::CertificateUnknown | Alert::UnsupportedCertificate => {
                "it cannot use your certificate"
            }
            Alert::DecryptError | Alert::BadRecordMac => "what you sent was changed on its way",
            other => return format!("it gives up ({other:?})"),
        };
        why.to_owned()
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the other end refuses: {}", self.why())
    }
}

/// Seals what is sent.
pub struct Sealer {
    suite: &'static Tls13CipherSuite,
    key: TrafficKey,
    encrypter: Box<dyn MessageEncrypter>,
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sealer").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Sealer {
    pub(crate) fn new(suite: &'static Tls13CipherSuite, key: TrafficKey) -> Sealer {
        let encrypter = suite.aead_alg.encrypter(key.key.into(), key.iv.into());
        Sealer { suite, key, encrypter }
    }

    pub(crate) fn into_key(self) -> (&'static Tls13CipherSuite, TrafficKey) {
        (self.suite, self.key)
    }

    /// Returns how many records its key has sealed.
    pub(crate) fn sealed(&self) -> u64 {
        self.key.sequence
    }

    /// Returns how many records its key may seal.
    fn limit(&self) -> u64 {
        self.suite.common.confidentiality_limit
    }

    /// Appends plain text, in parts that follow each other, to `out` as records.
    ///
    /// # Errors
    /// The key is used up: nothing of it has been sealed.
    pub fn seal(&mut self, plain: &[&[u8]], out: &mut Vec<u8>) -> Result<(), RecordError> {
        let mut rest = OutboundChunks::new(plain);
        let records = rest.len().div_ceil(MAX_PLAIN) as u64;
        let after = self.key.sequence.checked_add(records);
        if after.is_none_or(|after| after > self.limit().saturating_sub(SPARE)) {
            return Err(RecordError::UsedUp(self.key.sequence));
        }
        out.reserve(rest.len() + records as usize * (HEAD + 17));
        while !rest.is_empty() {
            let (now, later) = rest.split_at(MAX_PLAIN);
            self.record(ContentType::ApplicationData, now, out)?;
            rest = later;
        }
        Ok(())
    }

    /// Appends the record that says that nothing more is sent.
    ///
    /// # Errors
    /// The key is used up.
    pub fn close(&mut self, out: &mut Vec<u8>) -> Result<(), RecordError> {
        const WARNING: u8 = 1;
        let alert = [WARNING, AlertDescription::CloseNotify.into()];
        self.record(ContentType::Alert, OutboundChunks::Single(&alert), out)
    }

    fn record(
        &mut self,
        typ: ContentType,
        payload: OutboundChunks<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), RecordError> {
        if self.key.sequence >= self.limit() {
            return Err(RecordError::UsedUp(self.key.sequence));
        }
        let message = OutboundPlainMessage { typ, version: ProtocolVersion::TLSv1_3, payload };
        let sealed = self.encrypter.encrypt(message, self.key.sequence);
        out.extend_from_slice(&sealed.map_err(|_| RecordError::NoRecord)?.encode());
        self.key.sequence += 1;
        Ok(())
    }
}

/// Opens what arrives, however it was cut.
pub struct Opener {
    key: TrafficKey,
    /// Records that the key may have sealed.
    limit: u64,
    decrypter: Box<dyn MessageDecrypter>,
    /// The record that is arriving, head and body.
    record: Vec<u8>,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// The other end has said that nothing more comes.
    Ended,
    Dead,
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Opener");
        out.field("key", &self.key).field("state", &self.state).finish_non_exhaustive()
    }
}

impl Opener {
    pub(crate) fn new(suite: &Tls13CipherSuite, key: TrafficKey) -> Opener {
        let decrypter = suite.aead_alg.decrypter(key.key.into(), key.iv.into());
        let limit = suite.common.confidentiality_limit;
        let record = Vec::with_capacity(HEAD + MAX_SEALED);
        Opener { key, limit, decrypter, record, state: State::Open }
    }

    pub(crate) fn into_key(self) -> TrafficKey {
        self.key
    }

    /// Appends to `out` the plain text of all records that are whole with `arrived`; keeps the
    /// rest. Returns whether more may come: the other end may say that nothing does.
    ///
    /// # Errors
    /// What has arrived is not what the other end has sent, or it refuses. What was appended to
    /// `out` before is good; nothing is ever opened after that.
    pub fn open(&mut self, mut arrived: &[u8], out: &mut Vec<u8>) -> Result<bool, RecordError> {
        while self.state == State::Open && !arrived.is_empty() {
            let opened = self.take(&mut arrived, out);
            opened.inspect_err(|_| self.state = State::Dead)?;
        }
        match self.state {
            State::Dead => Err(RecordError::Dead),
            state => Ok(state == State::Open),
        }
    }

    /// Returns the same, of bytes that may be changed: of records that are whole among them, only
    /// the text is copied.
    ///
    /// # Errors
    /// As [`Opener::open`].
    pub fn open_in_place(
        &mut self,
        mut arrived: &mut [u8],
        out: &mut Vec<u8>,
    ) -> Result<bool, RecordError> {
        while self.state == State::Open
            && self.record.is_empty()
            && let Some(length) = arrived.first_chunk().map(body_length)
            && arrived.len() >= HEAD + length
        {
            let (record, later) = std::mem::take(&mut arrived).split_at_mut(HEAD + length);
            let opened = checked(record).and_then(|body| self.whole(body, out));
            opened.inspect_err(|_| self.state = State::Dead)?;
            arrived = later;
        }
        self.open(arrived, out)
    }

    /// Returns whether a record has arrived in part. A stream that ends then was cut.
    pub fn is_within_record(&self) -> bool {
        !self.record.is_empty()
    }

    /// Returns how many bytes at most belong to the record that is arriving, as far as is known:
    /// who reads no more leaves what is behind it on the stream.
    pub fn wanted(&self) -> usize {
        let length = self.record.first_chunk().map_or(0, body_length);
        (HEAD + length) - self.record.len()
    }

    /// Takes what belongs to the current record, and opens that once it is whole.
    fn take(&mut self, arrived: &mut &[u8], out: &mut Vec<u8>) -> Result<(), RecordError> {
        self.fill(arrived, HEAD);
        let Some(head) = self.record.first_chunk::<HEAD>() else { return Ok(()) };
        let length = checked_length(head)?;
        self.fill(arrived, HEAD + length);
        if self.record.len() < HEAD + length {
            return Ok(());
        }
        let mut record = std::mem::take(&mut self.record);
        let opened = self.whole(&mut record[HEAD..], out);
        record.clear();
        self.record = record;
        opened
    }

    /// Moves bytes over until the record has so many.
    fn fill(&mut self, arrived: &mut &[u8], to: usize) {
        let missing = to.saturating_sub(self.record.len()).min(arrived.len());
        let (now, later) = arrived.split_at(missing);
        self.record.extend_from_slice(now);
        *arrived = later;
    }

    /// Opens the body of a record, which is whole.
    fn whole(&mut self, body: &mut [u8], out: &mut Vec<u8>) -> Result<(), RecordError> {
        if self.key.sequence >= self.limit {
            return Err(RecordError::UsedUp(self.key.sequence));
        }
        let (typ, version) = (ContentType::ApplicationData, ProtocolVersion::TLSv1_2);
        let sealed = InboundOpaqueMessage::new(typ, version, body);
        let plain = self.decrypter.decrypt(sealed, self.key.sequence);
        let plain = plain.map_err(|_| RecordError::Changed)?;
        self.key.sequence += 1;
        match (plain.typ, plain.payload) {
            (ContentType::ApplicationData, text) => out.extend_from_slice(text),
            (ContentType::Alert, [_, what]) => match AlertDescription::from(*what) {
                AlertDescription::CloseNotify => self.state = State::Ended,
                // RFC 8446, section 6.1: says why, and that the end follows.
                AlertDescription::UserCanceled => {}
                other => return Err(RecordError::Refused(Told(other))),
            },
            (kind, _) => return Err(RecordError::Kind(kind.into())),
        }
        Ok(())
    }
}

/// Returns how long the body of a record with this head is.
fn checked_length(head: &[u8; HEAD]) -> Result<usize, RecordError> {
    let length = body_length(head);
    let proper = head[..3] == BEGIN && length <= MAX_SEALED;
    if proper { Ok(length) } else { Err(RecordError::NoRecord) }
}

/// Returns the body of a record, which is whole.
fn checked(record: &mut [u8]) -> Result<&mut [u8], RecordError> {
    let (head, body) = record.split_first_chunk_mut().ok_or(RecordError::NoRecord)?;
    checked_length(head).map(|_| body)
}

fn body_length(head: &[u8; HEAD]) -> usize {
    usize::from(u16::from_be_bytes([head[3], head[4]]))
}
