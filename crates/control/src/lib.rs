//! What a job's supervisor, its proxies and the `kedge` command say to each other, and what all of
//! them must read alike. Nothing here acts on devices.
//!
//! - [`proxy`]: orders to a proxy. [`keeper`]: what brings devices back when their proxy is gone.
//!   [`warm`]: proxies that are ready. [`job`]: what users ask of a running job.
//! - [`sharing`], [`peer`], [`aliases`]: what several clients have together, by name.
//! - [`session`]: which one a proxy has with a server of devices. [`account`]: what a tenant of
//!   such a server has of it.
//! - [`service`]: answers on a socket. [`stats`]: what a job has asked of its devices.
//!   [`check`]: what was found in a program that is checked. [`told`]: the files of both.
//!   [`trace`]: what a traced job has done and when. [`usage`]: what a client uses now.
//! - [`gpu`]: devices by name. [`machine`]: those that a machine has. [`joblog`]: the job's log.
//!   [`logfile`]: its files. [`size`]: bytes as people write them. [`text`]: what terminals may be
//!   shown.

#![forbid(unsafe_code)]

pub mod account;
pub mod aliases;
pub mod check;
pub mod gpu;
pub mod job;
pub mod joblog;
pub mod keeper;
pub mod logfile;
pub mod machine;
mod messages;
pub mod peer;
pub mod proxy;
pub mod service;
pub mod session;
pub mod sharing;
pub mod size;
pub mod stats;
pub mod text;
pub mod told;
pub mod trace;
pub mod usage;
pub mod warm;

pub use messages::check_bytes;
