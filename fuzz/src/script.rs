//! Encoding of scripts: the bytes of an input become operations, and operations become the bytes of a seed. A
//! byte names the operation, then its fields follow, little endian. Any bytes are a script; it ends where
//! they run out.

/// The rest of an input that a script is read from.
#[derive(Clone, Copy, Debug)]
pub struct Bytes<'a>(pub &'a [u8]);

/// A value that can be read from a script and written to one.
pub trait Field: Sized {
    /// Reads the value; `None` if the bytes run out.
    fn get(bytes: &mut Bytes<'_>) -> Option<Self>;
    /// Appends the encoded value to a script.
    fn put(&self, out: &mut Vec<u8>);
}

macro_rules! number {
    ($($number:ty),*) => {$(
        impl Field for $number {
            fn get(bytes: &mut Bytes<'_>) -> Option<Self> {
                let (first, rest) = bytes.0.split_first_chunk()?;
                bytes.0 = rest;
                Some(Self::from_le_bytes(*first))
            }
            fn put(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }
        }
    )*};
}

number!(u8, u16, u32, u64);

/// Makes an enum of operations a [`Field`].
macro_rules! operations {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $op:ident { $($(#[$sub:meta])* $field:ident: $kind:ty),* },)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs, reason = "what an operation does with its fields is said above it")]
        pub enum $name {
            $($(#[$doc])* $op { $($(#[$sub])* $field: $kind),* },)*
        }

        impl $crate::script::Field for $name {
            fn get(bytes: &mut $crate::script::Bytes<'_>) -> Option<Self> {
                const NAMES: &[&str] = &[$(stringify!($op)),*];
                let code = <u8 as $crate::script::Field>::get(bytes)?;
                let name = NAMES[usize::from(code) % NAMES.len()];
                $(if name == stringify!($op) {
                    return Some(Self::$op { $($field: $crate::script::Field::get(bytes)?),* });
                })*
                None
            }

            fn put(&self, out: &mut Vec<u8>) {
                const NAMES: &[&str] = &[$(stringify!($op)),*];
                match self {
                    $(Self::$op { $($field),* } => {
                        out.extend(NAMES.iter().position(|name| *name == stringify!($op)).map(|code| code as u8));
                        $($crate::script::Field::put($field, out);)*
                    })*
                }
            }
        }
    };
}

pub(crate) use operations;
