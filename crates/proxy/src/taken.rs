//! Which messages take of the devices' memory, and which give it back.

use kedge_protocol::{ArrayDesc, ArrayId, Call, CtxId, MemHandleId, Post};
use std::collections::HashMap;
use std::sync::Arc;

/// Arrays, which GPUs do not count: whose they are, and the bytes of all levels that were made with
/// them, which go with the last of those.
#[derive(Debug, Default)]
pub(crate) struct Arrays {
    arrays: HashMap<ArrayId, (CtxId, Arc<u64>)>,
    bytes: u64,
}

impl Arrays {
    pub(crate) fn add(&mut self, ctx: CtxId, levels: &[ArrayId], desc: &ArrayDesc) {
        let bytes = Arc::new(bytes_of_levels(levels.len(), desc));
        self.bytes = self.bytes.saturating_add(*bytes);
        self.arrays.extend(levels.iter().map(|id| (*id, (ctx, bytes.clone()))));
    }

    pub(crate) fn remove(&mut self, array: ArrayId) {
        let Some((_, shared)) = self.arrays.remove(&array) else { return };
        if let Some(bytes) = Arc::into_inner(shared) {
            self.bytes = self.bytes.saturating_sub(bytes);
        }
    }

    pub(crate) fn forget(&mut self, ctx: CtxId) {
        let of = self.arrays.iter().filter(|(_, (owner, _))| *owner == ctx);
        let ended: Vec<ArrayId> = of.map(|(id, _)| *id).collect();
        ended.into_iter().for_each(|id| self.remove(id));
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Returns the bytes of an array of so many levels.
fn bytes_of_levels(levels: usize, desc: &ArrayDesc) -> u64 {
    let each = (0..levels as u32).map(|level| bytes_of(&desc.level(level)));
    each.fold(0, u64::saturating_add)
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

/// The calls that take none of a device's memory that is counted: a pattern. A new call is put
/// here, or into `asking!`, or gets an arm in each match.
macro_rules! taking_nothing {
    () => {
        Call::Return { .. }
            | Call::Alias { .. }
            | Call::Kernel { .. }
            | Call::TextureCreate { .. }
            | Call::Share { .. }
            | Call::SetLimit { .. }
            | Call::HandleMap { .. }
            | Call::HandleAccess { .. }
            | Call::HandleImport { .. }
            | Call::PeerOpen { .. }
            | Call::EventOpen { .. }
            | $crate::record::asking!()
    };
}
pub(crate) use taking_nothing;

/// Returns what a call asks for. What others share is counted where it is opened, when its size is
/// known.
pub(crate) fn wants(call: &Call) -> u64 {
    match call {
        Call::Grant { bytes, .. } => *bytes,
        Call::HandleCreate { size, .. } => *size,
        Call::ArrayCreate { desc, .. } => bytes_of(desc),
        Call::MipmapCreate { levels, desc, .. } => bytes_of_levels(levels.len(), desc),
        Call::CtxCreate { .. } | taking_nothing!() => 0,
    }
}

/// What a post ends that has memory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ends {
    Nothing,
    Memory,
    Handle(MemHandleId),
    Array(ArrayId),
    Context(CtxId),
}

impl Ends {
    pub(crate) fn of(post: &Post) -> Ends {
        match post {
            Post::CtxDestroy { ctx } => Ends::Context(*ctx),
            Post::ArrayDestroy { array } => Ends::Array(*array),
            Post::HandleDestroy { handle } => Ends::Handle(*handle),
            Post::ModuleUnload { .. } => Ends::Memory,
            Post::StreamCreate { .. }
            | Post::StreamDestroy { .. }
            | Post::EventCreate { .. }
            | Post::EventDestroy { .. }
            | Post::Enqueue { .. }
            | Post::MemAlloc { .. }
            | Post::MemFree { .. }
            | Post::TextureDestroy { .. }
            | Post::GraphExecBegin { .. }
            | Post::GraphExecNode { .. }
            | Post::GraphExecEdges { .. }
            | Post::GraphExecReady { .. }
            | Post::GraphExecUpdate { .. }
            | Post::GraphExecDestroy { .. }
            | Post::Unshare { .. }
            | Post::HandleUnmap { .. }
            | Post::Unalias { .. }
            | Post::KernelAttribute { .. }
            | Post::Disown { .. } => Ends::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Weak;

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
    fn levels_count_until_the_last_of_them_goes() {
        let mut arrays = Arrays::default();
        arrays.add(CtxId(1), &[ArrayId(1), ArrayId(2)], &desc(8, 8, 1, 1));
        arrays.add(CtxId(2), &[ArrayId(3)], &desc(5, 0, 1, 1));
        arrays.add(CtxId(2), &[ArrayId(4), ArrayId(5)], &desc(2, 0, 1, 1));
        assert_eq!(arrays.bytes(), 64 + 16 + 5 + 2 + 1);
        let shared = arrays.arrays.values().map(|(_, shared)| Arc::downgrade(shared));
        let groups: Vec<Weak<u64>> = shared.collect();
        let left = || groups.iter().filter(|group| group.strong_count() > 0).count();
        arrays.remove(ArrayId(1));
        arrays.remove(ArrayId(1));
        assert_eq!(arrays.bytes(), 64 + 16 + 5 + 2 + 1, "the driver frees no level alone");
        arrays.remove(ArrayId(2));
        assert_eq!(arrays.bytes(), 5 + 2 + 1);
        arrays.remove(ArrayId(4));
        arrays.forget(CtxId(2));
        assert_eq!((arrays.bytes(), left(), arrays.arrays.len()), (0, 0, 0));
    }
}
