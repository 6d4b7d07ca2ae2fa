//! Prefixes of addresses, and sets of them in which the longest match decides.
//!
//! A set is written as a list of prefixes, each of which adds its addresses or, with `!`, excepts them from a shorter one. It is compiled into
//! ranges that are sorted and apart ([`ranges`]), so that its size costs memory and not time.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// An IP network: the addresses with a common prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Prefix {
    /// The first address of the network: all bits after the prefix are 0.
    address: IpAddr,
    /// Length of the prefix in bits, at most 32 for IPv4 or 128 for IPv6.
    bits: u8,
}

impl Prefix {
    /// The network of all addresses that share the first `bits` with `address`; `None` if there are not so many bits.
    #[must_use]
    pub fn new(address: IpAddr, bits: u8) -> Option<Prefix> {
        if u32::from(bits) > width(address) {
            return None;
        }
        let host = |width: u32| width - u32::from(bits);
        let address = match address {
            IpAddr::V4(v4) => {
                let mask = u32::MAX.checked_shl(host(32)).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() & mask))
            }
            IpAddr::V6(v6) => {
                let mask = u128::MAX.checked_shl(host(128)).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & mask))
            }
        };
        Some(Prefix { address, bits })
    }

    /// Returns true for a network of IPv4.
    #[must_use]
    pub const fn is_v4(&self) -> bool {
        self.address.is_ipv4()
    }

    /// Returns the first and the last address, as numbers.
    fn span(&self) -> (u128, u128) {
        let first = number(self.address);
        let host = width(self.address) - u32::from(self.bits);
        let rest = 1_u128.checked_shl(host).map_or(u128::MAX, |size| size - 1);
        (first, first | rest)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match u32::from(self.bits) == width(self.address) {
            true => write!(f, "{}", self.address),
            false => write!(f, "{}/{}", self.address, self.bits),
        }
    }
}

/// The error of text that is no [`Prefix`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrefixError {
    /// It is no address and no network.
    #[error("{0:?} is not an IP address or network, such as 10.0.0.2, 10.1.0.0/16 or fd00::/64")]
    NotOne(String),
    /// There are bits behind the prefix.
    #[error("{text:?} has bits set beyond the first {bits}: write {first}, or one address alone", bits = .first.bits)]
    BitsBeyond {
        /// The text.
        text: String,
        /// The network that the address is in.
        first: Prefix,
    },
}

impl FromStr for Prefix {
    type Err = PrefixError;

    fn from_str(text: &str) -> Result<Prefix, PrefixError> {
        let wrong = || PrefixError::NotOne(text.to_owned());
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let bits = match bits {
            None => width(address) as u8,
            // The standard parser takes a sign.
            Some(bits) if bits.bytes().all(|byte| byte.is_ascii_digit()) => {
                bits.parse().map_err(|_| wrong())?
            }
            Some(_) => return Err(wrong()),
        };
        let first = Prefix::new(address, bits).ok_or_else(wrong)?;
        match first.address == address {
            true => Ok(first),
            false => Err(PrefixError::BitsBeyond { text: text.to_owned(), first }),
        }
    }
}

fn width(address: IpAddr) -> u32 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// Returns an address as a number.
pub(crate) fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => v4.to_bits().into(),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

/// One line of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The addresses.
    pub prefix: Prefix,
    /// They are excepted from a shorter prefix, rather than added.
    pub excepted: bool,
}

/// Compiles the members of one family into the ranges of addresses that are in the set: sorted, apart, first and last address of each. The longest
/// prefix that an address has decides; of two that are alike, the exception does.
pub(crate) fn ranges(members: impl Iterator<Item = Member>) -> Vec<(u128, u128)> {
    /// Appends a range in which all addresses are in the set, or none.
    fn append(ranges: &mut Vec<(u128, u128)>, first: u128, last: u128, within: bool) {
        if !within || first > last {
            return;
        }
        match ranges.last_mut() {
            Some(before) if before.1.checked_add(1) == Some(first) => before.1 = last,
            _ => ranges.push((first, last)),
        }
    }
    let mut sorted: Vec<(u128, u8, bool, u128)> = members
        .map(|Member { prefix, excepted }| {
            let (first, last) = prefix.span();
            (first, prefix.bits, excepted, last)
        })
        .collect();
    // An outer prefix comes before those within it; the exception comes last of two alike, and is the inner one.
    sorted.sort_unstable();
    let mut ranges = Vec::new();
    // Prefixes around the address up to which all is decided, the longest last.
    let mut around: Vec<(u128, bool)> = Vec::new();
    let mut decided = 0;
    let mut close = |around: &mut Vec<(u128, bool)>, decided: &mut u128, until: Option<u128>| {
        while let Some((last, excepted)) = around.pop_if(|(last, _)| until.is_none_or(|until| *last < until))
        {
            append(&mut ranges, *decided, last, !excepted);
            *decided = (*decided).max(last.saturating_add(1));
            if last == u128::MAX {
                around.clear();
            }
        }
        if let (Some((_, excepted)), Some(until)) =
            (around.last(), until.and_then(|until| until.checked_sub(1)))
        {
            append(&mut ranges, *decided, until, !excepted);
        }
    };
    for (first, _, excepted, last) in sorted {
        close(&mut around, &mut decided, Some(first));
        decided = decided.max(first);
        around.push((last, excepted));
    }
    close(&mut around, &mut decided, None);
    ranges
}

/// The words that stand for sets which every policy has.
pub(crate) const BUILT_IN: [(&str, &[&str]); 3] = [
    ("private", &PRIVATE),
    ("metadata", &METADATA),
    ("multicast", &["224.0.0.0/4", "255.255.255.255", "ff00::/8"]),
];

/// Addresses that are not of the public internet (RFC 6890 and its registry): of private networks, of the link, of the host, and those of IPv6 in which
/// an address of IPv4 hides, behind which any of the others may be.
const PRIVATE: [&str; 20] = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "240.0.0.0/4",
    "::/96",
    "::ffff:0:0/96",
    "64:ff9b::/96",
    "64:ff9b:1::/48",
    "2001::/32",
    "2002::/16",
    "fc00::/7",
    "fe80::/10",
    "fec0::/10",
    "5f00::/16",
];

/// Addresses under which clouds tell a machine about itself, its credentials among it.
pub(crate) const METADATA: [&str; 7] = [
    // AWS, Azure, Google, Oracle, DigitalOcean, OpenStack; AWS by IPv6, and for containers.
    "169.254.169.254",
    "fd00:ec2::254",
    "169.254.170.2",
    "169.254.170.23",
    "fd00:ec2::23",
    // Google by IPv6; Alibaba.
    "fd20:ce::254",
    "100.100.100.200",
];

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn member(text: &str) -> Member {
        let (excepted, text) = text.strip_prefix('!').map_or((false, text), |text| (true, text));
        Member { prefix: text.parse().unwrap(), excepted }
    }

    fn has(ranges: &[(u128, u128)], address: u128) -> bool {
        ranges.iter().any(|(first, last)| (first..=last).contains(&&address))
    }

    #[test]
    fn prefixes_are_read_and_written() {
        for text in ["10.0.0.2", "10.1.0.0/16", "0.0.0.0/0", "fd00::/64", "::/0", "2001:db8::1"] {
            assert_eq!(text.parse::<Prefix>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "10.0.0",
            "10.0.0.0/33",
            "::/129",
            "10.0.0.0/+8",
            "10.0.0.0/",
            "10.0.0.1/8",
            "a/8",
            "1.2.3.4 ",
        ] {
            assert!(text.parse::<Prefix>().is_err(), "{text:?}");
        }
        let error = "10.1.2.3/8".parse::<Prefix>().unwrap_err();
        assert!(error.to_string().contains("write 10.0.0.0/8"), "{error}");
    }

    #[test]
    fn the_longest_prefix_decides() {
        let members = ["10.0.0.0/8", "!10.1.0.0/16", "10.1.2.0/24", "!10.1.2.3", "9.255.255.255"].map(member);
        let ranges = ranges(members.into_iter());
        let within = |text: &str| has(&ranges, number(text.parse().unwrap()));
        assert!(
            within("10.0.0.0") && within("10.255.255.255") && within("10.1.2.4") && within("9.255.255.255")
        );
        assert!(
            !within("10.1.0.0") && !within("10.1.2.3") && !within("11.0.0.0") && !within("9.255.255.254")
        );
        assert!(ranges.is_sorted() && ranges.len() == 4, "{ranges:?}");
    }

    #[test]
    fn of_two_alike_the_exception_counts_and_all_may_be_meant() {
        assert!(ranges([member("10.0.0.0/8"), member("!10.0.0.0/8")].into_iter()).is_empty());
        assert_eq!(ranges([member("::/0")].into_iter()), [(0, u128::MAX)]);
        let most = ranges([member("::/0"), member("!ffff::/16"), member("!::")].into_iter());
        assert_eq!(most, [(1, (0xffff_u128 << 112) - 1)]);
        assert_eq!(ranges([member("0.0.0.0/0")].into_iter()), [(0, u32::MAX.into())]);
    }

    #[test]
    fn the_sets_that_every_policy_has_are_well_formed() {
        for (name, prefixes) in BUILT_IN {
            for prefix in prefixes {
                assert!(prefix.parse::<Prefix>().is_ok(), "{name}: {prefix}");
            }
        }
        assert!(METADATA.iter().all(|one| {
            let one = number(one.parse::<Prefix>().unwrap().address);
            has(&ranges(PRIVATE.iter().map(|text| member(text))), one)
        }));
    }

    proptest! {
        #[test]
        fn ranges_are_what_the_longest_prefix_says(
            members in vec((any::<u8>(), 120..=128u8, any::<bool>()), 0..12), address: u8,
        ) {
            // Few bits, so that prefixes meet.
            let members: Vec<Member> = members.iter().map(|&(low, bits, excepted)| {
                let address = IpAddr::V6(Ipv6Addr::from_bits(low.into()));
                Member { prefix: Prefix::new(address, bits).unwrap(), excepted }
            }).collect();
            let found = has(&ranges(members.iter().copied()), address.into());
            let longest = members.iter()
                .filter(|member| { let (first, last) = member.prefix.span(); (first..=last).contains(&address.into()) })
                .max_by_key(|member| (member.prefix.bits, member.excepted));
            prop_assert_eq!(found, longest.is_some_and(|member| !member.excepted));
        }
    }
}
