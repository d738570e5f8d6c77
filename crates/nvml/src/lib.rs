//! `libnvidia-ml.so.1` for jobs: which devices there are, and what they are.
//!
//! Each function is a question to a process outside of the job, which has NVIDIA's library open, or
//! knows the job's software devices ([`kedge_protocol::management`]): so no process of the job has
//! a driver's file open, and after a restart the next question finds another one to answer it. A
//! function that is not in the table is missing from the library, which programs take for an old
//! driver.
//!
//! - [`state`]: who answers. [`call`]: from C's parameters to a question, and back. [`api`]: the
//!   functions.
//! - [`tool`]: the one program that needs NVIDIA's own.

mod api;
mod call;
mod state;
mod status;
mod tool;
