//! What a process's end would do to System V semaphores (SEM_UNDO). The kernel tells nobody, but
//! refuses operations that would take it past its bounds: so it is found by operations that fail
//! and change nothing.

use crate::home::Ways;
use crate::inject::checked;
use crate::plugins::sysv::{MAX_VALUE, Operation, bytes_of};
use crate::state::Undo;
use crate::sys;
use crate::{EngineError, Thread};

/// Semaphores that are looked at by one call; SEMOPM was 32 on older kernels.
const TOGETHER: usize = 7;
/// Bytes for the operations of a call.
const ROOM: u64 = 4096;
/// What the end adds lies in -32768 to 32767, and must stay there.
const MIN_ADDED: i32 = -MAX_VALUE - 1;

/// What `leader`'s process has promised, of these sets and their values now.
pub(super) fn ask(
    leader: &mut Thread,
    ways: &Ways,
    sets: &[(i32, Vec<u16>)],
) -> Result<Vec<Undo>, EngineError> {
    if sets.is_empty() {
        return Ok(Vec::new());
    }
    ways.lead(leader)?;
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let arguments = [0, ROOM, protection, flags, u64::MAX, 0];
    let at = leader.call(ways.home(), libc::SYS_mmap, &arguments)?;
    let at = checked(leader.pid(), "find room in it", at)? as u64;
    let mut asked = Asked { leader, entry: ways.home(), at };
    let found = sets.iter().map(|(set, values)| asked.set(*set, values));
    let found: Result<Vec<Vec<Undo>>, EngineError> = found.collect();
    let unmapped = asked.leader.call(ways.home(), libc::SYS_munmap, &[at, ROOM]);
    asked.leader.go_home()?;
    unmapped?;
    Ok(found?.concat())
}

struct Asked<'a> {
    leader: &'a mut Thread,
    entry: u64,
    at: u64,
}

impl Asked<'_> {
    fn set(&mut self, set: i32, values: &[u16]) -> Result<Vec<Undo>, EngineError> {
        let mut found = Vec::new();
        let numbered: Vec<(u16, u16)> = (0..=u16::MAX).zip(values.iter().copied()).collect();
        for some in numbered.chunks(TOGETHER) {
            // Most often nothing is promised of any of them, and two calls tell.
            let all =
                |push| some.iter().flat_map(move |one| beyond(*one, push)).collect::<Vec<_>>();
            let (up, down) = (all(MAX_VALUE), all(MIN_ADDED));
            if self.fits(set, some, &up)? && self.fits(set, some, &down)? {
                continue;
            }
            for one in some {
                let by = self.one(set, *one)?;
                if by != 0 {
                    found.push(Undo { set, number: one.0, by: by as i16 });
                }
            }
        }
        Ok(found)
    }

    /// The most that can be added to what is promised of a semaphore tells what that is.
    fn one(&mut self, set: i32, one: (u16, u16)) -> Result<i32, EngineError> {
        let (mut fits, mut fails) = (0, MAX_VALUE - MIN_ADDED + 1);
        while fails - fits > 1 {
            let push = (fits + fails) / 2;
            match self.fits(set, &[one], &beyond(one, push))? {
                true => fits = push,
                false => fails = push,
            }
        }
        Ok(MAX_VALUE - fits)
    }

    /// Whether what is promised stays in its bounds with these operations, which are never done. Of
    /// a set that the process may not change, nothing is promised.
    fn fits(
        &mut self,
        set: i32,
        touched: &[(u16, u16)],
        operations: &[Operation],
    ) -> Result<bool, EngineError> {
        let mut operations = operations.to_vec();
        // The last one would have to wait.
        let number = touched[0].0;
        operations.push(Operation { number, by: i16::MIN, flags: libc::IPC_NOWAIT });
        let pid = self.leader.pid();
        sys::write(pid, self.at, &bytes_of(&operations))?;
        let arguments = [set as u64, self.at, operations.len() as u64];
        let result = self.leader.call(self.entry, libc::SYS_semop, &arguments)?;
        match -result as i32 {
            libc::EAGAIN | libc::EACCES => Ok(true),
            libc::ERANGE => Ok(false),
            _ => checked(pid, "ask what it is to undo to a semaphore", result).map(|_| true),
        }
    }
}

/// Operations that add `push` to what is promised of a semaphore of that value, within what a value
/// can be.
fn beyond((number, value): (u16, u16), push: i32) -> Vec<Operation> {
    let (mut value, mut left) = (i32::from(value), push);
    let mut operations = Vec::new();
    let mut change = |value: &mut i32, by: i32, flags: i32| {
        *value += by;
        operations.push(Operation { number, by: by as i16, flags });
    };
    while left != 0 {
        // What the end adds, the operation takes.
        let by = left.clamp(-MAX_VALUE, MAX_VALUE);
        let needed = if by > 0 { by } else { MAX_VALUE + by };
        if value != needed {
            let by = needed - value;
            change(&mut value, by, 0);
        }
        change(&mut value, -by, libc::SEM_UNDO);
        left -= by;
    }
    operations
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_stay_within_what_a_value_can_be() {
        for push in [1, -1, 300, MAX_VALUE, MIN_ADDED, 2 * MAX_VALUE + 1] {
            for value in [0, 1, 300, 32767u16] {
                let (mut now, mut pushed) = (i32::from(value), 0);
                for op in beyond((0, value), push) {
                    now += i32::from(op.by);
                    assert!((0..=MAX_VALUE).contains(&now), "{push} {value}: {now}");
                    pushed -= if op.flags & libc::SEM_UNDO != 0 { i32::from(op.by) } else { 0 };
                }
                assert_eq!(pushed, push);
            }
        }
    }
}
