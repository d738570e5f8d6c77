//! NVML, NVIDIA's management library, as questions: a job's `libnvidia-ml.so.1` asks, and a process
//! outside of the job answers, which has the real library open, or knows its software devices. So
//! nothing in the job's processes has a driver's file open for it, and it goes on over a restart.
//!
//! A device is its number on the machine, as nvmlDeviceGetHandleByIndex counts.

mod functions;
pub mod status;

use kedge_wire::{Bytes, List, Text};

/// Longest argument or result, bytes: the room that a program gives for a list may be larger, what
/// is told is not.
pub const MAX_BYTES: usize = 64 << 10;
/// Parameters of a function, as C counts them: the registers for arguments.
pub const MAX_PARAMETERS: usize = 6;

/// Bytes of a device's handle.
pub const HANDLE: u32 = 8;

/// What a parameter is, and what travels for it: one [`Argument`] each, and for what the function
/// writes one result, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A device. Argument: its number.
    Device,
    /// A number, at most 64 bits. Argument: the number.
    Number,
    /// Text that ends with NUL. Argument: the text without it.
    Name,
    /// Where text goes, and how much room there is (two parameters). Argument: the room. Result:
    /// the text and its NUL.
    Room,
    /// Where so many bytes go. Result: the bytes.
    Out(u32),
    /// Where a device goes. Result: its number, 4 bytes.
    Handle,
    /// A structure that is read and written; its first word has its size in the low 24 bits.
    /// Argument, result: its bytes.
    Versioned,
    /// How many elements there is room for, read and written, and where they go, so many bytes each
    /// (two parameters). Argument: the room, 0 where they are not wanted. Result: how many there
    /// are, 4 bytes, and those that fit.
    List(u32),
    /// The same, of devices, 4 bytes each.
    Devices,
    /// How many elements are wanted, and where they go, so many bytes each (two parameters).
    /// Argument: how many. Result: the elements.
    Array(u32),
    /// The same, read and written. Argument, result: the elements.
    Fields(u32),
}

impl Kind {
    /// Returns how many of C's parameters it stands for.
    pub const fn parameters(self) -> usize {
        match self {
            Kind::Room | Kind::List(_) | Kind::Devices | Kind::Array(_) | Kind::Fields(_) => 2,
            _ => 1,
        }
    }

    /// Returns whether something is written for it.
    pub const fn has_result(self) -> bool {
        !matches!(self, Kind::Device | Kind::Number | Kind::Name)
    }
}

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Function {
    pub name: &'static str,
    pub kinds: &'static [Kind],
}

macro_rules! rows {
    ($($name:ident($($kind:ident $(($size:literal))?),*);)*) => {
        /// All functions, by name.
        pub const FUNCTIONS: &[Function] = &[$(
            Function { name: stringify!($name), kinds: &[$(Kind::$kind $(($size))?),*] },
        )*];
    };
}
crate::nvml_functions!(rows);

/// Starts the library: asked before anything else, with no arguments.
pub const INIT: Function = Function { name: "nvmlInit_v2", kinds: &[] };

/// Returns the function of that name.
pub fn function(name: &str) -> Option<&'static Function> {
    let at = FUNCTIONS.binary_search_by(|row| row.name.cmp(name));
    at.ok().map(|at| &FUNCTIONS[at]).or_else(|| (name == INIT.name).then_some(&INIT))
}

/// Returns how many elements of `size` bytes each travel at most, with a count.
pub const fn most(size: u32) -> usize {
    (MAX_BYTES - 4) / size as usize
}

/// Returns the size that the first word of a versioned structure tells, where one may be that
/// large.
pub fn versioned_size(word: u32) -> Option<usize> {
    let size = (word & 0x00ff_ffff) as usize;
    (4..=MAX_BYTES).contains(&size).then_some(size)
}

kedge_wire::wire! {
    /// What a function is called with, for one [`Kind`].
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum Argument {
        Number = 0 { value: u64 },
        Bytes = 1 { bytes: Bytes<MAX_BYTES> },
    }

    /// A call.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Question { pub function: Text<64>, pub arguments: List<Argument, MAX_PARAMETERS> }

    /// What it gave: nvmlReturn_t, and what the function wrote. A result is empty where nothing
    /// was.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Answer { pub status: u32, pub results: List<Bytes<MAX_BYTES>, MAX_PARAMETERS> }
}

impl Answer {
    /// Makes an answer without results.
    pub fn of(status: u32) -> Answer {
        Answer { status, results: List::default() }
    }
}

impl Function {
    /// Returns whether these arguments are of the kinds that it takes, and within bounds.
    pub fn takes(&self, arguments: &[Argument]) -> bool {
        let fits = |(kind, argument): (&Kind, &Argument)| match (kind, argument) {
            (Kind::Name, Argument::Bytes { bytes }) => !bytes.contains(&0),
            (Kind::Versioned, Argument::Bytes { bytes }) => {
                let word = bytes.first_chunk().map(|word| u32::from_le_bytes(*word));
                word.and_then(versioned_size) == Some(bytes.len())
            }
            (Kind::Fields(size), Argument::Bytes { bytes }) => bytes.len() % *size as usize == 0,
            (Kind::Name | Kind::Versioned | Kind::Fields(_), _) => false,
            (Kind::Room, Argument::Number { value }) => *value <= MAX_BYTES as u64,
            (Kind::List(size) | Kind::Array(size), Argument::Number { value }) => {
                *value <= most(*size) as u64
            }
            (Kind::Devices, Argument::Number { value }) => *value <= most(HANDLE) as u64,
            (_, Argument::Number { .. }) => true,
            (_, Argument::Bytes { .. }) => false,
        };
        self.kinds.len() == arguments.len() && self.kinds.iter().zip(arguments).all(fits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order_and_fits_into_registers() {
        assert!(FUNCTIONS.is_sorted_by(|a, b| a.name < b.name));
        for row in FUNCTIONS {
            let count: usize = row.kinds.iter().map(|kind| kind.parameters()).sum();
            assert!((1..=MAX_PARAMETERS).contains(&count), "{}", row.name);
            let bytes = |kind: &Kind| match kind {
                Kind::Out(size) | Kind::List(size) | Kind::Array(size) | Kind::Fields(size) => {
                    *size
                }
                _ => 1,
            };
            assert!(row.kinds.iter().all(|kind| (1..=4096).contains(&bytes(kind))), "{}", row.name);
            assert_eq!(function(row.name), Some(row));
        }
        assert_eq!(function(INIT.name), Some(&INIT));
        assert_eq!(function("nvmlDeviceSetComputeMode"), None);
    }

    #[test]
    fn arguments_of_other_kinds_or_sizes_are_not_taken() {
        let number = |value| Argument::Number { value };
        let bytes = |bytes: &[u8]| Argument::Bytes { bytes: Bytes::new(bytes.to_vec()).unwrap() };
        let takes = |name, arguments: &[Argument]| function(name).unwrap().takes(arguments);
        assert!(takes("nvmlDeviceGetName", &[number(0), number(96)]));
        assert!(!takes("nvmlDeviceGetName", &[number(0)]));
        assert!(!takes("nvmlDeviceGetName", &[number(0), number(1 << 40)]));
        assert!(takes("nvmlDeviceGetHandleByUUID", &[bytes(b"GPU-1"), number(0)]));
        assert!(!takes("nvmlDeviceGetHandleByUUID", &[bytes(b"GPU\0"), number(0)]));
        assert!(!takes("nvmlDeviceGetHandleByUUID", &[number(0), number(0)]));
        let structure =
            |word: u32, size: usize| bytes(&[&word.to_le_bytes()[..], &vec![0; size - 4]].concat());
        let told = "nvmlDeviceGetMemoryInfo_v2";
        assert!(takes(told, &[number(0), structure(40 | 2 << 24, 40)]));
        assert!(!takes(told, &[number(0), structure(40 | 2 << 24, 36)]));
        assert!(!takes(told, &[number(0), bytes(b"\x04\0")]));
        assert!(takes("nvmlDeviceGetFieldValues", &[number(0), bytes(&[0; 80])]));
        assert!(!takes("nvmlDeviceGetFieldValues", &[number(0), bytes(&[0; 79])]));
        assert!(!takes("nvmlDeviceGetSupportedMemoryClocks", &[number(0), number(u64::MAX)]));
    }
}
