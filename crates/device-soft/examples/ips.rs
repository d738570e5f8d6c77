//! Thread-instructions per second and core, on kernels whose instruction counts are known.
//!
//! `cargo run --release -p kedge-device-soft --example ips [WORKERS [PART OF A NAME]]`

use kedge_cuda_types::CuError;
use kedge_device_soft::code::{PlaceKind, Placement, Program};
use kedge_device_soft::exec::texture::TextureView;
use kedge_device_soft::memory::Spans;
use kedge_device_soft::{GridSpec, Pool, Services, lower};
use kedge_protocol::OutputTarget;
use std::sync::{Arc, mpsc};
use std::time::Instant;

/// 1024 rounds of eight dependent and independent fused multiply-adds.
const ALU: &str = "
.visible .entry alu(.param .u64 out, .param .u64 unused, .param .u64 unused2)
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .f32 %f<16>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    cvt.rn.f32.u32 %f1, %r1;
    mov.f32 %f2, 0f3F800000;
    mov.f32 %f3, 0f3F000000;
    mov.f32 %f4, 0f3E800000;
    mov.f32 %f5, 0f3F7FFF00;
    mov.u32 %r2, 0;
LOOP:
    fma.rn.f32 %f1, %f1, %f5, %f2;
    fma.rn.f32 %f2, %f2, %f5, %f3;
    fma.rn.f32 %f3, %f3, %f5, %f4;
    fma.rn.f32 %f4, %f4, %f5, %f1;
    add.f32 %f6, %f1, %f2;
    mul.f32 %f7, %f3, %f5;
    fma.rn.f32 %f1, %f6, %f5, %f7;
    sub.f32 %f2, %f7, %f4;
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p1, %r2, 1024;
    @%p1 bra LOOP;
    add.f32 %f8, %f1, %f2;
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd3, %rd1, %rd2;
    st.global.f32 [%rd3], %f8;
    ret;
}";

/// The inner product of a 16 × 16 tile in shared memory, 64 tiles a block, as nvcc unrolls it.
fn matmul() -> String {
    let mut inner = String::new();
    for k in 0..16 {
        if k % 4 == 0 {
            let row: Vec<_> = (0..4).map(|i| format!("%f{}", 20 + k + i)).collect();
            inner += &format!("ld.shared.v4.f32 {{{}}}, [%r10+{}];\n", row.join(", "), 4 * k);
        }
        inner += &format!(
            "ld.shared.f32 %f{}, [%r11+{}]; fma.rn.f32 %f1, %f{}, %f{}, %f1;\n",
            40 + k,
            64 * k,
            20 + k,
            40 + k
        );
    }
    format!(
        "
.visible .entry matmul(.param .u64 a, .param .u64 b, .param .u64 c)
{{
    .shared .align 16 .b8 as[1024];
    .shared .align 16 .b8 bs[1024];
    .reg .pred %p<2>;
    .reg .b32 %r<20>;
    .reg .f32 %f<64>;
    .reg .b64 %rd<12>;
    ld.param.u64 %rd1, [a];
    ld.param.u64 %rd2, [b];
    ld.param.u64 %rd3, [c];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %tid.y;
    shl.b32 %r3, %r2, 4;
    add.u32 %r4, %r3, %r1;
    shl.b32 %r4, %r4, 2;
    mov.u32 %r5, as;
    mov.u32 %r6, bs;
    add.u32 %r7, %r5, %r4;
    add.u32 %r8, %r6, %r4;
    shl.b32 %r9, %r2, 6;
    add.u32 %r10, %r5, %r9;
    shl.b32 %r12, %r1, 2;
    add.u32 %r11, %r6, %r12;
    cvt.u64.u32 %rd4, %r4;
    add.u64 %rd5, %rd1, %rd4;
    add.u64 %rd6, %rd2, %rd4;
    add.u64 %rd7, %rd3, %rd4;
    mov.f32 %f1, 0f00000000;
    mov.u32 %r13, 0;
LOOP:
    ld.global.f32 %f4, [%rd5];
    st.shared.f32 [%r7], %f4;
    ld.global.f32 %f5, [%rd6];
    st.shared.f32 [%r8], %f5;
    bar.sync 0;
    {inner}
    bar.sync 0;
    add.u32 %r13, %r13, 1;
    setp.lt.u32 %p1, %r13, 64;
    @%p1 bra LOOP;
    st.global.f32 [%rd7], %f1;
    ret;
}}"
    )
}

/// Rounds of a warp's share of a product: two tiles of A and four of B out of shared memory, eight
/// products.
struct Product {
    name: &'static str,
    shape: &'static str,
    /// Types of the operands and of the accumulators, and registers of a fragment of each.
    operand: (&'static str, usize),
    accumulator: (&'static str, usize),
    rounding: &'static str,
    stride: usize,
    macs: usize,
}

const PRODUCTS: &[Product] = &[
    Product {
        name: "wmma bf16",
        shape: "m16n16k16",
        operand: ("bf16", 4),
        accumulator: ("f32", 8),
        rounding: "",
        stride: 24,
        macs: 4096,
    },
    Product {
        name: "wmma tf32",
        shape: "m16n16k8",
        operand: ("tf32", 4),
        accumulator: ("f32", 8),
        rounding: "",
        stride: 12,
        macs: 2048,
    },
    Product {
        name: "wmma s8",
        shape: "m16n16k16",
        operand: ("s8", 2),
        accumulator: ("s32", 8),
        rounding: "",
        stride: 48,
        macs: 4096,
    },
    Product {
        name: "wmma f64",
        shape: "m8n8k4",
        operand: ("f64", 1),
        accumulator: ("f64", 2),
        rounding: ".rn",
        stride: 8,
        macs: 256,
    },
];

const ROUNDS: usize = 256;

impl Product {
    fn text(&self) -> String {
        let Self { shape, stride, rounding, .. } = self;
        let ((operand, ab), (sum, cd)) = (self.operand, self.accumulator);
        let fragment = |name: char, index: usize, count: usize| {
            let registers: Vec<_> = (0..count).map(|i| format!("%{name}{index}_{i}")).collect();
            registers.join(", ")
        };
        let bank = |ty: &str| if ty == "f64" { "f64" } else { "b32" };
        let mut text = String::new();
        for (name, fragments, ty, count) in
            [('a', 2, operand, ab), ('b', 4, operand, ab), ('c', 8, sum, cd)]
        {
            for index in 0..fragments {
                text += &format!(".reg .{} {};\n", bank(ty), fragment(name, index, count));
            }
        }
        for index in 0..8 {
            for register in 0..cd {
                let zero = if sum == "f64" { "0d0000000000000000" } else { "0" };
                text += &format!("mov.{} %c{index}_{register}, {zero};\n", bank(sum));
            }
        }
        text += "LOOP:\n";
        for (name, layout, fragments) in [('a', "row", 2), ('b', "col", 4)] {
            for index in 0..fragments {
                let at = 256 * index + if name == 'b' { 4096 } else { 0 };
                text += &format!(
                    "wmma.load.{name}.sync.aligned.{layout}.{shape}.shared.{operand} {{{}}}, [%r1+{at}], %r2;\n",
                    fragment(name, index, ab)
                );
            }
        }
        let types = if operand == "f16" {
            format!("{sum}.{sum}")
        } else {
            format!("{sum}.{operand}.{operand}.{sum}")
        };
        for (a, b) in (0..2).flat_map(|a| (0..4).map(move |b| (a, b))) {
            let c = fragment('c', a * 4 + b, cd);
            text += &format!(
                "wmma.mma.sync.aligned.row.col.{shape}.{types}{rounding} {{{c}}}, {{{}}}, {{{}}}, {{{c}}};\n",
                fragment('a', a, ab),
                fragment('b', b, ab)
            );
        }
        let mut sums = String::new();
        for index in 0..8 {
            sums += &format!(
                "wmma.store.d.sync.aligned.row.{shape}.global.{sum} [%rd1+{}], {{{}}};\n",
                2048 * index,
                fragment('c', index, cd)
            );
        }
        format!(
            ".visible .entry product(.param .u64 out, .param .u64 b, .param .u64 c)
            {{
            .shared .align 16 .b8 tile[16384];
            .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<4>;
            ld.param.u64 %rd1, [out];
            mov.u32 %r1, tile; mov.u32 %r2, {stride}; mov.u32 %r3, 0;
            {text}
            add.u32 %r3, %r3, 1;
            setp.lt.u32 %p1, %r3, {ROUNDS};
            @%p1 bra LOOP;
            {sums} ret;
            }}"
        )
    }
}

struct Nobody;

impl Services for Nobody {
    fn print(&self, _: OutputTarget, _: &[u8]) {}
    fn malloc(&self, _: u64) -> u64 {
        0
    }
    fn free(&self, _: u64) -> bool {
        false
    }
    fn texture(&self, _: u64) -> Option<Arc<TextureView>> {
        None
    }
}

impl Placement for Nobody {
    fn place(&mut self, _: &str, _: u64, _: u64, _: PlaceKind) -> Result<u64, CuError> {
        Err(CuError::NOT_SUPPORTED)
    }
}

fn main() {
    let workers = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(1);
    let wanted = std::env::args().nth(2).unwrap_or_default();
    let pool = Pool::new(workers).expect("threads start");
    let spans = Arc::new(Spans::new());
    let mut memory = vec![1.0f32; 1 << 16];
    let addr = memory.as_mut_ptr() as u64;
    spans.insert(addr, 4 << 16);
    // Instructions a thread: the loop, and what stands around it.
    let cases = [
        ("fp32 ALU loop", ALU.to_string(), [256, 1, 1], 11 * 1024 + 13),
        ("tiled matmul", matmul(), [16, 16, 1], (6 + 36 + 3) * 64 + 26),
    ];
    for (name, text, block, instructions) in cases.into_iter().filter(|c| c.0.contains(&wanted)) {
        let text = format!(".version 8.5\n.target sm_90\n.address_size 64\n{text}");
        let module = kedge_ptx::parse(&text).expect("the kernel parses");
        let program = Arc::new(lower::build(&module, &mut Nobody).expect("the kernel builds"));
        let mut best = 0.0f64;
        for _ in 0..5 {
            let blocks = 200 * workers as u32;
            let seconds = run(&pool, &program, &spans, [blocks, 1, 1], block, addr);
            let total = f64::from(blocks) * 256.0 * f64::from(instructions);
            best = best.max(total / seconds / workers as f64);
        }
        println!("{name}: {:.2}e9 thread-instructions/s/core", best / 1e9);
    }
    for product in PRODUCTS.iter().filter(|product| product.name.contains(&wanted)) {
        let text = format!(".version 8.5\n.target sm_90\n.address_size 64\n{}", product.text());
        let module = kedge_ptx::parse(&text).expect("the kernel parses");
        let program = Arc::new(lower::build(&module, &mut Nobody).expect("the kernel builds"));
        let blocks = 20 * workers as u32;
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            best = best.min(run(&pool, &program, &spans, [blocks, 1, 1], [256, 1, 1], addr));
        }
        let products = f64::from(blocks) * 8.0 * 8.0 * ROUNDS as f64;
        let each = best * workers as f64 / products;
        println!(
            "{}: {:.0} ns a product with its loads, {:.1}e9 multiply-adds/s/core",
            product.name,
            each * 1e9,
            product.macs as f64 / each / 1e9
        );
    }
}

fn run(
    pool: &Pool,
    program: &Arc<Program>,
    spans: &Arc<Spans>,
    grid: [u32; 3],
    block: [u32; 3],
    addr: u64,
) -> f64 {
    let (send, receive) = mpsc::channel();
    let params = [addr, addr + 65536, addr + 131072];
    let spec = GridSpec {
        program: program.clone(),
        kernel: 0,
        grid,
        block,
        cluster: [1; 3],
        shared_bytes: 0,
        cooperative: false,
        params: params.iter().flat_map(|p: &u64| p.to_le_bytes()).collect(),
        stack_limit: 1024,
        spans: spans.clone(),
        services: Arc::new(Nobody),
    };
    let start = Instant::now();
    let done = Box::new(move |result| send.send(result).expect("the receiver waits"));
    pool.launch(spec, done);
    receive.recv().expect("the grid ends").expect("the kernel runs");
    start.elapsed().as_secs_f64()
}
