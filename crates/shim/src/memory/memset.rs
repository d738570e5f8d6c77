//! Filling memory: the `cuMemset` family.

use super::place::{Home, Shape, locate_on_device};
use crate::entry::default_stream;
use crate::{capture, stream};
use kedge_cuda_types::CuError;
use kedge_cuda_types::handle::{CUdeviceptr, CUstream};
use kedge_protocol::StreamOp;

/// A rectangle of elements and what fills it.
#[derive(Debug, Clone, Copy)]
struct Fill {
    dst: u64,
    /// Bytes between rows.
    pitch: u64,
    value: u32,
    /// Bytes of an element: 1, 2 or 4.
    element: u32,
    /// Elements of a row, and rows.
    width: u64,
    height: u64,
}

impl Fill {
    fn line(dst: u64, value: u32, element: u32, count: usize) -> Self {
        Self { dst, pitch: 0, value, element, width: count as u64, height: 1 }
    }

    /// Checks it, and says where it lies. `None`: there is nothing to fill.
    fn check(&self) -> Result<Option<Home>, CuError> {
        if self.width == 0 || self.height == 0 {
            return Ok(None);
        }
        let element = u64::from(self.element);
        let width = self.width.checked_mul(element).ok_or(CuError::INVALID_VALUE)?;
        let misaligned = !self.dst.is_multiple_of(element)
            || (self.height > 1 && !self.pitch.is_multiple_of(element));
        if misaligned || (self.height > 1 && self.pitch < width) {
            return Err(CuError::INVALID_VALUE);
        }
        let shape = Shape { width, height: self.height, depth: 1 };
        Ok(Some(locate_on_device(self.dst, self.pitch, 0, shape)?.home))
    }

    /// The operation; a registered host address becomes the device's.
    fn op(&self) -> StreamOp {
        let Self { dst, pitch, value, element, width, height } = *self;
        let dst = super::MEMORY.table().resolve(dst).map_or(dst, |(_, addr)| addr);
        StreamOp::Memset { dst, pitch, value, element, width, height }
    }

    fn enqueue(self, stream: CUstream) -> Result<(), CuError> {
        match self.check()? {
            Some(_) => stream::enqueue(stream, self.op()),
            None => Ok(()),
        }
    }

    /// The functions without a stream wait where the host could look at the memory.
    fn run(self) -> Result<(), CuError> {
        let Some(home) = self.check()? else { return Ok(()) };
        capture::check_unsafe()?;
        stream::enqueue(default_stream(), self.op())?;
        if home == Home::Device { Ok(()) } else { stream::wait(default_stream()) }
    }
}

/// The operation of a graph's fill node, checked.
pub(crate) fn memset_op(
    dst: CUdeviceptr,
    pitch: usize,
    value: u32,
    element: u32,
    width: usize,
    height: usize,
) -> Result<StreamOp, CuError> {
    let (width, height) = (width as u64, height as u64);
    let fill = Fill { dst, pitch: pitch as u64, value, element, width, height };
    if !matches!(element, 1 | 2 | 4) || fill.check()?.is_none() {
        return Err(CuError::INVALID_VALUE);
    }
    Ok(fill.op())
}

macro_rules! family {
    ($ty:ty, $line:ident, $line_async:ident, $rect:ident, $rect_async:ident) => {
        pub(crate) unsafe fn $line(
            dst: CUdeviceptr,
            value: $ty,
            count: usize,
        ) -> Result<(), CuError> {
            Fill::line(dst, value.into(), size_of::<$ty>() as u32, count).run()
        }

        pub(crate) unsafe fn $line_async(
            dst: CUdeviceptr,
            value: $ty,
            count: usize,
            stream: CUstream,
        ) -> Result<(), CuError> {
            Fill::line(dst, value.into(), size_of::<$ty>() as u32, count).enqueue(stream)
        }

        pub(crate) unsafe fn $rect(
            dst: CUdeviceptr,
            pitch: usize,
            value: $ty,
            width: usize,
            height: usize,
        ) -> Result<(), CuError> {
            let line = Fill::line(dst, value.into(), size_of::<$ty>() as u32, width);
            Fill { pitch: pitch as u64, height: height as u64, ..line }.run()
        }

        pub(crate) unsafe fn $rect_async(
            dst: CUdeviceptr,
            pitch: usize,
            value: $ty,
            width: usize,
            height: usize,
            stream: CUstream,
        ) -> Result<(), CuError> {
            let line = Fill::line(dst, value.into(), size_of::<$ty>() as u32, width);
            Fill { pitch: pitch as u64, height: height as u64, ..line }.enqueue(stream)
        }
    };
}

family!(u8, cuMemsetD8_v2, cuMemsetD8Async, cuMemsetD2D8_v2, cuMemsetD2D8Async);
family!(u16, cuMemsetD16_v2, cuMemsetD16Async, cuMemsetD2D16_v2, cuMemsetD2D16Async);
family!(u32, cuMemsetD32_v2, cuMemsetD32Async, cuMemsetD2D32_v2, cuMemsetD2D32Async);

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_cuda_types::arena::{DEVICE_CLIENT_LEN, device_base};

    #[test]
    fn refuses_what_the_reference_refuses() {
        let at = device_base(2) + DEVICE_CLIENT_LEN;
        let fill = |dst, pitch, element, width, height| {
            Fill { dst, pitch, value: 0, element, width, height }.check()
        };
        assert_eq!(fill(at, 0, 4, 10, 1), Ok(Some(Home::Device)));
        assert_eq!(fill(at, 0, 4, 0, 1), Ok(None));
        assert_eq!(fill(at + 2, 0, 4, 10, 1), Err(CuError::INVALID_VALUE));
        assert_eq!(fill(at, 39, 4, 10, 2), Err(CuError::INVALID_VALUE));
        assert_eq!(fill(at, 36, 4, 10, 2), Err(CuError::INVALID_VALUE));
        assert_eq!(fill(at, 40, 4, 10, 2), Ok(Some(Home::Device)));
        assert_eq!(fill(at, 0, 4, u64::MAX, 1), Err(CuError::INVALID_VALUE));
        assert_eq!(fill(0x7fff_0000_0000, 0, 1, 8, 1), Err(CuError::INVALID_VALUE));
    }
}
