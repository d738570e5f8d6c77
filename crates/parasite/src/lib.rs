//! The machine code that runs inside a stopped process: two entry points, under a hundred bytes,
//! position-independent, without stack, lock, allocation or library.
//!
//! Everything that must happen inside a process, at capture as at restart, is a system call that
//! only the process itself can make. So what is injected is nothing but a way to make them; what to
//! call is decided outside, in ordinary Rust.
//!
//! * [`ONCE`]: one system call. The registers hold its number and arguments; the tracer stops the
//!   thread at the call's exit. Used on live programs, because it needs no signal.
//! * [`BATCH`]: the calls that an array of [`Call`]s lists, one after the other, ended by `int3`.
//!   Used on processes that nobody else knows yet.
#![cfg_attr(not(test), no_std)]

#[cfg(not(target_arch = "x86_64"))]
compile_error!("kedge's process engine knows x86-64 only");

/// Offset of the single system call in [`code`].
pub const ONCE: u64 = 0;
/// Offset of the batch's entry in [`code`]; `r15` holds the address of the first [`Call`].
pub const BATCH: u64 = 16;
/// The [`Call::number`] that ends a batch.
pub const END: u64 = u64::MAX;
/// The register that holds the current [`Call`]'s address is `r15`: at the batch's end it points to
/// the entry that ended it.
pub const CALL_SIZE: usize = size_of::<Call>();

/// One system call of a batch, as the code reads it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Call {
    pub number: u64,
    pub arguments: [u64; 6],
    /// Stored by the code: what the kernel returned.
    pub result: i64,
    /// 0: a failure ends the batch here. 1: it goes on.
    pub may_fail: u64,
}

// A call that fails stops at its own entry, so that r15 says which one it was.
core::arch::global_asm!(
    ".pushsection .rodata.kedge_parasite, \"a\", @progbits",
    ".balign 16",
    // Global, because code() may be inlined into other crates; hidden, because nobody else asks.
    ".globl kedge_parasite_start, kedge_parasite_end",
    ".hidden kedge_parasite_start, kedge_parasite_end",
    "kedge_parasite_start:",
    "syscall",
    "ud2",
    ".balign 16",
    "2:",
    "mov rax, [r15]",
    "cmp rax, -1",
    "je 4f",
    "mov rdi, [r15 + 8]",
    "mov rsi, [r15 + 16]",
    "mov rdx, [r15 + 24]",
    "mov r10, [r15 + 32]",
    "mov r8, [r15 + 40]",
    "mov r9, [r15 + 48]",
    "syscall",
    "mov [r15 + 56], rax",
    "cmp rax, -4096",
    "jbe 3f",
    "cmp qword ptr [r15 + 64], 0",
    "je 4f",
    "3:",
    "add r15, 72",
    "jmp 2b",
    "4:",
    "int3",
    "ud2",
    "kedge_parasite_end:",
    ".popsection",
);

unsafe extern "C" {
    static kedge_parasite_start: u8;
    static kedge_parasite_end: u8;
}

/// The code, to be copied anywhere that is executable.
pub fn code() -> &'static [u8] {
    let start = &raw const kedge_parasite_start;
    let end = &raw const kedge_parasite_end;
    // SAFETY: both symbols bound one read-only section of this program, start before end, which the
    // assembly above defines; its bytes are never written.
    unsafe { core::slice::from_raw_parts(start, end.addr() - start.addr()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_points_are_where_they_are_said_to_be() {
        let code = code();
        assert_eq!(code[ONCE as usize..][..2], [0x0f, 0x05], "syscall");
        assert_eq!(code[BATCH as usize..][..3], [0x49, 0x8b, 0x07], "mov rax, [r15]");
        assert!(code.len() < 128);
    }

    #[test]
    fn a_call_is_laid_out_as_the_code_reads_it() {
        assert_eq!(core::mem::offset_of!(Call, arguments), 8);
        assert_eq!(core::mem::offset_of!(Call, result), 56);
        assert_eq!(core::mem::offset_of!(Call, may_fail), 64);
        assert_eq!(CALL_SIZE, 72);
    }
}
