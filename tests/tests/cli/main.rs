//! Commands, and what they tell.
#![forbid(unsafe_code)]

mod asks;
mod check;
mod cli;
mod completions;
mod config;
mod debugger;
mod env;
mod explain;
mod gpu_page;
mod kernel_cache;
mod kernel_faults;
mod kubernetes;
mod limits;
mod logs;
mod management;
mod metrics;
mod model;
mod package;
mod postscript;
mod progress;
mod runtimes;
mod temporary;
mod top;
mod trace;
mod unnoticed;
