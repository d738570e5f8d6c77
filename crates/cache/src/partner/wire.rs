//! What a cache and its partner say to each other: frames of a bounded length.
//!
//! A frame is its kind, its body's length in four bytes (little-endian), and the body. What it says
//! of files are records as in a tier's journal ([`Record`]).

use crate::journal::Record;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::path::PathBuf;

/// What both ends must have in common.
pub(crate) const VERSION: u32 = 1;
/// The most data of one frame.
pub(crate) const PART: u64 = 4 << 20;
/// The longest text, and the longest record with its head.
const TEXT: usize = 16 << 10;
/// Bytes before a frame's body: its kind, and the body's length.
const HEAD: usize = 5;
/// What stands for data: file and offset.
const PLACE: usize = 16;
/// Files end before that.
pub(crate) const END: u64 = i64::MAX as u64;

/// Whose cache it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) version: u32,
    /// The folder that is cached.
    pub(crate) under: PathBuf,
    /// The node.
    pub(crate) node: String,
    /// Is the same as long as what was held in the node's memory is still there.
    pub(crate) token: String,
}

/// What one end says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Said {
    Hello(Hello),
    /// A record: `File`, `Clean` or `Drop` by the cache, `Write` by the partner, of what it has.
    Note(Record),
    /// Bytes of a file from an offset on.
    Data(u64, u64, Vec<u8>),
    /// Everything that was said of the file is to be on the partner's disk.
    Sync(u64),
    /// The cache is there.
    Beat,
    /// All is below: nothing is to be kept.
    End,
    /// The last answer was heard.
    Heard,
    /// It is done.
    Done,
    /// It is not done, and why.
    Failed(String),
}

fn bad(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

impl Said {
    fn kind(&self) -> u8 {
        match self {
            Said::Hello(_) => 1,
            Said::Note(_) => 2,
            Said::Data(..) => 3,
            Said::Sync(_) => 4,
            Said::Beat => 5,
            Said::End => 6,
            Said::Done => 7,
            Said::Failed(_) => 8,
            Said::Heard => 9,
        }
    }

    /// Writes the frame.
    pub(crate) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        if let Said::Data(file, offset, data) = self {
            return write_data(to, *file, *offset, data);
        }
        let body = match self {
            Said::Hello(hello) => serde_json::to_vec(hello)?,
            Said::Note(record) => {
                let mut body = Vec::new();
                record.encode(0, &mut body);
                body
            }
            Said::Sync(file) => file.to_le_bytes().to_vec(),
            Said::Failed(why) => why.chars().take(1024).collect::<String>().into_bytes(),
            Said::Beat | Said::End | Said::Heard | Said::Done | Said::Data(..) => Vec::new(),
        };
        if body.len() > TEXT {
            return Err(bad("a path is too long for the partner"));
        }
        let mut frame = vec![self.kind()];
        frame.extend((body.len() as u32).to_le_bytes());
        frame.extend(body);
        to.write_all(&frame)
    }

    /// Reads one frame. Its length is looked at before anything is allocated for it.
    ///
    /// # Errors
    /// The other end has gone, or says what is none.
    pub(crate) fn read(from: &mut impl Read) -> io::Result<Said> {
        let mut head = [0; HEAD];
        from.read_exact(&mut head)?;
        let [kind, length @ ..] = head;
        let length = u32::from_le_bytes(length) as usize;
        let fits = match kind {
            1 | 2 | 8 => length <= TEXT,
            3 => length > PLACE && length - PLACE <= PART as usize,
            4 => length == 8,
            5..=7 | 9 => length == 0,
            _ => return Err(bad("a message of a kind that is not known")),
        };
        if !fits {
            return Err(bad("a message of a wrong length"));
        }
        if kind == 3 {
            return read_data(from, length - PLACE);
        }
        let mut body = vec![0; length];
        from.read_exact(&mut body)?;
        Ok(match kind {
            1 => Said::Hello(serde_json::from_slice(&body)?),
            2 => match Record::decode(&body) {
                Some((_, record, used)) if used == length => Said::Note(record),
                _ => return Err(bad("a record that is none")),
            },
            4 => Said::Sync(u64::from_le_bytes(body.try_into().map_err(|_| bad("no number"))?)),
            5 => Said::Beat,
            6 => Said::End,
            7 => Said::Done,
            9 => Said::Heard,
            _ => Said::Failed(String::from_utf8_lossy(&body).into_owned()),
        })
    }
}

/// Writes bytes of a file without a copy of them.
pub(crate) fn write_data(
    to: &mut impl Write,
    file: u64,
    offset: u64,
    data: &[u8],
) -> io::Result<()> {
    if data.is_empty() || data.len() as u64 > PART {
        return Err(bad("no part of a file is as long"));
    }
    let mut head = vec![3];
    head.extend(((data.len() + PLACE) as u32).to_le_bytes());
    head.extend(file.to_le_bytes());
    head.extend(offset.to_le_bytes());
    to.write_all(&head)?;
    to.write_all(data)
}

fn read_data(from: &mut impl Read, length: usize) -> io::Result<Said> {
    let (mut file, mut offset) = ([0; 8], [0; 8]);
    from.read_exact(&mut file)?;
    from.read_exact(&mut offset)?;
    let offset = u64::from_le_bytes(offset);
    if offset.checked_add(length as u64).is_none_or(|end| end > END) {
        return Err(bad("no file is as long"));
    }
    let mut data = vec![0; length];
    from.read_exact(&mut data)?;
    Ok(Said::Data(u64::from_le_bytes(file), offset, data))
}

/// Reads any bytes as frames: what is read is written as it was. For tests with hostile bytes.
pub fn check_bytes(mut bytes: &[u8]) {
    while let Ok(said) = Said::read(&mut bytes) {
        let mut written = Vec::new();
        if said.write(&mut written).is_ok() && !matches!(said, Said::Failed(_)) {
            assert_eq!(Said::read(&mut &written[..]).expect("it was written"), said);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::Identity;
    use proptest::prelude::*;

    fn all() -> Vec<Said> {
        let under = "/scratch".into();
        let (node, token) = ("node7".into(), "1".into());
        vec![
            Said::Hello(Hello { version: VERSION, under, node, token }),
            Said::Note(Record::File(7, Identity { path: b"a/b".into(), ..Identity::default() })),
            Said::Note(Record::Clean(7, 1, 2)),
            Said::Data(7, 4096, vec![3; 100]),
            Said::Sync(7),
            Said::Beat,
            Said::End,
            Said::Heard,
            Said::Done,
            Said::Failed("full".into()),
        ]
    }

    #[test]
    fn what_is_said_is_heard() {
        let mut bytes = Vec::new();
        all().iter().for_each(|said| said.write(&mut bytes).expect("a vector"));
        let mut rest = &bytes[..];
        for said in all() {
            assert_eq!(Said::read(&mut rest).expect("a frame"), said);
        }
        assert!(rest.is_empty());
        check_bytes(&bytes);
    }

    #[test]
    fn lengths_and_places_are_bounded() {
        let head = |kind: u8, length: u32| [&[kind][..], &length.to_le_bytes()].concat();
        for (kind, length) in [(1, u32::MAX), (2, 1 << 20), (3, 16), (3, 8 << 20), (4, 9), (10, 0)]
        {
            let refused = Said::read(&mut &head(kind, length)[..]).expect_err("a bad length");
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData, "{kind} {length}");
        }
        let mut far = head(3, 17);
        far.extend([0; 8]);
        far.extend(u64::MAX.to_le_bytes());
        far.push(1);
        assert!(Said::read(&mut &far[..]).is_err(), "it ends beyond any file");
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_read(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            check_bytes(&bytes);
        }
    }
}
