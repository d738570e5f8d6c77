//! Each thread's stack of current contexts.

use super::Context;
use crate::per_thread::{self, AtEnd, PerThread};
use crate::session;
use kedge_cuda_types::CuError;
use std::sync::Arc;

thread_local! {
    static STACK: PerThread<Vec<Arc<Context>>> = const { PerThread::new(Vec::new()) };
}

static END: AtEnd = AtEnd::new(|| per_thread::clear(&STACK));

/// Reads the top of the stack in place.
#[inline]
pub(crate) fn with_current<T>(read: impl FnOnce(Option<&Arc<Context>>) -> T) -> T {
    per_thread::read(&STACK, |stack| read(stack.last()))
}

/// The current context. INVALID_CONTEXT without one, CONTEXT_IS_DESTROYED when it is no longer
/// active, or, for a primary context, not yet.
#[inline]
pub(crate) fn current() -> Result<Arc<Context>, CuError> {
    let ctx = current_or_dead()?;
    if ctx.is_active() { Ok(ctx) } else { Err(CuError::CONTEXT_IS_DESTROYED) }
}

/// The current context, active or not. INVALID_CONTEXT without one.
pub(crate) fn current_or_dead() -> Result<Arc<Context>, CuError> {
    with_current(|top| top.cloned()).ok_or(CuError::INVALID_CONTEXT)
}

/// The current context's sticky error, if a fault has set one.
#[inline]
pub(crate) fn check_sticky() -> Result<(), CuError> {
    let session = session::get()?;
    let sticky = with_current(|top| match top {
        Some(ctx) if ctx.is_active() => session.client.sticky(ctx.id()),
        _ => None,
    });
    sticky.map_or(Ok(()), Err)
}

fn change<T>(f: impl FnOnce(&mut Vec<Arc<Context>>) -> T) -> T {
    per_thread::change(&STACK, &END, f)
}

pub(super) fn push(ctx: Arc<Context>) {
    change(|stack| stack.push(ctx));
}

pub(super) fn pop() -> Result<Arc<Context>, CuError> {
    change(Vec::pop).ok_or(CuError::INVALID_CONTEXT)
}

/// Makes `ctx` the top of the stack in place of what was there; returns that.
pub(crate) fn replace_current(ctx: Option<Arc<Context>>) -> Option<Arc<Context>> {
    change(|stack| {
        let old = stack.pop();
        stack.extend(ctx);
        old
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(handle: usize) -> Arc<Context> {
        Arc::new(Context::new(handle, 0, false, 0))
    }

    #[test]
    fn a_stack_of_each_thread() {
        assert_eq!(pop().unwrap_err(), CuError::INVALID_CONTEXT);
        push(context(1));
        push(context(2));
        assert_eq!(with_current(|top| top.unwrap().handle().0), 2);
        std::thread::spawn(|| assert!(current_or_dead().is_err())).join().unwrap();
        replace_current(Some(context(3)));
        assert_eq!(pop().unwrap().handle().0, 3);
        replace_current(None);
        assert!(pop().is_err());
    }

    #[test]
    fn an_inactive_context_is_no_place_to_work() {
        push(context(1));
        assert_eq!(current().unwrap_err(), CuError::CONTEXT_IS_DESTROYED);
        pop().unwrap();
    }
}
