//! The CUDA driver API's types and constants as kedge uses them, and the address map that a client
//! and its proxy share. Facts of the API, written down from its reference; no behaviour.

pub mod abi;
pub mod arena;
pub mod attribute;
pub mod error;
pub mod granted;
pub mod graph;
pub mod handle;
pub mod memory;
pub mod tensor_map;
pub mod uuid;

pub use error::CuError;
