//! The rules of a port ([`Rules`]) as keys: read from a `[[port]]` table, from a flag or from `ringferry ctl set`, and written back.
//! Whatever is written by [`entries`] is read as the same rules by [`parse()`]; nothing else knows the keys.

use std::net::{IpAddr, Ipv6Addr};

use ringferry_packet::ether::Mac;
use toml::Value as Toml;

use super::parse::{Value, parse_mac};
use super::*;
use crate::rules::{Guard, Limits, MAX_VID, Network, Rate, Rules, Vid, Vlans};

/// Every key of a port's rules, in the order in which they are written.
pub(crate) const KEYS: [&str; 18] = [
    "vlan",
    "trunk",
    "native",
    "isolated",
    "max_macs",
    "static_macs",
    "allowed_macs",
    "allowed_ips",
    "storm",
    "storm_burst",
    "rate_in",
    "rate_in_burst",
    "rate_in_packets",
    "rate_in_packets_burst",
    "rate_out",
    "rate_out_burst",
    "rate_out_packets",
    "rate_out_packets_burst",
];

/// Those whose values are lists. In a flag a list goes on after each comma.
pub(super) const LISTS: [&str; 4] = ["trunk", "static_macs", "allowed_macs", "allowed_ips"];

/// Keys that make no sense without another.
const DEPENDENTS: [(&str, &str); 6] = [
    ("trunk", "native"),
    ("storm", "storm_burst"),
    ("rate_in", "rate_in_burst"),
    ("rate_in_packets", "rate_in_packets_burst"),
    ("rate_out", "rate_out_burst"),
    ("rate_out_packets", "rate_out_packets_burst"),
];

/// Most entries of a list; a trunk is bounded by the number of VLANs.
const MAX_LIST: usize = 4094;
/// Most addresses that a port may be limited to: more than the largest forwarding database has.
const MAX_MACS: u64 = 1 << 20;

/// A unit: its name, and how many of the smallest one it is.
type Unit = (&'static str, u64);

/// Units of bit rates, which are decimal, with the names of tc(8). Its `bps` are bytes per second and everybody else's are
/// bits, so there is none here.
const BIT_RATES: [Unit; 5] =
    [("tbit", 1_000_000_000_000), ("gbit", 1_000_000_000), ("mbit", 1_000_000), ("kbit", 1000), ("bit", 1)];
/// Units of packet rates.
const PACKET_RATES: [Unit; 3] = [("mpps", 1_000_000), ("kpps", 1000), ("pps", 1)];
/// Units of sizes (IEC 80000-13; tc(8) has 1024 for both kinds).
const SIZES: [Unit; 7] = [
    ("gib", 1 << 30),
    ("mib", 1 << 20),
    ("kib", 1 << 10),
    ("gb", 1_000_000_000),
    ("mb", 1_000_000),
    ("kb", 1000),
    ("b", 1),
];

/// Bits per second that a limit may be.
const BITS: RangeInclusive<u64> = 1000..=1_000_000_000_000;
/// Packets per second that a limit may be.
const PACKETS: RangeInclusive<u64> = 1..=1_000_000_000;
/// Bytes that may come at once. A frame that is to be segmented holds up to 64 KiB and counts with the headers of its
/// segments, 122 of them at the smallest common segment size (RFC 9293, 3.7.1: 536). With less it would never pass.
const BURST_BYTES: RangeInclusive<u64> = 72 << 10..=1 << 32;
/// Packets that may come at once: the same frame as its segments.
const BURST_PACKETS: RangeInclusive<u64> = 128..=1_000_000_000;
/// Flooded packets that may come at once; those are not segmented.
const BURST_STORM: RangeInclusive<u64> = 1..=1_000_000_000;
/// Burst where none is given, in bytes, at least: two of the longest frames.
const DEFAULT_BURST_BYTES: u64 = 128 << 10;
/// Burst where none is given, as a part of what passes in a second: a tenth, which is a few round trips of TCP across the
/// Internet. (Open vSwitch's manual asks for 80 %, and its default for less than 10 % on a fast port.)
const BURST_PART: u64 = 10;

/// What a rate counts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Bytes,
    Packets,
    Flooded,
}

impl Of {
    fn units(self) -> &'static [Unit] {
        if self == Of::Bytes { &BIT_RATES } else { &PACKET_RATES }
    }

    fn range(self) -> RangeInclusive<u64> {
        if self == Of::Bytes { BITS } else { PACKETS }
    }

    fn bursts(self) -> RangeInclusive<u64> {
        match self {
            Of::Bytes => BURST_BYTES,
            Of::Packets => BURST_PACKETS,
            Of::Flooded => BURST_STORM,
        }
    }

    /// The burst of a rate that names none. Storms are measured by the second, as switches do it.
    fn burst(self, per_second: u64) -> u64 {
        match self {
            Of::Bytes => (per_second / BURST_PART).max(DEFAULT_BURST_BYTES),
            Of::Packets => (per_second / BURST_PART).max(*BURST_PACKETS.start()),
            Of::Flooded => per_second,
        }
    }
}

/// Reads the rules of a port. `shared` says that several ports will have them.
pub(super) fn parse(fields: &mut Fields<'_>, shared: bool) -> Rules {
    let vlans = parse_vlans(fields);
    let isolated = fields.boolean("isolated").is_some_and(|(_, on)| on);
    let max_macs = fields.number("max_macs", 0..=MAX_MACS).map(|(_, most)| most);
    let statics_place = fields.place_of("static_macs").filter(|_| shared);
    let static_macs = list(fields, "static_macs", |value| station(value, &vlans)).unwrap_or_default();
    if let Some(place) = statics_place.filter(|_| !static_macs.is_empty()) {
        fields.report(&place, "static_macs", "only goes with vif: an address is behind one interface alone");
    }
    Rules {
        isolated,
        max_macs,
        static_macs,
        guard: parse_guard(fields),
        storm: parse_rate(fields, "storm", "storm_burst", Of::Flooded),
        rate_in: Limits {
            bytes: parse_rate(fields, "rate_in", "rate_in_burst", Of::Bytes),
            packets: parse_rate(fields, "rate_in_packets", "rate_in_packets_burst", Of::Packets),
        },
        rate_out: Limits {
            bytes: parse_rate(fields, "rate_out", "rate_out_burst", Of::Bytes),
            packets: parse_rate(fields, "rate_out_packets", "rate_out_packets_burst", Of::Packets),
        },
        vlans,
    }
}

fn parse_vlans(fields: &mut Fields<'_>) -> Vlans {
    let access = fields.has("vlan");
    let trunk_place = fields.place_of("trunk");
    let native_place = fields.place_of("native");
    if let Some(place) = trunk_place.as_ref().filter(|_| access) {
        fields.report(
            place,
            "trunk",
            "cannot be given with vlan: a port is in one VLAN, or a trunk of several",
        );
    }
    if let Some(place) = native_place.as_ref().filter(|_| trunk_place.is_none()) {
        let message = "only goes with trunk: say which VLANs the port carries, or trunk = \"all\"";
        fields.report(place, "native", message);
    }
    let vlan = fields.number("vlan", 0..=MAX_VID.into());
    let trunk = parse_trunk(fields);
    let native = parse_native(fields);
    match (vlan, trunk) {
        (Some((_, vid)), _) => Vlans::Access(vid),
        // Where only some VLANs are wanted, frames without a tag are not, unless that is said.
        (None, Some(allowed)) => {
            let native = native.unwrap_or_else(|| allowed.is_none().then_some(0));
            Vlans::Trunk { allowed, native }
        }
        (None, None) => Vlans::default(),
    }
}

/// The VLANs of a trunk; `None` inside: all.
fn parse_trunk(fields: &mut Fields<'_>) -> Option<Option<Vec<Vid>>> {
    if fields.is_word("trunk", "all") {
        fields.take("trunk");
        return Some(None);
    }
    let place = fields.place_of("trunk");
    let mut vids: Vec<Vid> = list(fields, "trunk", vid_range)?.into_iter().flatten().collect();
    let place = place?;
    let count = vids.len();
    vids.sort_unstable();
    vids.dedup();
    if vids.is_empty() {
        fields.report(&place, "trunk", "names no VLAN: a port that carries nothing is of no use");
        return None;
    }
    if vids.len() < count {
        fields.report(&place, "trunk", "names a VLAN twice");
    }
    Some(Some(vids))
}

/// `None` inside: frames without a tag are dropped.
fn parse_native(fields: &mut Fields<'_>) -> Option<Option<Vid>> {
    if fields.is_word("native", "none") {
        fields.take("native");
        return Some(None);
    }
    fields.number("native", 0..=MAX_VID.into()).map(|(_, vid)| Some(vid))
}

/// One VLAN that has a tag, or several: `10`, `"20-29"`.
fn vid_range(value: &Value) -> Result<RangeInclusive<Vid>, String> {
    let tagged = |number: u64| Vid::try_from(number).ok().filter(|vid| (1..=MAX_VID).contains(vid));
    let vid = |text: &str| digits(text).and_then(tagged);
    let range = match value {
        Value::Integer(Some(0)) => None,
        Value::Integer(number) => {
            number.and_then(|number| tagged(number.try_into().ok()?)).map(|vid| vid..=vid)
        }
        Value::Text(text) | Value::Flag(text) => match text.split_once('-') {
            Some((first, last)) => vid(first).zip(vid(last)).map(|(first, last)| first..=last),
            None => vid(text).map(|vid| vid..=vid),
        },
        _ => None,
    };
    range.filter(|range| !range.is_empty()).ok_or_else(|| {
        let what = value.describe();
        format!("{what} is neither a VLAN, 1 to {MAX_VID}, nor a range such as \"20-29\" (frames without a tag: native)")
    })
}

/// The VLAN of frames without a tag.
fn own(vlans: &Vlans) -> Option<Vid> {
    match vlans {
        Vlans::Access(vid) => Some(*vid),
        Vlans::Trunk { native, .. } => *native,
    }
}

/// Whether frames of a VLAN pass.
fn carries(vlans: &Vlans, vid: Vid) -> bool {
    let tagged = match vlans {
        Vlans::Access(_) => false,
        Vlans::Trunk { allowed, .. } => {
            vid > 0 && allowed.as_ref().is_none_or(|allowed| allowed.binary_search(&vid).is_ok())
        }
    };
    tagged || own(vlans) == Some(vid)
}

/// A static address: `MAC`, in the VLAN of frames without a tag, or `MAC@VLAN`.
fn station(value: &Value, vlans: &Vlans) -> Result<(Mac, Vid), String> {
    let text = value.text()?;
    let (mac, vid) = match text.split_once('@') {
        None => {
            let vid = own(vlans).ok_or_else(|| {
                format!("{text:?} is in no VLAN, as frames without a tag are not: write {text}@VLAN")
            })?;
            (text, vid)
        }
        Some((mac, vid)) => {
            let number = digits(vid).and_then(|vid| Vid::try_from(vid).ok()).filter(|vid| *vid <= MAX_VID);
            (mac, number.ok_or_else(|| format!("{vid:?} in {text:?} is not a VLAN, 0 to {MAX_VID}"))?)
        }
    };
    if !carries(vlans, vid) {
        return Err(format!("{text:?} is in a VLAN that the port does not carry"));
    }
    Ok((parse_mac(mac)?, vid))
}

fn parse_guard(fields: &mut Fields<'_>) -> Option<Guard> {
    let guarded = fields.has("allowed_macs");
    let ips_place = fields.place_of("allowed_ips").filter(|_| !guarded);
    if let Some(place) = ips_place {
        let message =
            "needs allowed_macs: whoever may send from any Ethernet address can answer for any IP address";
        fields.report(&place, "allowed_ips", message);
    }
    let macs = list(fields, "allowed_macs", |value| parse_mac(value.text()?));
    let ips = list(fields, "allowed_ips", |value| network(value.text()?));
    macs.map(|macs| Guard { macs, ips })
}

/// `10.0.0.2`, `10.1.0.0/16`, `fd00::/64`.
fn network(text: &str) -> Result<Network, String> {
    let (address, bits) = text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
    let wrong =
        || format!("{text:?} is not an IP address or network, such as 10.0.0.2, 10.1.0.0/16 or fd00::/64");
    let address: IpAddr = address.parse().map_err(|_| wrong())?;
    let most = if address.is_ipv4() { 32 } else { 128 };
    let bits = match bits {
        None => most,
        Some(bits) => digits(bits).filter(|bits| *bits <= most).ok_or_else(wrong)?,
    };
    let first = masked(address, bits);
    if first != address {
        return Err(format!(
            "{text:?} has bits set beyond the first {bits}: write {first}/{bits}, or one address alone"
        ));
    }
    Ok(Network { address, bits: bits as u8 })
}

/// The first address with the same first `bits`.
fn masked(address: IpAddr, bits: u64) -> IpAddr {
    match address {
        IpAddr::V4(address) => {
            let mask = u32::MAX.checked_shl(32 - bits as u32).unwrap_or(0);
            IpAddr::V4((u32::from(address) & mask).into())
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128 - bits as u32).unwrap_or(0);
            IpAddr::V6(Ipv6Addr::from(u128::from(address) & mask))
        }
    }
}

fn write_network(network: &Network) -> String {
    let Network { address, bits } = network;
    let host = if address.is_ipv4() { 32 } else { 128 };
    if *bits == host { address.to_string() } else { format!("{address}/{bits}") }
}

/// A list whose entries `read` makes, each once; `"none"` is an empty one.
fn list<T: PartialEq>(
    fields: &mut Fields<'_>,
    key: &'static str,
    read: impl Fn(&Value) -> Result<T, String>,
) -> Option<Vec<T>> {
    if fields.is_word(key, "none") {
        fields.take(key);
        return Some(Vec::new());
    }
    let (place, values) = fields.list(key)?;
    if values.len() > MAX_LIST {
        fields.report(&place, key, format!("has {} entries, at most {MAX_LIST} are possible", values.len()));
        return None;
    }
    let mut made = Vec::new();
    let mut wrong = Vec::new();
    for value in &values {
        match read(value) {
            Ok(entry) if made.contains(&entry) => wrong.push(format!("names {} twice", value.describe())),
            Ok(entry) => made.push(entry),
            Err(message) => wrong.push(message),
        }
    }
    if wrong.is_empty() {
        return Some(made);
    }
    wrong.into_iter().for_each(|message| fields.report(&place, key, message));
    None
}

fn parse_rate(fields: &mut Fields<'_>, key: &'static str, burst_key: &'static str, of: Of) -> Option<Rate> {
    let alone = fields.place_of(burst_key).filter(|_| !fields.has(key));
    if let Some(place) = alone {
        fields.report(&place, burst_key, format!("only goes with {key}"));
    }
    let rate = quantity(fields, key, of.units(), of.range());
    let burst = match of {
        Of::Bytes => quantity(fields, burst_key, &SIZES, of.bursts()),
        _ => fields.number(burst_key, of.bursts()).map(|(_, packets)| packets),
    };
    let per_second = if of == Of::Bytes { rate? / 8 } else { rate? };
    Some(Rate { per_second, burst: burst.unwrap_or_else(|| of.burst(per_second)) })
}

/// A number with a unit, in the smallest one.
fn quantity(
    fields: &mut Fields<'_>,
    key: &'static str,
    units: &[Unit],
    range: RangeInclusive<u64>,
) -> Option<u64> {
    let (place, value) = fields.take(key)?;
    let read = value.text().and_then(|text| {
        let number = measure(text, units)?;
        let least_and_most = || format!("{}..={}", write(*range.start(), units), write(*range.end(), units));
        if range.contains(&number) {
            Ok(number)
        } else {
            Err(format!("{text:?} is outside {}", least_and_most()))
        }
    });
    read.map_err(|message| fields.report(&place, key, message)).ok()
}

/// `2.5gbit` in bits.
fn measure(text: &str, units: &[Unit]) -> Result<u64, String> {
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let known = || units.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    let scale = units.iter().find(|(name, _)| unit.eq_ignore_ascii_case(name)).map(|(_, scale)| *scale);
    let wrong = || format!("{text:?} is not a number with one of the units {}", known());
    let scale = scale.ok_or_else(wrong)?;
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    // No unit has more than 12 digits, so none of a longer fraction could count.
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

/// A number in the unit in which it is shortest.
fn write(number: u64, units: &[Unit]) -> String {
    let whole = units.iter().filter(|(_, scale)| number.is_multiple_of(*scale));
    let (name, scale) = whole.max_by_key(|(_, scale)| *scale).copied().unwrap_or(("", 1));
    format!("{}{name}", number / scale)
}

/// Digits and nothing else, not even a sign.
fn digits(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// The rules by key, in the order of [`KEYS`], without what is as it is by default.
pub(crate) fn entries(rules: &Rules) -> Vec<(&'static str, Toml)> {
    let Rules { vlans, isolated, max_macs, static_macs, guard, storm, rate_in, rate_out } = rules;
    let mut out = Vec::new();
    write_vlans(vlans, &mut out);
    if *isolated {
        out.push(("isolated", true.into()));
    }
    if let Some(most) = max_macs {
        out.push(("max_macs", i64::from(*most).into()));
    }
    let strings = |items: Vec<String>| Toml::Array(items.into_iter().map(Toml::String).collect());
    if !static_macs.is_empty() {
        let station = |(mac, vid): &(Mac, Vid)| match own(vlans) {
            Some(own) if own == *vid => mac.to_string(),
            _ => format!("{mac}@{vid}"),
        };
        out.push(("static_macs", strings(static_macs.iter().map(station).collect())));
    }
    if let Some(Guard { macs, ips }) = guard {
        out.push(("allowed_macs", strings(macs.iter().map(Mac::to_string).collect())));
        if let Some(ips) = ips {
            out.push(("allowed_ips", strings(ips.iter().map(write_network).collect())));
        }
    }
    for (rate, key, burst_key, of) in [
        (storm, "storm", "storm_burst", Of::Flooded),
        (&rate_in.bytes, "rate_in", "rate_in_burst", Of::Bytes),
        (&rate_in.packets, "rate_in_packets", "rate_in_packets_burst", Of::Packets),
        (&rate_out.bytes, "rate_out", "rate_out_burst", Of::Bytes),
        (&rate_out.packets, "rate_out_packets", "rate_out_packets_burst", Of::Packets),
    ] {
        let Some(Rate { per_second, burst }) = *rate else { continue };
        let shown = if of == Of::Bytes { per_second.saturating_mul(8) } else { per_second };
        out.push((key, write(shown, of.units()).into()));
        if burst != of.burst(per_second) {
            let burst = match of {
                Of::Bytes => Toml::String(write(burst, &SIZES)),
                _ => Toml::Integer(burst.try_into().unwrap_or(i64::MAX)),
            };
            out.push((burst_key, burst));
        }
    }
    out
}

fn write_vlans(vlans: &Vlans, out: &mut Vec<(&'static str, Toml)>) {
    match vlans {
        Vlans::Access(vid) => out.push(("vlan", i64::from(*vid).into())),
        Vlans::Trunk { allowed: None, native: Some(0) } => {}
        Vlans::Trunk { allowed, native } => {
            out.push(("trunk", allowed.as_ref().map_or_else(|| "all".into(), |vids| write_vids(vids))));
            match native {
                Some(vid) => out.push(("native", i64::from(*vid).into())),
                None if allowed.is_none() => out.push(("native", "none".into())),
                None => {}
            }
        }
    }
}

/// Three and more in a row are written as a range.
fn write_vids(vids: &[Vid]) -> Toml {
    let rows = vids.chunk_by(|one, next| one + 1 == *next);
    let items = rows.flat_map(|row| match row {
        [first, .., last] if row.len() > 2 => vec![Toml::String(format!("{first}-{last}"))],
        _ => row.iter().map(|vid| i64::from(*vid).into()).collect(),
    });
    Toml::Array(items.collect())
}

/// What `ringferry ctl set` or `unset` changes about the rules of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Edit {
    set: BTreeMap<String, String>,
    /// Keys that go, together with those that are set.
    remove: Vec<&'static str>,
}

impl Edit {
    /// Sets keys: `KEY=VALUE`, the value as in a flag. Of `vlan` and `trunk` the one replaces the other.
    ///
    /// # Errors
    /// What has no value, and what is given twice. Keys and values are checked by [`PortConfig::edited`].
    pub(crate) fn set(settings: &[String]) -> Result<Edit, ConfigError> {
        let mut set = BTreeMap::new();
        let mut problems = Vec::new();
        let mut report = |key: &str, message: &str| problems.push(Place::default().problem(key, message));
        for setting in settings {
            match setting.split_once('=') {
                None => report(&format!("{setting:?}"), "is not KEY=VALUE"),
                Some((key, value)) => {
                    if set.insert(key.to_owned(), value.to_owned()).is_some() {
                        report(key, "is given twice");
                    }
                }
            }
        }
        if settings.is_empty() {
            report("", "nothing is to be set: give KEY=VALUE");
        }
        if !problems.is_empty() {
            return Err(ConfigError { problems });
        }
        let replaced: &[&str] = match (set.contains_key("vlan"), set.contains_key("trunk")) {
            (true, false) => &["trunk", "native"],
            (false, true) => &["vlan"],
            _ => &[],
        };
        let remove = replaced.iter().copied().filter(|key| !set.contains_key(*key)).collect();
        Ok(Edit { set, remove })
    }

    /// Takes keys away, and those that make no sense without them.
    ///
    /// # Errors
    /// What is no key.
    pub(crate) fn unset(keys: &[String]) -> Result<Edit, ConfigError> {
        let mut remove = Vec::new();
        let mut problems = Vec::new();
        for key in keys {
            match KEYS.into_iter().find(|known| known == key) {
                Some(key) => remove.push(key),
                None => problems.push(Place::default().problem(key, unknown())),
            }
        }
        if keys.is_empty() {
            problems.push(Place::default().problem("", "nothing is to be unset: give keys"));
        }
        if !problems.is_empty() {
            return Err(ConfigError { problems });
        }
        let dependents = DEPENDENTS.iter().filter(|(key, _)| remove.contains(key)).map(|(_, other)| *other);
        let dependents: Vec<_> = dependents.collect();
        remove.extend(dependents);
        Ok(Edit { set: BTreeMap::new(), remove })
    }

    /// Whether a key may have another value afterwards.
    pub(super) fn touches(&self, key: &str) -> bool {
        self.set.contains_key(key) || self.remove.contains(&key)
    }
}

/// What `ringferry ctl` can change, for the message about a key that it cannot.
fn unknown() -> String {
    format!("is not a rule that can change while the switch runs; known: {}", KEYS.join(", "))
}

impl PortConfig {
    /// The rules that the port would have after an edit.
    ///
    /// # Errors
    /// Whatever a file with these keys would be refused for.
    pub(crate) fn edited(&self, edit: &Edit) -> Result<Rules, ConfigError> {
        let mut problems = Vec::new();
        for key in edit.set.keys().filter(|key| !KEYS.contains(&key.as_str())) {
            problems.push(Place::default().problem(key, unknown()));
        }
        if !problems.is_empty() {
            return Err(ConfigError { problems });
        }
        let kept = entries(&self.rules).into_iter().filter(|(key, _)| !edit.remove.contains(key));
        let kept = kept.map(|(key, value)| (key.to_owned(), Value::from_written(value)));
        let set = edit.set.iter().map(|(key, value)| (key.clone(), Value::Flag(value.clone())));
        // What comes later replaces what was there.
        let mut fields = Fields::of_values(kept.chain(set), &mut problems);
        let rules = parse(&mut fields, self.kind.is_shared());
        fields.finish("");
        if problems.is_empty() { Ok(rules) } else { Err(ConfigError { problems }) }
    }
}

#[cfg(test)]
mod tests;
