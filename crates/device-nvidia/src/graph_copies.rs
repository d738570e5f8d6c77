//! A graph's copies from and to the client's private memory: pinned memory in between, which a host
//! node fills before the driver's copy, or empties after it.

use crate::copies::{self, Arrays, RawCopy};
use crate::driver::{Driver, check};
use kedge_cuda_types::CuError;
use kedge_cuda_types::graph::CUDA_HOST_NODE_PARAMS_v1;
use kedge_device::Host;
use kedge_protocol::{Copy3d, Place, Shape};
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

/// CU_MEMHOSTALLOC_PORTABLE.
const PORTABLE: u32 = 1;

/// A copy with private memory on one side, or on both.
pub(crate) struct StagedCopy {
    /// The driver's part; `None` between private memories.
    pub(crate) copy: Option<RawCopy>,
    /// Whether the host node comes before the driver's part.
    pub(crate) fills: bool,
    step: Box<HostStep>,
}

/// What the host node does.
pub(crate) struct HostStep {
    host: Arc<dyn Host>,
    driver: Arc<Driver>,
    /// Pinned, as long as the shape; one launch of the graph uses it at a time.
    buffer: Mutex<Pinned>,
    shape: Shape,
    from: Option<Place>,
    to: Option<Place>,
}

struct Pinned {
    at: *mut u8,
    len: usize,
}

// SAFETY: plain memory, behind a lock.
unsafe impl Send for Pinned {}

impl Pinned {
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the driver gave `len` bytes; the graph's edges keep its own copies apart from the
        // host node.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }
}

impl StagedCopy {
    /// A context must be current.
    pub(crate) fn new(
        driver: &Arc<Driver>,
        host: &Arc<dyn Host>,
        copy: &Copy3d,
        arrays: &impl Arrays,
    ) -> Result<StagedCopy, CuError> {
        let shape = copy.shape();
        let bytes = shape.bytes().and_then(|bytes| usize::try_from(bytes).ok());
        let len = bytes.filter(|bytes| *bytes > 0).ok_or(CuError::INVALID_VALUE)?;
        let mut at = ptr::null_mut();
        // SAFETY: a live out pointer.
        check(unsafe { (driver.cuMemHostAlloc)(&mut at, len, PORTABLE) })?;
        let private = |place| Some(place).filter(|place| matches!(place, Place::Client { .. }));
        let step = Box::new(HostStep {
            host: Arc::clone(host),
            driver: Arc::clone(driver),
            buffer: Mutex::new(Pinned { at: at.cast(), len }),
            shape,
            from: private(copy.src),
            to: private(copy.dst),
        });
        let staging = shape.packed_at(at as u64);
        let (src, dst) =
            (step.from.map_or(copy.src, |_| staging), step.to.map_or(copy.dst, |_| staging));
        let copy = match (step.from, step.to) {
            (Some(_), Some(_)) => None,
            _ => Some(copies::raw(&Copy3d::new(src, dst, shape), arrays)?),
        };
        Ok(StagedCopy { copy, fills: step.from.is_some(), step })
    }

    /// The host node. The step must outlive the graph.
    pub(crate) fn node_params(&self) -> CUDA_HOST_NODE_PARAMS_v1 {
        CUDA_HOST_NODE_PARAMS_v1 {
            r#fn: Some(stage),
            userData: ptr::from_ref(&*self.step).cast_mut().cast(),
        }
    }

    pub(crate) fn into_step(self) -> Box<HostStep> {
        self.step
    }
}

impl HostStep {
    fn run(&self) -> Result<(), CuError> {
        let mut buffer = self.buffer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(from) = self.from {
            each_row(from, self.shape, buffer.bytes(), |addr, row| {
                self.host.read_client(addr, row)
            })?;
        }
        match self.to {
            Some(to) => each_row(to, self.shape, buffer.bytes(), |addr, row| {
                self.host.write_client(addr, row)
            }),
            None => Ok(()),
        }
    }
}

/// Calls `f` with the address and the staged bytes of each row, or of all of them if they are
/// packed.
fn each_row(
    place: Place,
    shape: Shape,
    staged: &mut [u8],
    mut f: impl FnMut(u64, &mut [u8]) -> Result<(), CuError>,
) -> Result<(), CuError> {
    let row = |y, z| place.row(y, z).ok_or(CuError::INVALID_VALUE);
    if place.is_packed(shape) {
        return f(row(0, 0)?, staged);
    }
    let places = (0..shape.depth).flat_map(|z| (0..shape.height).map(move |y| (y, z)));
    places
        .zip(staged.chunks_mut(shape.width as usize))
        .try_for_each(|((y, z), bytes)| f(row(y, z)?, bytes))
}

impl Drop for HostStep {
    fn drop(&mut self) {
        let buffer = self.buffer.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the driver's allocation, once; the graph that used it is gone.
        unsafe { (self.driver.cuMemFreeHost)(buffer.at.cast()) };
    }
}

unsafe extern "C" fn stage(step: *mut c_void) {
    // SAFETY: a step that its graph keeps as long as a launch may run.
    let step = unsafe { &*step.cast::<HostStep>() };
    if let Err(error) = step.run() {
        step.host.log(&format!("a graph's copy cannot reach the program's memory: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_go_where_they_belong() {
        let shape = Shape { width: 2, height: 2, depth: 2 };
        let rows = |place| {
            let mut rows = Vec::new();
            let mut staged: Vec<u8> = (0..8).collect();
            each_row(place, shape, &mut staged, |addr, bytes| {
                rows.push((addr, bytes.to_vec()));
                Ok(())
            })
            .unwrap();
            rows
        };
        let packed = Place::Client { addr: 100, pitch: 2, slice: 4 };
        assert_eq!(rows(packed), [(100, (0..8).collect())]);
        let apart = Place::Client { addr: 100, pitch: 10, slice: 50 };
        let expected = [(100, vec![0, 1]), (110, vec![2, 3]), (150, vec![4, 5]), (160, vec![6, 7])];
        assert_eq!(rows(apart), expected);
    }
}
