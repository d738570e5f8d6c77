//! Jobs with devices, checkpointed and brought back.
#![forbid(unsafe_code)]

mod checkpoint;
mod elsewhere;
mod given_up;
mod hold;
mod incremental;
mod managed;
mod neighbours;
mod offload;
mod paging;
mod portable;
mod readme;
mod recover;
mod rights;
mod share;
mod swap;
mod warm;
