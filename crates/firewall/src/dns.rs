//! Messages of the domain name system (RFC 1035), as far as a firewall has to read them: what is asked for, and which addresses an answer has for it.
//!
//! The parser takes what a resolver and a stub say to each other, and nothing else: one question, of the class IN, and of answers the chain of canonical names from
//! the name that was asked for to its addresses. Whatever is cut short, points forwards, loops or does not add up makes the message none.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// UDP port of name servers.
pub(crate) const PORT: u16 = 53;

const HEADER: usize = 12;
/// Bytes of a name, at most (RFC 1035, 2.3.4), and of one of its labels.
const MAX_NAME: usize = 255;
/// Canonical names that are followed, at most: as many as resolvers do.
const MAX_CHAIN: usize = 16;
/// Records of an answer that are read, at most; an answer of 2 KiB has no more.
const MAX_RECORDS: usize = 128;

/// Types that ask for whole zones, or for whatever there is (RFC 6895, 3.1).
const META_TYPES: std::ops::RangeInclusive<u16> = 249..=255;
/// Bytes of the options of a query, at most: a cookie and a client's subnet.
const MAX_OPTIONS: usize = 128;

const RESPONSE: u16 = 0x8000;
const TRUNCATED: u16 = 0x0200;
const CODE: u16 = 0x000f;
const OPCODE: u16 = 0x7800;
const CLASS_IN: u16 = 1;
const TYPE_A: u16 = 1;
const TYPE_CNAME: u16 = 5;
const TYPE_AAAA: u16 = 28;

/// The number by which a name is remembered in a table of flows, the same in every process (FNV-1a).
pub(crate) fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// A name in lower case, as labels with their lengths in front, without the empty one at the end.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(crate) struct Name(Vec<u8>);

impl Name {
    /// Reads a name at `at` of a message; returns it with the offset behind it.
    fn read(message: &[u8], mut at: usize) -> Option<(Name, usize)> {
        let (mut name, mut behind, mut before) = (Vec::new(), None, at);
        loop {
            let len = *message.get(at)?;
            match len >> 6 {
                0 if len == 0 => return Some((Name(name), behind.unwrap_or(at + 1))),
                0 => {
                    let label = message.get(at + 1..at + 1 + usize::from(len))?;
                    name.push(len);
                    name.extend(label.iter().map(u8::to_ascii_lowercase));
                    if name.len() >= MAX_NAME {
                        return None;
                    }
                    at += 1 + usize::from(len);
                }
                // A pointer (4.1.4) leads back, to before where this part of the name began: so the walk ends.
                3 => {
                    let to = usize::from(len & 0x3f) << 8 | usize::from(*message.get(at + 1)?);
                    behind = behind.or(Some(at + 2));
                    if to >= before {
                        return None;
                    }
                    (at, before) = (to, to);
                }
                _ => return None,
            }
        }
    }

    /// Returns the labels, from the first on.
    fn labels(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.0[..];
        std::iter::from_fn(move || {
            let (len, behind) = rest.split_first()?;
            let (label, next) = behind.split_at_checked((*len).into())?;
            rest = next;
            Some(label)
        })
    }
}

/// As in files of zones (RFC 1035, 5.1), without the dot at the end: what is no letter, digit, hyphen or underscore of ASCII stands as its number.
impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (at, label) in self.labels().enumerate() {
            if at > 0 {
                f.write_str(".")?;
            }
            for byte in label {
                match byte {
                    b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' => f.write_char(char::from(*byte))?,
                    other => write!(f, "\\{other:03}")?,
                }
            }
        }
        if self.0.is_empty() { f.write_str(".") } else { Ok(()) }
    }
}

/// The names that a rule is for: one, or with `*.` in front all below one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    name: Name,
    below: bool,
    text: String,
}

impl Pattern {
    /// Reads a pattern: `example.com`, `*.example.com`.
    ///
    /// # Errors
    /// It is none; what to do, for people.
    pub(crate) fn read(text: &str) -> Result<Pattern, String> {
        let (below, name) = text.strip_prefix("*.").map_or((false, text), |name| (true, name));
        let name = name.strip_suffix('.').unwrap_or(name);
        let fits = |label: &str| {
            let inner = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
            (1..=63).contains(&label.len()) && label.chars().all(inner)
        };
        let labels: Vec<&str> = name.split('.').collect();
        if labels.len() < 2 || !labels.iter().all(|label| fits(label)) || name.len() >= MAX_NAME - 2 {
            return Err(format!(
                "{text:?} is no name, such as example.com, or *.example.com for all below it"
            ));
        }
        let bytes = labels.iter().flat_map(|label| {
            std::iter::once(label.len() as u8).chain(label.bytes().map(|byte| byte.to_ascii_lowercase()))
        });
        Ok(Pattern { name: Name(bytes.collect()), below, text: text.to_owned() })
    }

    /// Returns true if the pattern is for this name. `*.example.com` is not for `example.com`.
    pub(crate) fn matches(&self, name: &Name) -> bool {
        if !self.below {
            return self.name == *name;
        }
        let own = self.name.labels().count();
        let Some(more) = name.labels().count().checked_sub(own).filter(|more| *more > 0) else {
            return false;
        };
        name.labels().skip(more).eq(self.name.labels())
    }
}

impl std::fmt::Display for Pattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// A question, in a query or at the beginning of its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) id: u16,
    pub(crate) name: Name,
    /// Type of the records that are asked for.
    pub(crate) kind: u16,
}

impl Question {
    /// Returns the number by which the question is remembered.
    pub(crate) fn number(&self) -> u64 {
        number(&[&self.name.0[..], &self.kind.to_be_bytes()].concat())
    }
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Somebody asks.
    Query(Question),
    /// The answer: addresses of the name, each with the seconds for which it holds.
    Response(Question, Vec<(IpAddr, u32)>),
}

impl Message {
    /// Reads a message; `None` if it is none.
    pub(crate) fn read(message: &[u8]) -> Option<Message> {
        let be16 = |at: usize| Some(u16::from_be_bytes(*message.get(at..)?.first_chunk()?));
        let (id, flags, questions, answers) = (be16(0)?, be16(2)?, be16(4)?, be16(6)?);
        if flags & OPCODE != 0 || questions != 1 {
            return None;
        }
        let (name, at) = Name::read(message, HEADER)?;
        let (kind, class) = (be16(at)?, be16(at + 2)?);
        if class != CLASS_IN {
            return None;
        }
        let question = Question { id, name, kind };
        if flags & RESPONSE == 0 {
            let is_whole = answers == 0 && be16(8)? == 0 && is_options(message.get(at + 4..)?, be16(10)?);
            return (is_whole && !META_TYPES.contains(&kind)).then_some(Message::Query(question));
        }
        let addresses = addresses(message, at + 4, answers.into(), &question.name)?;
        // Of one that fails or is cut short nothing is known.
        let is_good = flags & (TRUNCATED | CODE) == 0;
        Some(Message::Response(question, if is_good { addresses } else { Vec::new() }))
    }
}

/// Returns true if what is behind the question of a query is nothing, or the one record that has the options of EDNS (RFC 6891, 6.1).
fn is_options(rest: &[u8], records: u16) -> bool {
    match (records, rest) {
        (0, []) => true,
        (1, [0, 0, 41, _, _, _, _, _, _, high, low, options @ ..]) => {
            options.len() == usize::from(u16::from_be_bytes([*high, *low])) && options.len() <= MAX_OPTIONS
        }
        _ => false,
    }
}

/// Returns the message by which a server refuses this question; `None` if it is none.
pub(crate) fn refused(message: &[u8]) -> Option<Vec<u8>> {
    const RECURSION_DESIRED: u8 = 1;
    /// Response; recursion is available, and the code of a refusal.
    const FLAGS: [u8; 2] = [0x80, 0x85];
    let (_, at) = Name::read(message, HEADER)?;
    let [high, low, flags, ..]: [u8; HEADER] = *message.first_chunk()?;
    let head = [high, low, FLAGS[0] | flags & RECURSION_DESIRED, FLAGS[1], 0, 1, 0, 0, 0, 0, 0, 0];
    Some([&head[..], message.get(HEADER..at + 4)?].concat())
}

/// One record of an answer that matters.
enum Record {
    Alias { of: Name, is: Name, ttl: u32 },
    Address { of: Name, is: IpAddr, ttl: u32 },
}

/// Reads the records of an answer from `at` on; returns the addresses to which the chain from `name` leads.
fn addresses(message: &[u8], mut at: usize, count: usize, name: &Name) -> Option<Vec<(IpAddr, u32)>> {
    if count > MAX_RECORDS {
        return None;
    }
    let mut records = Vec::new();
    for _ in 0..count {
        let (of, behind) = Name::read(message, at)?;
        let fixed: [u8; 10] = *message.get(behind..)?.first_chunk()?;
        let [k0, k1, c0, c1, t0, t1, t2, t3, l0, l1] = fixed;
        let (kind, class) = (u16::from_be_bytes([k0, k1]), u16::from_be_bytes([c0, c1]));
        // The highest bit is none of a time (RFC 2181, 8).
        let ttl = Some(u32::from_be_bytes([t0, t1, t2, t3])).filter(|ttl| ttl >> 31 == 0).unwrap_or(0);
        let data_at = behind + 10;
        let data = message.get(data_at..data_at + usize::from(u16::from_be_bytes([l0, l1])))?;
        at = data_at + data.len();
        match (class, kind) {
            (CLASS_IN, TYPE_A) => {
                let is = IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(data).ok()?));
                records.push(Record::Address { of, is, ttl });
            }
            (CLASS_IN, TYPE_AAAA) => {
                let is = IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(data).ok()?));
                records.push(Record::Address { of, is, ttl });
            }
            (CLASS_IN, TYPE_CNAME) => {
                let (is, end) = Name::read(message, data_at)?;
                if end != at {
                    return None;
                }
                records.push(Record::Alias { of, is, ttl });
            }
            _ => {}
        }
    }
    // Each link may come anywhere; an address holds no longer than the links to it.
    let (mut current, mut least) = (name, u32::MAX);
    for _ in 0..MAX_CHAIN {
        let next = records.iter().find_map(|record| match record {
            Record::Alias { of, is, ttl } if of == current => Some((is, *ttl)),
            _ => None,
        });
        let Some((is, ttl)) = next else { break };
        (current, least) = (is, least.min(ttl));
    }
    let found = records.iter().filter_map(|record| match record {
        Record::Address { of, is, ttl } if of == current => Some((*is, least.min(*ttl))),
        _ => None,
    });
    Some(found.collect())
}

#[cfg(test)]
mod tests;
