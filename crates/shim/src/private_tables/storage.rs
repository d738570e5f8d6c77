//! Context-local storage: what libraries keep beside a context, by a key of their own.

use std::ffi::c_void;
use std::sync::{PoisonError, RwLock};

/// Called with the context, the key and the value when the context ends.
pub(super) type Destructor =
    unsafe extern "C" fn(context: *mut c_void, key: *mut c_void, value: *mut c_void);

#[derive(Debug, Clone, Copy)]
struct Entry {
    key: usize,
    value: usize,
    destructor: Option<Destructor>,
}

/// A handful of entries, read at almost every call of the runtime.
#[derive(Debug, Default)]
pub(crate) struct Storage {
    entries: RwLock<Vec<Entry>>,
}

impl Storage {
    /// The value under `key`.
    pub(super) fn get(&self, key: usize) -> Option<usize> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.iter().find(|entry| entry.key == key).map(|entry| entry.value)
    }

    /// Sets or replaces the value under `key`.
    pub(super) fn put(&self, key: usize, value: usize, destructor: Option<Destructor>) {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|entry| entry.key != key);
        entries.push(Entry { key, value, destructor });
    }

    /// Forgets `key`, without running its destructor; whether it was there.
    pub(super) fn delete(&self, key: usize) -> bool {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let before = entries.len();
        entries.retain(|entry| entry.key != key);
        entries.len() != before
    }

    /// Runs every destructor: the context, whose handle is `context`, ends.
    pub(crate) fn clear(&self, context: usize) {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let ended = std::mem::take(&mut *entries);
        // A destructor may use the storage again.
        drop(entries);
        for Entry { key, value, destructor } in ended {
            if let Some(destructor) = destructor {
                // SAFETY: the library gave this function for exactly this value and moment.
                unsafe {
                    destructor(context as *mut c_void, key as *mut c_void, value as *mut c_void)
                };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn count(_: *mut c_void, _: *mut c_void, value: *mut c_void) {
        // SAFETY: the test below passes the address of a live counter.
        unsafe { *value.cast::<u32>() += 1 };
    }

    #[test]
    fn keeps_and_forgets() {
        let mut counter = 0u32;
        let address = &raw mut counter as usize;
        let storage = Storage::default();
        assert_eq!(storage.get(1), None);
        storage.put(1, 10, None);
        storage.put(1, 11, None);
        storage.put(2, address, Some(count));
        storage.put(3, address, Some(count));
        assert_eq!(storage.get(1), Some(11));
        assert!(storage.delete(3) && !storage.delete(3));
        storage.clear(0);
        assert_eq!((storage.get(1), storage.get(2)), (None, None));
        assert_eq!(counter, 1);
    }
}
