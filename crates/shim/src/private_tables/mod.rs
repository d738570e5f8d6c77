//! The undocumented tables that NVIDIA's runtime asks for (docs/interoperability.md).

mod storage;

pub(crate) use storage::Storage;
