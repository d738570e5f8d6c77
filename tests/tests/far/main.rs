//! Devices of servers, and of several places.
#![forbid(unsafe_code)]

mod far;
mod far_checkpoint;
mod far_keys;
mod far_migrate;
mod keys;
mod offload;
mod places;
mod places_checkpoint;
mod serve;
mod tenant_users;
mod tenants;
