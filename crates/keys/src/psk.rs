//! A sealed stream between two ends that share a secret, and that may both be brought back from an
//! image of their memory, more than once.
//!
//! Each end greets the other by 32 random bytes; the keys of both directions come from the secret
//! and both greetings (HKDF), and what follows are records of TLS 1.3. An end that finds itself
//! brought back greets anew ([`PskChannel::renew`]), because the keys that it remembers may seal
//! something else in another life of the same image. Who hears more greetings than he has sent
//! sends one, too; so the Nth of the one belongs to the Nth of the other, whatever was on its way.
//!
//! ```text
//! 1 RANDOM[32]                 a greeting
//! 23 3 3 LENGTH[2] BODY        a record, after greetings of both ends
//! ```

use crate::provider;
use crate::records::{Opener, RecordError, Sealer};
use crate::secrets::{TrafficKey, agreed_suite};
use rustls::crypto::tls13::Hkdf;
use std::fmt;
use thiserror::Error;
use zeroize::Zeroizing;

/// Bytes of a secret.
pub const PSK_BYTES: usize = 32;
/// Bytes of a greeting's random.
const RANDOM: usize = 32;
/// What a greeting begins with: no record does.
const GREETING: u8 = 1;
/// Most greetings of one stream: of so many lives.
const MAX_GREETINGS: usize = 4096;
/// New keys are made before a key has sealed so many records (it may seal 2²⁴).
const RENEWED: u64 = 1 << 23;

/// Why a stream is of no more use.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PskError {
    #[error("the system gives no random numbers")]
    Random,
    #[error("the other end greets more often than {MAX_GREETINGS} times")]
    TooOften,
    #[error("what arrives is neither a greeting nor a record")]
    Nonsense,
    #[error("{0}")]
    Record(#[from] RecordError),
    #[error("the other end has ended the stream")]
    Ended,
}

/// Which of the two ends this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PskEnd {
    First,
    Second,
}

/// Makes a secret for two ends.
///
/// # Errors
/// The system gives no random numbers.
pub fn new_psk() -> Result<[u8; PSK_BYTES], PskError> {
    let mut secret = [0; PSK_BYTES];
    provider().secure_random.fill(&mut secret).map_err(|_| PskError::Random)?;
    Ok(secret)
}

/// One end of a stream that is sealed by a shared secret. It has no socket: bytes go in and out.
pub struct PskChannel {
    secret: Zeroizing<[u8; PSK_BYTES]>,
    end: PskEnd,
    /// Greetings that were sent, and which are to be sent still, as bytes.
    own: Vec<[u8; RANDOM]>,
    greetings: Vec<u8>,
    /// How many have come, and what of the next one has.
    heard: usize,
    partial: Vec<u8>,
    /// Not while the other end's answer to the last greeting is missing.
    sealer: Option<Sealer>,
    opener: Option<Opener>,
}

/// Shows nothing that is secret.
impl fmt::Debug for PskChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("PskChannel");
        out.field("end", &self.end).field("greeted", &self.own.len()).finish_non_exhaustive()
    }
}

impl PskChannel {
    /// Makes one end, which greets the other one first of all.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub fn new(secret: [u8; PSK_BYTES], end: PskEnd) -> Result<PskChannel, PskError> {
        let mut channel = PskChannel {
            secret: Zeroizing::new(secret),
            end,
            own: Vec::new(),
            greetings: Vec::new(),
            heard: 0,
            partial: Vec::new(),
            sealer: None,
            opener: None,
        };
        channel.renew()?;
        Ok(channel)
    }

    /// Makes this end anew, for another connection between the two.
    ///
    /// # Errors
    /// The system gives no random numbers.
    pub fn anew(&self) -> Result<PskChannel, PskError> {
        PskChannel::new(*self.secret, self.end)
    }

    /// Greets anew: nothing more is sealed by the keys that there were.
    ///
    /// To be called before anything is sealed in another life of this memory. What is to be sealed
    /// must be known by then, and must not be read after the look at which life this is: else two
    /// lives could seal two things by one key.
    ///
    /// # Errors
    /// The system gives no random numbers, or this was done too often.
    pub fn renew(&mut self) -> Result<(), PskError> {
        if self.own.len() >= MAX_GREETINGS {
            return Err(PskError::TooOften);
        }
        let mut random = [0; RANDOM];
        // The kernel's, each time: what a generator in memory gives, it gives again in the next
        // life.
        provider().secure_random.fill(&mut random).map_err(|_| PskError::Random)?;
        self.sealer = None;
        self.own.push(random);
        self.greetings.push(GREETING);
        self.greetings.extend(random);
        Ok(())
    }

    /// Appends greetings that are to be sent to `out`.
    pub fn greet(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.greetings);
    }

    /// Returns whether something can be sealed now: the other end has answered.
    #[cfg(test)]
    pub(crate) fn is_ready(&self) -> bool {
        self.sealer.is_some()
    }

    /// Appends `plain` to `out` as records, behind greetings that are to be sent. Returns whether
    /// it has: not before the other end has answered.
    ///
    /// # Errors
    /// The system gives no random numbers for new keys.
    pub fn seal(&mut self, plain: &[u8], out: &mut Vec<u8>) -> Result<bool, PskError> {
        if self.sealer.as_ref().is_some_and(|sealer| sealer.sealed() >= RENEWED) {
            self.renew()?;
        }
        self.greet(out);
        let Some(sealer) = &mut self.sealer else { return Ok(false) };
        sealer.seal(&[plain], out)?;
        Ok(true)
    }

    /// Appends to `plain` what `arrived` has, however it was cut. Greetings may be to be sent then.
    ///
    /// # Errors
    /// It is not what the other end has sent. What was appended to `plain` is good.
    pub fn open(&mut self, mut arrived: &[u8], plain: &mut Vec<u8>) -> Result<(), PskError> {
        while let Some(first) = arrived.first() {
            let is_within = self.opener.as_ref().is_some_and(Opener::is_within_record);
            match &mut self.opener {
                _ if !self.partial.is_empty() || (*first == GREETING && !is_within) => {
                    let missing = (1 + RANDOM - self.partial.len()).min(arrived.len());
                    let (now, later) = arrived.split_at(missing);
                    self.partial.extend_from_slice(now);
                    arrived = later;
                    self.greeted()?;
                }
                Some(opener) => {
                    let (now, later) = arrived.split_at(opener.wanted().min(arrived.len()));
                    arrived = later;
                    if !opener.open(now, plain)? {
                        return Err(PskError::Ended);
                    }
                }
                None => return Err(PskError::Nonsense),
            }
        }
        Ok(())
    }

    /// Looks whether a greeting is whole.
    fn greeted(&mut self) -> Result<(), PskError> {
        let Some((_, random)) = self.partial.split_first() else { return Ok(()) };
        let Ok(random) = <[u8; RANDOM]>::try_from(random) else { return Ok(()) };
        self.partial.clear();
        self.heard += 1;
        if self.own.len() < self.heard {
            self.renew()?;
        }
        let (sealer, opener) = self.records(&self.own[self.heard - 1], &random)?;
        self.opener = Some(opener);
        // Not by the answer to an earlier greeting.
        if self.own.len() == self.heard {
            self.sealer = Some(sealer);
        }
        Ok(())
    }

    /// Returns what seals and opens after these greetings, this end's and the other's.
    fn records(
        &self,
        own: &[u8; RANDOM],
        other: &[u8; RANDOM],
    ) -> Result<(Sealer, Opener), PskError> {
        let (salt, labels) = match self.end {
            PskEnd::First => ([&own[..], other].concat(), [b"first", b"other"]),
            PskEnd::Second => ([&other[..], own].concat(), [b"other", b"first"]),
        };
        let suite = agreed_suite()?;
        let hkdf: &dyn Hkdf = suite.hkdf_provider;
        let expander = hkdf.extract_from_secret(Some(&salt), &*self.secret);
        let key = |label: &[u8; 5]| {
            let mut bytes = Zeroizing::new([0; 32 + 12]);
            let info: [&[u8]; 2] = [b"kedge psk channel 1 ", label];
            // 44 bytes are fewer than any hash gives.
            let made = expander.expand_slice(&info, &mut *bytes);
            made.map_err(|_| RecordError::NoRecord)?;
            let (mut key, mut iv) = ([0; 32], [0; 12]);
            key.copy_from_slice(&bytes[..32]);
            iv.copy_from_slice(&bytes[32..]);
            Ok::<_, RecordError>(TrafficKey { key, iv, sequence: 0 })
        };
        let [send, receive] = labels;
        Ok((Sealer::new(suite, key(send)?), Opener::new(suite, key(receive)?)))
    }
}
