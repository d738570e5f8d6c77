//! Checkpoints, images and restarts of processes.
#![forbid(unsafe_code)]

mod checkpoint;
mod checkpoint_faults;
mod faults;
mod hostile_images;
mod hostile_paths;
mod images;
mod incremental;
mod interrupted_restart;
mod resume;
mod verified;
