//! Measures snapshots and restores of a GPU's memory without the rest of kedge, beside the driver's
//! own checkpoint of a plain process; one JSON object a line.
//!
//!     checkpoint sizes GIB…            each size in turn
//!     checkpoint load GIB              what a drain costs the program
//!     checkpoint digest GIB            digests, and a second snapshot where 5 % of the blocks have
//changed !     checkpoint objects IMAGE FILE    everything but bulk memory: a cubin, PTX or fatbin
//of objects.cu
//!
//! Each measurement is a process of its own.

mod changes;
mod driver;
mod load;
mod objects;
mod plain;
mod rig;
mod sizes;

use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match &words[..] {
        ["sizes", sizes @ ..] => sizes.iter().all(|gib| {
            let also_plain = gib.parse::<u64>().is_ok_and(|gib| gib <= 40);
            run(&["take", gib]) & run(&["put", gib]) & (!also_plain || run(&["driver", gib]))
        }),
        ["take", gib] => report(sizes::take(gib)),
        ["put", gib] => report(sizes::put(gib)),
        ["driver", gib] => report(plain::checkpoint(gib)),
        ["plain", gib] => report(plain::program(gib)),
        ["load", gib] => report(load::measure(gib)),
        ["digest", gib] => report(changes::measure(gib)),
        ["objects", image, file] => run(&["make", image, file]) && run(&["remake", image, file]),
        ["make", image, file] => report(objects::make(image, file)),
        ["remake", image, file] => report(objects::remake(image, file)),
        _ => report(Err(
            "usage: checkpoint sizes GIB… | load GIB | digest GIB | objects IMAGE FILE".into(),
        )),
    };
    if done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a measurement in a process of its own.
fn run(words: &[&str]) -> bool {
    let this = std::env::current_exe().unwrap_or_default();
    Command::new(this).args(words).status().is_ok_and(|status| status.success())
}

fn report(outcome: rig::Outcome) -> bool {
    if let Err(why) = &outcome {
        rig::say(&format!("{{\"error\": \"{}\"}}", why.to_string().replace('"', "'")));
    }
    outcome.is_ok()
}
