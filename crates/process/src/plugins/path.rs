//! Paths: saved as bytes, mapped at a restart.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

/// A path as the image has it: text where it is UTF-8, else its bytes. Never with a zero byte.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SavedPath(pub PathBuf);

impl From<PathBuf> for SavedPath {
    fn from(path: PathBuf) -> SavedPath {
        SavedPath(path)
    }
}

/// `PATH_MAX`, and some more for a name that the kernel completed.
const MAX_PATH: usize = 8192;

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Form {
    Text(String),
    Bytes(Vec<u8>),
}

impl Serialize for SavedPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let form = match self.0.to_str() {
            Some(text) => Form::Text(text.to_owned()),
            None => Form::Bytes(self.0.as_os_str().as_bytes().to_owned()),
        };
        form.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for SavedPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = match Form::deserialize(deserializer)? {
            Form::Text(text) => text.into_bytes(),
            Form::Bytes(bytes) => bytes,
        };
        if bytes.len() > MAX_PATH || bytes.contains(&0) {
            return Err(serde::de::Error::custom("not a path"));
        }
        Ok(SavedPath(PathBuf::from(OsString::from_vec(bytes))))
    }
}

/// A path that the kernel has told, as the image has it: from the root, and without `..`. An image
/// that says otherwise is forged: it would lead to wherever its restart runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ResolvedPath(pub PathBuf);

impl Serialize for ResolvedPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        SavedPath(self.0.clone()).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ResolvedPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let SavedPath(path) = SavedPath::deserialize(deserializer)?;
        match is_resolved(&path) {
            true => Ok(ResolvedPath(path)),
            false => Err(serde::de::Error::custom("a path that leads elsewhere")),
        }
    }
}

/// Whether the kernel may have told such a path.
pub(crate) fn is_resolved(path: &Path) -> bool {
    path.is_absolute() && !path.components().any(|part| part == Component::ParentDir)
}

/// `--path-map OLD=NEW`: whatever lay below OLD is sought below NEW. The longest OLD counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PathMap(Vec<(PathBuf, PathBuf)>);

impl PathMap {
    pub fn new(pairs: impl IntoIterator<Item = (PathBuf, PathBuf)>) -> PathMap {
        let mut pairs: Vec<_> = pairs.into_iter().collect();
        pairs.sort_by_key(|(old, _)| std::cmp::Reverse(old.components().count()));
        PathMap(pairs)
    }

    pub fn apply(&self, path: &Path) -> PathBuf {
        for (old, new) in &self.0 {
            match path.strip_prefix(old) {
                // Joining nothing would add a slash.
                Ok(rest) if rest.as_os_str().is_empty() => return new.clone(),
                Ok(rest) => return new.join(rest),
                Err(_) => {}
            }
        }
        path.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_prefix_of_whole_names_counts() {
        let map = PathMap::new([("/a".into(), "/x".into()), ("/a/b".into(), "/y".into())]);
        for (from, to) in [("/a/c", "/x/c"), ("/a/b/c", "/y/c"), ("/a/b", "/y"), ("/ab", "/ab")] {
            assert_eq!(map.apply(Path::new(from)), Path::new(to));
        }
    }

    #[test]
    fn any_bytes_come_back_and_zero_bytes_do_not() {
        let odd = SavedPath(PathBuf::from(OsString::from_vec(vec![b'/', 0xff])));
        let text = serde_json::to_string(&odd).unwrap();
        assert_eq!(serde_json::from_str::<SavedPath>(&text).unwrap(), odd);
        assert!(serde_json::from_str::<SavedPath>("\"/a\\u0000b\"").is_err());
    }

    #[test]
    fn only_a_path_from_the_root_is_resolved() {
        let read = |path: &str| serde_json::from_str::<ResolvedPath>(&format!("{path:?}")).is_ok();
        assert!(read("/") && read("/a/b..c") && read("/a/..."));
        for path in ["", "a", "./a", "../a", "/a/../b", "/..", "/a/.."] {
            assert!(!read(path), "{path:?}");
        }
    }
}
