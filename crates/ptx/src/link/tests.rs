use super::*;
use crate::ast::{AddressBase, Operand, Statement};
use crate::parse;

const HEAD: &str = ".version 9.0\n.target sm_80\n.address_size 64\n";

fn module(text: &str) -> Module {
    parse(&format!("{HEAD}{text}")).unwrap()
}

fn linked(texts: &[&str]) -> Linked {
    link(texts.iter().map(|text| module(text)).collect()).unwrap()
}

fn refused(texts: &[&str]) -> LinkError {
    link(texts.iter().map(|text| module(text)).collect()).unwrap_err()
}

fn function<'m>(linked: &'m Linked, name: &str) -> &'m Function {
    linked.module.functions.iter().find(|function| function.name == name).unwrap()
}

/// Symbols that a function mentions, in order.
fn mentions(function: &Function) -> Vec<String> {
    let mut all = Vec::new();
    for statement in &function.body.as_ref().unwrap().statements {
        let Statement::Instruction(instruction) = statement else { continue };
        for operand in &instruction.operands {
            match operand {
                Operand::Symbol(name, _) | Operand::Address(AddressBase::Symbol(name), _) => {
                    all.push(name.clone());
                }
                _ => {}
            }
        }
    }
    all
}

#[test]
fn external_names_meet_their_definitions() {
    let linked = linked(&[
        ".extern .func f (.param .b32 a);\n.extern .global .b32 v;
         .visible .entry k() { .reg .b32 r; ld.global.b32 r, [v]; call f, (r); ret; }",
        ".visible .global .b32 v = 41;\n.visible .func f (.param .b32 a) { ret; }",
    ]);
    assert_eq!(linked.unresolved, Vec::<String>::new());
    assert_eq!(linked.module.functions.len(), 2);
    assert_eq!(linked.module.variables.len(), 1);
    assert_eq!(linked.module.variables[0].init, [41, 0, 0, 0]);
    assert!(function(&linked, "f").body.is_some());
}

#[test]
fn names_of_their_own_stay_apart() {
    let unit = |value: u32| {
        format!(
            ".global .b32 s = {value}; .func help() {{ ret; }}
             .visible .entry k{value}() {{ .reg .b64 r; mov.b64 r, s; call help; ret; }}"
        )
    };
    let linked = linked(&[&unit(1), &unit(2)]);
    assert_eq!(linked.module.variables.len(), 2);
    for (kernel, value) in [("k1", 1), ("k2", 2)] {
        let mentioned = mentions(function(&linked, kernel));
        let variable = linked.module.variables.iter().find(|v| v.name == mentioned[0]).unwrap();
        assert_eq!(variable.init[0], value, "{kernel}");
        assert!(function(&linked, &mentioned[1]).body.is_some());
    }
    assert_ne!(mentions(function(&linked, "k1")), mentions(function(&linked, "k2")));
}

#[test]
fn a_renamed_variable_is_followed_into_initialisers_but_not_into_locals() {
    let linked = linked(&[
        ".global .b32 s;",
        ".global .b32 s; .global .u64 p = s;
         .visible .entry k(.param .b64 s) { .reg .b64 r; ld.param.b64 r, [s]; ret; }",
    ]);
    let pointer = linked.module.variables.iter().find(|v| v.name == "p").unwrap();
    assert_eq!(pointer.relocations[0].symbol, linked.module.variables[1].name);
    assert_ne!(linked.module.variables[1].name, "s");
    assert_eq!(mentions(function(&linked, "k")), ["s"], "the parameter hides the variable");
}

#[test]
fn weak_definitions_give_way() {
    let weak = ".weak .func f() { trap; }";
    let two = linked(&[weak, weak]);
    assert_eq!(two.module.functions.len(), 1);
    for order in [[weak, ".visible .func f() { exit; }"], [".visible .func f() { exit; }", weak]] {
        let linked = linked(&order);
        assert_eq!(linked.module.functions.len(), 1);
        assert_eq!(linked.module.functions[0].linkage, Linkage::Visible);
    }
}

#[test]
fn the_largest_common_variable_counts() {
    let linked = linked(&[
        ".common .global .b32 c[2];",
        ".common .global .align 16 .b32 c[4];",
        ".common .global .b32 c[3];",
    ]);
    assert_eq!(linked.module.variables.len(), 1);
    assert_eq!(linked.module.variables[0].size(), 16);
    assert_eq!(linked.module.variables[0].align, 16);
}

#[test]
fn dynamic_shared_memory_takes_the_strictest_alignment() {
    let linked =
        linked(&[".extern .shared .align 4 .b8 s[];", ".extern .shared .align 16 .b8 s[];"]);
    assert_eq!(linked.module.variables.len(), 1);
    assert_eq!(linked.module.variables[0].align, 16);
    assert_eq!(linked.module.variables[0].linkage, Linkage::Extern);
}

#[test]
fn builtins_stay_unresolved() {
    let unit = ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);";
    let linked = linked(&[unit, unit]);
    assert_eq!(linked.unresolved, ["vprintf"]);
    assert_eq!(linked.module.functions.len(), 1);
}

#[test]
fn aliases_become_their_functions() {
    let linked = linked(&[
        ".func real() { ret; }\n.visible .func one();\n.visible .func two();
         .alias one, real;\n.alias two, one;
         .visible .entry k() { call one; ret; }",
        ".extern .func two();\n.func real() { trap; }
         .visible .entry other() { call two; call real; ret; }",
    ]);
    assert_eq!(linked.unresolved, Vec::<String>::new());
    assert_eq!(mentions(function(&linked, "k")), ["real"]);
    let other = mentions(function(&linked, "other"));
    assert_eq!(other[0], "real");
    assert_ne!(other[1], "real", "its own function of that name");
}

#[test]
fn clashes_are_named() {
    let visible = ".visible .func f() { ret; }";
    assert_eq!(refused(&[visible, visible]), LinkError::Duplicate("f".into()));
    let kernel = ".entry k() { ret; }";
    assert_eq!(refused(&[kernel, kernel]), LinkError::Duplicate("k".into()));
    assert_eq!(refused(&[visible, ".visible .global .b32 f;"]), LinkError::Kinds("f".into()));
    assert_eq!(refused(&[".extern .global .b32 v;"]), LinkError::Undefined("v".into()));
    assert_eq!(
        refused(&[".func a(); .func b(); .alias a, b; .alias b, a;"]),
        LinkError::AliasLoop("a".into())
    );
    assert_eq!(link(Vec::new()).unwrap_err(), LinkError::Empty);
}

#[test]
fn the_device_runtime_is_left_to_the_device() {
    let linked = linked(&[
        ".extern .func __cudaCDP2LaunchDeviceV2();
         .visible .entry k() { call __cudaCDP2LaunchDeviceV2; ret; }",
        ".visible .func __cudaCDP2LaunchDeviceV2() { ret; }",
    ]);
    assert_eq!(linked.unresolved, ["__cudaCDP2LaunchDeviceV2"]);
}
