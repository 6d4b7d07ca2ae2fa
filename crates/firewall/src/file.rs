//! Policy files: a line for each rule, read as a whole or not at all.
//!
//! ```text
//! # A web server that needs its updates.
//! egress deny
//! ingress deny
//!
//! set updates  203.0.113.0/24 2001:db8:7::/48 !203.0.113.99
//! set blocked  file blocked.txt
//!
//! deny  in          from @blocked
//! allow in  tcp     port 80,443
//! allow in  icmp
//! allow out udp     port 53  to 10.0.0.53
//! allow out tcp     port 443 to @updates
//! ```
//!
//! A file of a set has one prefix in a line. All mistakes are found at once, each with its line and what to do.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;
use std::ops::RangeInclusive;

use ringferry_packet::parse::{PROTO_SCTP, PROTO_TCP, PROTO_UDP};

use crate::address::{BUILT_IN, Member};
use crate::dns::Pattern;
use crate::flows::FLOWS;
use crate::policy::{Action, Draft, MAX_PREFIXES, MAX_RULES, Policy, Protocol, Remote, Rule, Source};

/// IP protocol numbers of GRE (RFC 2784) and ESP (RFC 4303).
const PROTO_GRE: u8 = 47;
const PROTO_ESP: u8 = 50;

/// Most mistakes that are told: a file that is none has one in every line.
const MAX_MISTAKES: usize = 20;

/// Longest text of a rule that is kept to be shown.
const MAX_TEXT: usize = 200;

/// A mistake in a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The file, as it was named.
    pub file: String,
    /// The line, from 1 on; 0 if the file as a whole is meant.
    pub line: usize,
    /// What is wrong, and what to do.
    pub message: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.file, self.message),
            line => write!(f, "{}:{line}: {}", self.file, self.message),
        }
    }
}

/// All mistakes of a policy, a line each.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(Mistake::to_string).collect::<Vec<_>>().join("\n"))]
pub struct Mistakes(pub Vec<Mistake>);

/// Reads a policy. `file` is its name in messages; `open` reads the file of a set, by the name that it is given by.
///
/// # Errors
/// [`Mistakes`].
pub fn read(
    file: &str,
    text: &str,
    open: &mut dyn FnMut(&str) -> io::Result<String>,
) -> Result<Policy, Mistakes> {
    let mut reader = Reader {
        file,
        open,
        draft: Draft::default(),
        names: HashMap::new(),
        prefixes: 0,
        files: BTreeMap::new(),
        first_name: None,
        mistakes: Vec::new(),
        given: HashMap::new(),
    };
    for (line, text) in (1..).zip(lines(text)) {
        if let Err(message) = reader.line(line, text) {
            reader.mistake(line, message);
        }
    }
    if let Some(line) = reader.first_name.filter(|_| reader.draft.resolvers.is_empty()) {
        reader.mistake(
            line,
            "names need a line `resolver ADDRESS`, with the name servers whose answers are believed"
                .to_owned(),
        );
    }
    if !reader.mistakes.is_empty() {
        return Err(Mistakes(reader.mistakes));
    }
    let source = Source { text: text.to_owned(), files: reader.files };
    Policy::new(reader.draft, source).ok_or_else(|| {
        let message = "its sets overlap in so many ways that it would take too much memory: use fewer sets, or fewer rules about them".to_owned();
        Mistakes(vec![Mistake { file: file.to_owned(), line: 0, message }])
    })
}

struct Reader<'r> {
    file: &'r str,
    open: &'r mut dyn FnMut(&str) -> io::Result<String>,
    draft: Draft,
    /// Numbers of the sets, by name.
    names: HashMap<String, u16>,
    prefixes: usize,
    /// The files of sets that were read, by name.
    files: BTreeMap<String, String>,
    /// The line of the first rule with a name.
    first_name: Option<usize>,
    /// Settings that were given, and in which line.
    given: HashMap<&'static str, usize>,
    mistakes: Vec<Mistake>,
}

/// The words that begin a line.
const FIRST: [&str; 10] =
    ["allow", "deny", "set", "egress", "ingress", "dry-run", "dhcp", "ethertype", "flows", "resolver"];

impl Reader<'_> {
    fn mistake(&mut self, line: usize, message: String) {
        let file = self.file.to_owned();
        match self.mistakes.len() {
            MAX_MISTAKES => self.mistakes.push(Mistake {
                file,
                line: 0,
                message: "there are further mistakes".to_owned(),
            }),
            len if len < MAX_MISTAKES => self.mistakes.push(Mistake { file, line, message }),
            _ => {}
        }
    }

    fn line(&mut self, line: usize, text: &str) -> Result<(), String> {
        let mut words = text.split_whitespace();
        let Some(first) = words.next() else { return Ok(()) };
        let rest: Vec<&str> = words.collect();
        match first {
            "allow" => self.rule(Action::Allow, line, text, &rest),
            "deny" => self.rule(Action::Deny, line, text, &rest),
            "set" => self.set(line, &rest),
            "egress" => {
                self.once("egress", line)?;
                self.draft.defaults[0] = action(first, &rest)?;
                Ok(())
            }
            "ingress" => {
                self.once("ingress", line)?;
                self.draft.defaults[1] = action(first, &rest)?;
                Ok(())
            }
            "dry-run" => {
                self.once("dry-run", line)?;
                self.draft.dry_run = on(first, &rest)?;
                Ok(())
            }
            "dhcp" => {
                self.once("dhcp", line)?;
                self.draft.dhcp = action(first, &rest)? == Action::Allow;
                Ok(())
            }
            "flows" => {
                self.once("flows", line)?;
                let flows = match rest[..] {
                    [flows] => flows.parse().ok().filter(|flows| FLOWS.contains(flows)),
                    _ => None,
                };
                let (least, most) = (FLOWS.start(), FLOWS.end());
                self.draft.flows =
                    flows.ok_or_else(|| format!("flows takes one number, {least} to {most}"))?;
                Ok(())
            }
            "ethertype" => self.ether_types(&rest),
            "resolver" => self.resolvers(&rest),
            other => Err(format!("{other:?} begins no line of a policy; known: {}", FIRST.join(", "))),
        }
    }

    fn once(&mut self, setting: &'static str, line: usize) -> Result<(), String> {
        match self.given.insert(setting, line) {
            Some(before) => {
                Err(format!("{setting} was said in line {before} already: leave one of them out"))
            }
            None => Ok(()),
        }
    }

    fn ether_types(&mut self, words: &[&str]) -> Result<(), String> {
        /// Below this a type is a length (IEEE 802.3).
        const LEAST: u16 = 0x0600;
        /// IP, ARP and tags: rules are about what is in them.
        const OWN: [u16; 6] = [0x0800, 0x0806, 0x8035, 0x86dd, 0x8100, 0x88a8];
        if words.is_empty() {
            return Err("ethertype takes numbers, such as 0x88f7".to_owned());
        }
        for word in words.iter().flat_map(|word| word.split(',')).filter(|word| !word.is_empty()) {
            let number = word.strip_prefix("0x").and_then(|digits| u16::from_str_radix(digits, 16).ok());
            let number = number.filter(|number| *number >= LEAST);
            let number =
                number.ok_or_else(|| format!("{word:?} is no type of frames: write 0x0600 to 0xffff"))?;
            if OWN.contains(&number) {
                return Err(format!("{word} cannot pass as a whole: rules say what of it does"));
            }
            self.draft.ether_types.push(number);
        }
        Ok(())
    }

    fn resolvers(&mut self, words: &[&str]) -> Result<(), String> {
        if words.is_empty() {
            return Err("resolver takes the addresses of name servers: resolver 10.0.0.53".to_owned());
        }
        for word in words.iter().flat_map(|word| word.split(',')).filter(|word| !word.is_empty()) {
            let address = word.parse().map_err(|_| format!("{word:?} is no address of a name server"))?;
            self.draft.resolvers.push(address);
        }
        Ok(())
    }

    fn set(&mut self, line: usize, words: &[&str]) -> Result<(), String> {
        let [name, words @ ..] = words else {
            return Err(
                "set needs a name and addresses: set NAME 10.0.0.0/8 ..., or set NAME file FILE".to_owned()
            );
        };
        check_name(name)?;
        if BUILT_IN.iter().any(|(word, _)| word == name) || *name == "any" {
            return Err(format!("every policy has {name:?}: give this set another name"));
        }
        let number = self.number_of(name)?;
        if let ["file", file] = words {
            return self.set_file(line, number, file);
        }
        if words.is_empty() {
            return Err(format!(
                "set {name} has no addresses: write set {name} 10.0.0.0/8 ..., or set {name} file FILE"
            ));
        }
        for word in words.iter().flat_map(|word| word.split(',')).filter(|word| !word.is_empty()) {
            let member = member(word)?;
            self.add(number, member)?;
        }
        Ok(())
    }

    fn set_file(&mut self, line: usize, number: u16, file: &str) -> Result<(), String> {
        let text = (self.open)(file).map_err(|error| format!("{file}: cannot be read: {error}"))?;
        let before = self.prefixes;
        let mut says_none = false;
        for (at, text) in (1..).zip(lines(&text)) {
            if text.is_empty() {
                continue;
            }
            // Further lines would say the same.
            if self.prefixes > MAX_PREFIXES {
                break;
            }
            if text == "none" {
                says_none = true;
                continue;
            }
            let added = member(text).and_then(|member| self.add(number, member));
            if let Err(message) = added {
                if self.mistakes.len() <= MAX_MISTAKES {
                    let file = file.to_owned();
                    self.mistakes.push(Mistake {
                        file,
                        line: at,
                        message: format!("{message} (a set in line {line} of {})", self.file),
                    });
                } else {
                    break;
                }
            }
        }
        self.files.insert(file.to_owned(), text);
        // A list that could not be had is mostly empty, and a rule about it would be for nobody.
        if self.prefixes == before && !says_none {
            return Err(format!("{file}: has no addresses; if that is meant, write the line none into it"));
        }
        Ok(())
    }

    fn add(&mut self, set: u16, member: Member) -> Result<(), String> {
        self.prefixes += 1;
        if self.prefixes > MAX_PREFIXES {
            return Err(format!("there are more than {MAX_PREFIXES} prefixes"));
        }
        self.draft.sets[usize::from(set)].push(member);
        Ok(())
    }

    /// Returns the number of a set, which is empty if there was none of this name.
    fn number_of(&mut self, name: &str) -> Result<u16, String> {
        if let Some(number) = self.names.get(name) {
            return Ok(*number);
        }
        let number =
            u16::try_from(self.draft.sets.len()).map_err(|_| "there are too many sets".to_owned())?;
        self.names.insert(name.to_owned(), number);
        self.draft.sets.push(Vec::new());
        Ok(number)
    }

    fn rule(&mut self, action: Action, line: usize, text: &str, words: &[&str]) -> Result<(), String> {
        let [direction, words @ ..] = words else {
            return Err(format!("a rule says out or in next: {text} out ..."));
        };
        let directions = match *direction {
            "out" => [true, false],
            "in" => [false, true],
            "both" => [true, true],
            other => {
                return Err(format!(
                    "{other:?} is no direction: write out (what the guest opens), in, or both"
                ));
            }
        };
        let mut words = words.iter().copied().peekable();
        let protocol = match words.peek() {
            None | Some(&("port" | "to" | "from")) => Protocol::Any,
            Some(_) => protocol(&mut words)?,
        };
        let (mut ports, mut ends) = (Vec::new(), None);
        while let Some(word) = words.next() {
            match word {
                "port" if ports.is_empty() => {
                    let given = words.next().ok_or("port takes ports: port 80,443,8000-8010")?;
                    ports = self::ports(given)?;
                    let with_ports = [PROTO_TCP, PROTO_UDP, PROTO_SCTP].map(Protocol::Number);
                    if !with_ports.contains(&protocol) {
                        return Err("ports need tcp, udp or sctp in front of them: tcp port 443".to_owned());
                    }
                }
                "to" | "from" if ends.is_none() => {
                    match (word, directions) {
                        ("to", [_, true]) => {
                            return Err(
                                "where a flow is opened to is said of out alone: write from".to_owned()
                            );
                        }
                        ("from", [true, false]) => {
                            return Err("out is what the guest opens: write to".to_owned());
                        }
                        _ => {}
                    }
                    let mut given = Vec::new();
                    while let Some(words) = words.next_if(|word| *word != "port") {
                        for end in words.split(',').filter(|end| !end.is_empty()) {
                            given.push(self.end(end)?);
                        }
                    }
                    if given.is_empty() {
                        return Err(format!(
                            "{word} takes addresses, sets as @NAME, names, private, metadata, multicast or any"
                        ));
                    }
                    if given.iter().any(|end| matches!(end, End::Name(_)))
                        && (action, directions) != (Action::Allow, [true, false])
                    {
                        return Err("names are for allow out alone: who else asks for them, and how, nobody sees here".to_owned());
                    }
                    ends = Some(given);
                }
                other => {
                    return Err(format!(
                        "{other:?} is not understood here: a rule is `allow out tcp port 443 to 10.0.0.0/8`"
                    ));
                }
            }
        }
        let (mut sets, mut names, mut all) = (Vec::new(), Vec::new(), ends.is_none());
        for end in ends.into_iter().flatten() {
            match end {
                End::Any => all = true,
                End::Set(set) => sets.push(set),
                End::Name(name) => names.push(name),
            }
        }
        let remote = if all { Remote::Any } else { Remote::Sets(sets) };
        self.first_name = self.first_name.or_else(|| names.first().map(|_| line));
        if self.draft.rules.len() == MAX_RULES {
            return Err(format!("there are more than {MAX_RULES} rules: put addresses into sets"));
        }
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let text = match text.char_indices().nth(MAX_TEXT) {
            Some((end, _)) => format!("{}...", &text[..end]),
            None => text,
        };
        let rule = Rule { action, directions, protocol, ports, remote, names, line, text };
        self.draft.rules.push(rule);
        Ok(())
    }

    /// Reads one of the other ends of a rule.
    fn end(&mut self, end: &str) -> Result<End, String> {
        if end == "any" {
            return Ok(End::Any);
        }
        if let Some(name) = end.strip_prefix('@') {
            let known = self.names.get(name).copied().map(End::Set);
            return known.ok_or_else(|| match BUILT_IN.iter().any(|(word, _)| *word == name) {
                true => format!("every policy has {name:?}: write it without @"),
                false => format!("there is no set {name:?} before this line: write set {name} ..."),
            });
        }
        let is_new = !self.names.contains_key(end);
        if let Some((_, prefixes)) = BUILT_IN.iter().find(|(word, _)| *word == end) {
            let number = self.number_of(end)?;
            let members = prefixes.iter().filter_map(|prefix| prefix.parse().ok());
            let members = members.map(|prefix| Member { prefix, excepted: false });
            if is_new {
                self.draft.sets[usize::from(number)].extend(members);
            }
            return Ok(End::Set(number));
        }
        let member = member(end);
        // An address that is none may be a name: one with a letter in its last label, as no name of the internet is without.
        let last = end.rsplit('.').next().unwrap_or_default();
        if member.is_err()
            && end.contains('.')
            && !end.contains(['/', ':', '!'])
            && !last.bytes().all(|byte| byte.is_ascii_digit())
        {
            let pattern = Pattern::read(end)?;
            let known = self.draft.names.iter().position(|known| *known == pattern);
            let number = known.unwrap_or_else(|| {
                self.draft.names.push(pattern);
                self.draft.names.len() - 1
            });
            return u16::try_from(number).map(End::Name).map_err(|_| "there are too many names".to_owned());
        }
        // A set of its own for each address; one that stands in several rules is one.
        let member = member.map_err(|error| match end.contains(['.', ':', '/']) {
            true => error,
            false => format!("{end:?} is none of the other ends: write addresses, @SET, names with a dot, private, metadata, multicast or any"),
        })?;
        if member.excepted {
            return Err(format!("{end} excepts addresses from a set: it has no meaning in a rule"));
        }
        let number = self.number_of(end)?;
        if is_new {
            self.add(number, member)?;
        }
        Ok(End::Set(number))
    }
}

/// One of the other ends of a rule.
enum End {
    Any,
    Set(u16),
    Name(u16),
}

/// Returns the lines of a file without comments, and without the mark that some editors put at its beginning.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    text.lines().map(|line| line.split_once('#').map_or(line, |(line, _)| line).trim())
}

fn check_name(name: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let starts = name.starts_with(|c: char| c.is_ascii_alphabetic());
    match starts && name.len() <= 63 && name.chars().all(fits) {
        true => Ok(()),
        false => Err(format!("{name:?} is no name of a set: letters, digits, - and _, a letter first")),
    }
}

fn member(text: &str) -> Result<Member, String> {
    let (excepted, prefix) = text.strip_prefix('!').map_or((false, text), |prefix| (true, prefix));
    let prefix = prefix.parse().map_err(|error: crate::address::PrefixError| error.to_string())?;
    Ok(Member { prefix, excepted })
}

fn action(setting: &str, words: &[&str]) -> Result<Action, String> {
    match words {
        ["allow"] => Ok(Action::Allow),
        ["deny"] => Ok(Action::Deny),
        _ => Err(format!("{setting} is allow or deny")),
    }
}

fn on(setting: &str, words: &[&str]) -> Result<bool, String> {
    match words {
        ["on"] => Ok(true),
        ["off"] => Ok(false),
        _ => Err(format!("{setting} is on or off")),
    }
}

/// Reads the protocol of a rule.
fn protocol<'w>(words: &mut impl Iterator<Item = &'w str>) -> Result<Protocol, String> {
    Ok(match words.next().unwrap_or_default() {
        "any" => Protocol::Any,
        "tcp" => Protocol::Number(PROTO_TCP),
        "udp" => Protocol::Number(PROTO_UDP),
        "sctp" => Protocol::Number(PROTO_SCTP),
        "icmp" => Protocol::Icmp,
        "gre" => Protocol::Number(PROTO_GRE),
        "esp" => Protocol::Number(PROTO_ESP),
        "proto" => {
            let number = words.next().and_then(|number| number.parse().ok());
            Protocol::Number(number.ok_or("proto takes a number, 0 to 255: proto 47")?)
        }
        other => {
            return Err(format!(
                "{other:?} is no protocol: write tcp, udp, icmp, sctp, gre, esp, any or proto NUMBER"
            ));
        }
    })
}

fn ports(text: &str) -> Result<Vec<RangeInclusive<u16>>, String> {
    let port = |text: &str| {
        let number = text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u16>().ok());
        number
            .flatten()
            .ok_or_else(|| format!("{text:?} is no port, 0 to 65535, nor a range such as 8000-8010 (a list has no blanks: 80,443)"))
    };
    let range = |text: &str| match text.split_once('-') {
        Some((first, last)) => Ok(port(first)?..=port(last)?),
        None => port(text).map(|port| port..=port),
    };
    let whole = |range: RangeInclusive<u16>| match range.is_empty() {
        true => Err(format!("the range {}-{} ends before it begins", range.start(), range.end())),
        false => Ok(range),
    };
    text.split(',').map(|text| range(text).and_then(whole)).collect()
}

#[cfg(test)]
mod tests;
