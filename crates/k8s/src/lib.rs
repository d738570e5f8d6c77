//! The device plugin of kedge for Kubernetes: tells a node's kubelet of software devices, and what
//! to add to a container that is given some. `kedge k8s plugin` starts it.
#![forbid(unsafe_code)]

pub mod api;
pub mod codec;
pub mod life;
pub mod offer;
pub mod options;
mod service;
