//! From text to a checked [`PortConfig`], with the place of every mistake.
//!
//! A `[[port]]` table and a `--port` flag both become [`Fields`], so each key has one check, whichever way it
//! was written. A reader takes the keys it knows; [`Fields::finish`] reports what is left over.

use ringferry_packet::ether::MacError;

use super::*;

/// Where something was written: a file and line, or a flag.
#[derive(Clone, Debug, Default)]
pub(super) struct Place {
    source: Arc<str>,
    line: Option<usize>,
}

impl Place {
    pub(super) fn new(source: &str, line: Option<usize>) -> Place {
        Place { source: source.into(), line }
    }

    /// The place of a `--port` flag with this value.
    pub(super) fn flag(text: &str) -> Place {
        Place::new(&format!("--port {text}"), None)
    }

    pub(super) fn problem(&self, key: impl Into<String>, message: impl Into<String>) -> Problem {
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
pub(super) struct Document<'a> {
    pub(super) name: Arc<str>,
    pub(super) text: &'a str,
}

impl Document<'_> {
    pub(super) fn place(&self, offset: usize) -> Place {
        let before = self.text.as_bytes().iter().take(offset);
        Place {
            source: Arc::clone(&self.name),
            line: Some(1 + before.filter(|byte| **byte == b'\n').count()),
        }
    }
}

/// A value as written. A flag's value has no type of its own: it is whatever its key asks for.
#[derive(Debug)]
pub(super) enum Value {
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
    pub(super) fn from_written(value: toml::Value) -> Value {
        match value {
            toml::Value::String(text) => Value::Text(text),
            toml::Value::Boolean(on) => Value::Boolean(on),
            toml::Value::Integer(number) => Value::Integer(Some(number)),
            toml::Value::Array(items) => Value::List(items.into_iter().map(Value::from_written).collect()),
            other => Value::Other(other.type_str()),
        }
    }

    /// A string.
    pub(super) fn text(&self) -> Result<&str, String> {
        match self {
            Value::Text(text) | Value::Flag(text) => Ok(text),
            other => Err(format!("{} is not a string in quotes", other.describe())),
        }
    }

    pub(super) fn describe(&self) -> String {
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
pub(super) struct Fields<'a> {
    /// Put before a key in messages: `port.` in a file, nothing in a flag.
    prefix: &'static str,
    /// Where the whole table is.
    place: Place,
    entries: BTreeMap<String, (Place, Value)>,
    /// Keys asked for so far, for the message about unknown ones.
    known: Vec<&'static str>,
    problems: &'a mut Vec<Problem>,
}

impl<'a> Fields<'a> {
    pub(super) fn of_document<'i>(
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
        Fields { prefix, place: document.place(start), entries, known: Vec::new(), problems }
    }

    /// Keys and values that are nowhere but in a request. Of a key given twice the last counts.
    pub(super) fn of_values(
        values: impl Iterator<Item = (String, Value)>,
        problems: &'a mut Vec<Problem>,
    ) -> Fields<'a> {
        let entries = values.map(|(key, value)| (key, (Place::default(), value))).collect();
        Fields { prefix: "", place: Place::default(), entries, known: Vec::new(), problems }
    }

    /// Notes a key that is read elsewhere.
    pub(super) fn knows(&mut self, keys: &[&'static str]) {
        self.known.extend(keys);
    }

    pub(super) fn report(&mut self, place: &Place, key: &str, message: impl Into<String>) {
        self.problems.push(place.problem(format!("{}{key}", self.prefix), message));
    }

    /// Where the table or flag is.
    pub(super) fn place(&self) -> Place {
        self.place.clone()
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    /// The keys asked for so far.
    #[cfg(test)]
    pub(super) fn known(&self) -> &[&'static str] {
        &self.known
    }

    /// Where a key is given.
    pub(super) fn place_of(&self, key: &str) -> Option<Place> {
        self.entries.get(key).map(|(place, _)| place.clone())
    }

    /// Whether a key is given, as this very word.
    pub(super) fn is_word(&self, key: &str, word: &str) -> bool {
        let value = self.entries.get(key).map(|(_, value)| value);
        matches!(value, Some(Value::Text(text) | Value::Flag(text)) if text == word)
    }

    /// Whether exactly one of `keys` is given; reports when not.
    fn exactly_one(&mut self, keys: &[&'static str]) -> bool {
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

    pub(super) fn take(&mut self, key: &'static str) -> Option<(Place, Value)> {
        self.known.push(key);
        self.entries.remove(key)
    }

    /// A string that is not empty.
    pub(super) fn text(&mut self, key: &'static str) -> Option<(Place, String)> {
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
    pub(super) fn checked(
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
    pub(super) fn number<T: TryFrom<u64>>(
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
    pub(super) fn boolean(&mut self, key: &'static str) -> Option<(Place, bool)> {
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
    pub(super) fn list(&mut self, key: &'static str) -> Option<(Place, Vec<Value>)> {
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
    fn descriptor(&mut self) -> Option<RawFd> {
        self.number("fd", 3..=RawFd::MAX as u64).map(|(_, fd)| fd)
    }

    /// Reports the keys nobody asked for. `context` says which table or kind they do not belong to.
    pub(super) fn finish(mut self, context: &str) {
        let known = self.known.join(", ");
        for (key, (place, _)) in std::mem::take(&mut self.entries) {
            self.report(&place, &key, format!("is not a key{context}; known: {known}"));
        }
    }
}

/// Reads a `--port` flag. Adds to `problems` whatever is wrong.
pub(super) fn parse_flag(text: &str, problems: &mut Vec<Problem>) -> Option<PortConfig> {
    let place = Place::flag(text);
    let mut parts = text.split(',');
    let head = parts.next().unwrap_or_default();
    let (kind, key) = match head.split_once(':').map(|(kind, _)| kind) {
        Some("vhost-user") => ("vhost-user", "socket"),
        Some("vhost-user-fd") => ("vhost-user", "fd"),
        Some("vhost-user-activation") => ("vhost-user", "activation"),
        Some("tap") => ("tap", "tap"),
        Some("tap-fd") => ("tap", "fd"),
        Some("xen-vif") => ("xen-vif", "provider"),
        _ => {
            let message = "must start with vhost-user:PATH, vhost-user-fd:N, vhost-user-activation:NAME, \
 tap:NAME, tap-fd:N or xen-vif:PROVIDER";
            problems.push(place.problem("", message));
            return None;
        }
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
    parse_port(Fields { prefix: "", place, entries, known: Vec::new(), problems })
}

/// Reads one port. `None`, with the reason reported, when too little of it makes sense to compare it with
/// other ports; other mistakes are reported too.
pub(super) fn parse_port(mut fields: Fields<'_>) -> Option<PortConfig> {
    fields.exactly_one(&["kind"]);
    let (kind_place, kind) = fields.text("kind")?;
    let named = fields.has("name");
    let name = fields.checked("name", check_port_name);
    let mtu = fields.number("mtu", MTU_RANGE).map(|(_, mtu)| mtu);
    let worker = fields.number("worker", 0..=u64::from(MAX_WORKERS) - 1);
    let (kind, context) = match kind.as_str() {
        "vhost-user" => (parse_vhost_user(&mut fields).map(PortKind::VhostUser), " of a vhost-user port"),
        "tap" => (parse_tap(&mut fields).map(PortKind::Tap), " of a tap port"),
        "xen-vif" => (vif::parse(&mut fields).map(PortKind::XenVif), " of a xen-vif port"),
        _ => {
            fields.report(
                &kind_place,
                "kind",
                format!("{kind:?} is not a kind of port; known: \"vhost-user\", \"tap\", \"xen-vif\""),
            );
            return None;
        }
    };
    let name = if named {
        name.map(|(_, name)| name)
    } else {
        kind.as_ref().and_then(|kind| default_name(kind, &mut fields))
    };
    if let (Some((place, _)), Some(PortKind::Tap(TapConfig { queues, .. }))) = (&worker, &kind)
        && *queues != Some(1)
    {
        fields.report(place, "worker", "only goes with queues = 1: of several queues each worker reads one");
    }
    let rules = rules::parse(&mut fields, kind.as_ref().is_some_and(rules::is_shared));
    fields.finish(context);
    Some(PortConfig { name: name?, mtu, worker: worker.map(|(_, worker)| worker), kind: kind?, rules })
}

fn parse_vhost_user(fields: &mut Fields<'_>) -> Option<VhostUserConfig> {
    let one = fields.exactly_one(&["socket", "fd", "activation"]);
    let mode = fields.checked("mode", |mode| match mode {
        "listen" | "connect" => Ok(()),
        _ => Err(format!("{mode:?} is not a mode; known: \"listen\", \"connect\"")),
    });
    if let Some((place, _)) = mode.as_ref().filter(|_| one && !fields.has("socket")) {
        fields.report(
            place,
            "mode",
            "only goes with socket: an inherited socket listens or is connected already",
        );
    }
    let socket = fields.checked("socket", check_socket_path).map(|(_, path)| match &mode {
        Some((_, mode)) if mode == "connect" => VhostUserEndpoint::Connect(path.into()),
        _ => VhostUserEndpoint::Listen(path.into()),
    });
    let fd = fields.descriptor().map(VhostUserEndpoint::Fd);
    let activation =
        fields.checked("activation", check_activation).map(|(_, name)| VhostUserEndpoint::Activation(name));
    let queue_size = fields.number::<u16>("queue_size", 2..=32768);
    if let Some((place, size)) = queue_size.as_ref().filter(|(_, size)| !size.is_power_of_two()) {
        fields.report(place, "queue_size", format!("{size} is not a power of two"));
    }
    let mac =
        fields.checked("mac", |text| parse_mac(text).map(|_| ())).and_then(|(_, text)| parse_mac(&text).ok());
    let features = parse_features(fields);
    Some(VhostUserConfig {
        endpoint: socket.or(fd).or(activation)?,
        queue_size: queue_size.map(|(_, size)| size),
        mac,
        features,
    })
}

/// Segmentation offloads follow `csum` when not given, and may not be asked for without it (VIRTIO 1.4,
/// 5.1.3.1).
fn parse_features(fields: &mut Fields<'_>) -> FeatureToggles {
    let csum = fields.boolean("csum").is_none_or(|(_, on)| on);
    let mut features = FeatureToggles { csum, ..FeatureToggles::default() };
    for (key, on) in [("tso", &mut features.tso), ("uso", &mut features.uso)] {
        let given = fields.boolean(key);
        *on = given.as_ref().map_or(csum, |(_, on)| *on);
        if let Some((place, true)) = given.filter(|_| !csum) {
            fields.report(
                &place,
                key,
                "needs csum: a segmented packet gets new checksums; turn csum on or this off",
            );
        }
    }
    for (key, on) in [
        ("mergeable", &mut features.mergeable),
        ("event_idx", &mut features.event_idx),
        ("indirect", &mut features.indirect),
        ("packed", &mut features.packed),
        ("in_order", &mut features.in_order),
    ] {
        *on = fields.boolean(key).is_none_or(|(_, on)| on);
    }
    features
}

fn parse_tap(fields: &mut Fields<'_>) -> Option<TapConfig> {
    let one = fields.exactly_one(&["tap", "fd"]);
    let existing = fields.boolean("existing");
    if let Some((place, _)) = existing.as_ref().filter(|_| one && !fields.has("tap")) {
        fields.report(place, "existing", "only goes with tap: an inherited tap exists already");
    }
    let tap = fields.checked("tap", check_tap_name);
    let tap = tap.map(|(_, name)| TapSource::Name { name, existing: existing.map(|(_, existing)| existing) });
    let fd = fields.descriptor().map(TapSource::Fd);
    let offloads = fields.boolean("offloads").is_none_or(|(_, on)| on);
    let queues = fields.number("queues", 1..=MAX_WORKERS.into()).map(|(_, queues)| queues);
    Some(TapConfig { source: tap.or(fd)?, offloads, queues })
}

/// The name of a port that gives none.
fn default_name(kind: &PortKind, fields: &mut Fields<'_>) -> Option<String> {
    let name = match Claim::of_kind(kind) {
        Claim::Socket(path) => path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        Claim::Fd(fd) => format!("fd{fd}"),
        Claim::Tap(name) | Claim::Activation(name) | Claim::Name(name) => name.to_owned(),
        Claim::Vif(_, _, Some(vif)) => format!("xen{vif}"),
        Claim::Vif(_, _, None) => "xen".to_owned(),
        Claim::Station(mac, _) => mac.to_string(),
    };
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

/// What the kernel takes as an interface name (`dev_valid_name`), without `%`, which makes it choose a
/// number.
fn check_tap_name(name: &str) -> Result<(), String> {
    if name.len() > MAX_TAP_NAME {
        return Err(format!(
            "{name:?} has {} bytes, an interface name has at most {MAX_TAP_NAME}",
            name.len()
        ));
    }
    let bad = |byte: u8| byte.is_ascii_whitespace() || byte == 0x0b || b"/:%\0".contains(&byte);
    if matches!(name, "" | "." | "..") || name.bytes().any(bad) {
        return Err(format!("{name:?} is not an interface name: no spaces, no / : %"));
    }
    Ok(())
}

/// What systemd takes as `FileDescriptorName=` (systemd.socket(5)).
fn check_activation(name: &str) -> Result<(), String> {
    if name.len() > 255 || name.bytes().any(|byte| !(b' '..=b'~').contains(&byte) || byte == b':') {
        return Err(format!(
            "{name:?} is not a FileDescriptorName= of systemd: at most 255 ASCII characters, no colon"
        ));
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
