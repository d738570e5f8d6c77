use crate::{Reader, Wire, WireError, Writer};
use std::ops::Deref;
use thiserror::Error;

/// A value longer than its type allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("length {len} exceeds the maximum {max}")]
pub struct TooLong {
    pub len: usize,
    pub max: usize,
}

fn check(len: usize, max: usize) -> Result<(), TooLong> {
    if len > max { Err(TooLong { len, max }) } else { Ok(()) }
}

#[inline]
fn get_len(r: &mut Reader<'_>, what: &'static str, max: usize) -> Result<usize, WireError> {
    let len = u32::get(r)? as usize;
    if len > max {
        return Err(WireError::TooLong { what, len: len as u64, max: max as u64 });
    }
    Ok(len)
}

/// At most `MAX` bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Bytes<const MAX: usize>(Box<[u8]>);

impl<const MAX: usize> Bytes<MAX> {
    pub fn new(bytes: Vec<u8>) -> Result<Self, TooLong> {
        check(bytes.len(), MAX)?;
        Ok(Self(bytes.into_boxed_slice()))
    }

    pub fn into_inner(self) -> Vec<u8> {
        self.0.into_vec()
    }
}

impl<const MAX: usize> Deref for Bytes<MAX> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl<const MAX: usize> Wire for Bytes<MAX> {
    #[inline]
    fn put(&self, w: &mut Writer<'_>) {
        (self.0.len() as u32).put(w);
        w.raw(&self.0);
    }
    #[inline]
    fn get(r: &mut Reader<'_>) -> Result<Self, WireError> {
        let len = get_len(r, "bytes", MAX)?;
        Ok(Self(r.raw(len)?.into()))
    }
}

/// At most `MAX` values of `T`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List<T, const MAX: usize>(Box<[T]>);

impl<T, const MAX: usize> Default for List<T, MAX> {
    fn default() -> Self {
        Self(Box::default())
    }
}

impl<T, const MAX: usize> List<T, MAX> {
    pub fn new(values: Vec<T>) -> Result<Self, TooLong> {
        check(values.len(), MAX)?;
        Ok(Self(values.into_boxed_slice()))
    }

    pub fn into_inner(self) -> Vec<T> {
        self.0.into_vec()
    }
}

impl<T, const MAX: usize> Deref for List<T, MAX> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T: Wire, const MAX: usize> Wire for List<T, MAX> {
    #[inline]
    fn put(&self, w: &mut Writer<'_>) {
        (self.0.len() as u32).put(w);
        for value in &self.0 {
            value.put(w);
        }
    }
    #[inline]
    fn get(r: &mut Reader<'_>) -> Result<Self, WireError> {
        let len = get_len(r, "list", MAX)?;
        // A hostile length must not reserve memory that the message cannot fill.
        let mut values = Vec::with_capacity(len.min(r.remaining()));
        for _ in 0..len {
            values.push(T::get(r)?);
        }
        Ok(Self(values.into_boxed_slice()))
    }
}

/// UTF-8 text of at most `MAX` bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Text<const MAX: usize>(String);

impl<const MAX: usize> Text<MAX> {
    pub fn new(text: String) -> Result<Self, TooLong> {
        check(text.len(), MAX)?;
        Ok(Self(text))
    }

    /// Cuts `text` at the last character boundary that fits: for messages meant for people.
    pub fn truncated(mut text: String) -> Self {
        let mut end = text.len().min(MAX);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        Self(text)
    }

    pub fn into_inner(self) -> String {
        self.0
    }
}

impl<const MAX: usize> Deref for Text<MAX> {
    type Target = str;
    fn deref(&self) -> &str {
        &self.0
    }
}

impl<const MAX: usize> Wire for Text<MAX> {
    #[inline]
    fn put(&self, w: &mut Writer<'_>) {
        (self.0.len() as u32).put(w);
        w.raw(self.0.as_bytes());
    }
    #[inline]
    fn get(r: &mut Reader<'_>) -> Result<Self, WireError> {
        let len = get_len(r, "text", MAX)?;
        match std::str::from_utf8(r.raw(len)?) {
            Ok(text) => Ok(Self(text.to_owned())),
            Err(_) => Err(WireError::Invalid { what: "text" }),
        }
    }
}
