//! What kedge says of a kernel that reaches beyond its memory.
use kedge_tests::world::World;
use kedge_tests::{host, root};

/// What the job's log says of a case of overruns.cu.
fn told(flag: &str, case: usize) -> String {
    let world = World::new(&format!("told{case}{flag}"));
    let name = format!("overruns{flag}");
    let program = host("overruns.cu", &name, &["-arch=sm_90", flag]).display().to_string();
    let run = ["run", "--gpu", "soft", "--job", "j", "--", &program, &case.to_string()];
    let output = world.output(&run);
    assert!(output.status.success(), "{output:?}");
    world.text(&["logs", "j"])
}

/// The line of overruns.cu that has a comment.
fn line_of(comment: &str) -> String {
    let source = std::fs::read_to_string(root().join("tests/hosts/overruns.cu")).expect("a file");
    let ends = |line: &str| line.ends_with(&format!("// {comment}"));
    format!("overruns.cu:{}", 1 + source.lines().position(ends).expect("a line"))
}

/// A kernel's fault names the kernel, the line, what was done, and what memory is next to it.
#[test]
fn a_kernel_s_fault_is_told_as_its_programmer_knows_it() {
    let past = |bytes: u32| format!("{bytes} bytes past the end of the 4000 bytes allocated at 0x");
    let expected = [
        ("reads(float*, int)", "reads", "read of 4 bytes", past(0)),
        ("writes(double*, int)", "writes", "write of 8 bytes", "16 bytes before the 4000".into()),
        ("adds(unsigned int*, int)", "adds", "atomic access of 4 bytes", past((4 << 20) - 4000)),
        ("shares(int*, int)", "shares", "read of 4 bytes", "offset 256 in 256 bytes of sh".into()),
        ("strays(char*, int)", "strays", "read of 8 bytes", "offset 4 in the 4000 bytes".into()),
        ("calls(float*, int)", "inlined", "read of 4 bytes", past(4)),
    ];
    for (case, (kernel, comment, access, near)) in expected.into_iter().enumerate() {
        for flag in ["-lineinfo", "-G"] {
            let log = told(flag, case);
            // Under -G atomicAdd is a function that is called, and has no lines.
            let line =
                if (flag, comment) == ("-G", "adds") { "adds".into() } else { line_of(comment) };
            for part in [kernel, &line, access, &near] {
                assert!(log.contains(part), "{flag} {case}: {part:?} is not in {log}");
            }
        }
        let kind = if comment == "strays" { "misaligned address in" } else { "illegal address in" };
        let log = told("-O3", case);
        assert!(log.contains(&format!("{kind} kernel {kernel}, {access}")), "{log}");
    }
}
