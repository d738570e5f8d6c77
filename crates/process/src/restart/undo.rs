//! What a process's end does to System V semaphores: it is promised again by operations that change
//! no value.

use super::tree::Made;
use crate::EngineError;
use crate::plugins::sysv::{MAX_VALUE, Operation, bytes_of, value};
use crate::state::{ProcessState, Undo};

pub(super) fn promise(state: &ProcessState, made: &mut Made) -> Result<(), EngineError> {
    for undo in &state.undo {
        let failed = |source| {
            let what = "read a System V semaphore of its";
            EngineError::System { pid: state.ids.pid, what, source }
        };
        let value = value(undo.set, undo.number).map_err(failed)?;
        for pair in pairs(undo, value) {
            let what = "promise to undo what it did to a System V semaphore";
            let arguments = [undo.set as u64, made.parasite.data(), pair.len() as u64];
            let Made { thread, parasite } = made;
            parasite.call_with(thread, what, libc::SYS_semop, &arguments, &bytes_of(&pair))?;
        }
    }
    Ok(())
}

/// Pairs of operations, one that is to be undone and one that takes it back, inside of what a
/// semaphore can hold.
fn pairs(undo: &Undo, value: i32) -> Vec<[Operation; 2]> {
    let room = (MAX_VALUE - value).max(value).max(1);
    let mut left = i32::from(undo.by);
    let mut pairs = Vec::new();
    while left != 0 {
        // What the end adds, the operation has taken.
        let by = -left.clamp(-room, room);
        let kept = operation(undo.number, by, libc::SEM_UNDO);
        let taken_back = operation(undo.number, -by, 0);
        let first = (0..=MAX_VALUE).contains(&(value + by));
        pairs.push(if first { [kept, taken_back] } else { [taken_back, kept] });
        left += by;
    }
    pairs
}

fn operation(number: u16, by: i32, flags: i32) -> Operation {
    // Both are within what a semaphore can hold.
    Operation { number, by: by as i16, flags: flags | libc::IPC_NOWAIT }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel would make of them: the value, which stays in its bounds, and what is
    /// promised.
    fn run(pairs: &[[Operation; 2]], mut value: i32) -> (i32, i32) {
        let mut promised = 0;
        for op in pairs.iter().flatten() {
            value += i32::from(op.by);
            assert!((0..=MAX_VALUE).contains(&value), "{value}");
            promised -= if op.flags & libc::SEM_UNDO != 0 { i32::from(op.by) } else { 0 };
        }
        (value, promised)
    }

    #[test]
    fn operations_promise_and_change_nothing() {
        for by in [1, -1, 5, 300, -300, 32767, -32767, -32768] {
            for value in [0, 1, 16000, 32766, 32767] {
                let pairs = pairs(&Undo { set: 0, number: 0, by }, value);
                assert_eq!(run(&pairs, value), (value, i32::from(by)), "{by} {value}");
            }
        }
    }
}
