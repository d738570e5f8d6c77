//! A part of a job that shares memory with another: that is refused by name before anything is
//! stopped, since each part brings back its own memory.

mod support;

use kedge_process::{Begun, Options, Roots, Together};
use std::process::Command;
use std::sync::Arc;
use support::{Folder, Running, alone, build};

/// Other parts, which are always ready.
#[derive(Debug)]
struct Others;

impl Together for Others {
    fn prepared(&self) -> Result<(), String> {
        Ok(())
    }

    fn stopped(&self) -> Result<(), String> {
        Ok(())
    }

    fn captured(&self, _: usize) -> Result<(), String> {
        Ok(())
    }
}

#[test]
fn memory_that_two_parts_share_is_refused_by_name() {
    let _alone = alone();
    let folder = Folder::new("parts-share");
    let program = build(&folder, "two_parts.c", &[]);
    let mut running = Running::start(&mut Command::new(program));
    let first = running.lines(1).remove(0);
    let child: i32 = first.strip_prefix("child ").expect("its child").parse().expect("a number");
    let survey = |name: &str, roots: Vec<i32>, together: Option<Arc<dyn Together>>| {
        let image = folder.path(name);
        std::fs::create_dir(&image).unwrap();
        let options = Options { together, ..Options::new(image) };
        Begun::new(options).unwrap().survey(&Roots::These(roots))
    };
    let others = || Some(Arc::new(Others) as Arc<dyn Together>);
    let parent = running.child.id() as i32;
    let said = survey("apart", vec![child], others()).unwrap_err().to_string();
    let named = ["shares memory", &format!("process {parent}"), "MPIR_CVAR_NOLOCAL"];
    assert!(named.iter().all(|part| said.contains(part)), "{said}");
    // In one part, or in no job of several, it is as it was.
    survey("one", vec![parent], others()).unwrap();
    survey("alone", vec![child], None).unwrap();
    running.lines(20);
    running.child.kill().unwrap();
    running.child.wait().unwrap();
}
