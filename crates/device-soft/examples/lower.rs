//! Lowers PTX files and names what this device lacks in each kernel.
//!
//! `cargo run -p kedge-device-soft --example lower FILE.ptx…`

use kedge_cuda_types::CuError;
use kedge_device_soft::code::{PlaceKind, Placement};
use kedge_device_soft::lower;

struct Leaked;

impl Placement for Leaked {
    fn place(&mut self, _: &str, size: u64, align: u64, _: PlaceKind) -> Result<u64, CuError> {
        let bytes = vec![0u8; (size + align) as usize].leak();
        Ok((bytes.as_ptr() as u64).next_multiple_of(align))
    }
}

fn main() {
    for path in std::env::args().skip(1) {
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) => {
                println!("{path}: {error}");
                continue;
            }
        };
        let module = match kedge_ptx::parse(&text) {
            Ok(module) => module,
            Err(error) => {
                println!("{path}: {error}");
                continue;
            }
        };
        match lower::build(&module, &mut Leaked) {
            Ok(program) => {
                for kernel in &program.kernels {
                    let missing = kernel.unsupported.as_deref().unwrap_or("ok");
                    println!(
                        "{path}: {}: {missing} ({} registers, {} B local, {} B shared)",
                        kernel.name, kernel.registers, kernel.local_bytes, kernel.shared_bytes
                    );
                }
            }
            Err(error) => println!("{path}: {error}"),
        }
    }
}
