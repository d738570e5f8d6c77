//! Jobs of several supervisors and hosts.
#![forbid(unsafe_code)]

mod bench;
mod hosts;
mod hosts_mpi;
mod joint;
mod joint_hosts;
mod joint_mpi;
mod joint_recover;
mod meet;
mod slurm;
mod spank;
mod ssh;
