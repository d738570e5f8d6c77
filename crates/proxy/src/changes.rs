//! What the last image has of a client's devices, so that the next can refer to it: the numbers of
//! its objects and the digests of their blocks.

use crate::record::Image;
use crate::saved::DevicePiece;
use kedge_device::digest::{BLOCK, Keys};
use kedge_device::{Digests, Known, Piece};
use kedge_gpu_image::SavedObject;
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, Weak};

/// What an object is known by from image to image.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    Piece(Piece),
    /// A part of the shared arena: its offset and its bytes.
    Arena(u64, u64),
    /// Where a module's image lies, while it is there.
    Image(usize),
}

impl Key {
    pub(crate) fn of_image(image: &Image) -> Key {
        Key::Image(Arc::as_ptr(image) as usize)
    }
}

/// Which objects there are in the image that is being made, and what of the last one is known. Each
/// has a number, which is never another's while images build on each other.
pub(crate) struct Tracked {
    /// Of the file that the next one may build on; `None` before the first.
    checksum: Option<u64>,
    known: Arc<Known>,
    arena: HashMap<(u64, u64), Digests>,
    numbers: HashMap<Key, u64>,
    /// Numbers of modules' images that the last file has; an address is nobody else's while it is
    /// known here.
    images: HashMap<u64, Weak<Vec<u8>>>,
    last: u64,
}

/// What has been written.
#[derive(Default)]
pub(crate) struct Written {
    /// Of which snapshot.
    pub(crate) snapshot: u64,
    pub(crate) pieces: HashMap<Piece, Digests>,
    pub(crate) arena: HashMap<(u64, u64), Digests>,
    pub(crate) images: Vec<(u64, Image)>,
}

impl Tracked {
    pub(crate) fn new() -> io::Result<Tracked> {
        let known = Arc::new(Known::nothing(Keys::draw()?));
        let (arena, numbers, images) = Default::default();
        Ok(Tracked { checksum: None, known, arena, numbers, images, last: 0 })
    }

    /// Leaves nothing to refer to, unless it is the file with this checksum that may be built on.
    pub(crate) fn build_on(&mut self, parent: Option<u64>) {
        if parent.is_none() || parent != self.checksum {
            self.known = Arc::new(Known::nothing(self.known.keys.clone()));
            self.arena.clear();
            self.images.clear();
        }
    }

    /// The first round of a move: what there is is about to be there twice.
    pub(crate) fn to_move() -> io::Result<Tracked> {
        let known = Known { leave: true, ..Known::nothing(Keys::draw()?) };
        Ok(Tracked { known: Arc::new(known), ..Tracked::new()? })
    }

    pub(crate) fn known(&self) -> &Arc<Known> {
        &self.known
    }

    /// The same without what is known: everything will be stored.
    pub(crate) fn nothing_known(&self) -> Arc<Known> {
        Arc::new(Known::nothing(self.known.keys.clone()))
    }

    /// The number of an object: a new one if it was not in the last image.
    pub(crate) fn number(&mut self, key: Key) -> u64 {
        let next = self.last + 1;
        let number = *self.numbers.entry(key).or_insert(next);
        self.last = self.last.max(number);
        number
    }

    /// The digests of an object's blocks in the last file.
    pub(crate) fn before(&self, object: &SavedObject) -> Option<Digests> {
        match object {
            SavedObject::Arena { start, bytes } => self.arena.get(&(*start, *bytes)).cloned(),
            SavedObject::Image { .. } => None,
            piece => self.known.pieces.get(&piece.piece()?).cloned(),
        }
    }

    /// Whether the last file has a module's image.
    pub(crate) fn has_image(&self, number: u64) -> bool {
        self.images.contains_key(&number)
    }

    /// The file with this checksum has all of `written`, and what is not in it is no more.
    pub(crate) fn succeed(&mut self, checksum: u64, written: Written) {
        let Written { snapshot, pieces, arena, images } = written;
        let known = images.iter().map(|(number, _)| *number).collect::<HashSet<u64>>();
        self.numbers.retain(|key, number| match key {
            Key::Piece(piece) => pieces.contains_key(piece),
            Key::Arena(start, bytes) => arena.contains_key(&(*start, *bytes)),
            Key::Image(_) => known.contains(number),
        });
        self.known =
            Arc::new(Known { snapshot, pieces, ..Known::nothing(self.known.keys.clone()) });
        self.arena = arena;
        self.images =
            images.into_iter().map(|(number, image)| (number, Arc::downgrade(&image))).collect();
        self.checksum = Some(checksum);
    }
}

/// Blocks of so many bytes.
pub(crate) fn blocks(bytes: u64) -> usize {
    bytes.div_ceil(BLOCK) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use kedge_device::Object;

    fn piece(start: u64) -> Piece {
        Piece { object: Object::Memory, start, bytes: BLOCK }
    }

    #[test]
    fn a_number_stays_with_its_object_and_is_never_anothers() {
        let mut tracked = Tracked::new().unwrap();
        let images: [Image; 2] = [Arc::new(vec![1]), Arc::new(vec![1])];
        let first = tracked.number(Key::Piece(piece(0)));
        let second = tracked.number(Key::Piece(piece(BLOCK)));
        let image = tracked.number(Key::of_image(&images[0]));
        assert_eq!(tracked.number(Key::Arena(0, 7)), 4);
        let digests: Digests = Arc::from([Some([1; 4])]);
        let mut written = Written::default();
        written.pieces.insert(piece(BLOCK), Arc::clone(&digests));
        written.images.push((image, Arc::clone(&images[0])));
        tracked.succeed(99, written);
        assert!(tracked.has_image(image));
        assert_eq!(tracked.number(Key::Piece(piece(BLOCK))), second);
        assert_eq!(tracked.number(Key::of_image(&images[0])), image);
        assert_eq!(tracked.number(Key::of_image(&images[1])), 5);
        assert_ne!(tracked.number(Key::Piece(piece(0))), first, "it was gone in between");
        let object = SavedObject::of(&piece(BLOCK));
        tracked.build_on(Some(99));
        assert!(tracked.before(&object).is_some());
        tracked.build_on(Some(98));
        assert!(tracked.before(&object).is_none() && !tracked.has_image(image));
    }
}
