//! Wires: `[[wire]]` tables, read and written, and checked against the ports that they join.
//!
//! The impairments may stand in the table itself, for both directions, and in its tables `[wire.a_to_b]` and `[wire.b_to_a]`, for one; what stands
//! there holds in place of what the wire says. [`written`] says what both directions have in common in the first.

use super::parse::Document;
use super::rules::{BIT_RATE, PORT_NAME};
use super::values::{Quantity, Unit};
use super::*;
use crate::impairments::{DEFAULT_LIMIT, DEFAULT_LIMIT_BYTES, Distribution, Impairments, Loss, Share, Wire};

mod edit;

/// The tables of the two directions, in the order of [`Wire::directions`].
pub(crate) const DIRECTIONS: [&str; 2] = ["a_to_b", "b_to_a"];

keys! {
    /// The keys of a wire.
    pub(crate) struct WireKeys: Live {
        /// Names the wire, for `ringferry ctl wire`.
        name: String {
            is: WIRE_NAME,
            default: Unset::Means("the names of its ports with `--` between them"),
            example: "r1--r2",
        }
        /// Names the two ports that the wire joins. The first is its end A, the second its end B.
        ports: Vec<String> {
            is: List(PORT_NAME),
            default: Unset::Required,
            example: "r1-eth1,r2-eth1",
        }
        /// Sets the seed of all chance on the wire: with the same one the same frames are lost, counted from the first.
        seed: u64 {
            is: number(0..=i64::MAX as u64),
            default: Unset::Means("drawn when the switch makes the wire; `ringferry ctl wire` shows it"),
            example: "42",
        }
    }
}

keys! {
    /// The impairments of a wire, in both directions or in one.
    #[derive(Clone)]
    pub(crate) struct ImpairmentKeys: Live {
        /// Sets the time that each frame is on the wire.
        delay: u64 {
            is: TIME,
            default: Unset::Value("0s"),
            example: "10ms",
        }
        /// Sets how much the delay of a frame varies. Frames overtake each other if that is more than the time between them.
        jitter: u64 {
            is: TIME,
            default: Unset::Value("0s"),
            example: "1ms",
        }
        /// Sets how the delay varies: `uniform` is between the delay less the jitter and the delay with it; of the others the jitter is the
        /// standard deviation. It needs `jitter`.
        distribution: Distribution {
            is: Choice {
                what: "a distribution",
                words: &[
                    ("uniform", Distribution::Uniform),
                    ("normal", Distribution::Normal),
                    ("pareto", Distribution::Pareto),
                    ("paretonormal", Distribution::ParetoNormal),
                ],
            },
            default: Unset::Value("uniform"),
            example: "normal",
        }
        /// Sets which frames are lost: a share, or `gemodel P R 1-H 1-K`, the model of Gilbert and Elliott with the probabilities of a change to the
        /// bad state and back, and of a loss in the bad state and in the good one (without them 100% less P, 100% and 0%).
        loss: Loss {
            is: LOSS,
            default: Unset::Value("0%"),
            example: "0.1%",
        }
        /// Sets the share of frames that are sent twice.
        duplicate: Share {
            is: SHARE,
            default: Unset::Value("0%"),
            example: "0.5%",
        }
        /// Sets the share of frames that are not delayed, and so overtake those that are. It needs `delay`.
        reorder: Share {
            is: SHARE,
            default: Unset::Value("0%"),
            example: "25%",
        }
        /// Sends at most one of so many frames at once: with 5, each fifth that comes may be. It needs `reorder`.
        gap: u32 {
            is: number_of("frames", 1..=1_000_000),
            default: Unset::Value("1"),
            example: "5",
        }
        /// Sets the share of frames in which one bit is inverted, after their checksums were made.
        corrupt: Share {
            is: SHARE,
            default: Unset::Value("0%"),
            example: "0.01%",
        }
        /// Limits the bits that the wire carries per second, counted from the Ethernet header on. Frames above it wait for their turn.
        rate: u64 {
            is: BIT_RATE,
            default: Unset::Means("no limit"),
            example: "100mbit",
        }
        /// Limits the frames that wait for the rate. Further ones are dropped. It needs `rate`.
        limit: u32 {
            is: number_of("frames", 1..=1_000_000),
            default: Unset::Value("1000"),
            example: "100",
        }
        /// Limits the memory of all frames that wait, for the rate or for the delay, with 128 bytes for each beside its own. Further ones are dropped.
        limit_bytes: u64 {
            is: MEMORY,
            default: Unset::Value("64mib"),
            example: "256mib",
        }
    }
}

/// Units of times.
const TIMES: [Unit; 4] = [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1000), ("ns", 1)];

/// A delay: a frame to the moon and back takes less than 3 s.
const TIME: Quantity = Quantity { placeholder: "TIME", range: 0..=60_000_000_000, units: &TIMES };

/// Units of memory.
const MEMORIES: [Unit; 4] = [("gib", 1 << 30), ("mib", 1 << 20), ("kib", 1 << 10), ("b", 1)];

/// Memory of a direction: the longest frame at least, and at most what 10 Gbit/s need for 3 s.
const MEMORY: Quantity = Quantity { placeholder: "SIZE", range: 72 << 10..=4 << 30, units: &MEMORIES };

/// The name of a wire.
const WIRE_NAME: Text<String> = Text {
    placeholder: "NAME",
    what: "a name of at most 127 letters, digits and -_.:@",
    read: |name| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:@".contains(&byte);
        if name.len() <= MAX_WIRE_NAME && name.bytes().all(allowed) {
            return Ok(name.to_owned());
        }
        Err(format!("{name:?} is not the name of a wire: at most {MAX_WIRE_NAME} letters, digits and -_.:@"))
    },
    write: String::to_owned,
};

/// Bytes that the name of a wire may have: those of two ports, and what is between them.
const MAX_WIRE_NAME: usize = 2 * MAX_PORT_NAME + 2;

/// A share in per cent: `0.1%`.
const SHARE: Text<Share> = Text {
    placeholder: "PERCENT",
    what: "a share such as \"0.1%\"",
    read: share,
    write: |share| percent(*share),
};

/// Which frames are lost.
const LOSS: Text<Loss> = Text {
    placeholder: "PERCENT",
    what: "a share such as \"0.1%\", or \"gemodel 1% 10% 70% 0.1%\"",
    read: loss,
    write: |loss| match *loss {
        Loss::None => percent(Share::NONE),
        Loss::Random(share) => percent(share),
        Loss::GilbertElliott { to_bad, to_good, in_bad, in_good } => {
            let [p, r, h, k] = [to_bad, to_good, in_bad, in_good].map(percent);
            format!("gemodel {p} {r} {h} {k}")
        }
    },
};

/// Digits behind the point that a share in per cent may have.
const DIGITS: usize = 7;

fn share(text: &str) -> Result<Share, String> {
    let wrong = || {
        format!(
            "{text:?} is not a share such as \"0.1%\": 0% to 100%, with at most {DIGITS} digits behind the point"
        )
    };
    let number = text.strip_suffix('%').ok_or_else(wrong)?;
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    if part.len() > DIGITS {
        return Err(wrong());
    }
    let [whole, part] = [whole.to_owned(), format!("{part:0<DIGITS$}")].map(|digits| values::digits(&digits));
    let billionths = || whole?.checked_mul(10u64.pow(DIGITS as u32))?.checked_add(part?);
    billionths().and_then(|all| Share::of_billionths(all.try_into().ok()?)).ok_or_else(wrong)
}

fn percent(share: Share) -> String {
    let unit = 10u32.pow(DIGITS as u32);
    let (whole, part) = (share.billionths() / unit, share.billionths() % unit);
    let part = format!("{part:0DIGITS$}");
    match part.trim_end_matches('0') {
        "" => format!("{whole}%"),
        part => format!("{whole}.{part}%"),
    }
}

fn loss(text: &str) -> Result<Loss, String> {
    let mut words = text.split([' ', ',']).filter(|word| !word.is_empty());
    match words.next() {
        Some("gemodel") => {}
        _ => {
            return share(text).map(|share| if share.is_none() { Loss::None } else { Loss::Random(share) });
        }
    }
    let shares = words.map(share).collect::<Result<Vec<_>, _>>()?;
    let [to_bad, rest @ ..] = shares.as_slice() else {
        return Err(
            "\"gemodel\" needs at least the probability of a change to the bad state: \"gemodel 1% 10%\""
                .to_owned(),
        );
    };
    if rest.len() > 3 {
        return Err(format!("{text:?} has more than the four probabilities of \"gemodel P R 1-H 1-K\""));
    }
    let or = |at: usize, default: Share| rest.get(at).copied().unwrap_or(default);
    Ok(Loss::GilbertElliott {
        to_bad: *to_bad,
        to_good: or(0, to_bad.rest()),
        in_bad: or(1, Share::ALL),
        in_good: or(2, Share::NONE),
    })
}

impl ImpairmentKeys {
    /// Takes from `common` what is not said here.
    fn or(self, common: &ImpairmentKeys) -> ImpairmentKeys {
        ImpairmentKeys {
            delay: self.delay.or(common.delay),
            jitter: self.jitter.or(common.jitter),
            distribution: self.distribution.or(common.distribution),
            loss: self.loss.or(common.loss),
            duplicate: self.duplicate.or(common.duplicate),
            reorder: self.reorder.or(common.reorder),
            gap: self.gap.or(common.gap),
            corrupt: self.corrupt.or(common.corrupt),
            rate: self.rate.or(common.rate),
            limit: self.limit.or(common.limit),
            limit_bytes: self.limit_bytes.or(common.limit_bytes),
        }
    }

    /// Returns the impairments, with what keys ask for that makes no sense: the key, and a message.
    fn impairments(&self) -> (Impairments, Vec<(&'static str, &'static str)>) {
        let ImpairmentKeys {
            delay,
            jitter,
            distribution,
            loss,
            duplicate,
            reorder,
            gap,
            corrupt,
            rate,
            limit,
            limit_bytes,
        } = self;
        let mut wrong = Vec::new();
        let mut needs = |is_wrong: bool, key, message| {
            if is_wrong {
                wrong.push((key, message));
            }
        };
        let is_zero = |value: &Option<u64>| value.unwrap_or(0) == 0;
        let has = |share: &Option<Share>| share.is_some_and(|share| !share.is_none());
        let no_delay = is_zero(delay) && is_zero(jitter);
        needs(
            has(reorder) && no_delay,
            "reorder",
            "needs delay: a frame overtakes only those that are delayed",
        );
        needs(
            gap.is_some_and(|gap| gap > 1) && !has(reorder),
            "gap",
            "needs reorder: it says which frames may be sent at once",
        );
        needs(
            distribution.is_some() && is_zero(jitter),
            "distribution",
            "needs jitter: without it all delays are the same",
        );
        needs(
            limit.is_some() && rate.is_none(),
            "limit",
            "needs rate: without it no frame waits for its turn; limit_bytes limits those that are delayed",
        );
        let none = Impairments::default();
        let impairments = Impairments {
            delay: delay.unwrap_or(none.delay),
            jitter: jitter.unwrap_or(none.jitter),
            distribution: distribution.unwrap_or(none.distribution),
            loss: loss.unwrap_or(none.loss),
            duplicate: duplicate.unwrap_or(none.duplicate),
            reorder: reorder.unwrap_or(none.reorder),
            gap: gap.unwrap_or(none.gap),
            corrupt: corrupt.unwrap_or(none.corrupt),
            rate: *rate,
            limit: limit.unwrap_or(none.limit),
            limit_bytes: limit_bytes.unwrap_or(none.limit_bytes),
        };
        (impairments, wrong)
    }

    /// Returns the keys that give these impairments; keys at their default are left out.
    fn of(impairments: &Impairments) -> ImpairmentKeys {
        fn said<T: PartialEq>(value: T, default: T) -> Option<T> {
            (value != default).then_some(value)
        }
        let none = Impairments::default();
        let Impairments {
            delay,
            jitter,
            distribution,
            loss,
            duplicate,
            reorder,
            gap,
            corrupt,
            rate,
            limit,
            limit_bytes,
        } = *impairments;
        ImpairmentKeys {
            delay: said(delay, none.delay),
            jitter: said(jitter, none.jitter),
            distribution: said(distribution, none.distribution),
            loss: said(loss, none.loss),
            duplicate: said(duplicate, none.duplicate),
            reorder: said(reorder, none.reorder),
            gap: said(gap, none.gap),
            corrupt: said(corrupt, none.corrupt),
            rate,
            limit: said(limit, DEFAULT_LIMIT),
            limit_bytes: said(limit_bytes, DEFAULT_LIMIT_BYTES),
        }
    }
}

/// Keys with their values.
type Entries = Vec<(&'static str, toml::Value)>;

/// Returns the impairments of a direction as keys with their values; keys at their default are left out.
pub(crate) fn impairment_entries(impairments: &Impairments) -> Entries {
    ImpairmentKeys::of(impairments).write()
}

/// A wire as a file has it: the keys of its table, and those of its directions.
pub(super) struct Written {
    pub(super) table: Entries,
    pub(super) directions: [Entries; 2],
}

/// Returns a wire as a file has it.
pub(super) fn written(wire: &Wire) -> Written {
    let Wire { name, ports, seed, directions } = wire;
    let keys = WireKeys { name: Some(name.clone()), ports: Some(ports.to_vec()), seed: *seed };
    let [a, b] = directions.each_ref().map(impairment_entries);
    let (common, a): (Entries, Entries) = a.into_iter().partition(|entry| b.contains(entry));
    let b = b.into_iter().filter(|entry| !common.contains(entry)).collect();
    Written { table: [keys.write(), common].concat(), directions: [a, b] }
}

/// Appends wires as a file has them.
pub(super) fn dump(wires: &[Wire], out: &mut String) {
    for wire in wires {
        let Written { table, directions } = written(wire);
        out.push_str("\n[[wire]]\n");
        append(out, table);
        for (name, entries) in DIRECTIONS.into_iter().zip(directions) {
            if !entries.is_empty() {
                let _ = writeln!(out, "\n[wire.{name}]");
                append(out, entries);
            }
        }
    }
}

/// Reads a `[[wire]]` table.
fn parse(document: &Document, start: usize, table: DeTable<'_>, problems: &mut Vec<Problem>) -> Option<Wire> {
    let before = problems.len();
    let (mut own, mut directions) = (Vec::new(), [None, None]);
    for (key, value) in table {
        match DIRECTIONS.iter().position(|name| key.get_ref() == name) {
            Some(at) => directions[at] = Some(value),
            None => own.push((key, value)),
        }
    }
    let mut fields = Fields::of_document(document, "wire.", start, own, problems);
    let WireKeys { name, ports, seed } = WireKeys::read(&mut fields);
    let common = ImpairmentKeys::read(&mut fields);
    fields.knows(&DIRECTIONS);
    let ports = match ports.map(<[String; 2]>::try_from) {
        Some(Ok(ports)) => Some(ports),
        Some(Err(_)) => {
            fields.report("ports", "must be two: a wire has two ends");
            None
        }
        None if fields.has("ports") => None,
        None => {
            fields.report(
                "ports",
                "must be given: the two ports that the wire joins, as in [\"r1-eth1\", \"r2-eth1\"]",
            );
            None
        }
    };
    // What both directions lack is said once, of the wire.
    let (impairments, wrong) = common.impairments();
    if directions.iter().all(Option::is_none) {
        wrong.iter().for_each(|(key, message)| fields.report(key, *message));
    }
    fields.finish(" of [[wire]]");
    let mut made = [impairments.clone(), impairments];
    for ((value, name), made) in directions.into_iter().zip(["wire.a_to_b.", "wire.b_to_a."]).zip(&mut made) {
        let (start, table) = match value.map(|value| (value.span().start, value.into_inner())) {
            Some((start, DeValue::Table(table))) => (start, table),
            Some((start, _)) => {
                let place = document.place(start);
                problems
                    .push(place.problem(name.trim_end_matches('.'), "must be a table: write [wire.a_to_b]"));
                continue;
            }
            None => (start, DeTable::default()),
        };
        let mut fields = Fields::of_document(document, name, start, table, problems);
        let (impairments, wrong) = ImpairmentKeys::read(&mut fields).or(&common).impairments();
        for (key, message) in wrong {
            let is_said = problems_have(&fields, message);
            if !is_said {
                fields.report(key, message);
            }
        }
        fields.finish(" of a direction of a wire");
        *made = impairments;
    }
    let ports = ports.filter(|_| problems.len() == before)?;
    let name = name.unwrap_or_else(|| ports.join("--"));
    Some(Wire { name, ports, seed, directions: made })
}

fn problems_have(fields: &Fields<'_>, message: &str) -> bool {
    fields.problems().iter().any(|problem| problem.message == message)
}

impl Wire {
    /// Reads one wire from text that [`dump`] has written.
    ///
    /// # Errors
    /// It is not one wire.
    pub(crate) fn of_text(text: &str) -> Result<Wire, String> {
        let config = Config::builder().part_of_a_configuration().toml("the wire", text).build();
        let mut config = config.map_err(|error| error.to_string())?;
        match (config.wires.pop(), config.wires.is_empty()) {
            (Some(wire), true) => Ok(wire),
            _ => Err("that is not one wire".to_owned()),
        }
    }

    /// Returns the wire as text.
    pub(crate) fn to_text(&self) -> String {
        let mut out = String::new();
        dump(std::slice::from_ref(self), &mut out);
        out
    }
}

impl ConfigBuilder {
    /// Reads `[[wire]]` tables.
    pub(super) fn wire_tables(&mut self, document: &Document, value: Spanned<DeValue<'_>>) {
        let start = value.span().start;
        let DeValue::Array(tables) = value.into_inner() else {
            let place = document.place(start);
            self.problems.push(place.problem("wire", "must be an array of tables: write [[wire]]"));
            return;
        };
        for table in tables {
            let start = table.span().start;
            let place = document.place(start);
            let DeValue::Table(table) = table.into_inner() else {
                self.problems.push(place.problem("wire", "must be a table: write [[wire]]"));
                continue;
            };
            if let Some(wire) = parse(document, start, table, &mut self.problems) {
                self.wires.push((place, wire));
            }
        }
    }

    /// Checks that wires have names of their own, and join ports that there are, that are in no other wire, and that have no rules which a wire
    /// does not know.
    pub(super) fn check_wires(&mut self) {
        let (mut names, mut ends) = (BTreeMap::new(), BTreeMap::new());
        for (place, wire) in &self.wires {
            let mut report = |key: &str, message: String| {
                self.problems.push(place.problem(format!("wire.{key}"), message));
            };
            if let Some(other) = names.insert(wire.name.as_str(), place) {
                report("name", format!("the name {:?} is already used by {other}", wire.name));
            }
            for port in &wire.ports {
                if let Some(other) = ends.insert(port.as_str(), wire) {
                    report(
                        "ports",
                        format!(
                            "{port:?} is an end of the wire {:?} already: a port is an end of one wire",
                            other.name
                        ),
                    );
                }
                let Some((_, config)) = self.ports.iter().find(|(_, there)| there.name == *port) else {
                    report("ports", format!("there is no port {port:?}: add it, or take the wire out"));
                    continue;
                };
                if config.kind.is_shared() {
                    report(
                        "ports",
                        format!(
                            "{port:?} stands for several interfaces, and a wire has two ends: give the interface an entry of its own (vif = \"DOMAIN.DEVICE\")"
                        ),
                    );
                }
                let rules = config.rules_that_no_wire_knows();
                if !rules.is_empty() {
                    let them = if rules.len() == 1 { "it" } else { "them" };
                    report(
                        "ports",
                        format!(
                            "port {port} has {}, which an end of the wire {} cannot have, as a wire carries everything as it is: take {them} away from the port, or take the wire out",
                            rules.join(", "),
                            wire.name
                        ),
                    );
                }
            }
        }
    }
}

impl PortConfig {
    /// Returns the rules of the port that make no sense at an end of a wire.
    fn rules_that_no_wire_knows(&self) -> Vec<&'static str> {
        rules_by_key(&self.rules).into_iter().map(|(key, _)| key).filter(|key| *key != "weight").collect()
    }
}

#[cfg(test)]
mod tests;
