//! Texture elements: formats, and the four channels of an element.

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
}
