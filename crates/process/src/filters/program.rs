//! A filter of system calls: a program that the kernel runs at each call, and what it would return.

use crate::state::Hex;
use serde::{Deserialize, Serialize};

/// Most instructions of one program (`BPF_MAXINSNS`).
const MAX_INSTRUCTIONS: usize = 4096;
/// Bytes of one: a code, two distances, and a number (`struct sock_filter`).
pub(crate) const INSTRUCTION: usize = 8;
/// `AUDIT_ARCH_X86_64`: the numbers of system calls are others elsewhere.
pub(crate) const ARCHITECTURE: u32 = 0xc000_003e;
/// Words of memory that a program has to itself, `BPF_MEMWORDS`.
const MEMORY: usize = 16;

/// A filter.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Filter {
    /// Its instructions, as the kernel tells and takes them.
    pub(crate) program: Hex,
    /// Actions other than to allow a call are logged (`SECCOMP_FILTER_FLAG_LOG`).
    pub(crate) log: bool,
}

/// One instruction.
#[derive(Debug, Clone, Copy)]
struct Instruction {
    code: u32,
    if_true: u8,
    if_false: u8,
    number: u32,
}

impl Filter {
    /// Returns whether the kernel may be asked to take it. It looks at the instructions itself.
    pub(crate) fn is_possible(&self) -> bool {
        let bytes = &self.program.0;
        bytes.len().is_multiple_of(INSTRUCTION)
            && (1..=MAX_INSTRUCTIONS).contains(&(bytes.len() / INSTRUCTION))
    }

    /// Returns how many instructions it has.
    pub(crate) fn length(&self) -> u64 {
        (self.program.0.len() / INSTRUCTION) as u64
    }

    fn instructions(&self) -> impl Iterator<Item = Instruction> + '_ {
        self.program.0.as_chunks::<INSTRUCTION>().0.iter().map(|bytes| {
            let [low, high, if_true, if_false, number @ ..] = *bytes;
            let code = u32::from(u16::from_ne_bytes([low, high]));
            Instruction { code, if_true, if_false, number: u32::from_ne_bytes(number) }
        })
    }

    /// Returns whether it may hand calls to another process, which listens to a descriptor that
    /// belongs to this very filter; also if it computes what it returns.
    pub(crate) fn may_notify(&self) -> bool {
        self.instructions().any(|it| match it.code & (CLASS | RETURNED) {
            RETURN => it.number & libc::SECCOMP_RET_ACTION_FULL == libc::SECCOMP_RET_USER_NOTIF,
            RETURN_A => true,
            _ => false,
        })
    }

    /// Returns whether it lets the call of that number and these arguments be, made at `address`.
    /// What cannot be told is not.
    pub(crate) fn allows(&self, number: i64, arguments: [u64; 6], address: u64) -> bool {
        let action = self.action(number, ARCHITECTURE, arguments, address);
        matches!(action, Some(libc::SECCOMP_RET_ALLOW | libc::SECCOMP_RET_LOG))
    }

    /// Returns what it has the kernel do with that call (`SECCOMP_RET_…`); `None` if no kernel
    /// would have taken it.
    pub(crate) fn action(
        &self,
        number: i64,
        architecture: u32,
        arguments: [u64; 6],
        address: u64,
    ) -> Option<u32> {
        let data = [u64::from(number as u32) | u64::from(architecture) << 32, address];
        let words: Vec<u32> = data
            .into_iter()
            .chain(arguments)
            .flat_map(|word| [word as u32, (word >> 32) as u32])
            .collect();
        let program: Vec<Instruction> = self.instructions().collect();
        run(&program, &words).map(|value| value & libc::SECCOMP_RET_ACTION_FULL)
    }
}

// What a code is made of (linux/bpf_common.h): a class, then what the class knows.
const CLASS: u32 = 0x07;
const LOAD: u32 = libc::BPF_LD;
const LOAD_X: u32 = libc::BPF_LDX;
const STORE: u32 = libc::BPF_ST;
const STORE_X: u32 = libc::BPF_STX;
const COMPUTE: u32 = libc::BPF_ALU;
const JUMP: u32 = libc::BPF_JMP;
const RETURN: u32 = libc::BPF_RET;
const MISC: u32 = libc::BPF_MISC;
const MODE: u32 = 0xe0;
const OPERATION: u32 = 0xf0;
/// Where the second operand is the register X, and not the instruction's number.
const SOURCE_X: u32 = libc::BPF_X;
const RETURNED: u32 = 0x18;
const RETURN_A: u32 = libc::BPF_RET | 0x10;
const TO_A: u32 = 0x80;

/// Runs a program over `words`, a `struct seccomp_data`: what it returns; `None` if no kernel would
/// have taken it.
fn run(program: &[Instruction], words: &[u32]) -> Option<u32> {
    let (mut a, mut x, mut memory) = (0u32, 0u32, [0u32; MEMORY]);
    let mut at = 0usize;
    // Jumps go forward alone: it ends.
    loop {
        let Instruction { code, if_true, if_false, number } = *program.get(at)?;
        at += 1;
        let operand = if code & SOURCE_X != 0 { x } else { number };
        match code & CLASS {
            class @ (LOAD | LOAD_X) => {
                let value = match code & MODE {
                    libc::BPF_IMM => number,
                    libc::BPF_ABS => *words.get(usize::try_from(number / 4).ok()?)?,
                    libc::BPF_MEM => *memory.get(number as usize)?,
                    libc::BPF_LEN => 4 * words.len() as u32,
                    _ => return None,
                };
                if class == LOAD { a = value } else { x = value }
            }
            STORE => *memory.get_mut(number as usize)? = a,
            STORE_X => *memory.get_mut(number as usize)? = x,
            COMPUTE => a = computed(code & OPERATION, a, operand)?,
            JUMP if code & OPERATION == libc::BPF_JA => at = at.checked_add(number as usize)?,
            JUMP => {
                let holds = match code & OPERATION {
                    libc::BPF_JEQ => a == operand,
                    libc::BPF_JGT => a > operand,
                    libc::BPF_JGE => a >= operand,
                    libc::BPF_JSET => a & operand != 0,
                    _ => return None,
                };
                at += usize::from(if holds { if_true } else { if_false });
            }
            RETURN => return Some(if code & RETURNED == RETURN_A & RETURNED { a } else { number }),
            MISC if code & TO_A != 0 => a = x,
            _ => x = a,
        }
    }
}

fn computed(operation: u32, a: u32, operand: u32) -> Option<u32> {
    Some(match operation {
        libc::BPF_ADD => a.wrapping_add(operand),
        libc::BPF_SUB => a.wrapping_sub(operand),
        libc::BPF_MUL => a.wrapping_mul(operand),
        // The kernel ends a program that divides by 0 as one that returns 0, which kills.
        libc::BPF_DIV => a.checked_div(operand)?,
        libc::BPF_OR => a | operand,
        libc::BPF_AND => a & operand,
        libc::BPF_XOR => a ^ operand,
        // As processors do.
        libc::BPF_LSH => a.wrapping_shl(operand),
        libc::BPF_RSH => a.wrapping_shr(operand),
        libc::BPF_NEG => a.wrapping_neg(),
        _ => return None,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const NUMBER: u32 = 0;
    const WORD: u32 = libc::BPF_W | libc::BPF_ABS;

    pub(crate) fn filter(program: &[(u32, u8, u8, u32)]) -> Filter {
        let bytes = program.iter().flat_map(|(code, if_true, if_false, number)| {
            let [low, high] = (*code as u16).to_ne_bytes();
            let [a, b, c, d] = number.to_ne_bytes();
            [low, high, *if_true, *if_false, a, b, c, d]
        });
        Filter { program: Hex(bytes.collect()), log: false }
    }

    /// Lets all calls be but one.
    pub(crate) fn without(number: i64, action: u32) -> Filter {
        filter(&[
            (LOAD | WORD, 0, 0, NUMBER),
            (JUMP | libc::BPF_JEQ, 0, 1, number as u32),
            (RETURN, 0, 0, action),
            (RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
        ])
    }

    fn returns(program: &[(u32, u8, u8, u32)]) -> Option<u32> {
        let instructions: Vec<_> = filter(program).instructions().collect();
        run(&instructions, &(0..16).collect::<Vec<u32>>())
    }

    #[test]
    fn what_a_filter_does_to_a_call_is_told() {
        let kill = without(libc::SYS_restart_syscall, libc::SECCOMP_RET_KILL_PROCESS);
        assert!(!kill.allows(libc::SYS_restart_syscall, [0; 6], 0));
        assert!(kill.allows(libc::SYS_read, [0; 6], 0));
        assert!(kill.is_possible() && !kill.may_notify());
        let log = without(libc::SYS_read, libc::SECCOMP_RET_LOG);
        assert!(log.allows(libc::SYS_read, [0; 6], 0));
        assert!(without(libc::SYS_bind, libc::SECCOMP_RET_USER_NOTIF).may_notify());
        assert!(filter(&[(LOAD | libc::BPF_IMM, 0, 0, 7), (RETURN_A, 0, 0, 0)]).may_notify());
    }

    #[test]
    fn arguments_are_seen_in_halves() {
        let second = filter(&[
            (LOAD | WORD, 0, 0, 16 + 8 + 4),
            (JUMP | libc::BPF_JEQ, 0, 1, 5),
            (RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
            (RETURN, 0, 0, libc::SECCOMP_RET_ERRNO),
        ]);
        assert!(second.allows(0, [0, 5 << 32, 0, 0, 0, 0], 0));
        assert!(!second.allows(0, [5 << 32, 5, 0, 0, 0, 0], 0));
    }

    #[test]
    fn every_instruction_does_what_the_kernel_says() {
        let load = |number| (LOAD | libc::BPF_IMM, 0, 0, number);
        let load_x = |number| (LOAD_X | libc::BPF_IMM, 0, 0, number);
        let end = (RETURN_A, 0, 0, 0);
        let compute = |operation| (COMPUTE | operation, 0, 0, 3);
        for (operation, expected) in [
            (libc::BPF_ADD, 15),
            (libc::BPF_SUB, 9),
            (libc::BPF_MUL, 36),
            (libc::BPF_DIV, 4),
            (libc::BPF_OR, 15),
            (libc::BPF_AND, 0),
            (libc::BPF_XOR, 15),
            (libc::BPF_LSH, 96),
            (libc::BPF_RSH, 1),
            (libc::BPF_NEG, 12u32.wrapping_neg()),
        ] {
            assert_eq!(returns(&[load(12), compute(operation), end]), Some(expected));
            let by_x = (COMPUTE | SOURCE_X | operation, 0, 0, 9);
            assert_eq!(returns(&[load(12), load_x(3), by_x, end]), Some(expected));
        }
        let by_x = (COMPUTE | SOURCE_X | libc::BPF_LSH, 0, 0, 0);
        assert_eq!(returns(&[load(12), load_x(33), by_x, end]), Some(24));
        let store = (STORE, 0, 0, 15);
        let fetch = (LOAD | libc::BPF_MEM, 0, 0, 15);
        assert_eq!(returns(&[load(5), store, load(6), fetch, end]), Some(5));
        let store_x = (STORE_X, 0, 0, 15);
        assert_eq!(returns(&[load_x(8), store_x, fetch, end]), Some(8));
        let (tax, txa) = ((MISC, 0, 0, 0), (MISC | TO_A, 0, 0, 0));
        assert_eq!(returns(&[load(5), tax, load(6), txa, end]), Some(5));
        assert_eq!(returns(&[(LOAD | libc::BPF_LEN, 0, 0, 0), end]), Some(64));
        let beyond = (JUMP | libc::BPF_JA, 0, 0, 1);
        assert_eq!(returns(&[load(1), beyond, load(2), end]), Some(1));
        for (jump, operand, taken) in [
            (libc::BPF_JEQ, 7, true),
            (libc::BPF_JGT, 7, false),
            (libc::BPF_JGE, 7, true),
            (libc::BPF_JSET, 8, false),
        ] {
            let program =
                [load(7), (JUMP | jump, 1, 0, operand), (RETURN, 0, 0, 0), (RETURN, 0, 0, 1)];
            assert_eq!(returns(&program), Some(u32::from(taken)));
        }
        for bad in [
            &[(LOAD | WORD, 0, 0, 64), end][..],
            &[(STORE, 0, 0, 16), end],
            &[(COMPUTE | libc::BPF_DIV, 0, 0, 0), end],
            &[load(1)],
        ] {
            assert_eq!(returns(bad), None);
        }
    }

    #[test]
    fn what_is_no_program_is_refused() {
        let long =
            Filter { program: Hex(vec![0; (MAX_INSTRUCTIONS + 1) * INSTRUCTION]), log: false };
        let torn = Filter { program: Hex(vec![0; 12]), log: false };
        let none = Filter { program: Hex(Vec::new()), log: false };
        assert!(![long, torn, none].iter().any(Filter::is_possible));
    }
}
