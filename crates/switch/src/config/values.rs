//! Types of values: how each is read from a file or a flag, written back, and described.
//!
//! A [`Codec`] reads and writes the values of one Rust type; its [`Shape`] says the same to people and to tests, in the
//! help of the program, in docs/configuration.md and as the generator of random configurations.

use std::fmt::{self, Display};
use std::ops::RangeInclusive;
use std::path::PathBuf;

use ringferry_packet::ether::Mac;
use toml::Value as Toml;

use super::parse::{Value, check_socket_path, parse_mac};

/// Most entries of a list. A trunk is bounded by the number of VLANs.
const MAX_LIST: usize = 4094;

/// Has a description of its values, for help and tests.
pub(crate) trait Described: Sync {
    /// Returns the description of the values allowed.
    fn shape(&self) -> Shape;
}

/// Reads and writes values of type `T`.
pub(crate) trait Codec<T>: Described {
    /// The value, or everything that is wrong with it.
    fn read(&self, value: &Value) -> Result<T, Vec<String>>;

    /// The value as it would be written in a file; [`read`](Self::read) makes the same of it.
    fn write(&self, value: &T) -> Toml;
}

/// A unit: its name, and how many of the smallest unit it stands for.
pub(crate) type Unit = (&'static str, u64);

/// The set of values of a key, as data: for help, for checks and for random configurations.
#[derive(Clone, Debug)]
pub(crate) enum Shape {
    /// `true` or `false`; in a flag also `on`, `off`, `yes` and `no`.
    Boolean,
    /// A whole number in a range.
    Number {
        /// Least and greatest value, both allowed.
        range: RangeInclusive<u64>,
        /// The unit of the number, in words; may be empty.
        unit: &'static str,
        /// If true, only powers of two are allowed.
        power_of_two: bool,
    },
    /// A number, or several in a row as a string: `"20-29"`.
    Span {
        /// Least and greatest value, both allowed.
        range: RangeInclusive<u64>,
    },
    /// A string of a certain form.
    Text {
        /// Placeholder for the value in a flag: `PATH`.
        placeholder: &'static str,
        /// Noun for the value in messages and help.
        what: &'static str,
    },
    /// One of the words of a list.
    Choice(Vec<&'static str>),
    /// A number with a unit.
    Quantity {
        /// Placeholder for the value in a flag: `RATE`.
        placeholder: &'static str,
        /// Least and greatest value, in the smallest unit.
        range: RangeInclusive<u64>,
        /// The units, largest first.
        units: &'static [Unit],
    },
    /// A list; in a flag with commas.
    List(Box<Shape>),
    /// A value, or a list of them that may have the same one several times.
    Each(Box<Shape>),
    /// A word, or something else.
    Or(&'static str, Box<Shape>),
}

impl Shape {
    /// Writes a value that is given as in a flag as a file has it.
    pub(crate) fn in_file(&self, flag: &str) -> String {
        match self {
            Shape::Boolean => matches!(flag, "true" | "on" | "yes").to_string(),
            Shape::Number { .. } => flag.to_owned(),
            Shape::Span { .. } if !flag.contains('-') => flag.to_owned(),
            Shape::Or(word, of) if *word != flag => of.in_file(flag),
            Shape::List(_) if flag == "none" => "[]".to_owned(),
            Shape::Each(of) if !flag.contains(',') => of.in_file(flag),
            Shape::List(of) | Shape::Each(of) => {
                let entries: Vec<_> = flag.split(',').map(|entry| of.in_file(entry)).collect();
                format!("[{}]", entries.join(", "))
            }
            _ => format!("{flag:?}"),
        }
    }

    /// Returns the placeholder for a value in a flag: `N`, `on|off`, `MAC,...`.
    pub(crate) fn placeholder(&self) -> String {
        match self {
            Shape::Boolean => "on|off".to_owned(),
            Shape::Number { .. } => "N".to_owned(),
            Shape::Span { .. } => "N[-N]".to_owned(),
            Shape::Text { placeholder, .. } | Shape::Quantity { placeholder, .. } => {
                (*placeholder).to_owned()
            }
            Shape::Choice(words) => words.join("|"),
            Shape::List(of) => format!("{},...", of.placeholder()),
            Shape::Each(of) => format!("{}[,...]", of.placeholder()),
            Shape::Or(word, of) => format!("{word}|{}", of.placeholder()),
        }
    }

    /// Returns true if the value may have commas in it, so that a flag may go on with it after one.
    pub(crate) fn is_list(&self) -> bool {
        match self {
            Shape::List(_) | Shape::Each(_) => true,
            Shape::Or(_, of) => of.is_list(),
            _ => false,
        }
    }
}

impl Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shape::Boolean => f.write_str("true or false"),
            Shape::Number { range, unit, power_of_two } => {
                write!(f, "{} to {}", range.start(), range.end())?;
                if !unit.is_empty() {
                    write!(f, " {unit}")?;
                }
                f.write_str(if *power_of_two { ", a power of two" } else { "" })
            }
            Shape::Span { range } => {
                write!(f, "{} to {}, or a range such as \"20-29\"", range.start(), range.end())
            }
            Shape::Text { what, .. } => f.write_str(what),
            Shape::Choice(words) => {
                let words: Vec<_> = words.iter().map(|word| format!("{word:?}")).collect();
                f.write_str(&words.join(" or "))
            }
            Shape::Quantity { range, units, .. } => {
                let [least, most] = [range.start(), range.end()].map(|number| with_unit(*number, units));
                let units: Vec<_> = units.iter().rev().map(|(name, _)| *name).collect();
                write!(f, "{least} to {most} (in {})", units.join(", "))
            }
            Shape::List(of) => write!(f, "a list, each {of}"),
            Shape::Each(of) => write!(f, "{of}, or a list"),
            Shape::Or(word, of) => write!(f, "{word:?}, or {of}"),
        }
    }
}

/// The codec of booleans: `true` or `false`.
pub(crate) struct Boolean;

impl Described for Boolean {
    fn shape(&self) -> Shape {
        Shape::Boolean
    }
}

impl Codec<bool> for Boolean {
    fn read(&self, value: &Value) -> Result<bool, Vec<String>> {
        match value {
            Value::Boolean(on) => Ok(*on),
            Value::Flag(text) if matches!(text.as_str(), "true" | "on" | "yes") => Ok(true),
            Value::Flag(text) if matches!(text.as_str(), "false" | "off" | "no") => Ok(false),
            Value::Flag(_) => Err(vec![format!("{} is neither on nor off", value.describe())]),
            _ => Err(vec![format!("{} is neither true nor false", value.describe())]),
        }
    }

    fn write(&self, value: &bool) -> Toml {
        (*value).into()
    }
}

/// A whole number in a range; made by [`number`].
pub(crate) struct Number {
    range: RangeInclusive<u64>,
    unit: &'static str,
    power_of_two: bool,
    /// What to do where several numbers are given, in messages.
    several: &'static str,
}

/// A whole number in this range.
pub(crate) const fn number(range: RangeInclusive<u64>) -> Number {
    Number { range, unit: "", power_of_two: false, several: "" }
}

/// A whole number in this range; who gives several is told what to do.
pub(crate) const fn one_number(range: RangeInclusive<u64>, several: &'static str) -> Number {
    Number { range, unit: "", power_of_two: false, several }
}

/// A whole number of something.
pub(crate) const fn number_of(unit: &'static str, range: RangeInclusive<u64>) -> Number {
    Number { range, unit, power_of_two: false, several: "" }
}

/// A power of two in this range.
pub(crate) const fn power_of_two(range: RangeInclusive<u64>) -> Number {
    Number { range, unit: "", power_of_two: true, several: "" }
}

impl Described for Number {
    fn shape(&self) -> Shape {
        Shape::Number { range: self.range.clone(), unit: self.unit, power_of_two: self.power_of_two }
    }
}

impl<T: Copy + TryFrom<u64> + TryInto<i64>> Codec<T> for Number {
    fn read(&self, value: &Value) -> Result<T, Vec<String>> {
        let written = match value {
            Value::Integer(number) => *number,
            Value::Flag(text) if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) => {
                text.parse().ok()
            }
            Value::Flag(text) if text.contains([',', '-']) => {
                return Err(vec![format!("{} is not one whole number{}", value.describe(), self.several)]);
            }
            _ => return Err(vec![format!("{} is not a whole number", value.describe())]),
        };
        let written = written.and_then(|number| u64::try_from(number).ok());
        let Some(inside) = written.filter(|number| self.range.contains(number)) else {
            let (least, most) = (self.range.start(), self.range.end());
            return Err(vec![format!("{} is outside {least} to {most}", value.describe())]);
        };
        if self.power_of_two && !inside.is_power_of_two() {
            return Err(vec![format!("{inside} is not a power of two")]);
        }
        T::try_from(inside).map_err(|_| vec![format!("{inside} is too large")])
    }

    fn write(&self, value: &T) -> Toml {
        Toml::Integer((*value).try_into().unwrap_or(i64::MAX))
    }
}

/// A string with a meaning.
pub(crate) struct Text<T> {
    /// Placeholder for the value in a flag: `PATH`.
    pub(crate) placeholder: &'static str,
    /// Noun for the value in messages.
    pub(crate) what: &'static str,
    /// Parses a string that is not empty, or says what is wrong with it.
    pub(crate) read: fn(&str) -> Result<T, String>,
    /// Formats the value as `read` would parse it.
    pub(crate) write: fn(&T) -> String,
}

impl<T> Described for Text<T> {
    fn shape(&self) -> Shape {
        Shape::Text { placeholder: self.placeholder, what: self.what }
    }
}

impl<T> Codec<T> for Text<T> {
    fn read(&self, value: &Value) -> Result<T, Vec<String>> {
        let text = value.text().map_err(|message| vec![message])?;
        if text.is_empty() {
            return Err(vec!["is empty".to_owned()]);
        }
        (self.read)(text).map_err(|message| vec![message])
    }

    fn write(&self, value: &T) -> Toml {
        Toml::String((self.write)(value))
    }
}

/// The path of a socket, for data or control.
pub(crate) const SOCKET: Text<PathBuf> = Text {
    placeholder: "PATH",
    what: "a path of at most 107 bytes",
    read: |text| check_socket_path(text).map(|()| text.into()),
    write: |path| path.to_string_lossy().into_owned(),
};

/// The address of one station.
pub(crate) const MAC: Text<Mac> = Text {
    placeholder: "MAC",
    what: "an Ethernet address of one station, such as \"52:54:00:12:34:56\"",
    read: parse_mac,
    write: Mac::to_string,
};

/// One of some words, each of which stands for a value.
pub(crate) struct Choice<T: 'static> {
    /// Noun for the value with its article, for messages.
    pub(crate) what: &'static str,
    /// The words, each with its value.
    pub(crate) words: &'static [(&'static str, T)],
}

impl<T: Sync> Described for Choice<T> {
    fn shape(&self) -> Shape {
        Shape::Choice(self.words.iter().map(|(word, _)| *word).collect())
    }
}

impl<T: Copy + PartialEq + Sync> Codec<T> for Choice<T> {
    fn read(&self, value: &Value) -> Result<T, Vec<String>> {
        let text = value.text().map_err(|message| vec![message])?;
        let found = self.words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
        found.ok_or_else(|| {
            let known: Vec<_> = self.words.iter().map(|(word, _)| format!("{word:?}")).collect();
            vec![format!("{text:?} is not {}; known: {}", self.what, known.join(", "))]
        })
    }

    fn write(&self, value: &T) -> Toml {
        let word = self.words.iter().find(|(_, known)| known == value).map_or("", |(word, _)| *word);
        word.into()
    }
}

/// A number with a unit, in the smallest one.
pub(crate) struct Quantity {
    /// Placeholder for the value in a flag.
    pub(crate) placeholder: &'static str,
    /// Least and greatest value, in the smallest unit.
    pub(crate) range: RangeInclusive<u64>,
    /// The units, largest first.
    pub(crate) units: &'static [Unit],
}

impl Described for Quantity {
    fn shape(&self) -> Shape {
        let Quantity { placeholder, units, .. } = *self;
        Shape::Quantity { placeholder, range: self.range.clone(), units }
    }
}

impl Codec<u64> for Quantity {
    fn read(&self, value: &Value) -> Result<u64, Vec<String>> {
        let number = value.text().and_then(|text| {
            let number = measure(text, self.units)?;
            if self.range.contains(&number) {
                return Ok(number);
            }
            let [least, most] =
                [self.range.start(), self.range.end()].map(|number| with_unit(*number, self.units));
            Err(format!("{text:?} is outside {least} to {most}"))
        });
        number.map_err(|message| vec![message])
    }

    fn write(&self, value: &u64) -> Toml {
        with_unit(*value, self.units).into()
    }
}

/// Parses a number with a unit, such as `2.5gbit`, and returns it in the smallest unit.
fn measure(text: &str, units: &[Unit]) -> Result<u64, String> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let known = || units.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let scale = units.iter().find(|(name, _)| unit.eq_ignore_ascii_case(name)).map(|(_, scale)| *scale);
    let wrong = || format!("{text:?} is not a number with one of the units {}", known());
    let scale = scale.ok_or_else(wrong)?;
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    // No unit has more than 12 digits after its first, so a longer fraction is refused as too fine.
    if part.len() > 12 {
        return Err(wrong());
    }
    let (whole, part_of) = (digits(whole).ok_or_else(wrong)?, 10u128.pow(part.len() as u32));
    let part = u128::from(digits(part).ok_or_else(wrong)?) * u128::from(scale);
    if !part.is_multiple_of(part_of) {
        return Err(format!(
            "{text:?} is not a whole number of the unit {}",
            units.last().map_or("", |unit| unit.0)
        ));
    }
    let total = u128::from(whole) * u128::from(scale) + part / part_of;
    Ok(u64::try_from(total).unwrap_or(u64::MAX))
}

/// Formats a number in the unit in which it is shortest.
pub(crate) fn with_unit(number: u64, units: &[Unit]) -> String {
    let whole = units.iter().filter(|(_, scale)| number.is_multiple_of(*scale));
    let (name, scale) = whole.max_by_key(|(_, scale)| *scale).copied().unwrap_or(("", 1));
    format!("{}{name}", number / scale)
}

/// Parses digits and nothing else, not even a sign.
pub(crate) fn digits(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// A list of different values; `"none"` is an empty one.
pub(crate) struct List<E>(pub(crate) E);

impl<E: Described> Described for List<E> {
    fn shape(&self) -> Shape {
        Shape::List(self.0.shape().into())
    }
}

impl<T: PartialEq, E: Codec<T>> Codec<Vec<T>> for List<E> {
    fn read(&self, value: &Value) -> Result<Vec<T>, Vec<String>> {
        let flag;
        let values = match value {
            Value::Text(text) | Value::Flag(text) if text == "none" => return Ok(Vec::new()),
            Value::List(values) => values,
            Value::Flag(text) => {
                flag = text.split(',').map(|item| Value::Flag(item.to_owned())).collect();
                &flag
            }
            other => {
                let what = other.describe();
                let items = match other {
                    // Each as it would be written alone.
                    Value::Text(text) => {
                        let item = |item: &str| match item.trim() {
                            number if number.parse::<u64>().is_ok() => number.to_owned(),
                            text => format!("{text:?}"),
                        };
                        text.split(',').map(item).collect::<Vec<_>>().join(", ")
                    }
                    _ => what.clone(),
                };
                return Err(vec![format!("{what} is not a list: write [{items}]")]);
            }
        };
        if values.len() > MAX_LIST {
            return Err(vec![format!("has {} entries, at most {MAX_LIST} are possible", values.len())]);
        }
        let mut made = Vec::new();
        let mut wrong = Vec::new();
        for value in values {
            match self.0.read(value) {
                Ok(entry) if made.contains(&entry) => {
                    wrong.push(format!("names {} twice", value.describe()));
                }
                Ok(entry) => made.push(entry),
                Err(messages) => wrong.extend(messages),
            }
        }
        if wrong.is_empty() { Ok(made) } else { Err(wrong) }
    }

    fn write(&self, value: &Vec<T>) -> Toml {
        Toml::Array(value.iter().map(|entry| self.0.write(entry)).collect())
    }
}

/// One value, or a list of values with one for each of several things in a row, which may be the same.
pub(crate) struct Each<E>(pub(crate) E);

impl<E: Described> Described for Each<E> {
    fn shape(&self) -> Shape {
        Shape::Each(self.0.shape().into())
    }
}

impl<T, E: Codec<T>> Codec<Vec<T>> for Each<E> {
    fn read(&self, value: &Value) -> Result<Vec<T>, Vec<String>> {
        let flag;
        let values = match value {
            Value::List(values) if values.is_empty() => return Err(vec!["names nothing".to_owned()]),
            Value::List(values) => values.as_slice(),
            Value::Flag(text) => {
                flag = text.split(',').map(|item| Value::Flag(item.to_owned())).collect::<Vec<_>>();
                &flag
            }
            one => std::slice::from_ref(one),
        };
        if values.len() > MAX_LIST {
            return Err(vec![format!("has {} entries, at most {MAX_LIST} are possible", values.len())]);
        }
        let (mut made, mut wrong) = (Vec::new(), Vec::new());
        for value in values {
            match self.0.read(value) {
                Ok(entry) => made.push(entry),
                Err(messages) => wrong.extend(messages),
            }
        }
        if wrong.is_empty() { Ok(made) } else { Err(wrong) }
    }

    fn write(&self, values: &Vec<T>) -> Toml {
        match values.as_slice() {
            [one] => self.0.write(one),
            several => Toml::Array(several.iter().map(|entry| self.0.write(entry)).collect()),
        }
    }
}

/// A word that stands for `None`, or another value.
pub(crate) struct Or<E>(pub(crate) &'static str, pub(crate) E);

impl<E: Described> Described for Or<E> {
    fn shape(&self) -> Shape {
        Shape::Or(self.0, self.1.shape().into())
    }
}

impl<T, E: Codec<T>> Codec<Option<T>> for Or<E> {
    fn read(&self, value: &Value) -> Result<Option<T>, Vec<String>> {
        match value {
            Value::Text(text) | Value::Flag(text) if text == self.0 => Ok(None),
            _ => self.1.read(value).map(Some),
        }
    }

    fn write(&self, value: &Option<T>) -> Toml {
        value.as_ref().map_or_else(|| self.0.into(), |value| self.1.write(value))
    }
}
