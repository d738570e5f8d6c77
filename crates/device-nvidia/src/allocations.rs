//! What a client has allocated that began on software devices. These told it that they are exact,
//! so it tells of its allocations, and must find them valid when it is on such devices again. GPUs
//! have no use for that.

use kedge_cuda_types::CuError;
use kedge_device::Ranges;
use kedge_protocol::CtxId;
use std::collections::HashMap;

#[derive(Default)]
pub(crate) struct Allocations(HashMap<CtxId, Ranges>);

impl Allocations {
    pub(crate) fn add(&mut self, ctx: CtxId, addr: u64, size: u64) -> Result<(), CuError> {
        addr.checked_add(size).ok_or(CuError::INVALID_VALUE)?;
        self.0.entry(ctx).or_default().add(addr, size);
        Ok(())
    }

    pub(crate) fn cut(&mut self, addr: u64, size: u64) -> Result<(), CuError> {
        addr.checked_add(size).ok_or(CuError::INVALID_VALUE)?;
        self.0.values_mut().for_each(|ranges| ranges.cut(addr, size));
        Ok(())
    }

    /// A context is about to end.
    pub(crate) fn forget(&mut self, ctx: CtxId) {
        self.0.remove(&ctx);
    }

    /// Context, address and size of each, in the order of their addresses.
    pub(crate) fn all(&self) -> Vec<(CtxId, u64, u64)> {
        let of = |(ctx, ranges): (&CtxId, &Ranges)| {
            let ctx = *ctx;
            ranges.iter().map(move |(addr, size)| (ctx, addr, size)).collect::<Vec<_>>()
        };
        let mut all: Vec<_> = self.0.iter().flat_map(of).collect();
        all.sort_unstable_by_key(|(_, addr, _)| *addr);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_freed_or_goes_with_its_context_is_forgotten() {
        let mut all = Allocations::default();
        let [a, b] = [CtxId(1), CtxId(2)];
        all.add(b, 0x4000, 0x100).unwrap();
        all.add(a, 0x1000, 0x300).unwrap();
        all.cut(0x1100, 0x100).unwrap();
        let left = [(a, 0x1000, 0x100), (a, 0x1200, 0x100), (b, 0x4000, 0x100)];
        assert_eq!(all.all(), left);
        all.forget(a);
        assert_eq!(all.all(), left[2..]);
        assert_eq!(all.add(a, u64::MAX, 2), Err(CuError::INVALID_VALUE));
        assert_eq!(all.cut(u64::MAX, 2), Err(CuError::INVALID_VALUE));
    }
}
