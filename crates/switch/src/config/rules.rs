//! The rules of a port ([`Rules`]) as keys: read from a `[[port]]` table, from a flag or from `ringferry ctl
//! set`, and written back. [`RulesKeys::rules`] reads what [`entries`] writes as the same rules.

use std::net::{IpAddr, Ipv6Addr};

use ringferry_packet::ether::Mac;
use toml::Value as Toml;

use super::parse::{Value, check_port_name, parse_mac};
use super::policies::check_policy_name;
use super::values::{Described, List, Or, Quantity, Shape, Unit, digits, one_number};
use super::*;
use crate::rules::{FirewallRule, Guard, Limits, MAX_VID, MAX_WEIGHT, Network, Rate, Rules, Vid, Vlans};

keys! {
    /// The rules of a port of any kind.
    pub(crate) struct RulesKeys: Live {
        /// Makes the port an access port: its frames belong to this VLAN and carry no tag.
        vlan: Vid {
            is: one_number(0..=MAX_VID as u64, ": several VLANs are a trunk, as in trunk=10,20-29"),
            default: Unset::Means("a trunk of all VLANs"),
            example: "10",
        }
        /// Makes the port a trunk: it carries the tagged frames of these VLANs, or of all. It cannot be given together
        /// with `vlan`.
        trunk: Option<Vec<Vid>> {
            is: Or("all", Vids),
            default: Unset::Value("all"),
            example: "10,20-29",
        }
        /// Sets the native VLAN, to which frames without a tag belong. With `none` such frames are dropped.
        native: Option<Vid> {
            is: Or("none", number(0..=MAX_VID as u64)),
            default: Unset::Means("0 with `trunk = \"all\"`, otherwise `none`"),
            example: "5",
            only_with: "trunk" because "say which VLANs the port carries, or trunk = \"all\"",
        }
        /// With `true` no frames pass between the port and other isolated ports.
        isolated: bool {
            is: Boolean,
            default: Unset::Value("false"),
            example: "true",
        }
        /// Puts the port into quarantine: it exchanges frames with the port of this name alone, which gets all that it
        /// sends, whatever that is for.
        quarantine: String {
            is: PORT_NAME,
            default: Unset::Means("none"),
            example: "rf1",
        }
        /// Says whether frames to the reserved addresses of IEEE 802.1Q (01:80:c2:00:00:00 to 0f), MAC control frames (PAUSE)
        /// to any address, and frames from a group address or from all zeros are dropped or forwarded.
        reserved: bool {
            is: Choice {
                what: "a treatment of reserved addresses",
                words: &[("drop", false), ("forward", true)],
            },
            default: Unset::Value("drop"),
            example: "forward",
        }
        /// Limits the MAC addresses that are learned on the port. Frames from further addresses are dropped.
        max_macs: u32 {
            is: number_of("addresses", 0..=MAX_MACS),
            default: Unset::Means("no limit but half of the table"),
            example: "8",
        }
        /// Assigns MAC addresses to the port statically: in the VLAN of frames without a tag or, with `@VLAN`, in
        /// another. No other port can learn them.
        static_macs: Vec<(Mac, Option<Vid>)> {
            is: List(STATION),
            default: Unset::Value("none"),
            example: "52:54:00:00:00:01",
        }
        /// Lists the only MAC addresses that the port may send from. Ethernet headers, ARP and neighbour discovery are
        /// checked.
        allowed_macs: Vec<Mac> {
            is: List(MAC),
            default: Unset::Means("any"),
            example: "52:54:00:00:00:01",
        }
        /// Lists the only IP addresses and networks that the port may send from; `none` allows none. IP headers, ARP
        /// and neighbour discovery are checked. It needs `allowed_macs`.
        allowed_ips: Vec<Network> {
            is: List(NETWORK),
            default: Unset::Means("any"),
            example: "10.0.0.2,fd00::/64",
        }
        /// Puts a firewall with the policy of this name in front of the port: what its guest may reach, and who may reach it. The policy is the file
        /// `NAME.policy` in the directory `policies`.
        firewall: String {
            is: POLICY_NAME,
            default: Unset::Means("none"),
            example: "web",
        }
        /// Limits the broadcast, multicast and unknown unicast packets that are taken from the port per second (storm
        /// control).
        storm: u64 {
            is: PACKET_RATE,
            default: Unset::Means("no limit"),
            example: "1kpps",
        }
        /// Limits the burst of such packets that is taken at once after a pause.
        storm_burst: u64 {
            is: number_of("packets", BURST_STORM),
            default: Unset::Means("those of a second"),
            example: "2000",
            only_with: "storm",
        }
        /// Limits the bits that are taken from the port per second, which is what its guest sends.
        rate_in: u64 {
            is: BIT_RATE,
            default: Unset::Means("no limit"),
            example: "1gbit",
        }
        /// Limits the burst of bytes that is taken at once after a pause.
        rate_in_burst: u64 {
            is: SIZE,
            default: Unset::Means("that of 10 ms, at least 256kib"),
            example: "1mib",
            only_with: "rate_in",
        }
        /// Limits the packets that are taken from the port per second. A frame that is to be segmented counts as its
        /// segments.
        rate_in_packets: u64 {
            is: PACKET_RATE,
            default: Unset::Means("no limit"),
            example: "100kpps",
        }
        /// Limits the burst of packets that is taken at once after a pause.
        rate_in_packets_burst: u64 {
            is: number_of("packets", BURST_PACKETS),
            default: Unset::Means("those of 10 ms, at least 256"),
            example: "1000",
            only_with: "rate_in_packets",
        }
        /// Limits the bits that are sent to the port per second, which is what its guest receives.
        rate_out: u64 {
            is: BIT_RATE,
            default: Unset::Means("no limit"),
            example: "1gbit",
        }
        /// Limits the burst of bytes that is sent at once after a pause.
        rate_out_burst: u64 {
            is: SIZE,
            default: Unset::Means("that of 10 ms, at least 256kib"),
            example: "1mib",
            only_with: "rate_out",
        }
        /// Limits the packets that are sent to the port per second. A frame that is to be segmented counts as its
        /// segments.
        rate_out_packets: u64 {
            is: PACKET_RATE,
            default: Unset::Means("no limit"),
            example: "100kpps",
        }
        /// Limits the burst of packets that is sent at once after a pause.
        rate_out_packets_burst: u64 {
            is: number_of("packets", BURST_PACKETS),
            default: Unset::Means("those of 10 ms, at least 256"),
            example: "1000",
            only_with: "rate_out_packets",
        }
        /// Sets the share of a worker that the port gets while the worker is fully used, as a multiple of the share of
        /// a port with weight 1.
        weight: u16 {
            is: number(1..=MAX_WEIGHT as u64),
            default: Unset::Value("1"),
            example: "4",
        }
    }
}

/// Most addresses that a port may be limited to: more than the largest forwarding database has.
const MAX_MACS: u64 = 1 << 20;

/// Units of bit rates, which are decimal, with the names of tc(8). tc's `bps` is bytes per second and that of
/// all others is bits, so it is left out here.
const BIT_RATES: [Unit; 5] =
    [("tbit", 1_000_000_000_000), ("gbit", 1_000_000_000), ("mbit", 1_000_000), ("kbit", 1000), ("bit", 1)];
/// Decimal units of packet rates.
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
/// Bytes that may come at once: at least the longest frame, which is to be segmented, holds up to 64 KiB and counts with the headers of its
/// segments, 122 of them at the smallest common segment size (RFC 9293, 3.7.1: 536).
const BURST_BYTES: RangeInclusive<u64> = 72 << 10..=1 << 32;
/// Packets that may come at once: the same frame as its segments.
const BURST_PACKETS: RangeInclusive<u64> = 128..=1_000_000_000;
/// Flooded packets that may come at once; those are not segmented.
const BURST_STORM: RangeInclusive<u64> = 1..=1_000_000_000;
/// Least default burst in bytes: four of the longest frames. A frame that waits for tokens is woken late on a
/// busy machine, and what could have been sent meanwhile has to be in the bucket.
const DEFAULT_BURST_BYTES: u64 = 256 << 10;
/// Least default burst in packets, for the reason above.
const DEFAULT_BURST_PACKETS: u64 = 256;
/// Default burst as a part of what passes in a second: 10 ms, as long as a thread may have to wait for a
/// processor. (With one millisecond a stream got four fifths of its rate on a busy machine.) Frames above the
/// rate wait and are not lost, so it need not be longer.
const BURST_PART: u64 = 100;

/// The quantity that a rate counts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Bytes,
    Packets,
    Flooded,
}

impl Of {
    /// The burst of a rate that names none. Storms are measured by the second, as switches do it.
    fn burst(self, per_second: u64) -> u64 {
        match self {
            Of::Bytes => (per_second / BURST_PART).max(DEFAULT_BURST_BYTES),
            Of::Packets => (per_second / BURST_PART).max(DEFAULT_BURST_PACKETS),
            Of::Flooded => per_second,
        }
    }

    /// Returns the factor from the unit of the key (bits) to the unit of the bucket (bytes): 8 bits make one
    /// byte.
    fn scale(self) -> u64 {
        if self == Of::Bytes { 8 } else { 1 }
    }

    /// Combines the keys of a rate and of its burst.
    fn rate(self, rate: Option<u64>, burst: Option<u64>) -> Option<Rate> {
        let per_second = rate? / self.scale();
        Some(Rate { per_second, burst: burst.unwrap_or_else(|| self.burst(per_second)) })
    }

    /// Splits a rate into its two keys; the burst is left out where it is the default.
    fn keys(self, rate: Option<Rate>) -> (Option<u64>, Option<u64>) {
        let Some(Rate { per_second, burst }) = rate else { return (None, None) };
        let other = (burst != self.burst(per_second)).then_some(burst);
        (Some(per_second.saturating_mul(self.scale())), other)
    }
}

pub(super) const BIT_RATE: Quantity = Quantity { placeholder: "RATE", range: BITS, units: &BIT_RATES };
const PACKET_RATE: Quantity = Quantity { placeholder: "RATE", range: PACKETS, units: &PACKET_RATES };
const SIZE: Quantity = Quantity { placeholder: "SIZE", range: BURST_BYTES, units: &SIZES };

/// The name of a port, which need not be there.
pub(super) const PORT_NAME: Text<String> = Text {
    placeholder: "PORT",
    what: "the name of a port",
    read: |name| check_port_name(name).map(|()| name.to_owned()),
    write: String::to_owned,
};

/// The name of a policy.
const POLICY_NAME: Text<String> = Text {
    placeholder: "POLICY",
    what: "the name of a policy",
    read: |name| check_policy_name(name).map(|()| name.to_owned()),
    write: String::to_owned,
};

/// A static address: `MAC`, in the VLAN of frames without a tag, or `MAC@VLAN`.
const STATION: Text<(Mac, Option<Vid>)> = Text {
    placeholder: "MAC[@VLAN]",
    what: "an Ethernet address of one station, with a VLAN or without",
    read: |text| {
        let Some((mac, vid)) = text.split_once('@') else { return Ok((parse_mac(text)?, None)) };
        let number = digits(vid).and_then(|vid| Vid::try_from(vid).ok()).filter(|vid| *vid <= MAX_VID);
        let number = number.ok_or_else(|| format!("{vid:?} in {text:?} is not a VLAN, 0 to {MAX_VID}"))?;
        Ok((parse_mac(mac)?, Some(number)))
    },
    write: |(mac, vid)| vid.map_or_else(|| mac.to_string(), |vid| format!("{mac}@{vid}")),
};

/// An address or a network: `10.0.0.2`, `10.1.0.0/16`, `fd00::/64`.
const NETWORK: Text<Network> = Text {
    placeholder: "IP[/BITS]",
    what: "an IP address or a network, such as \"10.1.0.0/16\"",
    read: network,
    write: |Network { address, bits }| {
        let host = if address.is_ipv4() { 32 } else { 128 };
        if *bits == host { address.to_string() } else { format!("{address}/{bits}") }
    },
};

/// VLANs with tags: numbers and ranges, read as sorted numbers.
struct Vids;

impl Described for Vids {
    fn shape(&self) -> Shape {
        List(VidRange).shape()
    }
}

impl Codec<Vec<Vid>> for Vids {
    fn read(&self, value: &Value) -> Result<Vec<Vid>, Vec<String>> {
        let mut vids: Vec<Vid> = List(VidRange).read(value)?.into_iter().flatten().collect();
        let count = vids.len();
        vids.sort_unstable();
        vids.dedup();
        if vids.is_empty() {
            return Err(vec!["names no VLAN: a port that carries nothing is of no use".to_owned()]);
        }
        if vids.len() < count {
            return Err(vec!["names a VLAN twice".to_owned()]);
        }
        Ok(vids)
    }

    /// Writes three or more consecutive VLANs as a range.
    fn write(&self, vids: &Vec<Vid>) -> Toml {
        let rows = vids.chunk_by(|one, next| one + 1 == *next);
        let ranges = rows.flat_map(|row| match row {
            [first, .., last] if row.len() > 2 => vec![*first..=*last],
            _ => row.iter().map(|vid| *vid..=*vid).collect(),
        });
        List(VidRange).write(&ranges.collect())
    }
}

/// One VLAN that has a tag, or several: `10`, `"20-29"`.
struct VidRange;

impl Described for VidRange {
    fn shape(&self) -> Shape {
        Shape::Span { range: 1..=MAX_VID.into() }
    }
}

impl Codec<RangeInclusive<Vid>> for VidRange {
    fn read(&self, value: &Value) -> Result<RangeInclusive<Vid>, Vec<String>> {
        let tagged = |number: u64| Vid::try_from(number).ok().filter(|vid| (1..=MAX_VID).contains(vid));
        let vid = |text: &str| digits(text).and_then(tagged);
        let range = match value {
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
            vec![format!(
                "{what} is neither a VLAN, 1 to {MAX_VID}, nor a range such as \"20-29\" (frames without a tag: native)"
            )]
        })
    }

    fn write(&self, range: &RangeInclusive<Vid>) -> Toml {
        let (first, last) = (range.start(), range.end());
        if first == last { i64::from(*first).into() } else { format!("{first}-{last}").into() }
    }
}

impl RulesKeys {
    /// Checks the keys together and returns the rules. `shared` says that several ports will have these
    /// rules.
    pub(super) fn rules(self, fields: &mut Fields<'_>, shared: bool) -> Rules {
        let RulesKeys {
            vlan,
            trunk,
            native,
            isolated,
            quarantine,
            reserved,
            max_macs,
            static_macs,
            allowed_macs,
            allowed_ips,
            firewall,
            storm,
            storm_burst,
            rate_in,
            rate_in_burst,
            rate_in_packets,
            rate_in_packets_burst,
            rate_out,
            rate_out_burst,
            rate_out_packets,
            rate_out_packets_burst,
            weight,
        } = self;
        if fields.has("vlan") && fields.has("trunk") {
            let message = "cannot be given with vlan: a port is in one VLAN, or a trunk of several";
            fields.report("trunk", message);
        }
        let vlans = match (vlan, trunk) {
            (Some(vid), _) => Vlans::Access(vid),
            // A trunk with a list of VLANs drops frames without a tag, unless `native` is given.
            (None, Some(allowed)) => {
                let native = native.unwrap_or_else(|| allowed.is_none().then_some(0));
                Vlans::Trunk { allowed, native }
            }
            (None, None) => Vlans::default(),
        };
        let static_macs = stations(static_macs.unwrap_or_default(), &vlans, fields);
        if shared && !static_macs.is_empty() {
            fields.report("static_macs", "only goes with vif: an address is behind one interface alone");
        }
        if fields.has("allowed_ips") && !fields.has("allowed_macs") {
            let message = "needs allowed_macs: whoever may send from any Ethernet address can answer for any IP address";
            fields.report("allowed_ips", message);
        }
        Rules {
            vlans,
            isolated: isolated.unwrap_or(false),
            quarantine,
            forward_reserved: reserved.unwrap_or(false),
            max_macs,
            static_macs,
            guard: allowed_macs.map(|macs| Guard { macs, ips: allowed_ips }),
            firewall: firewall.map(|name| FirewallRule { name, policy: None }),
            storm: Of::Flooded.rate(storm, storm_burst),
            rate_in: Limits {
                bytes: Of::Bytes.rate(rate_in, rate_in_burst),
                packets: Of::Packets.rate(rate_in_packets, rate_in_packets_burst),
            },
            rate_out: Limits {
                bytes: Of::Bytes.rate(rate_out, rate_out_burst),
                packets: Of::Packets.rate(rate_out_packets, rate_out_packets_burst),
            },
            weight: weight.unwrap_or(1),
            wire: None,
        }
    }

    /// Returns the keys that give these rules; keys at their default are left out.
    fn of(rules: &Rules) -> RulesKeys {
        let Rules {
            vlans,
            isolated,
            quarantine,
            forward_reserved,
            max_macs,
            static_macs,
            guard,
            firewall,
            storm,
            rate_in,
            rate_out,
            weight,
            // No key says so.
            wire: _,
        } = rules;
        let (vlan, trunk, native) = match vlans {
            Vlans::Access(vid) => (Some(*vid), None, None),
            Vlans::Trunk { allowed: None, native: Some(0) } => (None, None, None),
            Vlans::Trunk { allowed, native } => {
                let said = native.is_some() || allowed.is_none();
                (None, Some(allowed.clone()), said.then_some(*native))
            }
        };
        // At a trunk with its VLAN, which may be that of frames without a tag for a while only: what was written for a customer's VLAN stays there,
        // whatever `native` becomes.
        let moves_along = |vid| own(vlans) == Some(vid) && (vid == 0 || matches!(vlans, Vlans::Access(_)));
        let station = |&(mac, vid): &(Mac, Vid)| (mac, Some(vid).filter(|vid| !moves_along(*vid)));
        let static_macs: Vec<_> = static_macs.iter().map(station).collect();
        let (storm, storm_burst) = Of::Flooded.keys(*storm);
        let (rate_in_bits, rate_in_burst) = Of::Bytes.keys(rate_in.bytes);
        let (rate_in_packets, rate_in_packets_burst) = Of::Packets.keys(rate_in.packets);
        let (rate_out_bits, rate_out_burst) = Of::Bytes.keys(rate_out.bytes);
        let (rate_out_packets, rate_out_packets_burst) = Of::Packets.keys(rate_out.packets);
        RulesKeys {
            vlan,
            trunk,
            native,
            isolated: isolated.then_some(true),
            quarantine: quarantine.clone(),
            reserved: forward_reserved.then_some(true),
            max_macs: *max_macs,
            static_macs: Some(static_macs).filter(|macs| !macs.is_empty()),
            allowed_macs: guard.as_ref().map(|guard| guard.macs.clone()),
            allowed_ips: guard.as_ref().and_then(|guard| guard.ips.clone()),
            firewall: firewall.as_ref().map(|firewall| firewall.name.clone()),
            storm,
            storm_burst,
            rate_in: rate_in_bits,
            rate_in_burst,
            rate_in_packets,
            rate_in_packets_burst,
            rate_out: rate_out_bits,
            rate_out_burst,
            rate_out_packets,
            rate_out_packets_burst,
            weight: Some(*weight).filter(|weight| *weight != 1),
        }
    }
}

/// Returns the rules by key, in the order of the table; keys at their default are left out.
pub(crate) fn entries(rules: &Rules) -> Vec<(&'static str, Toml)> {
    RulesKeys::of(rules).write()
}

/// Gives each static address its VLAN. Reports addresses in a VLAN that the port is not in.
fn stations(given: Vec<(Mac, Option<Vid>)>, vlans: &Vlans, fields: &mut Fields<'_>) -> Vec<(Mac, Vid)> {
    let mut stations = Vec::new();
    for station in given {
        let text = (STATION.write)(&station);
        let (mac, vid) = station;
        match vid.or_else(|| own(vlans)) {
            None => {
                let message = "is in no VLAN, as frames without a tag are not: write";
                fields.report("static_macs", format!("{text:?} {message} {text}@VLAN"));
            }
            Some(vid) if !carries(vlans, vid) => {
                fields.report("static_macs", format!("{text:?} is in a VLAN that the port does not carry"));
            }
            Some(vid) if stations.contains(&(mac, vid)) => {
                fields.report("static_macs", format!("names {text:?} twice"));
            }
            Some(vid) => stations.push((mac, vid)),
        }
    }
    stations
}

/// Returns the VLAN of frames without a tag.
fn own(vlans: &Vlans) -> Option<Vid> {
    match vlans {
        Vlans::Access(vid) => Some(*vid),
        Vlans::Trunk { native, .. } => *native,
    }
}

/// Returns true if the port is in this VLAN.
fn carries(vlans: &Vlans, vid: Vid) -> bool {
    let tagged = match vlans {
        Vlans::Access(_) => false,
        Vlans::Trunk { allowed, .. } => {
            vid > 0 && allowed.as_ref().is_none_or(|allowed| allowed.binary_search(&vid).is_ok())
        }
    };
    tagged || own(vlans) == Some(vid)
}

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

#[cfg(test)]
mod tests;
