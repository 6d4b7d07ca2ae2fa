//! Sets of flags and addresses by the names that they have in JSON.
//!
//! A set is a list of names. A reader leaves out names that it does not know, as it does with fields: a later version may have
//! more of them.

use bitflags::Flags;
use ringferry_virtio_net::Features;

/// Begins the name of a feature bit that has no other.
const NUMBERED: &str = "BIT_";

/// Returns the names of the flags in a set, each spelled by `spell`, in the order of their bits.
pub(crate) fn of<F: Flags>(set: &F, spell: fn(&str) -> String) -> Vec<String> {
    set.iter_names().map(|(name, _)| spell(name)).collect()
}

/// Returns the set of the flags that are spelled like this.
pub(crate) fn set<F: Flags>(names: &[String], spell: fn(&str) -> String) -> F {
    let mut set = F::empty();
    for flag in F::FLAGS.iter().filter(|flag| names.contains(&spell(flag.name()))) {
        set.insert(F::from_bits_retain(flag.value().bits()));
    }
    set
}

/// As the standard spells it: `GUEST_TSO4`.
pub(crate) fn upper(name: &str) -> String {
    name.to_owned()
}

/// As the switch speaks of offloads: `tso4`.
pub(crate) fn lower(name: &str) -> String {
    name.to_ascii_lowercase()
}

/// As the store of Xen spells it: `gso-tcpv4`.
pub(crate) fn kebab(name: &str) -> String {
    name.to_ascii_lowercase().replace('_', "-")
}

/// Returns the features with these names, among them `BIT_n`.
pub(crate) fn features(names: &[String]) -> Features {
    let bit = |name: &String| name.strip_prefix(NUMBERED)?.parse().ok().and_then(|bit| 1u64.checked_shl(bit));
    let numbered = names.iter().filter_map(bit).fold(0, |bits, bit| bits | bit);
    set::<Features>(names, upper) | Features::from_bits_retain(numbered)
}

/// For `#[serde(with)]`: negotiated virtio features.
pub(crate) mod virtio {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Features;

    pub(crate) fn serialize<S: Serializer>(set: &Features, to: S) -> Result<S::Ok, S::Error> {
        set.names().serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Features, D::Error> {
        Vec::deserialize(from).map(|names: Vec<String>| super::features(&names))
    }
}

/// For `#[serde(with)]`: offloads.
pub(crate) mod offloads {
    use ringferry_packet::vnet::Offloads;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(set: &Offloads, to: S) -> Result<S::Ok, S::Error> {
        super::of(set, super::lower).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Offloads, D::Error> {
        Vec::deserialize(from).map(|names: Vec<String>| super::set(&names, super::lower))
    }
}

/// For `#[serde(with)]`: types of hashes.
pub(crate) mod hash_types {
    use ringferry_packet::flow::HashTypes;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<S: Serializer>(set: &HashTypes, to: S) -> Result<S::Ok, S::Error> {
        super::of(set, super::upper).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<HashTypes, D::Error> {
        Vec::deserialize(from).map(|names: Vec<String>| super::set(&names, super::upper))
    }
}

/// For `#[serde(with)]`: an address, `52:54:00:00:00:01`.
pub(crate) mod mac {
    use ringferry_packet::ether::Mac;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(mac: &Mac, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(mac)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Mac, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use ringferry_packet::vnet::Offloads;

    use super::*;

    #[test]
    fn bits_without_a_name_come_back() {
        for bits in [1, 1 << 63 | 1 << 2, u64::MAX, 1 << 4] {
            let set = Features::from_bits_retain(bits);
            assert_eq!(features(&set.names()), set);
        }
    }

    #[test]
    fn names_of_later_versions_are_left_out() {
        let names = ["tso4", "tso9", "TSO6", ""].map(str::to_owned);
        assert_eq!(set::<Offloads>(&names, lower), Offloads::TSO4);
        let names = ["CSUM", "BIT_64", "BIT_x", "BIT_", "LATER"].map(str::to_owned);
        assert_eq!(features(&names), Features::CSUM);
    }
}
