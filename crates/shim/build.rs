//! Gives the library the name that programs ask the loader for.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // A program may dlclose the driver and still hold addresses of it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
