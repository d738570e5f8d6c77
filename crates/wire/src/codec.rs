use thiserror::Error;

/// Why a message could not be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum WireError {
    /// The message ends inside a value.
    #[error("message ends after {have} bytes where {need} more are needed")]
    Truncated { have: usize, need: usize },
    /// A length exceeds the maximum of its type.
    #[error("length {len} of {what} exceeds its maximum {max}")]
    TooLong { what: &'static str, len: u64, max: u64 },
    /// A tag names no variant of its enum.
    #[error("unknown tag {tag} for {what}")]
    UnknownTag { what: &'static str, tag: u32 },
    /// A value is outside its type's domain.
    #[error("invalid value for {what}")]
    Invalid { what: &'static str },
    /// Bytes follow the end of the message.
    #[error("{extra} bytes follow the end of the message")]
    Trailing { extra: usize },
}

/// Appends values to a caller-owned buffer, so that hot paths reuse one allocation.
#[derive(Debug)]
pub struct Writer<'a> {
    out: &'a mut Vec<u8>,
}

impl<'a> Writer<'a> {
    pub fn new(out: &'a mut Vec<u8>) -> Self {
        Self { out }
    }

    #[inline]
    pub fn raw(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }
}

/// Takes values from the front of a borrowed buffer.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    #[inline]
    pub fn raw(&mut self, len: usize) -> Result<&'a [u8], WireError> {
        if len > self.rest.len() {
            return Err(WireError::Truncated { have: self.rest.len(), need: len });
        }
        let (head, rest) = self.rest.split_at(len);
        self.rest = rest;
        Ok(head)
    }

    pub fn remaining(&self) -> usize {
        self.rest.len()
    }

    pub fn finish(self) -> Result<(), WireError> {
        match self.rest.len() {
            0 => Ok(()),
            extra => Err(WireError::Trailing { extra }),
        }
    }
}

/// A value with one encoding.
pub trait Wire: Sized {
    fn put(&self, w: &mut Writer<'_>);
    fn get(r: &mut Reader<'_>) -> Result<Self, WireError>;
}

/// Appends `value` to `out`.
#[inline]
pub fn encode<T: Wire>(value: &T, out: &mut Vec<u8>) {
    value.put(&mut Writer::new(out));
}

/// Decodes exactly one `T`; bytes that follow it are an error.
pub fn decode<T: Wire>(bytes: &[u8]) -> Result<T, WireError> {
    let mut r = Reader::new(bytes);
    let value = T::get(&mut r)?;
    r.finish()?;
    Ok(value)
}

/// Decodes what a test or a fuzz target holds this encoding to: bytes decode to nothing, or to a
/// value that has no other encoding.
///
/// # Panics
/// Where the value encodes to other bytes.
pub fn decode_canonical<T: Wire>(bytes: &[u8]) -> Option<T> {
    let value = decode::<T>(bytes).ok()?;
    let mut again = Vec::with_capacity(bytes.len());
    encode(&value, &mut again);
    assert!(again == bytes, "{} has two encodings", std::any::type_name::<T>());
    Some(value)
}

macro_rules! wire_int {
    ($($t:ty),*) => {$(
        impl Wire for $t {
            #[inline]
            fn put(&self, w: &mut Writer<'_>) {
                w.raw(&self.to_le_bytes());
            }
            #[inline]
            fn get(r: &mut Reader<'_>) -> Result<Self, WireError> {
                let mut bytes = [0; size_of::<$t>()];
                bytes.copy_from_slice(r.raw(size_of::<$t>())?);
                Ok(<$t>::from_le_bytes(bytes))
            }
        }
    )*};
}
wire_int!(u8, u16, u32, u64, i32, i64, f32, f64);

impl Wire for bool {
    #[inline]
    fn put(&self, w: &mut Writer<'_>) {
        u8::from(*self).put(w);
    }
    #[inline]
    fn get(r: &mut Reader<'_>) -> Result<Self, WireError> {
        match u8::get(r)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(WireError::Invalid { what: "bool" }),
        }
    }
}

/// For what is large and rare: an enum is as large as its largest variant.
impl<T: Wire> Wire for Box<T> {
    fn put(&self, w: &mut Writer<'_>) {
        (**self).put(w);
    }
    fn get(r: &mut Reader<'_>) -> Result<Self, WireError> {
        T::get(r).map(Box::new)
    }
}

impl Wire for () {
    fn put(&self, _: &mut Writer<'_>) {}
    fn get(_: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(())
    }
}

impl<T: Wire + Copy + Default, const N: usize> Wire for [T; N] {
    #[inline]
    fn put(&self, w: &mut Writer<'_>) {
        for value in self {
            value.put(w);
        }
    }
    #[inline]
    fn get(r: &mut Reader<'_>) -> Result<Self, WireError> {
        let mut out = [T::default(); N];
        for slot in &mut out {
            *slot = T::get(r)?;
        }
        Ok(out)
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    #[inline]
    fn put(&self, w: &mut Writer<'_>) {
        self.0.put(w);
        self.1.put(w);
    }
    #[inline]
    fn get(r: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok((A::get(r)?, B::get(r)?))
    }
}

impl<T: Wire> Wire for Option<T> {
    #[inline]
    fn put(&self, w: &mut Writer<'_>) {
        self.is_some().put(w);
        if let Some(value) = self {
            value.put(w);
        }
    }
    #[inline]
    fn get(r: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(if bool::get(r)? { Some(T::get(r)?) } else { None })
    }
}

impl<T: Wire, E: Wire> Wire for Result<T, E> {
    #[inline]
    fn put(&self, w: &mut Writer<'_>) {
        self.is_ok().put(w);
        match self {
            Ok(value) => value.put(w),
            Err(error) => error.put(w),
        }
    }
    #[inline]
    fn get(r: &mut Reader<'_>) -> Result<Self, WireError> {
        Ok(if bool::get(r)? { Ok(T::get(r)?) } else { Err(E::get(r)?) })
    }
}
