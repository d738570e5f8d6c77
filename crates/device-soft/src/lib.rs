//! device-soft
