//! Work on many things by several threads, where none of it traces: while a job stands still, one
//! thread would read /proc for process after process, and the other processors wait.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Things that a thread takes at a time.
const PART: usize = 8;
/// So many things are worth another thread.
const WORTH: usize = 32;
/// Most threads.
const MAX_THREADS: usize = 8;

/// Does `work` with each of `things`; the results are in their order. A thread that cannot be made
/// is done without.
pub(crate) fn each<T: Sync, R: Send>(things: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let most = (things.len() / WORTH).min(MAX_THREADS);
    let threads = if most < 2 { 1 } else { processors().min(most) };
    spread(things, threads, work)
}

/// The same of what may fail: the first error in their order.
///
/// # Errors
///
/// That of the first of `things` that has one. Others may have been worked on.
pub(crate) fn try_each<T: Sync, R: Send, E: Send>(
    things: &[T],
    work: impl Fn(&T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    each(things, work).into_iter().collect()
}

/// The same of things that the work changes.
///
/// # Errors
///
/// That of the first of `things` that has one.
pub(crate) fn try_each_mut<T: Send, E: Send>(
    things: &mut [T],
    work: impl Fn(&mut T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    // Each is locked once, and nobody waits.
    let things: Vec<Mutex<&mut T>> = things.iter_mut().map(Mutex::new).collect();
    try_each(&things, |thing| work(&mut thing.lock().unwrap_or_else(PoisonError::into_inner)))
        .map(drop)
}

fn processors() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

fn spread<T: Sync, R: Send>(things: &[T], threads: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    if threads < 2 {
        return things.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let some = || {
        let mut done = Vec::new();
        loop {
            let from = next.fetch_add(PART, Ordering::Relaxed);
            let Some(rest) = things.get(from..).filter(|rest| !rest.is_empty()) else { break };
            let part = rest.iter().take(PART).map(&work).collect::<Vec<R>>();
            done.push((from, part));
        }
        done
    };
    let mut parts = thread::scope(|scope| {
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, some).ok();
        let others: Vec<_> = (1..threads).filter_map(spawn).collect();
        let mut parts = some();
        for other in others {
            match other.join() {
                Ok(its) => parts.extend(its),
                // As if this thread had done it.
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        parts
    });
    parts.sort_unstable_by_key(|(from, _)| *from);
    parts.into_iter().flat_map(|(_, part)| part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn each_is_done_once_and_in_order() {
        for count in [0, 1, PART - 1, PART, PART + 1, 1000] {
            for threads in [1, 2, 5] {
                let things: Vec<usize> = (0..count).collect();
                let seen = Mutex::new(vec![0; count]);
                let results = spread(&things, threads, |thing| {
                    seen.lock().unwrap()[*thing] += 1;
                    thing * 3
                });
                assert!(results.iter().copied().eq((0..count).map(|thing| thing * 3)));
                assert!(seen.into_inner().unwrap().iter().all(|times| *times == 1));
            }
        }
    }

    #[test]
    fn the_first_error_in_order_counts() {
        let things: Vec<usize> = (0..500).collect();
        let odd = |thing: &usize| if *thing % 100 == 77 { Err(*thing) } else { Ok(()) };
        assert_eq!(try_each(&things, odd), Err(77));
        assert_eq!(try_each(&things, |thing| Ok::<_, ()>(*thing)).unwrap(), things);
        let mut changed = things.clone();
        let twice = |thing: &mut usize| {
            *thing *= 2;
            odd(&(*thing / 2))
        };
        assert_eq!(try_each_mut(&mut changed, twice), Err(77));
        assert!(changed.iter().zip(things).all(|(twice, once)| *twice == 2 * once));
    }
}
