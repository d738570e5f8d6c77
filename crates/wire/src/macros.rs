/// Declares structs and enums together with their [`Wire`](crate::Wire) encoding.
///
/// A struct's fields are encoded in order. An enum's variant is a `u32` tag, written beside it so
/// that inserting a variant never renumbers the others, followed by its fields.
///
/// ```
/// kedge_wire::wire! {
///     /// A point.
///     #[derive(Debug, Clone, PartialEq)]
///     pub struct Point { pub x: u32, pub y: u32 }
///
///     #[derive(Debug, Clone, PartialEq)]
///     pub enum Shape {
///         Dot = 1 { at: Point },
///         Nothing = 2 {},
///     }
/// }
/// let mut bytes = Vec::new();
/// kedge_wire::encode(&Shape::Dot { at: Point { x: 1, y: 2 } }, &mut bytes);
/// assert_eq!(kedge_wire::decode::<Shape>(&bytes).unwrap(), Shape::Dot { at: Point { x: 1, y: 2 } });
/// ```
#[macro_export]
macro_rules! wire {
    () => {};
    ($(#[$m:meta])* pub struct $name:ident { $($(#[$fm:meta])* pub $f:ident : $t:ty),* $(,)? } $($rest:tt)*) => {
        $(#[$m])*
        pub struct $name { $($(#[$fm])* pub $f: $t),* }
        impl $crate::Wire for $name {
            #[inline]
            fn put(&self, w: &mut $crate::Writer<'_>) { $( $crate::Wire::put(&self.$f, w); )* let _ = w; }
            #[inline]
            fn get(r: &mut $crate::Reader<'_>) -> Result<Self, $crate::WireError> {
                $( let $f = $crate::Wire::get(r)?; )*
                let _ = r;
                Ok(Self { $($f),* })
            }
        }
        $crate::wire! { $($rest)* }
    };
    ($(#[$m:meta])* pub enum $name:ident { $($(#[$vm:meta])* $v:ident = $tag:literal { $($(#[$fm:meta])* $f:ident : $t:ty),* $(,)? }),* $(,)? } $($rest:tt)*) => {
        $(#[$m])*
        pub enum $name { $($(#[$vm])* $v { $($(#[$fm])* $f: $t),* }),* }
        impl $name {
            /// Returns the variant's name, for logs.
            pub fn name(&self) -> &'static str {
                match self { $(Self::$v { .. } => stringify!($v)),* }
            }
        }
        impl $crate::Wire for $name {
            #[inline]
            fn put(&self, w: &mut $crate::Writer<'_>) {
                match self {
                    $(Self::$v { $($f),* } => {
                        $crate::Wire::put(&($tag as u32), w);
                        $( $crate::Wire::put($f, w); )*
                    })*
                }
            }
            #[inline]
            fn get(r: &mut $crate::Reader<'_>) -> Result<Self, $crate::WireError> {
                match <u32 as $crate::Wire>::get(r)? {
                    $($tag => Ok(Self::$v { $($f: $crate::Wire::get(r)?),* }),)*
                    tag => Err($crate::WireError::UnknownTag { what: stringify!($name), tag }),
                }
            }
        }
        $crate::wire! { $($rest)* }
    };
    // A u32 newtype: an id that the client chose.
    ($(#[$m:meta])* pub id $name:ident; $($rest:tt)*) => {
        $(#[$m])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        pub struct $name(pub u32);
        impl $crate::Wire for $name {
            #[inline]
            fn put(&self, w: &mut $crate::Writer<'_>) { self.0.put(w); }
            #[inline]
            fn get(r: &mut $crate::Reader<'_>) -> Result<Self, $crate::WireError> {
                Ok(Self(<u32 as $crate::Wire>::get(r)?))
            }
        }
        $crate::wire! { $($rest)* }
    };
}
