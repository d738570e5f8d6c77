//! CUDA arrays' shapes.

use kedge_cuda_types::memory::{CUDA_ARRAY3D_CUBEMAP, CUDA_ARRAY3D_LAYERED};
use kedge_wire::wire;

wire! {
    /// A CUDA array's shape, as CUDA_ARRAY3D_DESCRIPTOR gives it.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct ArrayDesc {
        /// Device ordinal.
        pub device: u32,
        /// Elements; height and depth 0 for fewer dimensions.
        pub width: u64,
        pub height: u64,
        pub depth: u64,
        /// CUarray_format.
        pub format: u32,
        /// 1, 2 or 4.
        pub channels: u32,
        /// CUDA_ARRAY3D_* flags (layered 1, surface 2, cubemap 4, texture gather 8).
        pub flags: u32,
    }
}

impl ArrayDesc {
    /// Returns whether the depth counts layers.
    pub fn is_layered(&self) -> bool {
        self.flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP) != 0
    }

    /// Returns the shape of a mipmapped array's level, whose finest this is: extents halve down to
    /// 1, layers stay.
    #[must_use]
    pub fn level(&self, level: u32) -> ArrayDesc {
        let halved = |extent: u64| match extent {
            0 => 0,
            _ => extent.checked_shr(level).unwrap_or(0).max(1),
        };
        ArrayDesc {
            width: halved(self.width),
            height: halved(self.height),
            depth: if self.is_layered() { self.depth } else { halved(self.depth) },
            ..*self
        }
    }

    /// Returns how many levels there are down to a single element.
    pub fn max_levels(&self) -> u32 {
        let depth = if self.is_layered() { 0 } else { self.depth };
        self.width.max(self.height).max(depth).max(1).ilog2() + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_halve_but_layers_stay() {
        let desc = |width, height, depth, flags| ArrayDesc {
            device: 0,
            width,
            height,
            depth,
            format: 0x20,
            channels: 1,
            flags,
        };
        let cube = desc(8, 4, 2, 0);
        assert_eq!((cube.max_levels(), cube.level(2)), (4, desc(2, 1, 1, 0)));
        let layered = desc(8, 4, 100, CUDA_ARRAY3D_LAYERED);
        assert_eq!((layered.max_levels(), layered.level(3)), (4, desc(1, 1, 100, 1)));
        assert_eq!(desc(8, 8, 6, CUDA_ARRAY3D_CUBEMAP).level(1), desc(4, 4, 6, 4));
        assert_eq!(desc(8, 0, 0, 0).level(64), desc(1, 0, 0, 0));
        assert_eq!(desc(0, 0, 0, 0).max_levels(), 1);
    }
}
