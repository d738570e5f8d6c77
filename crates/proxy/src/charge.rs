//! What messages take of the devices' memory, as it is counted in the account of a server's tenant.

use crate::account::Account;
use crate::dispatch::Dispatcher;
use kedge_cuda_types::CuError;
use kedge_protocol::{ArrayDesc, ArrayId, Call, CtxId, Post};
use std::collections::HashMap;
use std::sync::Arc;
use std::thread;

/// How often a backend is asked that cannot tell just now.
const TRIES: u32 = 1000;

/// Arrays, which GPUs do not count: whose they are, and their bytes.
#[derive(Debug, Default)]
pub(crate) struct Arrays(HashMap<ArrayId, (CtxId, u64)>);

impl Arrays {
    fn add(&mut self, ctx: CtxId, levels: &[ArrayId], desc: &ArrayDesc) {
        let levels = levels.iter().zip(0..);
        self.0.extend(levels.map(|(id, level)| (*id, (ctx, bytes_of(&desc.level(level))))));
    }

    fn bytes(&self) -> u64 {
        self.0.values().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

/// Returns the bytes of an array's elements.
fn bytes_of(desc: &ArrayDesc) -> u64 {
    let element = match desc.format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        _ => 4,
    };
    let extents = [desc.width, desc.height.max(1), desc.depth.max(1), desc.channels.into()];
    extents.into_iter().fold(element, u64::saturating_mul)
}

/// Returns what a call asks for.
fn wants(call: &Call) -> u64 {
    match call {
        Call::Grant { bytes, .. } => *bytes,
        Call::HandleCreate { size, .. } => *size,
        Call::ArrayCreate { desc, .. } => bytes_of(desc),
        Call::MipmapCreate { levels, desc, .. } => {
            let levels = (0..).zip(levels.iter()).map(|(level, _)| bytes_of(&desc.level(level)));
            levels.fold(0, u64::saturating_add)
        }
        _ => 0,
    }
}

impl Dispatcher {
    fn account(&self) -> Option<Arc<Account>> {
        self.host().account.clone()
    }

    /// Counts what a call is about to take.
    ///
    /// # Errors
    /// OUT_OF_MEMORY: the tenant may not have so much.
    pub(crate) fn charge(&self, call: &Call) -> Result<(), CuError> {
        let Some(account) = self.account() else { return Ok(()) };
        let bytes = wants(call);
        if bytes == 0 || account.reserve(bytes) {
            return Ok(());
        }
        if let Some(words) = account.refusal(bytes) {
            self.host().log.line(&words);
        }
        Err(CuError::OUT_OF_MEMORY)
    }

    /// Says what the client has, after a call that may have changed that.
    pub(crate) fn called(&mut self, call: &Call, made: bool) {
        match call {
            Call::ArrayCreate { ctx, array, desc } if made => {
                self.arrays.add(*ctx, &[*array], desc)
            }
            Call::MipmapCreate { ctx, levels, desc } if made => self.arrays.add(*ctx, levels, desc),
            _ => {}
        }
        self.settle();
    }

    /// The same after a post; what it ends is named before it is carried out.
    pub(crate) fn posted(&mut self, ends: Ends) {
        match ends {
            Ends::Nothing => return,
            Ends::Memory => {}
            Ends::Array(array) => drop(self.arrays.0.remove(&array)),
            Ends::Context(ctx) => self.arrays.0.retain(|_, (owner, _)| *owner != ctx),
        }
        self.settle();
    }

    /// Says what the client has; whether the tenant may have so much. What is swapped out is had.
    pub(crate) fn settle(&self) -> bool {
        let Some(account) = self.account().filter(|_| self.away.is_none()) else { return true };
        let devices = self.backend().devices();
        let exact = devices.iter().all(|device| device.exact);
        let mut used = (0..).zip(&devices).map(|(device, _)| self.used(device));
        let used = used.try_fold(0_u64, |sum, used| sum.checked_add(used?));
        let arrays = if exact { 0 } else { self.arrays.bytes() };
        // Where it cannot be told, what was reserved goes on to count.
        used.is_none_or(|used| account.has(used.saturating_add(arrays)))
    }

    /// Bytes of a device that are had: other threads change that for moments.
    fn used(&self, device: u32) -> Option<u64> {
        (0..TRIES).find_map(|_| {
            self.backend().used_memory(device).or_else(|| {
                thread::yield_now();
                None
            })
        })
    }

    /// Bytes of a device that the client may still take.
    pub(crate) fn free_memory(&self, device: u32) -> Result<u64, CuError> {
        let free = self.backend().free_memory(device)?;
        Ok(self.account().and_then(|it| it.left()).map_or(free, |left| left.min(free)))
    }
}

/// What a post ends that has memory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ends {
    Nothing,
    Memory,
    Array(ArrayId),
    Context(CtxId),
}

impl Ends {
    pub(crate) fn of(post: &Post) -> Ends {
        match post {
            Post::CtxDestroy { ctx } => Ends::Context(*ctx),
            Post::ArrayDestroy { array } => Ends::Array(*array),
            Post::HandleDestroy { .. } | Post::ModuleUnload { .. } => Ends::Memory,
            _ => Ends::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_protocol::MemHandleId;

    fn desc(width: u64, height: u64, format: u32, channels: u32) -> ArrayDesc {
        ArrayDesc { device: 0, width, height, depth: 0, format, channels, flags: 0 }
    }

    #[test]
    fn what_calls_want_is_counted_in_bytes() {
        let ctx = CtxId(1);
        let array = |desc| wants(&Call::ArrayCreate { ctx, array: ArrayId(1), desc });
        assert_eq!(array(desc(10, 0, 0x20, 4)), 160);
        assert_eq!(array(desc(10, 5, 0x10, 1)), 100);
        assert_eq!(array(desc(u64::MAX, u64::MAX, 0x20, 4)), u64::MAX);
        let levels = vec![ArrayId(1), ArrayId(2), ArrayId(3)];
        let levels = kedge_wire::List::new(levels).unwrap();
        assert_eq!(wants(&Call::MipmapCreate { ctx, levels, desc: desc(8, 8, 1, 1) }), 84);
        assert_eq!(wants(&Call::Grant { device: 0, addr: 0, bytes: 7 }), 7);
        let handle = MemHandleId(1);
        assert_eq!(wants(&Call::HandleCreate { handle, device: 0, size: 9, shareable: true }), 9);
        assert_eq!(wants(&Call::Ping {}), 0);
    }

    #[test]
    fn arrays_go_one_by_one_and_with_their_context() {
        let mut arrays = Arrays::default();
        arrays.add(CtxId(1), &[ArrayId(1), ArrayId(2)], &desc(8, 8, 1, 1));
        arrays.add(CtxId(2), &[ArrayId(3)], &desc(5, 0, 1, 1));
        assert_eq!(arrays.bytes(), 64 + 16 + 5);
        arrays.0.remove(&ArrayId(1));
        arrays.0.retain(|_, (owner, _)| *owner != CtxId(2));
        assert_eq!(arrays.bytes(), 16);
    }
}
