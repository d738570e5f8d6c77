//! Handles given to the program: words that name objects and are never dereferenced.
//!
//! A handle holds its kind, a slot and the slot's generation, so that a stale or foreign word is
//! found out instead of followed. It looks like an aligned user-space address, because programs
//! expect one (not NULL, not a small integer).

use std::sync::{Arc, PoisonError, RwLock};

/// What a handle names. The number is part of the handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Context = 1,
    Module = 2,
    Library = 3,
    Function = 4,
    Kernel = 5,
    LinkState = 6,
    Stream = 7,
    Event = 8,
    Array = 9,
    MipmappedArray = 10,
    TexRef = 11,
    GraphExec = 14,
    UserObject = 15,
    MemoryPool = 16,
    MemHandle = 17,
    ResourceDescriptor = 18,
    GreenContext = 19,
}

const SLOT_SHIFT: u32 = 4;
const SLOT_BITS: u32 = 22;
const GENERATION_SHIFT: u32 = SLOT_SHIFT + SLOT_BITS;
const GENERATION_BITS: u32 = 16;
const KIND_SHIFT: u32 = GENERATION_SHIFT + GENERATION_BITS;
const MAX_SLOTS: usize = 1 << SLOT_BITS;

/// The objects of one kind.
#[derive(Debug)]
pub(crate) struct Table<T> {
    kind: Kind,
    slots: RwLock<Slots<T>>,
}

#[derive(Debug)]
struct Slots<T> {
    all: Vec<Slot<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u16,
    object: Option<Arc<T>>,
}

impl<T> Table<T> {
    pub(crate) const fn new(kind: Kind) -> Self {
        Self { kind, slots: RwLock::new(Slots { all: Vec::new(), free: Vec::new() }) }
    }

    /// Makes an object that knows its own handle. None when four million objects live.
    pub(crate) fn insert_with(&self, make: impl FnOnce(usize) -> T) -> Option<Arc<T>> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let index = match slots.free.pop() {
            Some(index) => index as usize,
            None if slots.all.len() < MAX_SLOTS => {
                slots.all.push(Slot { generation: 0, object: None });
                slots.all.len() - 1
            }
            None => return None,
        };
        let slot = &mut slots.all[index];
        let object = Arc::new(make(self.word(index, slot.generation)));
        slot.object = Some(object.clone());
        Some(object)
    }

    /// The handle of a new `object`. None when four million objects live.
    pub(crate) fn insert(&self, object: T) -> Option<usize> {
        let mut word = 0;
        self.insert_with(|handle| {
            word = handle;
            object
        })?;
        Some(word)
    }

    /// The object that `handle` names, if it lives and is of this kind.
    #[inline]
    pub(crate) fn get(&self, handle: usize) -> Option<Arc<T>> {
        let (index, generation) = self.split(handle)?;
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let slot = slots.all.get(index)?;
        if slot.generation == generation { slot.object.clone() } else { None }
    }

    /// Ends the handle's life; the object lives on while somebody uses it.
    pub(crate) fn remove(&self, handle: usize) -> Option<Arc<T>> {
        let (index, generation) = self.split(handle)?;
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let slot = slots.all.get_mut(index)?;
        if slot.generation != generation {
            return None;
        }
        let object = slot.object.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        slots.free.push(index as u32);
        Some(object)
    }

    /// Ends the lives of all objects that `dead` names, and returns them.
    pub(crate) fn remove_where(&self, dead: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let slots = &mut *slots;
        let mut removed = Vec::new();
        for (index, slot) in slots.all.iter_mut().enumerate() {
            if slot.object.as_deref().is_some_and(&dead) {
                removed.extend(slot.object.take());
                slot.generation = slot.generation.wrapping_add(1);
                slots.free.push(index as u32);
            }
        }
        removed
    }

    /// Every live object.
    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.all.iter().filter_map(|slot| slot.object.clone()).collect()
    }

    /// The handle of the first object that `wanted` accepts. Looks at all of them.
    pub(crate) fn handle_where(&self, wanted: impl Fn(&T) -> bool) -> Option<usize> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let is_wanted = |slot: &Slot<T>| slot.object.as_deref().is_some_and(&wanted);
        let index = slots.all.iter().position(is_wanted)?;
        Some(self.word(index, slots.all[index].generation))
    }

    fn word(&self, index: usize, generation: u16) -> usize {
        ((self.kind as usize) << KIND_SHIFT)
            | ((generation as usize) << GENERATION_SHIFT)
            | (index << SLOT_SHIFT)
    }

    fn split(&self, handle: usize) -> Option<(usize, u16)> {
        let index = (handle >> SLOT_SHIFT) & (MAX_SLOTS - 1);
        let generation = (handle >> GENERATION_SHIFT) as u16;
        (handle == self.word(index, generation)).then_some((index, generation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_forgets() {
        let table = Table::new(Kind::Event);
        let a = table.insert(1).unwrap();
        let b = table.insert(2).unwrap();
        assert_eq!(*table.get(a).unwrap(), 1);
        assert_eq!(*table.remove(a).unwrap(), 1);
        assert!(table.get(a).is_none() && table.remove(a).is_none());
        let c = table.insert(3).unwrap();
        assert!(c != a && table.get(a).is_none());
        assert_eq!((*table.get(b).unwrap(), *table.get(c).unwrap()), (2, 3));
    }

    #[test]
    fn refuses_foreign_words() {
        let events = Table::new(Kind::Event);
        let streams = Table::<u8>::new(Kind::Stream);
        let event = events.insert(0u8).unwrap();
        for word in [0, 1, 2, usize::MAX, event + 1, event | 1 << 60, event + (1 << SLOT_SHIFT)] {
            assert!(events.get(word).is_none(), "{word:#x}");
        }
        assert!(streams.get(event).is_none());
        assert!(event % 16 == 0 && event > 1 << 32);
    }

    #[test]
    fn removes_by_what_they_are() {
        let table = Table::new(Kind::Stream);
        let handles: Vec<usize> = (0..10).map(|n| table.insert(n).unwrap()).collect();
        assert_eq!(table.remove_where(|n| n % 2 == 0).len(), 5);
        assert!(table.get(handles[0]).is_none() && table.get(handles[1]).is_some());
    }
}
