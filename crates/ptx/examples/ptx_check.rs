//! Parses PTX files and prints what stands in them: `ptx_check FILE…`.

use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let mut failed = false;
    for path in std::env::args().skip(1) {
        let text = match std::fs::read(&path) {
            Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) => {
                eprintln!("{path}: {error}");
                failed = true;
                continue;
            }
        };
        let start = Instant::now();
        match kedge_ptx::parse(&text) {
            Ok(module) => {
                let speed = text.len() as f64 / start.elapsed().as_secs_f64() / 1e6;
                let (functions, variables) = (module.functions.len(), module.variables.len());
                println!("{path}: {functions} functions, {variables} variables, {speed:.0} MB/s");
            }
            Err(error) => {
                eprintln!("{path}: {error}");
                failed = true;
            }
        }
    }
    ExitCode::from(u8::from(failed))
}
