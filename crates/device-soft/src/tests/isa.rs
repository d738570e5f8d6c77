//! Which instructions lower: one form or two of each that the PTX ISA has for this device, and
//! those that are refused by name.

use super::{Leaked, Spans};
use crate::exec::Level;
use crate::lower;
use std::sync::Arc;

/// What CUDA's compiler does not emit from C++, or what this device does not have.
const REFUSED: &[&str] = &[
    // Multicast objects are not offered.
    "multimem.ld_reduce.add.u32 r0,[rd1]",
    "multimem.red.add.u32 [rd1],r0",
    // Graphs are not launched by kernels.
    "mov.u64 rd0,%current_graph_exec",
    "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {f0,f1,f2,f3},rd1,rd2,r3,0,p,1,1,0,0",
    "sured.b.add.2d.u32.trap [rd1,{r5,r6}],r2",
    "sust.p.2d.v4.b32.trap [rd1,{r5,r6}],{r0,r1,r2,r3}",
    "tex.2dms.v4.f32.s32 {f0,f1,f2,f3},[rd1,{r5,r6,r7,r8}]",
    "txq.filter_mode.b32 r0,[rd1]",
    "vadd2.s32.u32.s32 r0.h10,r1.h23,r2.h01,r3",
    "vmad.s32.u32.s32 r0,r1,r2,r3",
    "fma.rn.oob.f16 h0,h1,h2,h3",
    "istypep.texref p,rd1",
];

/// Why a kernel with this instruction cannot run; None where it can.
fn refusal(line: &str) -> Option<String> {
    let text = format!(
        ".version 9.1\n.target sm_90a\n.address_size 64
        .global .align 16 .b8 gbuf[1024]; .const .align 16 .b8 cbuf[1024];
        .global .texref tref; .global .surfref sref;
        .visible .entry k(.param .u64 data, .param .align 16 .b8 big[64]) {{
        .reg .pred p,q; .reg .b8 b<8>; .reg .b16 h<12>; .reg .b32 r<80>; .reg .b64 rd<80>;
        .reg .f32 f<80>; .reg .f64 d<80>; .reg .b128 x<4>; .reg .v2 .b32 v<4>; .reg .v4 .f32 w;
        .shared .align 128 .b8 smem[1024]; .local .align 16 .b8 lbuf[64];
        {line};
        ret; }}"
    );
    let module = match kedge_ptx::parse(&text) {
        Ok(module) => module,
        Err(error) => return Some(error.to_string()),
    };
    let mut placement = Leaked(Arc::new(Spans::new()));
    match lower::build_at(&module, &mut placement, Level::Portable) {
        Ok(program) => program.kernels[0].unsupported.clone(),
        Err(error) => Some(error.to_string()),
    }
}

#[test]
fn what_the_isa_has_lowers() {
    let lines = include_str!("isa.txt").lines().filter(|line| !line.starts_with('#'));
    let refused: Vec<String> =
        lines.filter_map(|line| Some(format!("{line}: {}", refusal(line)?))).collect();
    assert!(refused.is_empty(), "{refused:#?}");
}

#[test]
fn what_is_missing_is_refused_by_name() {
    for line in REFUSED {
        let why = refusal(line).unwrap_or_else(|| panic!("{line} lowers"));
        let name = line.split(' ').next().unwrap_or(line);
        let named = why.contains(name) || why.contains("%current_graph_exec");
        assert!(named && why.contains("not supported"), "{line}: {why}");
    }
}
