//! Texture and surface objects with the handles that they had: the program keeps handles in its
//! memory.
//!
//! The driver numbers objects as it likes, and says nothing of how. So while a restart makes them
//! again, in their old order, each is made until its handle comes up, and the others are held back
//! until the end.

use crate::context::Context;
use crate::driver::Driver;
use crate::textures::Textures;
use kedge_cuda_types::CuError;
use kedge_protocol::{CtxId, Texture};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Objects that are made in vain for one that is wanted.
const MAX_TRIES: usize = 4096;
/// A handle's low 20 bits number the object's header, the others its sampler.
const HEADER: u64 = (1 << 20) - 1;

/// What a restart is about to make.
#[derive(Default)]
pub(crate) struct Expected {
    /// Handles, in the order in which the objects were made.
    handles: BTreeMap<CtxId, VecDeque<u64>>,
    /// Made in vain.
    spare: Vec<(Arc<Context>, u64)>,
}

impl Expected {
    pub(crate) fn new(handles: impl Iterator<Item = (CtxId, u64)>) -> Expected {
        let mut expected = Expected::default();
        for (ctx, handle) in handles {
            expected.handles.entry(ctx).or_default().push_back(handle);
        }
        expected
    }

    /// One that has not been made.
    pub(crate) fn missing(&self) -> Option<u64> {
        self.handles.values().flatten().next().copied()
    }

    /// Takes out the spare objects that are in the place of `handle`.
    fn in_the_way(&mut self, ctx: CtxId, handle: u64) -> Vec<u64> {
        let blocks =
            |(of, spare): &(Arc<Context>, u64)| of.id == ctx && spare & HEADER == handle & HEADER;
        let (gone, kept) = std::mem::take(&mut self.spare).into_iter().partition(blocks);
        self.spare = kept;
        let gone: Vec<(Arc<Context>, u64)> = gone;
        gone.into_iter().map(|(_, spare)| spare).collect()
    }
}

impl Textures {
    /// Makes an object; during a restart, with the handle that it had.
    ///
    /// # Errors
    /// The driver's, and INVALID_HANDLE where it does not give the handle again.
    pub(crate) fn create_as_before(
        &mut self,
        driver: &Driver,
        ctx: &Arc<Context>,
        texture: &Texture,
    ) -> Result<u64, CuError> {
        let wanted = self.expected.handles.get_mut(&ctx.id).and_then(VecDeque::pop_front);
        let Some(wanted) = wanted else { return self.create_object(driver, ctx, texture) };
        for spare in self.expected.in_the_way(ctx.id, wanted) {
            self.destroy_object(driver, ctx, spare)?;
        }
        for _ in 0..MAX_TRIES {
            let made = self.create_object(driver, ctx, texture)?;
            if made == wanted {
                return Ok(made);
            }
            self.expected.spare.push((Arc::clone(ctx), made));
        }
        Err(CuError::INVALID_HANDLE)
    }

    /// All have been made: ends those that were made in vain.
    pub(crate) fn end_spare(&mut self, driver: &Driver) -> Result<(), CuError> {
        let spare = std::mem::take(&mut self.expected.spare);
        spare.into_iter().try_for_each(|(ctx, handle)| self.destroy_object(driver, &ctx, handle))
    }
}
