//! What the format of a client's devices in an image means to a backend.

use kedge_device::{Object, Piece};
use kedge_gpu_image::SavedObject;
use kedge_wire::Text;

/// An object of an image as a backend knows it.
pub(crate) trait DevicePiece: Sized {
    fn of(piece: &Piece) -> Self;
    /// `None`: no backend has it.
    fn piece(&self) -> Option<Piece>;
}

impl DevicePiece for SavedObject {
    fn of(piece: &Piece) -> SavedObject {
        let Piece { object, start, bytes } = piece.clone();
        match object {
            Object::Memory => SavedObject::Memory { start, bytes },
            Object::Handle(handle) => SavedObject::Handle { handle, start, bytes },
            Object::Array(array) => SavedObject::Array { array, start, bytes },
            Object::Variable { module, name } => {
                SavedObject::Variable { module, name: Text::truncated(name), start, bytes }
            }
        }
    }

    fn piece(&self) -> Option<Piece> {
        let (object, start, bytes) = match self.clone() {
            SavedObject::Memory { start, bytes } => (Object::Memory, start, bytes),
            SavedObject::Handle { handle, start, bytes } => (Object::Handle(handle), start, bytes),
            SavedObject::Array { array, start, bytes } => (Object::Array(array), start, bytes),
            SavedObject::Variable { module, name, start, bytes } => {
                (Object::Variable { module, name: name.into_inner() }, start, bytes)
            }
            SavedObject::Image { .. } | SavedObject::Arena { .. } => return None,
        };
        Some(Piece { object, start, bytes })
    }
}
