//! What a process has of leases, by the paths of its files and mappings, as /proc tells them.

use crate::ask::DIGITS;

/// What stands behind the path of a file that has no name any more (proc_pid_fd(5)).
const DELETED: &[u8] = b" (deleted)";
/// How the folder of a user's caches is called, before the user's number.
const CACHES: &[u8] = b"kedge-cache-";
/// The folder of a cache's tier in memory.
const TIER: &[u8] = b"tier";

/// Returns the name of a file of a tier.
fn in_tier(path: &[u8]) -> Option<&[u8]> {
    let path = path.strip_suffix(DELETED).unwrap_or(path);
    let mut names = path.rsplit(|byte| *byte == b'/');
    let (name, folder, _cache, user) = (names.next()?, names.next()?, names.next()?, names.next()?);
    (folder == TIER && user.starts_with(CACHES)).then_some(name)
}

/// Returns whether a path is that of a page of leases.
pub fn is_page(path: &[u8]) -> bool {
    in_tier(path) == Some(crate::PAGE.as_bytes())
}

/// Returns whether a path is that of a shadow.
pub fn is_shadow(path: &[u8]) -> bool {
    let digit = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    in_tier(path).is_some_and(|name| name.len() == DIGITS && name.iter().all(digit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_tier_are_known_by_their_paths() {
        let tier = "/dev/shm/kedge-cache-0/scratch-1/tier";
        for end in ["", " (deleted)"] {
            let (page, shadow) =
                (format!("{tier}/leases{end}"), format!("{tier}/00000000000000ab{end}"));
            assert!(is_page(page.as_bytes()) && !is_shadow(page.as_bytes()));
            assert!(is_shadow(shadow.as_bytes()) && !is_page(shadow.as_bytes()));
        }
        let others = ["/tier/leases", "/a/cache-0/b/tier/leases", "/kedge-cache-0/b/tier/x/leases"];
        assert!(!others.iter().any(|path| is_page(path.as_bytes())));
        for name in ["00000000000000AB", "ab", "journal", "00000000000000ab0"] {
            assert!(!is_shadow(format!("{tier}/{name}").as_bytes()), "{name}");
        }
    }
}
