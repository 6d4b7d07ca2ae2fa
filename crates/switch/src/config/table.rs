//! The table of all configuration keys.
//!
//! A row has a key's name, its values, its help and its default. [`keys!`] makes a structure of some rows,
//! with one field for each key, that is read from a table of a file, a flag or a request and written back as
//! what a file would say. The help of the program and docs/configuration.md are made from the same rows, so a
//! key is spelled once. The code that turns a structure into a configuration, such as
//! [`PortSettings::from_keys`](super::PortSettings::from_keys), checks its keys against each other.

use toml::Value as Toml;

use super::parse::Fields;
use super::values::{Described, Shape};

/// A row of the table.
pub(crate) struct Key {
    /// The key as it is written in a file or a flag.
    pub(crate) name: &'static str,
    /// The values that the key takes.
    pub(crate) values: &'static dyn Described,
    /// The behaviour if the key is not given.
    pub(crate) default: Unset,
    /// A value for examples, written as in a flag.
    pub(crate) example: &'static str,
    /// Another key without which this one makes no sense, and why; the reason may be empty.
    pub(crate) only_with: Option<(&'static str, &'static str)>,
    /// How a change of the key comes into force while the switch runs.
    pub(crate) change: Effect,
    /// Help text on the key, a sentence or two.
    pub(crate) help: &'static str,
}

/// How a change of a key comes into force while the switch runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// At once, while packets flow.
    Live,
    /// With the next front end that connects, as the one that is connected has agreed on something else; at once for kinds of ports that
    /// have no front end to agree with ([`PortSettings::has_sessions`](super::PortSettings::has_sessions)).
    NextConnection,
    /// Only when the port is opened anew.
    Reopen,
    /// Only when the switch is started again.
    Restart,
}

impl Key {
    /// Returns the description of the values allowed.
    pub(crate) fn shape(&self) -> Shape {
        self.values.shape()
    }
}

/// The behaviour where a key is not given.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unset {
    /// As if the key had this value, written as in a flag.
    Value(&'static str),
    /// A description: no value of the key says the same, or it depends on other keys.
    Means(&'static str),
    /// None: the key must be given.
    Required,
}

/// Some rows of the table, as a structure with an optional field for each key.
pub(crate) trait Keys: Sized {
    /// The rows of the table that this structure has fields for.
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
/// - `change`: the [`Effect`] of a change, if it is not that of the whole structure, which stands behind its name;
/// - `only_with`: the key without which it makes no sense, and, after `because`, why.
macro_rules! keys {
    (
        $(#[$about:meta])+
        $vis:vis struct $keys:ident: $effect:ident {
            $(
                $(#[doc = $help:literal])+
                $name:ident: $type:ty {
                    is: $is:expr,
                    default: $default:expr,
                    example: $example:literal,
                    $(change: $change:ident,)?
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
                change: [$($crate::config::Effect::$change,)? $crate::config::Effect::$effect][0],
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
