//! NVIDIA's management library, `libnvidia-ml.so.1`, opened at run time and asked for jobs that
//! cannot have it open themselves ([`kedge_protocol::management`]).

use kedge_protocol::management::status::{
    FUNCTION_NOT_FOUND, INSUFFICIENT_SIZE, INVALID_ARGUMENT, LIBRARY_NOT_FOUND, SUCCESS,
};
use kedge_protocol::management::{
    Answer, Argument, Function, Kind, MAX_BYTES, MAX_PARAMETERS, function,
};
use kedge_wire::{Bytes, List};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{c_uint, c_void};
use std::path::PathBuf;

const NAME: &str = "libnvidia-ml.so.1";

type Device = *mut c_void;

/// The library, started.
pub struct Nvml {
    library: Library,
    by_index: unsafe extern "C" fn(c_uint, *mut Device) -> u32,
    index_of: unsafe extern "C" fn(Device, *mut c_uint) -> u32,
}

impl Nvml {
    /// Opens the library that `KEDGE_NVML` names, else the one that the loader finds, else the one
    /// beside the driver; and starts it. An error is what nvmlInit is to return.
    pub fn open() -> Result<Nvml, u32> {
        let named = std::env::var_os("KEDGE_NVML").map(PathBuf::from);
        let beside = crate::driver_path().and_then(|driver| Some(driver.parent()?.join(NAME)));
        let places = match named {
            Some(path) => vec![path],
            None => [PathBuf::from(NAME)].into_iter().chain(beside).collect(),
        };
        let library = places.into_iter().find_map(|path| {
            // SAFETY: the library's initialisers run, as in any program that uses it.
            let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.ok()?;
            // A job's own library path leads to kedge's, which would have to ask this process.
            // SAFETY: the symbol is only looked for.
            let ours = unsafe { library.get::<*const c_void>(b"kedge_nvml\0") }.is_ok();
            (!ours).then_some(library)
        });
        let library = library.ok_or(LIBRARY_NOT_FOUND)?;
        // SAFETY: functions of nvml.h with the types that it gives them; they are used while the
        // library is open.
        let found = unsafe {
            let init = library.get::<unsafe extern "C" fn() -> u32>(b"nvmlInit_v2\0").map(|f| *f);
            let by_index = library.get(b"nvmlDeviceGetHandleByIndex_v2\0").map(|f| *f);
            let index_of = library.get(b"nvmlDeviceGetIndex\0").map(|f| *f);
            (init, by_index, index_of)
        };
        let (Ok(init), Ok(by_index), Ok(index_of)) = found else { return Err(FUNCTION_NOT_FOUND) };
        // SAFETY: it takes nothing.
        match unsafe { init() } {
            SUCCESS => Ok(Nvml { library, by_index, index_of }),
            status => Err(status),
        }
    }

    /// Calls a function of the table.
    pub fn ask(&self, name: &str, arguments: &[Argument]) -> Answer {
        let Some(row) = function(name).filter(|row| row.takes(arguments)) else {
            return Answer::of(INVALID_ARGUMENT);
        };
        if row.kinds.is_empty() {
            return Answer::of(SUCCESS);
        }
        self.call(row, arguments).unwrap_or_else(Answer::of)
    }

    fn call(&self, row: &Function, arguments: &[Argument]) -> Result<Answer, u32> {
        let mut name = row.name.as_bytes().to_vec();
        name.push(0);
        // SAFETY: the symbol is read as an address; `enter` calls it as what nvml.h says.
        let symbol = unsafe { self.library.get::<*const c_void>(&name) };
        let symbol = *symbol.map_err(|_| FUNCTION_NOT_FOUND)?;
        let pairs = row.kinds.iter().zip(arguments);
        let mut places = pairs
            .map(|(kind, argument)| self.place(*kind, argument))
            .collect::<Result<Vec<Place>, u32>>()?;
        let parameters: Vec<usize> = places.iter_mut().flat_map(Place::parameters).collect();
        // SAFETY: a function of the table, with parameters of its kinds: handles of the library's
        // own, numbers, and pointers to memory in `places` that is as large as the kind says.
        let status = unsafe { enter(symbol, &parameters) };
        if status != SUCCESS && status != INSUFFICIENT_SIZE {
            return Ok(Answer::of(status));
        }
        let written = places.iter().filter(|place| place.kind.has_result());
        let results: Vec<_> = written.map(|place| self.result(place, status)).collect();
        Ok(Answer { status, results: List::new(results).unwrap_or_default() })
    }

    fn place(&self, kind: Kind, argument: &Argument) -> Result<Place, u32> {
        let number = match argument {
            Argument::Number { value } => *value as usize,
            Argument::Bytes { .. } => 0,
        };
        let bytes: &[u8] = match argument {
            Argument::Bytes { bytes } => bytes,
            Argument::Number { .. } => &[],
        };
        let place = |room: usize, first: usize| {
            let mut memory = vec![0_u64; room.div_ceil(8).max(1)];
            for (word, from) in memory.iter_mut().zip(bytes.chunks(8)) {
                let mut whole = [0; 8];
                whole[..from.len()].copy_from_slice(from);
                *word = u64::from_le_bytes(whole);
            }
            Place { kind, memory, room, first }
        };
        Ok(match kind {
            Kind::Device => place(0, self.handle(number)? as usize),
            Kind::Number | Kind::Room => place(if kind == Kind::Room { number } else { 0 }, number),
            // One more for NUL.
            Kind::Name => place(bytes.len() + 1, 0),
            Kind::Out(size) => place(size as usize, 0),
            Kind::Handle => place(size_of::<Device>(), 0),
            Kind::Versioned => place(bytes.len(), 0),
            Kind::List(size) => place(number * size as usize, number),
            Kind::Devices => place(number * size_of::<Device>(), number),
            Kind::Array(size) => place(number * size as usize, number),
            Kind::Fields(size) => place(bytes.len(), bytes.len() / size as usize),
        })
    }

    /// What a function has written there, unless it only said that there is too little room.
    fn result(&self, place: &Place, status: u32) -> Bytes<MAX_BYTES> {
        let count = || place.first as u32;
        let told = match place.kind {
            Kind::List(_) | Kind::Devices if status == INSUFFICIENT_SIZE => {
                count().to_le_bytes().to_vec()
            }
            _ if status == INSUFFICIENT_SIZE => Vec::new(),
            Kind::Room => {
                let end = place.bytes().iter().position(|byte| *byte == 0);
                let end = end.map_or(place.room, |at| at + 1);
                place.bytes()[..end].to_vec()
            }
            Kind::Handle => self.index(place.memory[0]).to_vec(),
            Kind::List(size) => {
                let length = (place.first * size as usize).min(place.room);
                [&count().to_le_bytes()[..], &place.bytes()[..length]].concat()
            }
            Kind::Devices => {
                let devices = place.memory.iter().take(place.first.min(place.room / 8));
                let numbers = devices.map(|handle| self.index(*handle));
                [count().to_le_bytes()].into_iter().chain(numbers).flatten().collect()
            }
            _ => place.bytes().to_vec(),
        };
        Bytes::new(told).unwrap_or_default()
    }

    fn handle(&self, index: usize) -> Result<Device, u32> {
        let index = c_uint::try_from(index).map_err(|_| INVALID_ARGUMENT)?;
        let mut device: Device = std::ptr::null_mut();
        // SAFETY: `device` is there to be written.
        match unsafe { (self.by_index)(index, &raw mut device) } {
            SUCCESS => Ok(device),
            status => Err(status),
        }
    }

    /// A device's number; one that is none where the library does not tell it.
    fn index(&self, handle: u64) -> [u8; 4] {
        let mut index = c_uint::MAX;
        // SAFETY: a handle that the library has just given, and a place for the number.
        unsafe { (self.index_of)(handle as usize as Device, &raw mut index) };
        index.to_le_bytes()
    }
}

/// What a parameter points to, or is.
struct Place {
    kind: Kind,
    /// Aligned for whatever is written there.
    memory: Vec<u64>,
    /// Bytes of it that are the function's.
    room: usize,
    /// The parameter where it is no pointer; a count that may be written (List, Devices).
    first: usize,
}

impl Place {
    /// As C takes them. The pointers are good as long as the place is and does not move.
    fn parameters(&mut self) -> impl Iterator<Item = usize> + use<> {
        let memory = self.memory.as_mut_ptr() as usize;
        let count = &raw mut self.first as usize;
        let (first, second) = match self.kind {
            Kind::Device | Kind::Number => (self.first, None),
            Kind::Name | Kind::Out(_) | Kind::Handle | Kind::Versioned => (memory, None),
            Kind::Room => (memory, Some(self.first)),
            Kind::List(_) | Kind::Devices => (count, Some(if self.room == 0 { 0 } else { memory })),
            Kind::Array(_) | Kind::Fields(_) => (self.first, Some(memory)),
        };
        [Some(first), second].into_iter().flatten()
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: initialised memory, of which `room` bytes are there; bytes need no alignment.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.room) }
    }
}

/// Calls a C function that takes integers and pointers and returns nvmlReturn_t.
///
/// # Safety
/// `function` takes so many parameters, and these are good for it.
unsafe fn enter(function: *const c_void, parameters: &[usize]) -> u32 {
    const { assert!(MAX_PARAMETERS == 6) };
    macro_rules! with {
        ($($parameter:ident: $type:ty),*) => {{
            type Function = unsafe extern "C" fn($($type),*) -> u32;
            // SAFETY: the caller's promise; on this ABI, an integer or a pointer takes one register
            // whatever its type.
            unsafe { std::mem::transmute::<*const c_void, Function>(function)($($parameter),*) }
        }};
    }
    type P = usize;
    match *parameters {
        [a] => with!(a: P),
        [a, b] => with!(a: P, b: P),
        [a, b, c] => with!(a: P, b: P, c: P),
        [a, b, c, d] => with!(a: P, b: P, c: P, d: P),
        [a, b, c, d, e] => with!(a: P, b: P, c: P, d: P, e: P),
        [a, b, c, d, e, f] => with!(a: P, b: P, c: P, d: P, e: P, f: P),
        _ => FUNCTION_NOT_FOUND,
    }
}
