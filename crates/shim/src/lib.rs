//! shim
#![allow(dead_code, reason = "the parts are published before what calls them")]

mod capture;
mod stream;
