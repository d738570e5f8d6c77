//! Addresses of functions in variables of a linked module. The driver makes them when it loads the module, and nothing
//! makes it place code where it was.

use std::collections::HashMap;

/// How far a module's code has moved, by words of its variables that began as addresses of functions: each as it was, and
/// as the driver has made it here. The program may have written some, but hardly most. `None` if that does not tell.
pub(crate) fn moved(words: impl Iterator<Item = (u64, u64)>) -> Option<u64> {
    let (mut votes, mut all) = (HashMap::<u64, usize>::new(), 0);
    for (was, now) in words {
        *votes.entry(now.wrapping_sub(was)).or_default() += 1;
        all += 1;
    }
    if votes.contains_key(&0) {
        return Some(0);
    }
    votes.into_iter().find(|(_, count)| 2 * count > all).map(|(by, _)| by)
}

/// What was the address of a function; null stays null.
pub(crate) fn translated(was: u64, by: u64) -> u64 {
    if was == 0 { 0 } else { was.wrapping_add(by) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_words_tell_how_far_code_has_moved() {
        let of = |words: &[(u64, u64)]| moved(words.iter().copied());
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[(0x100, 0x500), (0x180, 0x580), (0, 0x600)]), Some(0x400));
        assert_eq!(of(&[(0x500, 0x100)]), Some(0x400_u64.wrapping_neg()));
        // One that is as it was, and the code is where it was.
        assert_eq!(of(&[(0x180, 0x100), (0x100, 0x180), (0x200, 0x200)]), Some(0));
        assert_eq!(of(&[(0x180, 0x500), (0x100, 0x580)]), None);
        assert_eq!((translated(0x180, 0x400), translated(0, 0x400)), (0x580, 0));
    }
}
