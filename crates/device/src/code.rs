//! What a module is made of.

/// A module's code: images of type `T`, as a program gave them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Code<T> {
    /// An image that needs nothing else.
    Whole(T),
    /// Relocatable images to be linked. A single one needs that as well: a GPU's driver does not
    /// load it as it is.
    Parts(Vec<T>),
}

impl<T> Code<T> {
    /// Returns all images, in order.
    pub fn images(&self) -> &[T] {
        match self {
            Code::Whole(image) => std::slice::from_ref(image),
            Code::Parts(images) => images,
        }
    }

    pub fn images_mut(&mut self) -> &mut [T] {
        match self {
            Code::Whole(image) => std::slice::from_mut(image),
            Code::Parts(images) => images,
        }
    }
}
