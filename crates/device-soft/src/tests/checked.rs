//! Checked programs: what orders accesses to shared memory, in forms that compilers make rarely.

use super::{Bench, Shape};
use crate::check::{Check, Checker};
use crate::exec::Level;
use kedge_device::{FindingKind, Findings, Host};
use kedge_protocol::{CtxId, OutputTarget};
use std::sync::{Arc, Mutex};

/// Keeps what it is told.
#[derive(Default)]
struct Told(Mutex<Findings>);

impl Host for Told {
    fn read_client(&self, _: u64, _: &mut [u8]) -> Result<(), kedge_cuda_types::CuError> {
        Ok(())
    }
    fn write_client(&self, _: u64, _: &[u8]) -> Result<(), kedge_cuda_types::CuError> {
        Ok(())
    }
    fn host_function(&self, _: u64, _: kedge_device::Done) {}
    fn output(&self, _: OutputTarget, _: &[u8]) {}
    fn fault(&self, _: CtxId, _: kedge_cuda_types::CuError) {}
    fn idle(&self) {}
    fn log(&self, _: &str) {}
    fn found(&self, findings: &Findings) {
        *self.0.lock().unwrap() = findings.clone();
    }
}

/// The kinds of what is found in a kernel of two warps that has these lines.
fn found(lines: &str) -> Vec<FindingKind> {
    let body = format!(
        ".visible .entry k(.param .u64 data)
        {{
            .reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %rd<8>;
            .shared .align 16 .b8 words[256]; .shared .align 8 .b64 object;
            mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; setp.eq.u32 %p2, %r1, 0;
            shl.b32 %r2, %r1, 2; mov.u32 %r3, words; mov.u32 %r9, object;
            add.u32 %r4, %r3, %r2; xor.b32 %r5, %r2, 128; add.u32 %r5, %r5, %r3;
            @%p2 mbarrier.init.shared.b64 [%r9], 32;
            bar.sync 0;
            {lines}
            ret;
        }}"
    );
    let bench = Bench::new();
    let check = Check { races: true, init: true, unused: false };
    let checker = Arc::new(Checker::new(check, 1).unwrap());
    let program = bench.program_for(&body, Level::detect(), Some(checker.clone()));
    assert_eq!(program.kernels[0].unsupported, None);
    bench.run(&program, &Shape::new(1, 64), &[0]).unwrap();
    let told = Told::default();
    checker.tell(&told);
    let found = told.0.lock().unwrap();
    found.list.iter().map(|finding| finding.kind).collect()
}

#[test]
fn each_thread_has_its_own_word() {
    let nothing: [FindingKind; 0] = [];
    assert_eq!(found("st.shared.u32 [%r4], 1; ld.shared.u32 %r6, [%r4];"), nothing);
    // Whether a warp reads before the other writes is the order of their turns.
    let crossed = found("st.shared.u32 [%r4], %r1; ld.shared.u32 %r6, [%r5];");
    assert!(crossed.contains(&FindingKind::Race));
    assert_eq!(found("ld.shared.u32 %r6, [%r4];"), [FindingKind::Uninitialised]);
}

#[test]
fn barriers_order_also_those_of_some_threads() {
    let nothing: [FindingKind; 0] = [];
    for barrier in ["bar.sync 0;", "barrier.sync 3, 64;", "bar.red.popc.u32 %r7, 1, %p1;"] {
        let lines = format!("st.shared.u32 [%r4], %r1; {barrier} ld.shared.u32 %r6, [%r5];");
        assert_eq!(found(&lines), nothing, "{barrier}");
    }
    // The first warp goes on without the other.
    let pair = "@%p1 st.shared.u32 [%r4], %r1; @%p1 bar.arrive 2, 64; @!%p1 bar.sync 2, 64;
                @!%p1 ld.shared.u32 %r6, [%r5];";
    assert_eq!(found(pair), nothing);
    let late = "@%p1 bar.arrive 2, 64; @%p1 st.shared.u32 [%r4], %r1; @!%p1 bar.sync 2, 64;
                @!%p1 ld.shared.u32 %r6, [%r5];";
    assert!(found(late).contains(&FindingKind::Race));
}

#[test]
fn mbarriers_order_who_arrives_and_who_waits() {
    let nothing: [FindingKind; 0] = [];
    let wait = "@!%p1 mbarrier.test_wait.parity.shared.b64 %p3, [%r9], 0;";
    let lines = format!(
        "@!%p1 bra WAIT;
         st.shared.u32 [%r4], %r1;
         mbarrier.arrive.shared.b64 %rd1, [%r9];
         ret;
         WAIT: {wait}
         @!%p3 bra WAIT;
         ld.shared.u32 %r6, [%r5];"
    );
    assert_eq!(found(&lines), nothing);
    let unordered = found(&lines.replace(wait, "setp.eq.u32 %p3, %r1, %r1;"));
    assert!(unordered.contains(&FindingKind::Race));
}

/// The word of a flag, which both warps can see, and fences.
#[test]
fn flags_order_with_fences_alone() {
    let lines = "@!%p1 bra WAIT;
         st.shared.u32 [%r4], %r1;
         FENCE
         bar.warp.sync -1;
         @%p2 st.volatile.shared.u32 [words+252], 7;
         ret;
         WAIT: ld.volatile.shared.u32 %r7, [words+252];
         setp.ne.u32 %p3, %r7, 7;
         @%p3 bra WAIT;
         FENCE
         xor.b32 %r5, %r5, 0; ld.shared.u32 %r6, [%r5];";
    let first = "setp.eq.u32 %p3, %r1, 63; @%p3 st.shared.u32 [words+252], 0; bar.sync 0;";
    let nothing: [FindingKind; 0] = [];
    let fenced = format!("{first} {}", lines.replace("FENCE", "membar.cta;"));
    assert_eq!(found(&fenced), nothing);
    let plain = format!("{first} {}", lines.replace("FENCE", ""));
    assert_eq!(found(&plain), [FindingKind::Race]);
}
