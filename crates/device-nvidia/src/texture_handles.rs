//! Texture and surface objects with the handles that they had: the program keeps handles in its memory.
//!
//! The driver numbers objects as it likes, and says nothing of how. So objects are made until each
//! wanted handle has come up, the wrong ones held back meanwhile, and then ended.

use crate::context::Context;
use crate::driver::Driver;
use crate::textures::Textures;
use kedge_cuda_types::CuError;
use kedge_device::SnapshotError;
use kedge_protocol::{CtxId, Texture};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Objects that may be made in vain, beside as many as are wanted.
const MAX_TRIES: usize = 1 << 16;

impl Textures {
    /// Gives the objects the handles of `wanted`: context, handle, object.
    pub(crate) fn renew<'a>(
        &mut self,
        driver: &Driver,
        contexts: &HashMap<CtxId, Arc<Context>>,
        wanted: impl Iterator<Item = (CtxId, u64, &'a Texture)>,
    ) -> Result<(), SnapshotError> {
        let mut by_context: BTreeMap<CtxId, BTreeMap<u64, &Texture>> = BTreeMap::new();
        for (ctx, handle, texture) in wanted {
            by_context.entry(ctx).or_default().insert(handle, texture);
        }
        for (ctx, wanted) in by_context {
            let context = contexts.get(&ctx).ok_or(CuError::INVALID_CONTEXT)?;
            self.renew_in(driver, context, wanted)?;
        }
        Ok(())
    }

    fn renew_in(
        &mut self,
        driver: &Driver,
        context: &Arc<Context>,
        mut wanted: BTreeMap<u64, &Texture>,
    ) -> Result<(), SnapshotError> {
        let there: BTreeMap<u64, Texture> = self
            .objects()
            .filter(|(ctx, ..)| *ctx == context.id)
            .map(|(_, handle, texture)| (handle, texture.clone()))
            .collect();
        if there
            .iter()
            .map(|(handle, texture)| (*handle, texture))
            .eq(wanted.iter().map(|(handle, texture)| (*handle, *texture)))
        {
            return Ok(());
        }
        for handle in there.into_keys() {
            self.destroy_object(driver, context, handle)?;
        }
        let tries = MAX_TRIES + 2 * wanted.len();
        let (spare, outcome) = self.make_until(driver, context, &mut wanted, tries);
        for handle in spare {
            let _ = self.destroy_object(driver, context, handle);
        }
        outcome?;
        match wanted.first_key_value() {
            None => Ok(()),
            Some((handle, texture)) => Err(not_again(*handle, texture.surface)),
        }
    }

    /// Makes objects until none is wanted; returns those that are not.
    fn make_until(
        &mut self,
        driver: &Driver,
        context: &Arc<Context>,
        wanted: &mut BTreeMap<u64, &Texture>,
        tries: usize,
    ) -> (Vec<u64>, Result<(), CuError>) {
        let mut spare = Vec::new();
        // What was seen to come next, if anything.
        let mut next = None;
        for _ in 0..tries {
            let likely = next.take().and_then(|handle| wanted.get_key_value(&handle));
            let Some((&expected, &texture)) = likely.or_else(|| wanted.first_key_value()) else {
                break;
            };
            let made = match self.create_object(driver, context, texture) {
                Ok(made) => made,
                Err(error) => return (spare, Err(error)),
            };
            if made == expected {
                wanted.remove(&made);
                continue;
            }
            match owner(wanted, made).filter(|owner| *owner != expected) {
                // Another's place: this is ended, and that other made next.
                Some(owner) => {
                    if let Err(error) = self.destroy_object(driver, context, made) {
                        return (spare, Err(error));
                    }
                    next = Some(owner);
                }
                None => spare.push(made),
            }
        }
        (spare, Ok(()))
    }
}

/// Whose handle, or whose place among the headers (a handle's low 20 bits), this is.
fn owner(wanted: &BTreeMap<u64, &Texture>, made: u64) -> Option<u64> {
    const HEADER: u64 = (1 << 20) - 1;
    let same = |mask: u64| wanted.keys().copied().find(|handle| handle & mask == made & mask);
    same(u64::MAX).or_else(|| same(HEADER))
}

fn not_again(handle: u64, surface: bool) -> SnapshotError {
    let what = if surface { "surface" } else { "texture" };
    let message = format!(
        "the driver does not give {what} object {handle:#x} its handle again: restart with the driver \
         and the GPU model of the checkpoint"
    );
    SnapshotError::new(CuError::INVALID_HANDLE, message)
}
