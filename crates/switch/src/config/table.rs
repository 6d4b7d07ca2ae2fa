//! The table of all configuration keys.
//!
//! A row says of a key which values it takes, what it means and what holds without it. [`keys!`] makes a structure of some
//! rows, with one field for each key, that is read from a table of a file, a flag or a request and written back as what a file
//! would say. The help of the program and docs/configuration.md are made from the same rows, so a key is spelled once. What the
//! keys of a structure mean together is decided by the one who turns it into a configuration, such as
//! [`PortSettings::from_keys`](super::PortSettings::from_keys).

use toml::Value as Toml;

use super::parse::Fields;
use super::values::{Described, Shape};

/// A row of the table.
pub(crate) struct Key {
    /// The key.
    pub(crate) name: &'static str,
    /// Which values it takes.
    pub(crate) values: &'static dyn Described,
    /// What holds where it is not given.
    pub(crate) default: Unset,
    /// A value, as in a flag.
    pub(crate) example: &'static str,
    /// Another key without which this one makes no sense, and why; the reason may be empty.
    pub(crate) only_with: Option<(&'static str, &'static str)>,
    /// What it means, in a sentence or two.
    pub(crate) help: &'static str,
}

impl Key {
    /// Which values it takes.
    pub(crate) fn shape(&self) -> Shape {
        self.values.shape()
    }
}

/// What holds where a key is not given.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unset {
    /// The same as with this value, written as in a flag.
    Value(&'static str),
    /// Something that no value says, or that depends on other keys.
    Means(&'static str),
    /// Nothing: it must be given.
    Required,
}

/// Some rows of the table, as a structure with an optional field for each key.
pub(crate) trait Keys: Sized {
    /// The rows.
    const KEYS: &'static [Key];

    /// Takes these keys and reports what is wrong with each. A field is empty if the key is not given, or not as it should be.
    fn read(fields: &mut Fields<'_>) -> Self;

    /// The keys that are given with their values, in the order of the table.
    fn write(&self) -> Vec<(&'static str, Toml)>;
}

/// Makes a structure that implements [`Keys`] from its rows: the sentence of help, the key, the type of its value, and
/// - `is`: the [`Codec`](super::values::Codec) of that type;
/// - `default`: see [`Unset`];
/// - `example`: a value, as in a flag;
/// - `only_with`: the key without which it makes no sense, and, after `because`, why.
macro_rules! keys {
    (
        $(#[$about:meta])+
        $vis:vis struct $keys:ident {
            $(
                $(#[doc = $help:literal])+
                $name:ident: $type:ty {
                    is: $is:expr,
                    default: $default:expr,
                    example: $example:literal,
                    $(only_with: $with:literal $(because $why:literal)?,)?
                }
            )+
        }
    ) => {
        $(#[$about])+
        #[derive(Debug, Default)]
        $vis struct $keys {
            $($(#[doc = $help])+ pub(crate) $name: Option<$type>,)+
        }

        impl $crate::config::Keys for $keys {
            const KEYS: &'static [$crate::config::Key] = &[$($crate::config::Key {
                name: stringify!($name),
                values: &$is,
                default: $default,
                example: $example,
                only_with: [$(Some(($with, concat!($($why)?))),)? None][0],
                help: concat!($($help),+).trim_ascii(),
            },)+];

            fn read(fields: &mut $crate::config::Fields<'_>) -> Self {
                let keys = Self { $($name: fields.read(stringify!($name), &$is),)+ };
                fields.check_companions(Self::KEYS);
                keys
            }

            fn write(&self) -> Vec<(&'static str, toml::Value)> {
                use $crate::config::Codec as _;
                let mut written = Vec::new();
                $(if let Some(value) = &self.$name {
                    written.push((stringify!($name), $is.write(value)));
                })+
                written
            }
        }
    };
}

pub(crate) use keys;

#[cfg(test)]
pub(super) mod tests;
