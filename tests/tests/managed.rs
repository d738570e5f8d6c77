//! Managed memory on software devices that see none of the host's pages.

use kedge_tests::{Program, Target, Toolchain, root, run};

#[test]
fn programs_find_one_memory_where_there_are_two() {
    let toolchain = Toolchain::find(&root().join("target/programs")).expect("nvcc");
    let target = Target::Kedge("soft:apart".to_owned());
    for name in ["managed", "managed_pages", "managed_pools", "zero_copy", "graph_nodes"] {
        let source = root().join(format!("tests/programs/{name}.cu"));
        let program = Program::load(&source).expect("a program of the conformance tests");
        let binary = toolchain.compile(&program).expect("it compiles");
        let outcome = run(&binary, &program, &target);
        assert_eq!(outcome.failure, None, "{name}: {}", outcome.stdout);
    }
}
