//! The kernel's account of a process's pages.

pub(crate) use kedge_pagemap::{Run, Scanner, Wanted, cannot_tell};

#[cfg(test)]
pub(crate) mod tests {
    pub(crate) use kedge_test_memory::{PAGE, PAGES, Room, scans};
}
