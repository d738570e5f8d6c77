//! Each thread's stack of current contexts.

use super::Context;
use crate::session;
use kedge_cuda_types::CuError;
use std::cell::RefCell;
use std::sync::Arc;

thread_local! {
    static STACK: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
}

/// Reads the top of the stack in place. None also while the thread ends.
#[inline]
pub(crate) fn with_current<T: Default>(read: impl FnOnce(Option<&Arc<Context>>) -> T) -> T {
    STACK.try_with(|stack| read(stack.borrow().last())).unwrap_or_default()
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

/// Changes this thread's stack; NOT_PERMITTED while the thread ends.
fn change<T>(f: impl FnOnce(&mut Vec<Arc<Context>>) -> T) -> Result<T, CuError> {
    STACK.try_with(|stack| f(&mut stack.borrow_mut())).map_err(|_| CuError::NOT_PERMITTED)
}

pub(super) fn push(ctx: Arc<Context>) -> Result<(), CuError> {
    change(|stack| stack.push(ctx))
}

pub(super) fn pop() -> Result<Arc<Context>, CuError> {
    change(Vec::pop)?.ok_or(CuError::INVALID_CONTEXT)
}

/// Makes `ctx` the top of the stack in place of what was there; returns that.
pub(crate) fn replace_current(ctx: Option<Arc<Context>>) -> Result<Option<Arc<Context>>, CuError> {
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
        push(context(1)).unwrap();
        push(context(2)).unwrap();
        assert_eq!(with_current(|top| top.unwrap().handle().0), 2);
        std::thread::spawn(|| assert!(current_or_dead().is_err())).join().unwrap();
        replace_current(Some(context(3))).unwrap();
        assert_eq!(pop().unwrap().handle().0, 3);
        replace_current(None).unwrap();
        assert!(pop().is_err());
    }

    #[test]
    fn an_inactive_context_is_no_place_to_work() {
        push(context(1)).unwrap();
        assert_eq!(current().unwrap_err(), CuError::CONTEXT_IS_DESTROYED);
        pop().unwrap();
    }
}
