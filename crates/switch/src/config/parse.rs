//! Parsing: turns text into a checked [`PortConfig`] and reports every mistake with its place.
//!
//! A `[[port]]` table and a `--port` flag both become [`Fields`], so each key has one check, whichever way it
//! was written. Structures of [`Keys`] take the keys they know; [`Fields::finish`] reports what is left over.

use ringferry_packet::ether::MacError;

use super::*;

/// Position of a setting in its source: a file and line, or a flag.
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

/// A file being read: turns byte offsets into lines. Every key asks for its own, so the ends of lines are looked for once: in a file of 300 ports they
/// would else be looked for in a gigabyte.
pub(crate) struct Document {
    name: Arc<str>,
    /// Where lines end.
    ends: Vec<usize>,
}

impl Document {
    pub(super) fn new(name: &str, text: &str) -> Document {
        Document { name: name.into(), ends: text.match_indices('\n').map(|(at, _)| at).collect() }
    }

    pub(crate) fn place(&self, offset: usize) -> Place {
        let ended = self.ends.partition_point(|end| *end < offset);
        Place { source: Arc::clone(&self.name), line: Some(1 + ended) }
    }
}

/// A value as written. A flag's value has no type of its own: it is read as the type that its key asks for.
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
            // A number that does not fit 64 bits is out of every range.
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

    /// Returns the string, or the message that the value is none.
    pub(crate) fn text(&self) -> Result<&str, String> {
        match self {
            Value::Text(text) | Value::Flag(text) => Ok(text),
            other => Err(format!("{} is not a string in quotes", other.describe())),
        }
    }

    pub(crate) fn describe(&self) -> String {
        match self {
            Value::Flag(text) if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) => {
                text.clone()
            }
            Value::Text(text) | Value::Flag(text) => format!("{text:?}"),
            Value::Integer(Some(number)) => number.to_string(),
            Value::Integer(None) => "the number given".to_owned(),
            Value::Boolean(on) => on.to_string(),
            Value::List(_) => "array".to_owned(),
            Value::Other(kind) => (*kind).to_owned(),
        }
    }
}

/// The keys of one table, flag or request, taken by the structures of keys that may stand there.
pub(crate) struct Fields<'a> {
    /// Text put before a key in messages: `port.` in a file, nothing in a flag.
    prefix: &'static str,
    /// Place of the whole table.
    place: Place,
    /// Places of all keys given.
    written: BTreeMap<String, Place>,
    /// Values that no structure of keys has taken yet.
    values: BTreeMap<String, Value>,
    /// Keys asked for so far, for the message about unknown ones.
    known: Vec<&'static str>,
    problems: &'a mut Vec<Problem>,
}

impl<'a> Fields<'a> {
    fn new(
        prefix: &'static str,
        place: Place,
        entries: impl Iterator<Item = (String, (Place, Value))>,
        problems: &'a mut Vec<Problem>,
    ) -> Fields<'a> {
        let mut fields = Fields {
            prefix,
            place,
            written: BTreeMap::new(),
            values: BTreeMap::new(),
            known: Vec::new(),
            problems,
        };
        for (key, (place, value)) in entries {
            fields.written.insert(key.clone(), place);
            fields.values.insert(key, value);
        }
        fields
    }

    /// The keys of a table of a file that begins at the byte `start`.
    pub(super) fn of_document<'i>(
        document: &Document,
        prefix: &'static str,
        start: usize,
        table: impl IntoIterator<Item = (Spanned<std::borrow::Cow<'i, str>>, Spanned<DeValue<'i>>)>,
        problems: &'a mut Vec<Problem>,
    ) -> Fields<'a> {
        let entries = table.into_iter().map(|(key, value)| {
            let place = document.place(key.span().start);
            (key.into_inner().into_owned(), (place, Value::from_toml(value.into_inner())))
        });
        Fields::new(prefix, document.place(start), entries, problems)
    }

    /// Keys and values that are nowhere but in a request. Of a key given twice the last counts.
    pub(super) fn of_values(
        values: impl Iterator<Item = (String, Value)>,
        problems: &'a mut Vec<Problem>,
    ) -> Fields<'a> {
        let entries = values.map(|(key, value)| (key, (Place::default(), value)));
        Fields::new("", Place::default(), entries, problems)
    }

    /// Takes a key and reads its value. Reports every mistake in it.
    pub(crate) fn read<T>(&mut self, key: &'static str, codec: &impl Codec<T>) -> Option<T> {
        self.known.push(key);
        let value = self.values.remove(key)?;
        match codec.read(&value) {
            Ok(value) => Some(value),
            Err(messages) => {
                messages.into_iter().for_each(|message| self.report(key, message));
                None
            }
        }
    }

    /// Notes keys that are read elsewhere.
    pub(super) fn knows(&mut self, keys: &[&'static str]) {
        self.known.extend(keys);
    }

    /// Reports a problem of a key, at the place where the key is given or else of the table that lacks it.
    pub(crate) fn report(&mut self, key: &str, message: impl Into<String>) {
        let place = self.written.get(key).unwrap_or(&self.place);
        self.problems.push(place.problem(format!("{}{key}", self.prefix), message));
    }

    /// Returns the problems found so far.
    pub(super) fn problems(&self) -> &[Problem] {
        self.problems
    }

    /// Returns true if a key is given, with whatever value.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.written.contains_key(key)
    }

    /// Returns the place where a key is given.
    pub(super) fn place_of(&self, key: &str) -> Option<Place> {
        self.written.get(key).cloned()
    }

    /// Reports of the table if not exactly one of `keys` is given.
    pub(crate) fn exactly_one(&mut self, keys: &[&'static str]) {
        let given: Vec<_> = keys.iter().copied().filter(|key| self.has(key)).collect();
        let (key, message) = match given.as_slice() {
            [_] => return,
            [] if keys.len() == 1 => (keys[0], "must be given".to_owned()),
            [] => (keys[0], format!("must be given, or another of {}", keys.join(", "))),
            [first, second, ..] => (*second, format!("cannot be given with {first}: choose one")),
        };
        self.problems.push(self.place.problem(format!("{}{key}", self.prefix), message));
    }

    /// Reports those of `keys` that are given without the one that they need.
    pub(crate) fn check_companions(&mut self, keys: &[Key]) {
        for key in keys {
            let Some((with, why)) = key.only_with.filter(|(with, _)| self.has(key.name) && !self.has(with))
            else {
                continue;
            };
            let why = if why.is_empty() { String::new() } else { format!(": {why}") };
            self.report(key.name, format!("only goes with {with}{why}"));
        }
    }

    /// Reports the keys that no structure of keys has taken. `context` says which table or kind they do not
    /// belong to.
    pub(super) fn finish(mut self, context: &str) {
        let known = self.known.join(", ");
        for key in std::mem::take(&mut self.values).into_keys() {
            let elsewhere = sections().find(|(_, keys)| keys.iter().any(|other| other.name == key));
            let message = match (nearest(&key, &self.known), elsewhere) {
                (near, Some((scope, _))) => {
                    let near = near.map_or_else(String::new, |near| format!(" (or did you mean {near}?)"));
                    format!("is not a key{context}, but one of {scope}{near}; known: {known}")
                }
                (Some(nearest), None) => {
                    format!("is not a key{context}: did you mean {nearest}?")
                }
                (None, None) => format!("is not a key{context}; known: {known}"),
            };
            self.report(&key, message);
        }
    }
}

/// Returns the one of `known` that is closest in spelling to `key`, if one is close enough to suggest.
pub(super) fn nearest<'k>(key: &str, known: &[&'k str]) -> Option<&'k str> {
    let likeness = |known: &&str| strsim::jaro_winkler(key, known);
    let nearest = known.iter().copied().max_by(|one, two| likeness(one).total_cmp(&likeness(two)))?;
    (likeness(&nearest) > 0.8).then_some(nearest)
}

/// Reads the text of a `--port` flag, which stands at `place`. Appends every mistake to `problems`.
pub(super) fn parse_flag(text: &str, place: &Place, problems: &mut Vec<Problem>) -> Option<PortConfig> {
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
        if part.starts_with(' ') {
            problems
                .push(place.problem(format!("{part:?}"), "begins with a space: write none behind a comma"));
            continue;
        }
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
        list = is_list(key).then_some(key);
        if entries.insert(key, value.to_owned()).is_some() {
            problems.push(place.problem(key, "is given twice"));
        }
    }
    let entries =
        entries.into_iter().map(|(key, value)| (key.to_owned(), (place.clone(), Value::Flag(value))));
    parse_port(Fields::new("", place.clone(), entries, problems))
}

/// Returns true if the values of this key are lists.
pub(super) fn is_list(key: &str) -> bool {
    sections().flat_map(|(_, keys)| keys).any(|row| row.name == key && row.shape().is_list())
}

keys! {
    /// The keys of every port.
    pub(crate) struct PortKeys: Reopen {
        /// Selects the kind of the port.
        kind: String {
            is: KindName,
            default: Unset::Required,
            example: "tap",
        }
        /// Names the port in the answers of `ctl` and in the log. No other port may have the same name.
        name: String {
            is: NAME,
            default: Unset::Means(
                "the stem of the socket, the name of the tap or of the systemd socket, `fd` and the number of a descriptor, or `xen`",
            ),
            example: "vm0",
        }
        /// Sets the MTU, without the Ethernet header. A tap is configured with it, and a front end is told it as the
        /// most that its guest may set. Frames are dropped for what does not fit into the receiver's buffers, and not for this.
        mtu: u16 {
            is: number_of("bytes", MTU_RANGE),
            default: Unset::Means("a tap keeps its own; a guest is told 1500 and may set any"),
            example: "9000",
            change: NextConnection,
        }
        /// Selects the worker that serves the first queue pair; the next workers serve the following pairs in turn. A
        /// list selects the workers of as many pairs, from the first on: `ringferry ctl assign` writes one. A tap takes
        /// this key, one number, only with `queues = 1`.
        worker: Vec<u16> {
            is: Each(number(0..=MAX_WORKERS as u64 - 1)),
            default: Unset::Means("worker 0"),
            example: "1",
            change: Live,
        }
    }
}

/// The name of a kind of port.
struct KindName;

impl Described for KindName {
    fn shape(&self) -> Shape {
        Shape::Choice(PortKind::names().to_vec())
    }
}

impl Codec<String> for KindName {
    fn read(&self, value: &Value) -> Result<String, Vec<String>> {
        let kind = value.text().map_err(|message| vec![message])?;
        let known = PortKind::names();
        if known.contains(&kind) {
            return Ok(kind.to_owned());
        }
        let known: Vec<_> = known.iter().map(|name| format!("{name:?}")).collect();
        Err(vec![format!("{kind:?} is not a kind of port; known: {}", known.join(", "))])
    }

    fn write(&self, kind: &String) -> toml::Value {
        kind.as_str().into()
    }
}

const NAME: Text<String> = Text {
    placeholder: "NAME",
    what: "1 to 63 letters, digits and `-_.:@`",
    read: |name| check_port_name(name).map(|()| name.to_owned()),
    write: String::to_owned,
};

/// Reads one port. `None`, with the reason reported, when too little of it makes sense to compare it with
/// other ports; other mistakes are reported too.
pub(super) fn parse_port(mut fields: Fields<'_>) -> Option<PortConfig> {
    fields.exactly_one(&["kind"]);
    let PortKeys { kind, name, mtu, worker } = PortKeys::read(&mut fields);
    let workers = worker.unwrap_or_default();
    if workers.len() > MAX_WORKERS.into() {
        fields.report("worker", format!("names the workers of more than {MAX_WORKERS} pairs"));
    }
    let kind = kind?;
    let context = format!(" of a {kind} port");
    let kind = PortKind::read(&kind, &mut fields);
    let name = if fields.has("name") {
        name
    } else {
        kind.as_ref().and_then(|kind| default_name(kind, &mut fields))
    };
    let rules = RulesKeys::read(&mut fields);
    let rules = rules.rules(&mut fields, kind.as_ref().is_some_and(PortKind::is_shared));
    fields.finish(&context);
    Some(PortConfig { name: name?, mtu, workers, kind: kind?, rules })
}

/// Returns a name for a port that is given none.
fn default_name(kind: &PortKind, fields: &mut Fields<'_>) -> Option<String> {
    let name = kind.default_name();
    match check_port_name(&name) {
        Ok(()) => Some(name),
        Err(message) => {
            fields.report("name", format!("must be given here: {message}"));
            None
        }
    }
}

pub(super) fn check_port_name(name: &str) -> Result<(), String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:@".contains(&byte);
    if name.is_empty() || name.len() > MAX_PORT_NAME || !name.bytes().all(allowed) {
        return Err(format!("{name:?} is not a port name: 1 to {MAX_PORT_NAME} letters, digits and -_.:@"));
    }
    Ok(())
}

/// A path that fits a Unix socket address; used for data and control sockets.
pub(super) fn check_socket_path(path: &str) -> Result<(), String> {
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
pub(super) fn parse_mac(text: &str) -> Result<Mac, String> {
    let mac: Mac = text.parse().map_err(|error: MacError| error.to_string())?;
    if mac.is_multicast() || mac == Mac::default() {
        return Err(format!(
            "{mac} is not the address of one station: use an even first octet, such as 52:54:00:12:34:56"
        ));
    }
    Ok(mac)
}
