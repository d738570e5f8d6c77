//! Device functions that programs call and no module defines.

pub mod heap;
pub mod printf;
