//! Texture elements: formats, and the four channels of an element.

use super::narrow::f16_to_f32;

/// What one channel of an element holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channel {
    U8,
    U16,
    U32,
    S8,
    S16,
    S32,
    F16,
    F32,
}

/// An element's format: up to four channels of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    pub channel: Channel,
    /// 1, 2 or 4.
    pub channels: u32,
}

/// The largest element, bytes.
pub(crate) const MAX_BYTES: usize = 16;

impl Format {
    /// From a CUarray_format. None: not a format of plain elements.
    pub fn new(format: u32, channels: u32) -> Option<Self> {
        let channel = match format {
            0x01 => Channel::U8,
            0x02 => Channel::U16,
            0x03 => Channel::U32,
            0x08 => Channel::S8,
            0x09 => Channel::S16,
            0x0A => Channel::S32,
            0x10 => Channel::F16,
            0x20 => Channel::F32,
            _ => return None,
        };
        matches!(channels, 1 | 2 | 4).then_some(Self { channel, channels })
    }

    /// Bytes of a channel.
    pub const fn channel_bytes(self) -> u32 {
        match self.channel {
            Channel::U8 | Channel::S8 => 1,
            Channel::U16 | Channel::S16 | Channel::F16 => 2,
            Channel::U32 | Channel::S32 | Channel::F32 => 4,
        }
    }

    /// Bytes of an element.
    pub const fn bytes(self) -> u32 {
        self.channel_bytes() * self.channels
    }

    /// Whether channels are read as numbers in [0, 1] or [-1, 1] unless the texture is read as
    /// integers: 8 and 16 bits only.
    pub const fn normalises(self) -> bool {
        matches!(self.channel, Channel::U8 | Channel::S8 | Channel::U16 | Channel::S16)
    }

    /// What an absent fourth channel reads as: one.
    pub(crate) fn one(self, normalised: bool) -> u32 {
        match self.channel {
            Channel::F16 | Channel::F32 => 1f32.to_bits(),
            _ if normalised => 1f32.to_bits(),
            _ => 1,
        }
    }

    /// An element's channels in registers: integers extended to 32 bits, floats as f32.
    /// `normalised`: 8- and 16-bit integers as numbers, in `srgb` the first three of 8 bits as
    /// linear light.
    pub(crate) fn decode(
        self,
        element: &[u8; MAX_BYTES],
        normalised: bool,
        srgb: bool,
    ) -> [u32; 4] {
        let word = |index: usize| {
            let at = 4 * index;
            u32::from_le_bytes([element[at], element[at + 1], element[at + 2], element[at + 3]])
        };
        // The commonest formats first, without a loop over odd sizes.
        match (self.channel, self.channels) {
            (Channel::F32 | Channel::U32 | Channel::S32, 1) => {
                return [word(0), 0, 0, self.one(false)];
            }
            (Channel::F32 | Channel::U32 | Channel::S32, 4) => {
                return [word(0), word(1), word(2), word(3)];
            }
            (Channel::U8, 4) if normalised && !srgb => {
                return [0, 1, 2, 3].map(|i: usize| (f32::from(element[i]) / 255.0).to_bits());
            }
            (Channel::U8, 1) if normalised && !srgb => {
                let value = f32::from(element[0]) / 255.0;
                return [value.to_bits(), 0, 0, 1f32.to_bits()];
            }
            _ => {}
        }
        let normalised = normalised && self.normalises();
        let mut out = [0, 0, 0, self.one(normalised)];
        let size = self.channel_bytes() as usize;
        for (index, slot) in out.iter_mut().enumerate().take(self.channels as usize) {
            let mut word = [0; 4];
            word[..size].copy_from_slice(&element[index * size..][..size]);
            *slot = self.channel_value(u32::from_le_bytes(word), normalised, srgb && index < 3);
        }
        out
    }

    fn channel_value(self, bits: u32, normalised: bool, srgb: bool) -> u32 {
        let signed = |value: i32, top: f32| {
            if normalised { (value as f32 / top).max(-1.0).to_bits() } else { value as u32 }
        };
        match self.channel {
            Channel::U8 if normalised && srgb => linear(bits as f32 / 255.0).to_bits(),
            Channel::U8 if normalised => (bits as f32 / 255.0).to_bits(),
            Channel::U16 if normalised => (bits as f32 / 65535.0).to_bits(),
            Channel::S8 => signed((bits as i8).into(), 127.0),
            Channel::S16 => signed((bits as i16).into(), 32767.0),
            Channel::F16 => f16_to_f32(bits as u16).to_bits(),
            _ => bits,
        }
    }
}

/// sRGB's transfer function (IEC 61966-2-1).
fn linear(c: f32) -> f32 {
    if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(format: u32, channels: u32, element: &[u8], normalised: bool) -> [u32; 4] {
        let mut bytes = [0; MAX_BYTES];
        bytes[..element.len()].copy_from_slice(element);
        Format::new(format, channels).unwrap().decode(&bytes, normalised, false)
    }

    #[test]
    fn channels() {
        let one = 1f32.to_bits();
        assert_eq!(decode(0x01, 4, &[255, 0, 51, 1], false), [255, 0, 51, 1]);
        assert_eq!(decode(0x01, 2, &[255, 51], true), [one, 0.2f32.to_bits(), 0, one]);
        assert_eq!(decode(0x08, 1, &[0x80], false), [0xFFFF_FF80, 0, 0, 1]);
        assert_eq!(decode(0x08, 1, &[0x80], true)[0], (-1f32).to_bits());
        assert_eq!(decode(0x10, 1, &[0x00, 0x3C], false), [one, 0, 0, one]);
        assert_eq!(decode(0x03, 1, &[1, 2, 3, 4], true)[0], 0x0403_0201);
        assert!(Format::new(0x01, 3).is_none() && Format::new(0x30, 1).is_none());
    }
}
