//! The backend against a host that is this process.
