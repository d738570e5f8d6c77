//! MPI programs whose ranks use devices.

use crate::{copy_program, host, root};
use std::ffi::OsString;
use std::path::Path;

/// What an MPI's compiler is given to make `program` of `tests/hosts/mpi_device.c`; the device's
/// side of it lies beside that.
pub fn with_device(program: &Path) -> [OsString; 2] {
    let flags = ["-O1", "-arch=sm_80", "-shared", "-Xcompiler", "-fPIC"];
    let device = program.with_file_name("mpi_device.so");
    // Known to the program by its path: whoever runs it may not see the build's folder.
    copy_program(&host("mpi_device.cu", "mpi_device.so", &flags), &device);
    [root().join("tests/hosts/mpi_device.c").into(), device.into()]
}
