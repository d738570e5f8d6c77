//! Tensor maps (`CUtensorMap`): what they say, what the reference demands of them, and how kedge
//! writes them into their 128 opaque bytes.
//!
//! The bytes are kedge's own: the software device reads them, and every parameter can be read back,
//! so that a real driver can be asked for its own form of the same map.

use crate::CuError;

/// Bytes of a `CUtensorMap`.
pub const TENSOR_MAP_BYTES: usize = 128;
/// Its alignment, in bytes.
pub const TENSOR_MAP_ALIGN: u64 = 64;
/// Most dimensions.
pub const MAX_RANK: usize = 5;

/// `CUtensorMapDataType`; those that only compute capability 10.0 has are left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Format {
    U8,
    U16,
    U32,
    S32,
    U64,
    S64,
    F16,
    F32,
    F64,
    Bf16,
    /// As `F32`, subnormals flushed.
    F32Ftz,
    Tf32,
    Tf32Ftz,
}

impl Format {
    const ALL: [Format; 13] = [
        Format::U8,
        Format::U16,
        Format::U32,
        Format::S32,
        Format::U64,
        Format::S64,
        Format::F16,
        Format::F32,
        Format::F64,
        Format::Bf16,
        Format::F32Ftz,
        Format::Tf32,
        Format::Tf32Ftz,
    ];

    pub fn from_raw(raw: u32) -> Option<Format> {
        Self::ALL.get(raw as usize).copied()
    }

    /// Bytes of an element.
    pub fn size(self) -> u32 {
        match self {
            Format::U8 => 1,
            Format::U16 | Format::F16 | Format::Bf16 => 2,
            Format::U64 | Format::S64 | Format::F64 => 8,
            _ => 4,
        }
    }

    pub fn is_float(self) -> bool {
        self as u8 >= Format::F16 as u8
    }
}

/// `CUtensorMapInterleave`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Interleave {
    None,
    B16,
    B32,
}

impl Interleave {
    pub fn from_raw(raw: u32) -> Option<Interleave> {
        [Interleave::None, Interleave::B16, Interleave::B32].get(raw as usize).copied()
    }
}

/// `CUtensorMapSwizzle`; those that only compute capability 10.0 has are left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Swizzle {
    None,
    B32,
    B64,
    B128,
}

impl Swizzle {
    pub fn from_raw(raw: u32) -> Option<Swizzle> {
        [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128].get(raw as usize).copied()
    }

    /// Bytes of the span in which 16-byte chunks change places.
    fn span(self) -> u32 {
        16 << self as u8
    }

    /// Where the byte for `addr`, an address in shared memory, is kept: bits 4 to 6, as many as the
    /// span has chunks, are xored with the number of the 128-byte line.
    pub fn place(self, addr: u64) -> u64 {
        let chunks = u64::from(self.span() / 16);
        addr ^ (addr >> 7 & (chunks - 1)) << 4
    }
}

/// Which elements a copy takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// A box of so many elements along each dimension.
    Tiled { extent: [u16; MAX_RANK] },
    /// So many channels of so many pixels of a bounding box, whose corners are given as offsets {W,
    /// H, D} from the tensor's own.
    Im2col { lower: [i16; 3], upper: [i16; 3], channels: u16, pixels: u16 },
}

/// A tensor map's parameters, lowest dimension first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap {
    pub format: Format,
    pub rank: u8,
    pub address: u64,
    /// Elements along each dimension, 1 to 2^32.
    pub dims: [u64; MAX_RANK],
    /// Bytes from one element to the next along dimensions 1, 2, ….
    pub strides: [u64; MAX_RANK - 1],
    /// `elementStrides`: every so many'th element is taken. The first is not looked at.
    pub steps: [u8; MAX_RANK],
    pub mode: Mode,
    pub interleave: Interleave,
    pub swizzle: Swizzle,
    /// `CUtensorMapL2promotion`, a hint.
    pub promotion: u8,
    /// What lies outside is NaN instead of 0.
    pub nan_fill: bool,
}

const MAGIC: [u8; 7] = *b"kedgeTM";
const TILED: u8 = 0;
const IM2COL: u8 = 1;

impl TensorMap {
    /// What the reference demands of `cuTensorMapEncode*`'s parameters.
    ///
    /// # Errors
    /// INVALID_VALUE.
    pub fn check(&self) -> Result<(), CuError> {
        let rank = usize::from(self.rank);
        let ok = (1..=MAX_RANK).contains(&rank)
            && (self.interleave == Interleave::None || rank >= 3)
            && self.address.is_multiple_of(self.unit())
            && self.dims[..rank].iter().all(|dim| (1..=1 << 32).contains(dim))
            && self.strides[..rank - 1]
                .iter()
                .all(|stride| stride.is_multiple_of(self.unit()) && *stride < 1 << 40)
            && self.steps[self.first_step()..rank].iter().all(|step| (1..=8).contains(step))
            && self.promotion <= 3
            && (!self.nan_fill || self.format.is_float())
            && self.inner_fits()
            && self.mode_fits(rank);
        if ok { Ok(()) } else { Err(CuError::INVALID_VALUE) }
    }

    /// What addresses and strides are multiples of.
    fn unit(&self) -> u64 {
        if self.interleave == Interleave::B32 { 32 } else { 16 }
    }

    fn first_step(&self) -> usize {
        usize::from(self.interleave == Interleave::None)
    }

    /// Elements of a row in shared memory.
    pub fn row_elements(&self) -> u32 {
        match self.mode {
            Mode::Tiled { extent } => extent[0].into(),
            Mode::Im2col { channels, .. } => channels.into(),
        }
    }

    fn inner_fits(&self) -> bool {
        let bytes = self.row_elements() * self.format.size();
        match self.interleave {
            Interleave::None => {
                bytes.is_multiple_of(16)
                    && (self.swizzle == Swizzle::None || bytes <= self.swizzle.span())
            }
            Interleave::B16 => true,
            Interleave::B32 => self.swizzle == Swizzle::B32,
        }
    }

    fn mode_fits(&self, rank: usize) -> bool {
        match self.mode {
            Mode::Tiled { extent } => extent[..rank].iter().all(|n| (1..=256).contains(n)),
            Mode::Im2col { lower, upper, channels, pixels } => {
                let most = match rank {
                    3 => i16::MAX,
                    4 => 127,
                    5 => 15,
                    _ => return false,
                };
                let spatial = rank - 2;
                let range = |corner: &i16| (-most - 1..=most).contains(corner);
                let area = |at: usize| {
                    self.dims[1 + at] as i64 - i64::from(lower[at]) + i64::from(upper[at]) > 0
                };
                lower[..spatial].iter().all(range)
                    && upper[..spatial].iter().all(range)
                    && (0..spatial).all(area)
                    && (1..=256).contains(&channels)
                    && (1..=1024).contains(&pixels)
            }
        }
    }

    /// The 128 bytes.
    pub fn encode(&self) -> [u8; TENSOR_MAP_BYTES] {
        let mut out = [0; TENSOR_MAP_BYTES];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        let mode = if matches!(self.mode, Mode::Tiled { .. }) { TILED } else { IM2COL };
        put(&MAGIC);
        put(&[mode, self.format as u8, self.rank, self.interleave as u8, self.swizzle as u8]);
        put(&[self.promotion, u8::from(self.nan_fill), 0, 0]);
        put(&self.address.to_le_bytes());
        // 2^32 is a size, 0 is none.
        self.dims.iter().for_each(|dim| put(&(dim.wrapping_sub(1) as u32).to_le_bytes()));
        self.strides.iter().for_each(|stride| put(&stride.to_le_bytes()));
        put(&self.steps);
        match self.mode {
            Mode::Tiled { extent } => extent.iter().for_each(|n| put(&n.to_le_bytes())),
            Mode::Im2col { lower, upper, channels, pixels } => {
                lower.iter().chain(&upper).for_each(|corner| put(&corner.to_le_bytes()));
                put(&channels.to_le_bytes());
                put(&pixels.to_le_bytes());
            }
        }
        out
    }

    /// What [`Self::encode`] wrote. None for other bytes, and for parameters that [`Self::check`]
    /// refuses: a kernel may have written them.
    pub fn decode(bytes: &[u8; TENSOR_MAP_BYTES]) -> Option<TensorMap> {
        let map = Self::decode_unchecked(bytes)?;
        map.check().is_ok().then_some(map)
    }

    /// As [`Self::decode`], without the check: a map whose fields are being replaced one by one.
    pub fn decode_unchecked(bytes: &[u8; TENSOR_MAP_BYTES]) -> Option<TensorMap> {
        let mut rest = bytes.as_slice();
        let magic: [u8; 7] = take(&mut rest)?;
        let [mode, format, rank, interleave] = take(&mut rest)?;
        let [swizzle, promotion, nan_fill, _, _] = take(&mut rest)?;
        let address = u64::from_le_bytes(take(&mut rest)?);
        let mut dims = [0; MAX_RANK];
        for dim in &mut dims {
            *dim = u64::from(u32::from_le_bytes(take(&mut rest)?)) + 1;
        }
        let mut strides = [0; MAX_RANK - 1];
        for stride in &mut strides {
            *stride = u64::from_le_bytes(take(&mut rest)?);
        }
        let steps = take(&mut rest)?;
        let mut word = || Some(u16::from_le_bytes(take(&mut rest)?));
        let mode = match mode {
            TILED => Mode::Tiled { extent: [word()?, word()?, word()?, word()?, word()?] },
            IM2COL => {
                let mut corner = || Some([word()? as i16, word()? as i16, word()? as i16]);
                let (lower, upper) = (corner()?, corner()?);
                Mode::Im2col { lower, upper, channels: word()?, pixels: word()? }
            }
            _ => return None,
        };
        (magic == MAGIC).then_some(())?;
        Some(TensorMap {
            format: Format::from_raw(format.into())?,
            rank,
            address,
            dims,
            strides,
            steps,
            mode,
            interleave: Interleave::from_raw(interleave.into())?,
            swizzle: Swizzle::from_raw(swizzle.into())?,
            promotion,
            nan_fill: nan_fill != 0,
        })
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (first, left) = rest.split_first_chunk()?;
    *rest = left;
    Some(*first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile() -> TensorMap {
        TensorMap {
            format: Format::F16,
            rank: 2,
            address: 0x1000,
            dims: [1 << 32, 100, 1, 1, 1],
            strides: [256, 0, 0, 0],
            steps: [1; 5],
            mode: Mode::Tiled { extent: [64, 256, 1, 1, 1] },
            interleave: Interleave::None,
            swizzle: Swizzle::B128,
            promotion: 2,
            nan_fill: true,
        }
    }

    #[test]
    fn parameters_survive_encoding() {
        let column = TensorMap {
            rank: 4,
            dims: [64, 14, 14, 2, 1],
            strides: [128, 1792, 25088, 0],
            mode: Mode::Im2col { lower: [-1, -1, 0], upper: [-1, -1, 0], channels: 64, pixels: 32 },
            ..tile()
        };
        for map in [tile(), column] {
            assert_eq!(TensorMap::decode(&map.encode()), Some(map));
        }
        assert_eq!(TensorMap::decode(&[0; 128]), None);
    }

    #[test]
    fn what_the_reference_forbids_is_refused() {
        let wrong: [fn(&mut TensorMap); 14] = [
            |map| map.rank = 0,
            |map| map.rank = 6,
            |map| map.address = 8,
            |map| map.dims[1] = 0,
            |map| map.dims[0] = (1 << 32) + 1,
            |map| map.strides[0] = 24,
            |map| map.strides[0] = 1 << 40,
            |map| map.steps[1] = 0,
            |map| map.steps[1] = 9,
            |map| map.promotion = 4,
            |map| map.format = Format::U16,
            |map| map.swizzle = Swizzle::B64,
            |map| map.mode = Mode::Tiled { extent: [60, 1, 1, 1, 1] },
            |map| map.mode = Mode::Tiled { extent: [64, 257, 1, 1, 1] },
        ];
        assert_eq!(tile().check(), Ok(()));
        for (index, change) in wrong.iter().enumerate() {
            let mut map = tile();
            change(&mut map);
            assert_eq!(map.check(), Err(CuError::INVALID_VALUE), "change {index}");
        }
        assert_eq!(TensorMap::decode(&TensorMap { rank: 6, ..tile() }.encode()), None);
        let interleaved = TensorMap { interleave: Interleave::B16, ..tile() };
        assert!(interleaved.check().is_err(), "three dimensions at least");
    }

    #[test]
    fn chunks_change_places_by_line() {
        assert_eq!(Swizzle::None.place(0x3F0), 0x3F0);
        assert_eq!(Swizzle::B128.place(0x80), 0x90);
        assert_eq!(Swizzle::B128.place(0x3F5), 0x385);
        assert_eq!(Swizzle::B64.place(0x1B0), 0x180);
        assert_eq!(Swizzle::B32.place(0x180), 0x190);
        for mode in [Swizzle::B32, Swizzle::B64, Swizzle::B128] {
            assert!((0..4096).all(|addr| mode.place(mode.place(addr)) == addr));
        }
    }
}
