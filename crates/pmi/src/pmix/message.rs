//! Messages, and the greeting that a rank begins with.

use super::{BUFFER, PACKING, PmixError, SECURITY, STORE, VERSION};

/// Bytes of a message's header: the sender's index at the other side, the tag, the length, and four
/// that mean nothing.
const HEADER_LEN: usize = 16;
/// Longest message, in bytes.
pub const MAX_MESSAGE_LEN: usize = 32 << 20;
/// Longest greeting, in bytes (the library's own bound).
pub const MAX_HELLO_LEN: usize = 131_072;

/// A request, or the answer to the one with the same tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    pub tag: u32,
    pub body: Vec<u8>,
}

impl Message {
    /// Takes the first one out of `buffer`. `None`: it is not there as a whole.
    ///
    /// # Errors
    /// It is longer than [`MAX_MESSAGE_LEN`].
    pub fn take(buffer: &mut Vec<u8>) -> Result<Option<Message>, PmixError> {
        let Some(header) = buffer.first_chunk::<HEADER_LEN>() else { return Ok(None) };
        let [tag, length] =
            [4, 8].map(|at| u32::from_be_bytes([0, 1, 2, 3].map(|byte| header[at + byte])));
        let body = take(buffer, length as usize, MAX_MESSAGE_LEN)?;
        Ok(body.map(|body| Message { tag, body }))
    }

    /// Returns its bytes, from a sender whom the other side knows by `index`.
    pub fn encode(&self, index: u32) -> Vec<u8> {
        let length = u32::try_from(self.body.len()).unwrap_or(u32::MAX);
        let mut bytes = [index, self.tag, length, 0].map(u32::to_be_bytes).concat();
        bytes.extend_from_slice(&self.body);
        bytes
    }
}

/// Takes a header and the body of so many bytes behind it.
fn take(buffer: &mut Vec<u8>, length: usize, most: usize) -> Result<Option<Vec<u8>>, PmixError> {
    if length > most {
        return Err(PmixError::Long { bytes: length, most });
    }
    if buffer.len() < HEADER_LEN + length {
        return Ok(None);
    }
    let rest = buffer.split_off(HEADER_LEN + length);
    let body = buffer.split_off(HEADER_LEN);
    *buffer = rest;
    Ok(Some(body))
}

/// What a rank says first: who it is, and how it speaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    pub security: String,
    pub credential: Vec<u8>,
    pub namespace: String,
    pub rank: u32,
    pub version: String,
    pub packing: String,
    pub buffer: u8,
    pub store: String,
}

impl Hello {
    /// Returns the one of a rank that runs as this user and group.
    pub fn of(namespace: &str, rank: u32, user: u32, group: u32) -> Hello {
        Hello {
            security: SECURITY.to_owned(),
            credential: [user.to_ne_bytes(), group.to_ne_bytes()].concat(),
            namespace: namespace.to_owned(),
            rank,
            version: VERSION.to_owned(),
            packing: PACKING.to_owned(),
            buffer: BUFFER,
            store: STORE.to_owned(),
        }
    }

    /// Takes it out of `buffer`. `None`: it is not there as a whole.
    ///
    /// # Errors
    /// It is too long, or no rank's.
    pub fn take(buffer: &mut Vec<u8>) -> Result<Option<Hello>, PmixError> {
        let Some(header) = buffer.first_chunk::<HEADER_LEN>() else { return Ok(None) };
        // In the order of the machine, unlike later headers.
        let length = u32::from_ne_bytes([0, 1, 2, 3].map(|byte| header[8 + byte]));
        let body = take(buffer, length as usize, MAX_HELLO_LEN)?;
        body.map(|body| Hello::parse(&body)).transpose()
    }

    fn parse(body: &[u8]) -> Result<Hello, PmixError> {
        let mut rest = Rest(body);
        let security = rest.text()?;
        let length = rest.word()? as usize;
        let credential = rest.take(length)?.to_vec();
        // Tools and launchers tell more.
        match rest.take(1)? {
            [0] => {}
            other => {
                let found = format!("a process of kind {}", other[0]);
                return Err(PmixError::Who { found, expected: "a rank".to_owned() });
            }
        }
        let (namespace, rank, version) = (rest.text()?, rest.word()?, rest.text()?);
        // 2.0 says no more.
        let packing = rest.text().unwrap_or_else(|_| "v20".to_owned());
        let buffer = rest.take(1).map_or(0, |byte| byte[0]);
        let store = rest.text().unwrap_or_default();
        Ok(Hello { security, credential, namespace, rank, version, packing, buffer, store })
    }

    /// Returns its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let text = |text: &str| [text.as_bytes(), &[0]].concat();
        let length = u32::try_from(self.credential.len()).unwrap_or(u32::MAX);
        let parts = [
            text(&self.security),
            length.to_be_bytes().to_vec(),
            self.credential.clone(),
            vec![0],
            text(&self.namespace),
            self.rank.to_be_bytes().to_vec(),
            text(&self.version),
            text(&self.packing),
            vec![self.buffer],
            text(&self.store),
        ];
        let body = parts.concat();
        let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
        let mut bytes = [u32::MAX, u32::MAX, length, 0].map(u32::to_ne_bytes).concat();
        bytes.extend_from_slice(&body);
        bytes
    }

    /// Checks that the rank speaks as is known here.
    ///
    /// # Errors
    /// It does not; what it does instead.
    pub fn check(&self) -> Result<(), PmixError> {
        if self.packing != PACKING || self.buffer != BUFFER {
            let (version, packing) = (short(&self.version), short(&self.packing));
            return Err(PmixError::Packing { version, packing, kind: self.buffer });
        }
        if self.store != STORE {
            return Err(PmixError::Store(short(&self.store)));
        }
        // Another one may begin to talk here.
        match self.security.as_str() {
            "native" | "none" | "munge" => Ok(()),
            other => Err(PmixError::Security(short(other))),
        }
    }
}

/// A name that errors tell.
fn short(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(40).collect()
}

struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], PmixError> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(PmixError::Short)?;
        self.0 = rest;
        Ok(taken)
    }

    fn word(&mut self) -> Result<u32, PmixError> {
        let bytes = self.take(4)?;
        Ok(bytes.iter().fold(0, |word, byte| word << 8 | u32::from(*byte)))
    }

    /// Up to a zero.
    fn text(&mut self) -> Result<String, PmixError> {
        let end = self.0.iter().position(|byte| *byte == 0).ok_or(PmixError::Short)?;
        let text = self.take(end)?.to_vec();
        self.take(1)?;
        String::from_utf8(text).map_err(|_| PmixError::Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_whole_or_not_at_all() {
        let message = Message { tag: 101, body: b"abc".to_vec() };
        let bytes = message.encode(2);
        assert_eq!(bytes, b"\0\0\0\x02\0\0\0\x65\0\0\0\x03\0\0\0\0abc");
        for end in 0..bytes.len() {
            let mut part = bytes[..end].to_vec();
            assert_eq!(Message::take(&mut part), Ok(None));
            assert_eq!(part, bytes[..end]);
        }
        let mut two = [&bytes[..], b"x"].concat();
        assert_eq!(Message::take(&mut two), Ok(Some(message)));
        assert_eq!(two, b"x");
        let mut long = vec![0xff; HEADER_LEN];
        assert!(matches!(Message::take(&mut long), Err(PmixError::Long { .. })));
    }

    #[test]
    fn a_greeting_says_how_the_rank_speaks() {
        let hello = Hello::of("slurm.pmix.7.0", 1, 1000, 100);
        let mut bytes = hello.encode();
        // The library has a zero more at the end.
        bytes.push(0);
        let length = u32::from_ne_bytes(bytes[8..12].try_into().unwrap()) + 1;
        bytes[8..12].copy_from_slice(&length.to_ne_bytes());
        assert_eq!(Hello::take(&mut bytes), Ok(Some(hello.clone())));
        assert!(bytes.is_empty() && hello.check().is_ok());
        let newer = Hello { packing: "v41".to_owned(), ..hello.clone() };
        assert!(matches!(newer.check(), Err(PmixError::Packing { .. })));
        let shared = Hello { store: "ds21".to_owned(), ..hello };
        assert_eq!(shared.check(), Err(PmixError::Store("ds21".to_owned())));
    }
}
