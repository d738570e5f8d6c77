//! The lock on the engine, which a checkpoint can see from outside.

use super::{Paged, State};
use std::ops::{Deref, DerefMut};
use std::sync::{MutexGuard, PoisonError};

/// The state, locked. While it is, pages and what the file says of them may differ, but where
/// [`Paged::carry_out`] or [`Locked::settled`] say otherwise: nothing else waits for anybody.
pub(super) struct Locked<'a> {
    paged: &'a Paged,
    state: MutexGuard<'a, State>,
}

impl<'a> Locked<'a> {
    pub(super) fn of(paged: &'a Paged) -> Locked<'a> {
        let state = paged.state.lock().unwrap_or_else(PoisonError::into_inner);
        paged.view.marks.busy(true);
        let mut locked = Locked { paged, state };
        let generation = paged.view.marks.generation();
        if locked.generation != generation {
            locked.generation = generation;
            paged.view.lodged().rebuilt();
            let actions = locked.engine.rebuilt();
            paged.carry_out(&mut locked, actions);
        }
        locked
    }

    /// The engine is not asked for anything more: its state is that of the pages.
    pub(super) fn settled(&self) {
        self.paged.view.marks.busy(false);
    }
}

impl Deref for Locked<'_> {
    type Target = State;
    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.paged.view.marks.busy(false);
    }
}
