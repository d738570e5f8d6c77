use super::parse;
use crate::ParseError;
use crate::ast::*;

const HEAD: &str = ".version 9.0\n.target sm_90a, debug\n.address_size 64\n";

fn module(text: &str) -> Module {
    parse(&format!("{HEAD}{text}")).unwrap_or_else(|error| panic!("{error}"))
}

fn refused(text: &str) -> ParseError {
    parse(&format!("{HEAD}{text}")).expect_err(text)
}

/// The body of a kernel with some registers and variables, around `text`.
fn body(text: &str) -> Body {
    let all = module(&format!(
        ".global .align 4 .b32 table[8];\n.extern .func (.param .b32 r) callee(.param .b32 a);
         .visible .entry k(.param .u64 p)
         {{ .reg .pred %p<4>; .reg .b32 %r<10>; .reg .b64 %rd<10>; .reg .f32 %f<10>;
         .local .align 8 .b8 depot[16];
         {text}
         }}"
    ));
    all.functions.into_iter().last().unwrap().body.unwrap()
}

fn instructions(body: &Body) -> Vec<&Instruction> {
    let mut all = Vec::new();
    for statement in &body.statements {
        if let Statement::Instruction(instruction) = statement {
            all.push(instruction);
        }
    }
    all
}

/// The operands of one instruction, with registers by their names.
fn operands(text: &str) -> String {
    let body = body(text);
    let all = instructions(&body);
    let shown: Vec<_> = all[0].operands.iter().map(|operand| show(&body, operand)).collect();
    shown.join(", ")
}

fn show(body: &Body, operand: &Operand) -> String {
    let register = |id: &RegId| body.registers[id.0 as usize].name.clone();
    let several = |all: &[Operand]| {
        all.iter().map(|operand| show(body, operand)).collect::<Vec<_>>().join(" ")
    };
    match operand {
        Operand::Register(id) => register(id),
        Operand::NotRegister(id) => format!("!{}", register(id)),
        Operand::NegRegister(id) => format!("-{}", register(id)),
        Operand::Pair(left, right) => format!("{}|{}", show(body, left), show(body, right)),
        Operand::Component(id, part) => format!("{}.{part}", register(id)),
        Operand::Int(value) => value.to_string(),
        Operand::F32(bits) => format!("f{}", f32::from_bits(*bits)),
        Operand::F64(bits) => format!("d{}", f64::from_bits(*bits)),
        Operand::Special(name) => name.clone(),
        Operand::Symbol(name, 0) => name.clone(),
        Operand::Symbol(name, offset) => format!("{name}{offset:+}"),
        Operand::Label(id) => format!(":{}", body.labels[id.0 as usize]),
        Operand::Address(base, offset) => match base {
            AddressBase::Register(id) => format!("[{}{offset:+}]", register(id)),
            AddressBase::Symbol(name) => format!("[{name}{offset:+}]"),
            AddressBase::Absolute => format!("[{offset}]"),
        },
        Operand::Vector(all) => format!("{{{}}}", several(all)),
        Operand::List(all) => format!("({})", several(all)),
        Operand::Bracket(all) => format!("<{}>", several(all)),
        Operand::Sink => "_".into(),
    }
}

#[test]
fn a_header_is_read() {
    let module = module("");
    assert_eq!((module.version, module.sm, module.sm_suffix), ((9, 0), 90, Some('a')));
    assert_eq!(module.address_size, 64);
}

#[test]
fn each_form_of_operand() {
    for (text, shown) in [
        ("add.s32 %r1, %r2, -3;", "%r1, %r2, -3"),
        ("mov.b32 %r1, 0xFFFFFFFFU;", "%r1, 4294967295"),
        ("mov.b64 %rd1, 0xFFFFFFFFFFFFFFFF;", "%rd1, -1"),
        ("mov.b32 %r1, 0b101;", "%r1, 5"),
        ("mov.f32 %f1, 0f3FC00000;", "%f1, f1.5"),
        ("mov.f32 %f1, -0f3FC00000;", "%f1, f-1.5"),
        ("mov.f64 %rd1, 0d3FF8000000000000;", "%rd1, d1.5"),
        ("mov.f32 %f1, 1.5;", "%f1, d1.5"),
        ("mov.b32 %r1, (2*3+1)<<2;", "%r1, 28"),
        ("mov.b32 %r1, -1+3;", "%r1, 2"),
        ("mov.b32 %r1, 1 ? 5 : 6;", "%r1, 5"),
        ("mov.b32 %r1, ~0 & 0xff;", "%r1, 255"),
        ("mov.b32 %r1, WARP_SZ;", "%r1, 32"),
        ("mov.u32 %r1, %tid.x;", "%r1, %tid.x"),
        ("mov.u64 %rd1, %clock64;", "%rd1, %clock64"),
        ("mov.u32 %r1, %envreg31;", "%r1, %envreg31"),
        ("setp.lt.s32 %p1|%p2, %r1, %r2;", "%p1|%p2, %r1, %r2"),
        ("setp.lt.and.s32 %p1|_, %r1, 0, !%p2;", "%p1|_, %r1, 0, !%p2"),
        ("elect.sync _|%p1, -1;", "_|%p1, -1"),
        ("mad.f32 %f1, %f2, -%f3, %f4;", "%f1, %f2, -%f3, %f4"),
        ("vadd.s32.u32.s32 %r1, %r2.b0, %r3.h1;", "%r1, %r2.b0, %r3.h1"),
        ("ld.global.b32 %r1, [%rd1];", "%r1, [%rd1+0]"),
        ("ld.global.b32 %r1, [%rd1+-4];", "%r1, [%rd1-4]"),
        ("ld.param.b64 %rd1, [p+8];", "%rd1, [p+8]"),
        ("ld.shared.b32 %r1, [16];", "%r1, [16]"),
        ("ld.local.b32 %r1, [depot+4*2];", "%r1, [depot+8]"),
        ("ld.global.b32 %r1, table[3];", "%r1, [table+12]"),
        ("mov.b64 %rd1, table[1];", "%rd1, table+4"),
        ("mov.b64 %rd1, table+4;", "%rd1, table+4"),
        ("mov.b64 {%r1, _}, %rd1;", "{%r1 _}, %rd1"),
        (
            "tex.2d.v4.f32.f32 {%f1,%f2,%f3,%f4}, [%rd1, {%f5, %f6}];",
            "{%f1 %f2 %f3 %f4}, <%rd1 {%f5 %f6}>",
        ),
        (
            "tex.1d.v4.f32.s32 {%f1,%f2,%f3,%f4}, [table, %rd2, {%r5}];",
            "{%f1 %f2 %f3 %f4}, <table %rd2 {%r5}>",
        ),
        ("call (%r1), callee, (%r2, 3);", "(%r1), callee, (%r2 3)"),
        ("call callee;", "callee"),
        (
            "red.async.relaxed.cluster.global.add.u32 [%rd1+8], %r1, [%rd2];",
            "[%rd1+8], %r1, [%rd2+0]",
        ),
        ("ret;", ""),
    ] {
        assert_eq!(operands(text), shown, "{text}");
    }
}

#[test]
fn an_instruction_has_name_guard_and_line() {
    let body =
        body("\n@!%p1 ld.acquire.sys.global.L1::no_allocate.L2::128B.v2.b32 {%r1,%r2}, [%rd1];");
    let all = instructions(&body);
    let expected = ["ld", "acquire", "sys", "global", "L1::no_allocate", "L2::128B", "v2", "b32"];
    assert_eq!(all[0].name, expected);
    assert!(all[0].guard.is_some_and(|guard| guard.negated));
    assert_eq!(all[0].line, 10);
}

#[test]
fn branches_find_labels_before_and_after() {
    let body = body("top: bra done; bra top; done: ret;");
    let all = instructions(&body);
    assert_eq!(show(&body, &all[0].operands[0]), ":done");
    assert_eq!(show(&body, &all[1].operands[0]), ":top");
    assert_eq!(body.labels, ["top", "done"]);
    assert!(matches!(body.statements[0], Statement::Label(LabelId(0))));
}

#[test]
fn scopes_keep_labels_registers_and_variables_apart() {
    let body = body(
        "{ .reg .b32 t; .param .b32 a0; L: st.param.b32 [a0], t; bra L; bra END; }
         { .reg .f32 t; .param .b64 a0; L: st.param.b64 [a0+4], t; bra L; bra END; }
         END: ret;",
    );
    let all = instructions(&body);
    let names: Vec<_> = body.variables.iter().map(|variable| variable.name.as_str()).collect();
    assert_eq!(names, ["depot", "a0", "a0$1"]);
    assert_eq!(show(&body, &all[3].operands[0]), "[a0$1+4]");
    let types: Vec<_> = body.registers.iter().map(|register| register.ty).collect();
    assert_eq!(types, [Type::B32, Type::F32]);
    let targets: Vec<_> = [1, 2, 4, 5].map(|at| all[at].operands[0].clone()).into();
    let labels = [0, 2, 1, 2].map(|id| Operand::Label(LabelId(id)));
    // The labels in order of appearance: both L, then END.
    assert_eq!(targets, labels.to_vec());
}

#[test]
fn indirect_branches_and_calls_have_tables() {
    let body = body(
        "ts: .branchtargets A, B;
         brx.idx.uni %r1, ts;
         A: { proto: .callprototype (.param .b32 _) _ (.param .b64 _, .param .b32 _) .noreturn;
         call (%r1), %rd1, (%rd2, %r2), proto; }
         B: targets: .calltargets callee;
         call (%r1), %rd1, (%r2), targets;",
    );
    assert_eq!(body.branch_targets[0].0, "ts");
    let names = body.branch_targets[0].1.iter().map(|id| body.labels[id.0 as usize].as_str());
    assert_eq!(names.collect::<Vec<_>>(), ["A", "B"]);
    let all = instructions(&body);
    assert_eq!(show(&body, &all[0].operands[1]), "ts");
    assert_eq!(show(&body, &all[1].operands[3]), "proto");
    let counts = |at: usize| {
        let prototype: &(String, Prototype) = &body.prototypes[at];
        (prototype.0.as_str(), prototype.1.returns.len(), prototype.1.params.len())
    };
    assert_eq!(counts(0), ("proto", 1, 2));
    assert_eq!(counts(1), ("targets", 1, 1));
}

#[test]
fn a_prototype_may_stand_after_its_call() {
    let body = body(
        "call (%r1), %rd1, (%r2), later; later: .callprototype (.param .b32 _) _ (.param .b32 _);",
    );
    assert_eq!(show(&body, &instructions(&body)[0].operands[3]), "later");
}

#[test]
fn functions_have_linkage_limits_and_parameters() {
    let module = module(
        ".visible .entry k(.param .u64 .ptr .global .align 16 p, .param .align 8 .b8 s[24])
         .maxntid 128, 2 .reqntid 32 .minnctapersm 3 .maxnreg 64 .maxclusterrank 8
         .explicitcluster .reqnctapercluster 2, 1, 1 { ret; }
         .weak .func (.reg .u32 out) f (.reg .u32 in) .noreturn { mov.u32 out, in; ret; }
         .func later(.param .b64 a);
         .func later(.param .b64 a) { call f; ret; }",
    );
    let [kernel, function, later] = &module.functions[..] else { panic!() };
    assert!(kernel.entry && kernel.linkage == Linkage::Visible);
    assert_eq!((kernel.params[0].align, kernel.params[0].size()), (8, 8));
    assert_eq!((kernel.params[1].align, kernel.params[1].size()), (8, 24));
    let limits = kernel.limits;
    assert_eq!((limits.max_threads, limits.required_threads), ([128, 2, 1], [32, 1, 1]));
    assert_eq!((limits.min_blocks_per_sm, limits.max_registers), (3, 64));
    assert_eq!((limits.max_cluster_rank, limits.required_cluster), (8, [2, 1, 1]));
    assert!(limits.explicit_cluster && function.noreturn);
    assert_eq!(function.returns[0].in_register, Some(RegId(0)));
    assert_eq!(function.params[0].in_register, Some(RegId(1)));
    assert!(later.body.is_some());
}

#[test]
fn variables_have_shape_and_contents() {
    let module = module(
        ".visible .global .align 16 .b8 bytes[6] = {1, 255, -1};
         .const .f32 floats[2][2] = {{0f3F800000, 2.0}, {3}};
         .global .v4 .s32 vector = {1, 2, 3, 4};
         .global .u16 inferred[] = {1, 2, 3};
         .global .attribute(.managed) .f64 managed = -0.5, second = 2;
         .extern .shared .align 8 .b8 dynamic[];
         .shared .b32 tile[4][8];
         .global .texref tex;
         .weak .global .u64 zero = 0;",
    );
    let all = &module.variables;
    assert_eq!(all[0].init, [1, 255, 255]);
    assert_eq!((all[0].align, all[0].size()), (16, 6));
    let floats: Vec<_> =
        all[1].init.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(floats, [1.0, 2.0, 3.0]);
    assert_eq!((all[2].lanes, all[2].init.len(), all[2].align), (4, 16, 16));
    assert_eq!(all[3].dims, [3]);
    assert!(all[4].managed && all[5].managed);
    assert_eq!(all[4].init, (-0.5f64).to_le_bytes());
    assert_eq!(all[5].init, 2f64.to_le_bytes());
    assert_eq!((all[6].dims.as_slice(), all[6].linkage), (&[0][..], Linkage::Extern));
    assert_eq!(all[7].size(), 128);
    assert_eq!(all[8].ty, Type::TexRef);
    assert_eq!(all[9].linkage, Linkage::Weak);
}

#[test]
fn initialisers_hold_addresses() {
    let module = module(
        ".global .b32 a[4];\n.func f() { ret; }
         .global .align 8 .u64 t[4] = {1, a+4, generic(a)+8, f};
         .global .b8 bytes[2] = {0xFF(a), 0xFF00(generic(f)+1)};",
    );
    let table = &module.variables[1];
    assert_eq!(table.init.len(), 32);
    let shown: Vec<_> = table
        .relocations
        .iter()
        .map(|r| (r.offset, r.size, r.symbol.as_str(), r.addend, r.generic))
        .collect();
    let expected = [(8, 8, "a", 4, false), (16, 8, "a", 8, true), (24, 8, "f", 0, false)];
    assert_eq!(shown, expected);
    let bytes = &module.variables[2].relocations;
    assert_eq!((bytes[0].size, bytes[0].shift), (1, 0));
    assert_eq!((bytes[1].size, bytes[1].shift, bytes[1].addend), (1, 8, 1));
}

#[test]
fn debug_directives_tell_where_instructions_come_from() {
    let module = module(
        ".file 1 \"a b.cu\", 1700000000, 55
         .visible .entry k() {
         .loc 1 3 5
         .loc 1 4 7, function_name $L__info_string0, inlined_at 1 9 1
         .loc 1 4 7, function_name $L__info_string0+6, inlined_at 1 9 1
         $L__tmp0: .pragma \"nounroll\";
         ret; $L__func_end0: }
         .section .debug_abbrev { .b8 1 .b8 2, 3\n{ } $L__x: .b32 $L__tmp0-$L__func_end0 }
         .section .debug_str { $L__info_string0: .b8 95,90 }",
    );
    let function = &module.functions[0];
    let body = function.body.as_ref().unwrap();
    assert_eq!(instructions(body).len(), 1);
    assert_eq!(*function.files, [(1, "a b.cu".to_owned())]);
    let told: Vec<_> =
        body.locations.iter().map(|it| (it.ptx_line, it.file, it.line, it.inlined_at)).collect();
    // Three lines stand before this text.
    let caller = Some((1, 9));
    assert_eq!(told, [(6, 1, 3, None), (7, 1, 4, caller), (8, 1, 4, caller)]);
}

#[test]
fn registers_get_ids_when_used() {
    let all = body("mov.b32 %r9, %r3;");
    let names: Vec<_> = all.registers.iter().map(|register| register.name.as_str()).collect();
    assert_eq!(names, ["%r9", "%r3"]);
}

#[test]
fn variables_have_ranges_as_registers_have() {
    let body = body(
        "{ .param .u64 %P<2>; st.param.u64 [%P1], %rd1; call callee, (%P0, %P1); }
         { .param .align 16 .b8 %P<2>[24]; st.param.u64 [%P1+8], %rd1; mov.b64 %rd2, %P1[2]; }
         .param .b64 huge<4000000>;",
    );
    let shown: Vec<_> = body.variables.iter().map(|it| (it.name.as_str(), it.size())).collect();
    let expected = [("depot", 16), ("%P1<0>", 8), ("%P0<1>", 8), ("%P1<2>", 24)];
    assert_eq!(shown, expected, "those that are used");
    assert_eq!((body.variables[3].align, body.variables[3].space), (16, Space::Param));
    let all = instructions(&body);
    let shown: Vec<_> = all.iter().map(|it| show(&body, it.operands.last().unwrap())).collect();
    assert_eq!(shown, ["%rd1", "(%P0<1> %P1<0>)", "%rd1", "%P1<2>+2"]);
    assert_eq!(show(&body, &all[2].operands[0]), "[%P1<2>+8]");
}

#[test]
fn vector_registers_are_their_elements() {
    let body = body(
        ".reg .v2 .u32 v, w<3>; .reg .v4 .f32 q;
         mov.v2.u32 v, {0, %r1}; mov.u32 v.y, w2.x; st.v2.u32 [%rd1], v;
         mov.f32 q.a, q.g; mov.f32 q.w, q.y; tex.2d.v4.f32.f32 q, [%rd1, v];
         vadd.s32.u32.s32 %r1, %r2.b0, %r3.h1;",
    );
    assert!(body.registers.iter().all(|register| register.lanes == 1));
    let all = instructions(&body);
    let shown = |it: &&Instruction| {
        it.operands.iter().map(|operand| show(&body, operand)).collect::<Vec<_>>().join(", ")
    };
    let shown: Vec<_> = all.iter().map(shown).collect();
    assert_eq!(shown[0], "{v.x v.y}, {0 %r1}");
    assert_eq!(shown[1], "v.y, w2.x");
    assert_eq!(shown[2], "[%rd1+0], {v.x v.y}");
    assert_eq!((shown[3].as_str(), &shown[3]), ("q.w, q.y", &shown[4]));
    assert_eq!(shown[5], "{q.x q.y q.z q.w}, <%rd1 {v.x v.y}>");
    assert_eq!(shown[6], "%r1, %r2.b0, %r3.h1");
}

#[test]
fn errors_say_where_and_what() {
    let error = refused(".visible .entry k() {\n mov.b32 %r1, 0;\n}");
    assert_eq!((error.line, error.found.as_str()), (5, "'%r1'"));
    assert_eq!(error.to_string(), "PTX line 5: undeclared register, found '%r1'");
}

#[test]
fn what_is_wrong_is_named() {
    for (text, what) in [
        (".entry k() .fancy 3 { ret; }", "unknown directive .fancy"),
        (".entry k() { bra nowhere; }", "undefined label"),
        (".entry k() { call nobody; }", "undeclared name"),
        (".global .u64 x = nobody;", "undeclared name"),
        (".entry k() { .reg .b32 %r<4000000000>; }", "number of names"),
        (".entry k() { .param .b32 p<4000000000>; }", "number of names"),
        (".entry k() { .param .b32 p<2>; .param .b32 p<2>; }", "second declaration"),
        (".entry k() { .reg .v2 .b32 v; mov.b32 v.z, 0; }", "no such element"),
        (".entry k() { .reg .v2 .b64 v; .reg .b32 a; ld.b32 a, [v+4]; }", "a vector is no address"),
        (".entry k() { .reg .b32 a; .reg .b32 a; }", "second declaration"),
        (".entry k() { ret; ", "expected a statement"),
        (".entry k() { mov.b32 1 2; }", "expected ';'"),
        (".func f() { ret; } .func f() { ret; }", "second definition"),
        (".global .b32 f; .func f() { ret; }", "variable's name"),
        (".global .b8 x[2] = {1, 2, 3};", "more initialisers"),
        (".global .b8 x[99999999999999999];", "too large"),
        (".global .b8 x[2] = {0xF0(x)};", "whole bytes"),
        (".global .align 3 .b8 x;", "alignment"),
        (".global .b24 x;", "unknown type"),
        (".reg .b32 x;", "module scope"),
        (".nonsense 3;", "unknown directive"),
        (".entry k() { mov.b32 1, 1/0; }", "division by zero"),
        (".section .debug { ", "without an end"),
        ("/* no end", "comment without an end"),
    ] {
        let error = refused(text);
        assert!(error.what.contains(what), "{text}: {error}");
    }
}

#[test]
fn nesting_is_bounded() {
    let deep = 100_000;
    for text in [
        format!(".entry k() {{ {}", "{".repeat(deep)),
        format!(".entry k() {{ mov.b32 1, {}", "(".repeat(deep)),
        format!(".entry k() {{ mov.b32 1, {}", "- ".repeat(deep)),
        format!(".entry k() {{ mov.b32 1, {}", "{".repeat(deep)),
        format!(".entry k() {{ mov.b32 1, {}", "1?".repeat(deep)),
        format!(".global .b32 x[1] = {}", "{".repeat(deep)),
        format!(".global .b32 x{};", "[1]".repeat(deep)),
    ] {
        refused(&text);
    }
}

#[test]
fn large_declarations_cost_nothing_until_used() {
    let body = body(".reg .b32 %a<4000000>; mov.b32 %a3999999, 0;");
    assert_eq!(body.registers.len(), 1);
    let module = module(".global .b8 huge[70000000000000] = {1};");
    assert_eq!(module.variables[0].init, [1]);
}
