//! The program's read-only constants: one row for each value, shared by all warps.

use crate::exec::{Row32, Row64};
use crate::spec::WARP;
use std::collections::HashMap;

#[derive(Default)]
pub(super) struct Pools {
    slots32: HashMap<u32, i32>,
    slots64: HashMap<u64, i32>,
    values32: Vec<u32>,
    values64: Vec<u64>,
}

impl Pools {
    pub(super) fn value32(&mut self, value: u32) -> i32 {
        *self.slots32.entry(value).or_insert_with(|| {
            self.values32.push(value);
            -(self.values32.len() as i32)
        })
    }

    pub(super) fn value64(&mut self, value: u64) -> i32 {
        *self.slots64.entry(value).or_insert_with(|| {
            self.values64.push(value);
            -(self.values64.len() as i32)
        })
    }

    /// The rows, laid out so that slot −1 is the last one.
    pub(super) fn rows(self) -> (Vec<Row32>, Vec<Row64>) {
        let rows32 = self.values32.iter().rev().map(|&value| Row32([value; WARP])).collect();
        let rows64 = self.values64.iter().rev().map(|&value| Row64([value; WARP])).collect();
        (rows32, rows64)
    }
}
