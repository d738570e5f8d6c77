//! Whether the promises of this crate hold for some input: the bodies of the fuzz targets in
//! `fuzz/` and of the tests that replay their corpus.

use crate::ast::{Body, LabelId, Module, Operand, RegId, Statement};
use crate::{fatbin, link, parse};

/// Largest image that a check decompresses; the real bound would make a run slow.
const MAX_CHECKED: u64 = 4 << 20;

/// Parses and links a text. Errors are fine.
///
/// # Panics
/// Where a promise is broken: ids that mean nothing, or contents larger than their variable.
pub fn check_text(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    let Ok(module) = parse(text) else { return };
    check_module(&module, text.len());
    if let Ok(linked) = link(vec![module.clone(), module]) {
        check_module(&linked.module, 2 * text.len());
    }
}

fn check_module(module: &Module, text: usize) {
    for variable in &module.variables {
        assert!(variable.init.len() as u64 <= variable.size(), "{} overflows", variable.name);
        for relocation in &variable.relocations {
            let end = relocation.offset + u64::from(relocation.size);
            assert!(end <= variable.init.len() as u64, "{} overflows", variable.name);
        }
    }
    for body in module.functions.iter().filter_map(|function| function.body.as_ref()) {
        assert!(body.registers.len() + body.statements.len() <= text, "more than the text says");
        check_body(body);
    }
}

fn check_body(body: &Body) {
    let mut stands = vec![false; body.labels.len()];
    for statement in &body.statements {
        match statement {
            Statement::Label(id) => {
                let first = !std::mem::replace(&mut stands[id.0 as usize], true);
                assert!(first, "a label stands twice");
            }
            Statement::Instruction(instruction) => {
                if let Some(guard) = instruction.guard {
                    check_register(body, guard.register);
                }
                instruction.operands.iter().for_each(|operand| check_operand(body, operand));
            }
        }
    }
    assert!(stands.iter().all(|stands| *stands), "a label stands nowhere");
    for label in body.branch_targets.iter().flat_map(|(_, labels)| labels) {
        check_label(body, *label);
    }
}

fn check_register(body: &Body, id: RegId) {
    assert!((id.0 as usize) < body.registers.len(), "register without a declaration");
}

fn check_label(body: &Body, id: LabelId) {
    assert!((id.0 as usize) < body.labels.len(), "label without a place");
}

fn check_operand(body: &Body, operand: &Operand) {
    match operand {
        Operand::Register(id)
        | Operand::NotRegister(id)
        | Operand::NegRegister(id)
        | Operand::Component(id, _) => check_register(body, *id),
        Operand::Label(id) => check_label(body, *id),
        Operand::Pair(left, right) => {
            check_operand(body, left);
            check_operand(body, right);
        }
        Operand::Vector(all) | Operand::List(all) | Operand::Bracket(all) => {
            all.iter().for_each(|operand| check_operand(body, operand));
        }
        _ => {}
    }
}

/// Reads a container and all its images, and finds the length of an image. Errors are fine.
///
/// # Panics
/// Where a promise is broken: an image of another size than its header says.
pub fn check_fatbin(bytes: &[u8]) {
    let _ = fatbin::classify(bytes);
    let _ = fatbin::image_len(&mut |at, buffer| {
        let known = usize::try_from(at).ok().and_then(|at| bytes.get(at..)).unwrap_or_default();
        let count = known.len().min(buffer.len());
        buffer[..count].copy_from_slice(&known[..count]);
        count
    });
    let Ok(images) = fatbin::images(bytes) else { return };
    let _ = fatbin::select_ptx(&images, 90);
    for image in images.iter().filter(|image| image.size <= MAX_CHECKED) {
        let size = image.part.as_ref().map_or(image.size, |part| part.end - part.start);
        if let Ok(data) = image.data() {
            assert_eq!(data.len() as u64, size, "an image of another size");
        }
    }
}
