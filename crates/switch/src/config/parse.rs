//! From text to a checked [`PortConfig`], with the place of every mistake.
//!
//! A `[[port]]` table and a `--port` flag both become [`Fields`], so each key has one check, whichever way it
//! was written. A reader takes the keys it knows; [`Fields::finish`] reports what is left over.

use ringferry_packet::ether::MacError;

use super::*;

/// Where something was written: a file and line, or a flag.
#[derive(Clone, Debug, Default)]
pub(crate) struct Place {
    source: Arc<str>,
    line: Option<usize>,
}

impl Place {
    pub(crate) fn new(source: &str, line: Option<usize>) -> Place {
        Place { source: source.into(), line }
    }

    /// The place of a `--port` flag with this value.
    pub(crate) fn flag(text: &str) -> Place {
        Place::new(&format!("--port {text}"), None)
    }

    pub(crate) fn problem(&self, key: impl Into<String>, message: impl Into<String>) -> Problem {
        Problem { place: self.to_string(), key: key.into(), message: message.into() }
    }
}

impl Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source)?;
        match self.line {
            Some(line) => write!(f, ":{line}"),
            None => Ok(()),
        }
    }
}

/// A file being read: turns byte offsets into lines.
pub(crate) struct Document<'a> {
    pub(super) name: Arc<str>,
    pub(super) text: &'a str,
}

impl Document<'_> {
    pub(crate) fn place(&self, offset: usize) -> Place {
        let before = self.text.as_bytes().iter().take(offset);
        Place {
            source: Arc::clone(&self.name),
            line: Some(1 + before.filter(|byte| **byte == b'\n').count()),
        }
    }
}

/// A value as written. A flag's value has no type of its own: it is whatever its key asks for.
#[derive(Debug)]
pub(crate) enum Value {
    Text(String),
    Integer(Option<i64>),
    Boolean(bool),
    List(Vec<Value>),
    Other(&'static str),
    Flag(String),
}

impl Value {
    fn from_toml(value: DeValue<'_>) -> Value {
        match value {
            DeValue::String(text) => Value::Text(text.into_owned()),
            DeValue::Boolean(on) => Value::Boolean(on),
            // Too large for 64 bits is out of every range, hence None.
            DeValue::Integer(digits) => {
                Value::Integer(i64::from_str_radix(digits.as_str(), digits.radix()).ok())
            }
            DeValue::Array(items) => {
                Value::List(items.into_iter().map(|item| Value::from_toml(item.into_inner())).collect())
            }
            other => Value::Other(other.type_str()),
        }
    }

    /// A value that was made to be written.
    pub(crate) fn from_written(value: toml::Value) -> Value {
        match value {
            toml::Value::String(text) => Value::Text(text),
            toml::Value::Boolean(on) => Value::Boolean(on),
            toml::Value::Integer(number) => Value::Integer(Some(number)),
            toml::Value::Array(items) => Value::List(items.into_iter().map(Value::from_written).collect()),
            other => Value::Other(other.type_str()),
        }
    }

    /// A string.
    pub(crate) fn text(&self) -> Result<&str, String> {
        match self {
            Value::Text(text) | Value::Flag(text) => Ok(text),
            other => Err(format!("{} is not a string in quotes", other.describe())),
        }
    }

    pub(crate) fn describe(&self) -> String {
        match self {
            Value::Flag(text) if text.bytes().all(|byte| byte.is_ascii_digit()) => text.clone(),
            Value::Text(text) | Value::Flag(text) => format!("{text:?}"),
            Value::Integer(Some(number)) => number.to_string(),
            Value::Integer(None) => "the number given".to_owned(),
            Value::Boolean(on) => on.to_string(),
            Value::List(_) => "array".to_owned(),
            Value::Other(kind) => (*kind).to_owned(),
        }
    }
}

/// The keys of one table or flag, taken one by one.
pub(crate) struct Fields<'a> {
    /// Put before a key in messages: `port.` in a file, nothing in a flag.
    prefix: &'static str,
    /// Where the whole table is.
    place: Place,
    /// The keys given.
    written: BTreeMap<String, Place>,
    /// Those that have not been taken.
    entries: BTreeMap<String, (Place, Value)>,
    /// Keys asked for so far, for the message about unknown ones.
    known: Vec<&'static str>,
    problems: &'a mut Vec<Problem>,
}

impl<'a> Fields<'a> {
    fn new(
        prefix: &'static str,
        place: Place,
        entries: BTreeMap<String, (Place, Value)>,
        problems: &'a mut Vec<Problem>,
    ) -> Fields<'a> {
        let written = entries.iter().map(|(key, (place, _))| (key.clone(), place.clone())).collect();
        Fields { prefix, place, written, entries, known: Vec::new(), problems }
    }

    pub(crate) fn of_document<'i>(
        document: &Document<'_>,
        prefix: &'static str,
        start: usize,
        table: impl IntoIterator<Item = (Spanned<std::borrow::Cow<'i, str>>, Spanned<DeValue<'i>>)>,
        problems: &'a mut Vec<Problem>,
    ) -> Fields<'a> {
        let entries = table
            .into_iter()
            .map(|(key, value)| {
                let place = document.place(key.span().start);
                (key.into_inner().into_owned(), (place, Value::from_toml(value.into_inner())))
            })
            .collect();
        Fields::new(prefix, document.place(start), entries, problems)
    }

    /// Keys and values that are nowhere but in a request. Of a key given twice the last counts.
    pub(crate) fn of_values(
        values: impl Iterator<Item = (String, Value)>,
        problems: &'a mut Vec<Problem>,
    ) -> Fields<'a> {
        let entries = values.map(|(key, value)| (key, (Place::default(), value))).collect();
        Fields::new("", Place::default(), entries, problems)
    }

    /// Notes a key that is read elsewhere.
    pub(crate) fn knows(&mut self, keys: &[&'static str]) {
        self.known.extend(keys);
    }

    pub(crate) fn report(&mut self, place: &Place, key: &str, message: impl Into<String>) {
        self.problems.push(place.problem(format!("{}{key}", self.prefix), message));
    }

    /// Where the table or flag is.
    pub(crate) fn place(&self) -> Place {
        self.place.clone()
    }

    /// Whether a key is given.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.written.contains_key(key)
    }

    /// The keys asked for so far.
    #[cfg(test)]
    pub(crate) fn known(&self) -> &[&'static str] {
        &self.known
    }

    /// Where a key is given.
    pub(crate) fn place_of(&self, key: &str) -> Option<Place> {
        self.written.get(key).cloned()
    }

    /// Whether a key is given, as this very word.
    pub(crate) fn is_word(&self, key: &str, word: &str) -> bool {
        let value = self.entries.get(key).map(|(_, value)| value);
        matches!(value, Some(Value::Text(text) | Value::Flag(text)) if text == word)
    }

    /// Whether exactly one of `keys` is given; reports when not.
    pub(crate) fn exactly_one(&mut self, keys: &[&'static str]) -> bool {
        let given: Vec<_> = keys.iter().copied().filter(|key| self.has(key)).collect();
        let (key, message) = match given.as_slice() {
            [_] => return true,
            [] if keys.len() == 1 => (keys[0], "must be given".to_owned()),
            [] => (keys[0], format!("must be given, or another of {}", keys.join(", "))),
            [first, second, ..] => (*second, format!("cannot be given with {first}: choose one")),
        };
        let place = self.place.clone();
        self.report(&place, key, message);
        false
    }

    pub(crate) fn take(&mut self, key: &'static str) -> Option<(Place, Value)> {
        self.known.push(key);
        self.entries.remove(key)
    }

    /// A string that is not empty.
    pub(crate) fn text(&mut self, key: &'static str) -> Option<(Place, String)> {
        match self.take(key)? {
            (place, Value::Text(text) | Value::Flag(text)) => {
                if text.is_empty() {
                    self.report(&place, key, "is empty");
                    return None;
                }
                Some((place, text))
            }
            (place, other) => {
                self.report(&place, key, format!("{} is not a string in quotes", other.describe()));
                None
            }
        }
    }

    /// A string that passes `check`.
    pub(crate) fn checked(
        &mut self,
        key: &'static str,
        check: fn(&str) -> Result<(), String>,
    ) -> Option<(Place, String)> {
        let (place, text) = self.text(key)?;
        match check(&text) {
            Ok(()) => Some((place, text)),
            Err(message) => {
                self.report(&place, key, message);
                None
            }
        }
    }

    /// An integer in `range`.
    pub(crate) fn number<T: TryFrom<u64>>(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u64>,
    ) -> Option<(Place, T)> {
        let (place, value) = self.take(key)?;
        let number = match &value {
            Value::Integer(number) => *number,
            Value::Flag(text) if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) => {
                text.parse().ok()
            }
            _ => {
                self.report(&place, key, format!("{} is not a whole number", value.describe()));
                return None;
            }
        };
        let number =
            number.and_then(|number| u64::try_from(number).ok()).filter(|number| range.contains(number));
        let number = number.and_then(|number| T::try_from(number).ok());
        if number.is_none() {
            self.report(
                &place,
                key,
                format!("{} is outside {}..={}", value.describe(), range.start(), range.end()),
            );
        }
        number.map(|number| (place, number))
    }

    /// A boolean; in a flag also `on`, `off`, `yes` and `no`.
    pub(crate) fn boolean(&mut self, key: &'static str) -> Option<(Place, bool)> {
        let (place, value) = self.take(key)?;
        let on = match &value {
            Value::Boolean(on) => Some(*on),
            Value::Flag(text) => match text.as_str() {
                "true" | "on" | "yes" => Some(true),
                "false" | "off" | "no" => Some(false),
                _ => None,
            },
            _ => None,
        };
        match on {
            Some(on) => Some((place, on)),
            None => {
                self.report(&place, key, format!("{} is neither true nor false", value.describe()));
                None
            }
        }
    }

    /// A list; in a flag its entries have commas between them.
    pub(crate) fn list(&mut self, key: &'static str) -> Option<(Place, Vec<Value>)> {
        match self.take(key)? {
            (place, Value::List(items)) => Some((place, items)),
            (place, Value::Flag(text)) => {
                let items = text.split(',').map(|item| Value::Flag(item.to_owned())).collect();
                Some((place, items))
            }
            (place, other) => {
                self.report(
                    &place,
                    key,
                    format!("{} is not a list: write [{}]", other.describe(), other.describe()),
                );
                None
            }
        }
    }

    /// The key `fd`: an inherited descriptor, not one of the standard streams.
    pub(crate) fn descriptor(&mut self) -> Option<RawFd> {
        self.number("fd", 3..=RawFd::MAX as u64).map(|(_, fd)| fd)
    }

    /// Reports the keys nobody asked for. `context` says which table or kind they do not belong to.
    pub(crate) fn finish(mut self, context: &str) {
        let known = self.known.join(", ");
        for (key, (place, _)) in std::mem::take(&mut self.entries) {
            self.report(&place, &key, format!("is not a key{context}; known: {known}"));
        }
    }
}

/// Reads a `--port` flag. Adds to `problems` whatever is wrong.
pub(crate) fn parse_flag(text: &str, problems: &mut Vec<Problem>) -> Option<PortConfig> {
    let place = Place::flag(text);
    let mut parts = text.split(',');
    let head = parts.next().unwrap_or_default();
    let word = head.split_once(':').map(|(word, _)| word);
    let Some((kind, key)) =
        PortKind::flags().find(|(_, flag)| word == Some(flag.word)).map(|(kind, flag)| (kind, flag.key))
    else {
        let mut known: Vec<_> =
            PortKind::flags().map(|(_, flag)| format!("{}:{}", flag.word, flag.place)).collect();
        let last = known.pop().unwrap_or_default();
        problems.push(place.problem("", format!("must start with {} or {last}", known.join(", "))));
        return None;
    };
    let location = head.split_once(':').map_or("", |(_, location)| location);
    let mut entries = BTreeMap::from([("kind", kind.to_owned()), (key, location.to_owned())]);
    let mut list = None;
    for part in parts {
        let Some((key, value)) = part.split_once('=') else {
            if let Some(values) = list.and_then(|list| entries.get_mut(list)) {
                values.push(',');
                values.push_str(part);
                continue;
            }
            let message = "is not KEY=VALUE (a path with a comma can only be given in a configuration file)";
            problems.push(place.problem(format!("{part:?}"), message));
            continue;
        };
        list = rules::LISTS.contains(&key).then_some(key);
        if entries.insert(key, value.to_owned()).is_some() {
            problems.push(place.problem(key, "is given twice"));
        }
    }
    let entries = entries
        .into_iter()
        .map(|(key, value)| (key.to_owned(), (place.clone(), Value::Flag(value))))
        .collect();
    parse_port(Fields::new("", place, entries, problems))
}

/// Reads one port. `None`, with the reason reported, when too little of it makes sense to compare it with
/// other ports; other mistakes are reported too.
pub(crate) fn parse_port(mut fields: Fields<'_>) -> Option<PortConfig> {
    fields.exactly_one(&["kind"]);
    let (kind_place, kind) = fields.text("kind")?;
    let named = fields.has("name");
    let name = fields.checked("name", check_port_name);
    let mtu = fields.number("mtu", MTU_RANGE).map(|(_, mtu)| mtu);
    let worker = fields.number("worker", 0..=u64::from(MAX_WORKERS) - 1);
    if !PortKind::names().contains(&kind.as_str()) {
        let known: Vec<_> = PortKind::names().iter().map(|name| format!("{name:?}")).collect();
        let message = format!("{kind:?} is not a kind of port; known: {}", known.join(", "));
        fields.report(&kind_place, "kind", message);
        return None;
    }
    let context = format!(" of a {kind} port");
    let kind = PortKind::parse(&kind, &mut fields);
    let name = if named {
        name.map(|(_, name)| name)
    } else {
        kind.as_ref().and_then(|kind| default_name(kind, &mut fields))
    };
    let rules = rules::parse(&mut fields, kind.as_ref().is_some_and(PortKind::is_shared));
    fields.finish(&context);
    Some(PortConfig { name: name?, mtu, worker: worker.map(|(_, worker)| worker), kind: kind?, rules })
}

/// The name of a port that gives none.
fn default_name(kind: &PortKind, fields: &mut Fields<'_>) -> Option<String> {
    let name = kind.default_name();
    match check_port_name(&name) {
        Ok(()) => Some(name),
        Err(message) => {
            let place = fields.place.clone();
            fields.report(&place, "name", format!("must be given here: {message}"));
            None
        }
    }
}

fn check_port_name(name: &str) -> Result<(), String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:@".contains(&byte);
    if name.is_empty() || name.len() > MAX_PORT_NAME || !name.bytes().all(allowed) {
        return Err(format!("{name:?} is not a port name: 1 to {MAX_PORT_NAME} letters, digits and -_.:@"));
    }
    Ok(())
}

/// A path that fits a Unix socket address; used for data and control sockets.
pub(crate) fn check_socket_path(path: &str) -> Result<(), String> {
    if path.len() > MAX_SOCKET_PATH {
        return Err(format!(
            "the socket path has {} bytes, {MAX_SOCKET_PATH} are possible: \
 use a shorter folder such as /run/ringferry",
            path.len()
        ));
    }
    if path.is_empty() || path.ends_with('/') || path.contains('\0') {
        return Err(format!("{path:?} is not the path of a socket"));
    }
    Ok(())
}

/// The address of one station, so neither multicast nor zero.
pub(crate) fn parse_mac(text: &str) -> Result<Mac, String> {
    let mac: Mac = text.parse().map_err(|error: MacError| error.to_string())?;
    if mac.is_multicast() || mac == Mac::default() {
        return Err(format!(
            "{mac} is not the address of one station: use an even first octet, such as 52:54:00:12:34:56"
        ));
    }
    Ok(mac)
}
