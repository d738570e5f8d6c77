//! Values as version 3 of the library packs them: integers with their high byte first, texts with
//! a length and a zero at the end, sizes with their type. A list has its length before it.

use super::PmixError;

/// Types of values (`PMIX_STRING` …).
pub(super) mod kind {
    pub(crate) const STRING: u16 = 3;
    pub(crate) const UINT16: u16 = 13;
    pub(crate) const UINT32: u16 = 14;
    pub(crate) const UINT64: u16 = 15;
    pub(crate) const INFO: u16 = 24;
    pub(crate) const BYTES: u16 = 27;
    pub(crate) const ARRAY: u16 = 39;
    pub(crate) const RANK: u16 = 40;
}

/// How deep arrays may hold each other.
const MAX_DEPTH: u32 = 8;

/// Values that are packed.
#[derive(Debug, Default)]
pub(super) struct Pack(pub(super) Vec<u8>);

impl Pack {
    fn put(mut self, bytes: &[u8]) -> Pack {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(super) fn raw(self, bytes: &[u8]) -> Pack {
        self.put(bytes)
    }

    pub(super) fn byte(self, value: u8) -> Pack {
        self.put(&[value])
    }

    pub(super) fn half(self, value: u16) -> Pack {
        self.put(&value.to_be_bytes())
    }

    pub(super) fn word(self, value: u32) -> Pack {
        self.put(&value.to_be_bytes())
    }

    /// How many values of one type follow.
    pub(super) fn count(self, values: u32) -> Pack {
        self.word(values)
    }

    pub(super) fn size(self, value: usize) -> Pack {
        self.half(kind::UINT64).put(&(value as u64).to_be_bytes())
    }

    /// A text without zeros.
    pub(super) fn text(self, text: &str) -> Pack {
        let length = u32::try_from(text.len()).unwrap_or(u32::MAX).saturating_add(1);
        self.word(length).put(text.as_bytes()).byte(0)
    }

    /// How a request went.
    pub(super) fn status(self, status: i32) -> Pack {
        self.count(1).put(&status.to_be_bytes())
    }

    pub(super) fn rank_of(self, namespace: &str, rank: u32) -> Pack {
        self.text(namespace).word(rank)
    }

    pub(super) fn bytes(self, bytes: &[u8]) -> Pack {
        self.size(bytes.len()).put(bytes)
    }

    /// A key with its value.
    pub(super) fn pair(self, key: &str, value: &Value<'_>) -> Pack {
        self.count(1).text(key).value(value)
    }

    pub(super) fn value(self, value: &Value<'_>) -> Pack {
        match value {
            Value::Text(text) => self.half(kind::STRING).text(text),
            Value::Half(number) => self.half(kind::UINT16).half(*number),
            Value::Word(number) => self.half(kind::UINT32).word(*number),
            Value::Rank(rank) => self.half(kind::RANK).word(*rank),
            Value::Bytes(bytes) => self.half(kind::BYTES).bytes(bytes),
            Value::Array(all) => {
                let array = self.half(kind::ARRAY).half(kind::INFO).size(all.len());
                // No flags.
                all.iter().fold(array, |pack, (key, value)| pack.text(key).word(0).value(value))
            }
        }
    }
}

/// What a server tells of a job.
#[derive(Debug)]
pub(super) enum Value<'a> {
    Text(&'a str),
    Half(u16),
    Word(u32),
    Rank(u32),
    Bytes(&'a [u8]),
    Array(&'a [(&'a str, Value<'a>)]),
}

/// Reads what is packed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unpack<'a>(pub(super) &'a [u8]);

impl<'a> Unpack<'a> {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn take(&mut self, length: usize) -> Result<&'a [u8], PmixError> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(PmixError::Short)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], PmixError> {
        self.take(N)?.try_into().map_err(|_| PmixError::Short)
    }

    pub(super) fn byte(&mut self) -> Result<u8, PmixError> {
        self.array().map(u8::from_be_bytes)
    }

    pub(super) fn half(&mut self) -> Result<u16, PmixError> {
        self.array().map(u16::from_be_bytes)
    }

    pub(super) fn word(&mut self) -> Result<u32, PmixError> {
        self.array().map(u32::from_be_bytes)
    }

    /// One value follows.
    pub(super) fn one(&mut self) -> Result<(), PmixError> {
        match self.word()? {
            1 => Ok(()),
            other => Err(PmixError::Count { given: other.into() }),
        }
    }

    pub(super) fn size(&mut self) -> Result<usize, PmixError> {
        let size = match self.half()? {
            kind::UINT32 => self.word()?.into(),
            kind::UINT64 => self.array().map(u64::from_be_bytes)?,
            other => return Err(PmixError::Type(other)),
        };
        usize::try_from(size).map_err(|_| PmixError::Short)
    }

    /// A size that tells how many values follow, each of a byte or more.
    pub(super) fn values(&mut self) -> Result<usize, PmixError> {
        let count = self.size()?;
        if count > self.0.len() {
            return Err(PmixError::Count { given: i64::try_from(count).unwrap_or(i64::MAX) });
        }
        Ok(count)
    }

    /// A text, which may be none.
    pub(super) fn text(&mut self) -> Result<&'a str, PmixError> {
        let length = self.word()? as usize;
        match self.take(length)?.split_last() {
            None => Ok(""),
            Some((0, text)) => std::str::from_utf8(text).map_err(|_| PmixError::Text),
            Some(_) => Err(PmixError::Text),
        }
    }

    pub(super) fn bytes(&mut self) -> Result<&'a [u8], PmixError> {
        let length = self.size()?;
        self.take(length)
    }

    /// How a request went.
    pub(super) fn status(&mut self) -> Result<i32, PmixError> {
        self.one()?;
        self.array().map(i32::from_be_bytes)
    }

    /// Of a key with its value: the key, and the value where it is a text.
    pub(super) fn pair(&mut self) -> Result<(&'a str, Option<&'a str>), PmixError> {
        self.one()?;
        let key = self.text()?;
        let kind = self.half()?;
        if kind == kind::STRING {
            return Ok((key, Some(self.text()?)));
        }
        self.skip(kind, 1, 0)?;
        Ok((key, None))
    }

    /// Passes over what qualifies a request; returns the keys whose value is not false.
    pub(super) fn qualifiers(&mut self) -> Result<Vec<&'a str>, PmixError> {
        let mut found = Vec::new();
        self.one()?;
        if self.values()? == 0 {
            return Ok(found);
        }
        for _ in 0..self.word()? {
            let key = self.text()?;
            self.word()?;
            let kind = self.half()?;
            let before = self.0;
            self.skip(kind, 1, 0)?;
            let is_false = kind == BOOL && before.first() == Some(&0);
            found.extend((!is_false).then_some(key));
        }
        Ok(found)
    }

    /// Passes over so many values of one type.
    fn skip(&mut self, kind: u16, count: usize, depth: u32) -> Result<(), PmixError> {
        if depth > MAX_DEPTH {
            return Err(PmixError::Deep);
        }
        let of = |width: usize| count.checked_mul(width).ok_or(PmixError::Short);
        match kind {
            UNDEFINED => {}
            BOOL | BYTE | 7 | 12 | 30..=34 | 37 | 43 | 51 => drop(self.take(of(1)?)?),
            8 | kind::UINT16 | 36 | 45 => drop(self.take(of(2)?)?),
            9 | kind::UINT32 | 20 | 35 | kind::RANK => drop(self.take(of(4)?)?),
            10 | kind::UINT64 | 19 => drop(self.take(of(8)?)?),
            18 => drop(self.take(of(16)?)?),
            // Their widths are told.
            SIZE | PROCESS_ID | 6 | 11 => {
                let width = self.half()?;
                if matches!(width, SIZE | PROCESS_ID | 6 | 11) {
                    return Err(PmixError::Type(width));
                }
                self.skip(width, count, depth + 1)?;
            }
            kind::STRING | FLOAT | DOUBLE => {
                for _ in 0..count {
                    let length = self.word()? as usize;
                    self.take(length)?;
                }
            }
            22 => {
                for _ in 0..count {
                    self.text()?;
                    self.word()?;
                }
            }
            kind::BYTES | 42 | 59 => {
                for _ in 0..count {
                    self.bytes()?;
                }
            }
            kind::INFO => {
                for _ in 0..count {
                    self.text()?;
                    self.word()?;
                    self.inner(depth)?;
                }
            }
            21 => {
                for _ in 0..count {
                    self.inner(depth)?;
                }
            }
            kind::ARRAY => {
                for _ in 0..count {
                    let inner = self.half()?;
                    let count = self.values()?;
                    self.skip(inner, count, depth + 1)?;
                }
            }
            other => return Err(PmixError::Type(other)),
        }
        Ok(())
    }

    fn inner(&mut self, depth: u32) -> Result<(), PmixError> {
        let kind = self.half()?;
        self.skip(kind, 1, depth + 1)
    }
}

const UNDEFINED: u16 = 0;
const BOOL: u16 = 1;
const BYTE: u16 = 2;
const SIZE: u16 = 4;
const PROCESS_ID: u16 = 5;
const FLOAT: u16 = 16;
const DOUBLE: u16 = 17;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_packed_as_the_library_does() {
        let packed = Pack::default().pair("k", &Value::Text("ab")).0;
        let bytes = b"\0\0\0\x01\0\0\0\x02k\0\0\x03\0\0\0\x03ab\0";
        assert_eq!(packed, bytes);
        assert_eq!(Unpack(&packed).pair(), Ok(("k", Some("ab"))));
        let size = Pack::default().size(258).0;
        assert_eq!(size, b"\0\x0f\0\0\0\0\0\0\x01\x02");
        assert_eq!(Unpack(&size).size(), Ok(258));
        assert_eq!(Pack::default().status(-46).0, b"\0\0\0\x01\xff\xff\xff\xd2");
    }

    #[test]
    fn what_is_passed_over_ends_where_the_next_begins() {
        let node = [("pmix.hname", Value::Text("a1")), ("pmix.nodeid", Value::Word(3))];
        for value in [
            Value::Half(7),
            Value::Word(7),
            Value::Rank(7),
            Value::Bytes(b"xyz"),
            Value::Array(&node),
            Value::Array(&[]),
        ] {
            let packed = Pack::default().pair("k", &value).word(0xabcd).0;
            let mut unpack = Unpack(&packed);
            assert_eq!(unpack.pair(), Ok(("k", None)), "{value:?}");
            assert_eq!(unpack.word(), Ok(0xabcd), "{value:?}");
            for end in 0..packed.len() - 4 {
                assert!(Unpack(&packed[..end]).pair().is_err(), "{value:?}, {end}");
            }
        }
    }

    #[test]
    fn what_nobody_can_hold_is_refused() {
        // An array of more values than there are bytes.
        let many = Pack::default().count(1).text("k").half(kind::ARRAY).half(0).size(1 << 40).0;
        assert!(matches!(Unpack(&many).pair(), Err(PmixError::Count { .. })));
        let other = Pack::default().count(1).text("k").half(499).0;
        assert_eq!(Unpack(&other).pair(), Err(PmixError::Type(499)));
        let deep = (0..20).fold(Pack::default().count(1).text("k").half(kind::ARRAY), |pack, _| {
            pack.half(kind::ARRAY).size(1)
        });
        assert_eq!(Unpack(&deep.0).pair(), Err(PmixError::Deep));
        assert_eq!(Unpack(b"\0\0\0\x01a").text(), Err(PmixError::Text));
    }

    #[test]
    fn qualifiers_that_are_false_do_not_count() {
        let one = |pack: Pack, key: &str, value: u8| pack.text(key).word(0).half(BOOL).byte(value);
        let pack = Pack::default().count(1).size(2).count(2);
        let packed = one(one(pack, "pmix.immediate", 1), "pmix.optional", 0).0;
        assert_eq!(Unpack(&packed).qualifiers(), Ok(vec!["pmix.immediate"]));
        let none = Pack::default().count(1).size(0).0;
        assert_eq!(Unpack(&none).qualifiers(), Ok(vec![]));
    }
}
