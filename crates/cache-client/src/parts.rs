//! The bytes of one write.

/// Most bytes that Linux writes in one call (linux/fs.h).
const MAX_RW_COUNT: usize = 0x7fff_f000;
/// Most parts of one call (UIO_MAXIOV, linux/uio.h).
const MAX_PARTS: usize = 1024;

/// What a program has the kernel write, as `writev` takes it. The memory is read by the kernel
/// alone, which refuses what is not there.
#[derive(Debug, Clone, Copy)]
pub struct Parts<'a> {
    parts: &'a [libc::iovec],
    length: usize,
}

impl<'a> Parts<'a> {
    /// Returns the write of these parts; `None` if it has no bytes, or is one that the kernel cuts
    /// or refuses.
    pub fn new(parts: &'a [libc::iovec]) -> Option<Parts<'a>> {
        if parts.len() > MAX_PARTS {
            return None;
        }
        let add = |sum: usize, part: &libc::iovec| sum.checked_add(part.iov_len);
        let length = parts.iter().try_fold(0, add)?;
        (1..=MAX_RW_COUNT).contains(&length).then_some(Parts { parts, length })
    }

    /// Returns how many bytes they are; never 0.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Returns all parts, if `skip` and `most` leave none of their bytes out.
    pub(crate) fn whole(&self, skip: usize, most: usize) -> Option<&'a [libc::iovec]> {
        (skip == 0 && most >= self.length).then_some(self.parts)
    }

    /// Returns the rest of the part that the byte after the first `skip` ones is in, of `most`
    /// bytes at most. `None` behind the end.
    pub(crate) fn rest_at(&self, mut skip: usize, most: usize) -> Option<libc::iovec> {
        for part in self.parts {
            if skip < part.iov_len {
                let iov_base = part.iov_base.cast::<u8>().wrapping_add(skip).cast();
                return Some(libc::iovec { iov_base, iov_len: (part.iov_len - skip).min(most) });
            }
            skip -= part.iov_len;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(address: usize, iov_len: usize) -> libc::iovec {
        libc::iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len }
    }

    #[test]
    fn what_the_kernel_cuts_or_refuses_is_none() {
        assert!(Parts::new(&[]).is_none() && Parts::new(&[part(1, 0)]).is_none());
        assert!(Parts::new(&[part(1, MAX_RW_COUNT)]).is_some());
        assert!(Parts::new(&[part(1, MAX_RW_COUNT), part(1, 1)]).is_none());
        assert!(Parts::new(&[part(1, usize::MAX), part(1, 2)]).is_none());
        assert!(Parts::new(&[part(1, 1); MAX_PARTS + 1]).is_none());
    }

    #[test]
    fn parts_are_gone_through_one_by_one() {
        let list = [part(100, 3), part(200, 0), part(300, 5)];
        let parts = Parts::new(&list).into_iter().next();
        let at = |skip, most| {
            let found = parts.and_then(|parts| parts.rest_at(skip, most));
            found.map(|part| (part.iov_base.addr(), part.iov_len))
        };
        assert_eq!(at(0, 9), Some((100, 3)));
        assert_eq!(at(2, 9), Some((102, 1)));
        assert_eq!(
            (at(3, 9), at(3, 2), at(7, 9)),
            (Some((300, 5)), Some((300, 2)), Some((304, 1)))
        );
        assert_eq!(at(8, 9), None);
        let whole = |skip, most| parts.is_some_and(|parts| parts.whole(skip, most).is_some());
        assert!(whole(0, 8) && !whole(0, 7) && !whole(1, 8));
    }
}
