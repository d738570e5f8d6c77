//! The list of actions that an event returns.

use crate::types::{Action, Pages};

/// Actions so far; what follows on from the last one is joined to it.
#[derive(Debug, Default)]
pub(crate) struct Out(Vec<Action>);

impl Out {
    pub(crate) fn push(&mut self, action: Action) {
        if !self.0.last_mut().is_some_and(|last| joins(last, &action)) {
            self.0.push(action);
        }
    }

    pub(crate) fn done(self) -> Vec<Action> {
        self.0
    }
}

/// Lengthens `last` by `next` where that is the same for the pages behind it.
fn joins(last: &mut Action, next: &Action) -> bool {
    use Action::{Copy, Fetch, Forget, Map, Protect, Release, Reserve, Send};
    match (last, next) {
        (Protect { pages, to }, Protect { pages: more, to: same }) if to == same => {
            behind(pages, more)
        }
        (Map { pages, at }, Map { pages: more, at: same }) if at == same => behind(pages, more),
        (Forget { pages }, Forget { pages: more }) => behind(pages, more),
        (Reserve { node, pages }, Reserve { node: same, pages: more })
        | (Release { node, pages }, Release { node: same, pages: more })
        | (Fetch { node, pages }, Fetch { node: same, pages: more })
        | (Send { node, pages }, Send { node: same, pages: more })
            if node == same =>
        {
            behind(pages, more)
        }
        (Copy { from, to, pages }, Copy { from: a, to: b, pages: more })
            if (&*from, &*to) == (a, b) =>
        {
            behind(pages, more)
        }
        _ => false,
    }
}

fn behind(pages: &mut Pages, more: &Pages) -> bool {
    let follows = pages.end == more.start;
    if follows {
        pages.end = more.end;
    }
    follows
}
