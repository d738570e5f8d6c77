//! What a restart changes of the user's files, and how that is undone.

pub(crate) mod folder;
