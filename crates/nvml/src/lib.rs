//! `libnvidia-ml.so.1` for jobs: NVIDIA's management library, which tells of the job's devices.
//!
//! Each function sends a request to a process outside of the job, which has NVIDIA's library open
//! or knows the job's software devices ([`kedge_protocol::management`]). So no process of the job
//! has a file of the driver open, and after a restart another process answers. A function that is
//! not in the table is missing from the library, as in that of an older driver.
//!
//! - [`state`]: the connection to the process that answers.
//! - [`call`]: converts C's parameters to a request, and the answer back.
//! - [`api`]: the functions.
//! - [`tool`]: starts nvidia-smi anew with NVIDIA's own library, which it needs.

mod api;
mod call;
mod state;
mod status;
mod tool;
