//! Devices that move while their job runs.
#![forbid(unsafe_code)]

mod balance;
mod jobs;
mod migrate;
mod move_when;
mod streams;
mod terminals;
