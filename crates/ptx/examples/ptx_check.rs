//! Parses PTX files, or all PTX in the fatbins of programs, and prints what stands in them:
//! `ptx_check FILE…`. `KEDGE_PTX_DUMP=1` prints the PTX of fatbins too.

use std::process::ExitCode;
use std::time::Instant;

use kedge_ptx::fatbin::{self, ImageKind};

const MAGIC: [u8; 8] = [0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0];

fn main() -> ExitCode {
    let mut failed = false;
    for path in std::env::args().skip(1) {
        if let Err(why) = check(&path) {
            eprintln!("{path}: {why}");
            failed = true;
        }
    }
    ExitCode::from(u8::from(failed))
}

fn check(path: &str) -> Result<(), String> {
    let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
    if fatbin::classify(&bytes) == fatbin::Kind::Ptx {
        return parse(path, &String::from_utf8_lossy(&bytes));
    }
    let mut at = 0;
    while let Some(found) = bytes[at..].windows(8).position(|window| window == MAGIC) {
        at += found;
        let length = fatbin::container_len(&bytes[at..]).map_err(|error| error.to_string())?;
        let container = bytes.get(at..at + length as usize).ok_or("a container is cut off")?;
        for image in fatbin::images(container).map_err(|error| error.to_string())? {
            let (kind, sm, suffix) = (image.kind, image.sm, image.sm_suffix.unwrap_or(' '));
            let data = image.data().map_err(|error| error.to_string())?;
            println!("{path} @{at:#x}: {kind:?} sm {sm}{suffix} {} bytes", data.len());
            if image.kind == ImageKind::Ptx {
                let text = image.text().map_err(|error| error.to_string())?;
                if std::env::var_os("KEDGE_PTX_DUMP").is_some() {
                    println!("{text}");
                }
                parse(path, &text)?;
            }
        }
        at += length as usize;
    }
    Ok(())
}

fn parse(path: &str, text: &str) -> Result<(), String> {
    let start = Instant::now();
    let module = kedge_ptx::parse(text).map_err(|error| error.to_string())?;
    let speed = text.len() as f64 / start.elapsed().as_secs_f64() / 1e6;
    let (functions, variables) = (module.functions.len(), module.variables.len());
    println!("{path}: {functions} functions, {variables} variables, {speed:.0} MB/s");
    Ok(())
}
