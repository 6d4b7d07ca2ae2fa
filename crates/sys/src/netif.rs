//! Settings of a network interface, by name, in the calling thread's network namespace.
//!
//! Each function is one request on a socket of its own and keeps no state. All are ioctls, except that addresses are
//! set by netlink. Neither a library nor the program `ip` is needed.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::{ifreq, netlink};

/// The error of reading or changing a setting, with interface, action and a hint in its message.
#[derive(Debug, thiserror::Error)]
#[error("interface {name}: {action}: {source}{}", hint(.source))]
pub struct InterfaceError {
    name: String,
    action: String,
    source: io::Error,
}

impl InterfaceError {
    /// Returns the error of the system call.
    pub fn os_error(&self) -> &io::Error {
        &self.source
    }
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "; it needs root or CAP_NET_ADMIN in the interface's network namespace"
        }
        Some(libc::ENODEV) => "; there is no such interface in this network namespace",
        _ => "",
    }
}

type Result<T> = std::result::Result<T, InterfaceError>;

/// Returns the interface's index, or `None` if there is no such interface.
///
/// # Errors
/// No socket can be opened.
pub fn index(name: &str) -> Result<Option<u32>> {
    match call(name, "looking up its index", libc::SIOCGIFINDEX, |_| {}) {
        // SAFETY: SIOCGIFINDEX has just written this member; any bit pattern is an int.
        Ok(reply) => Ok(u32::try_from(unsafe { reply.ifr_ifru.ifru_ifindex }).ok()),
        Err(e) if e.source.raw_os_error() == Some(libc::ENODEV) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Returns the name of the interface with this index, or `None` if there is no such interface.
///
/// # Errors
/// No socket can be opened.
pub fn name(index: u32) -> Result<Option<String>> {
    // The name in the request is what the kernel fills in.
    match call("-", "looking up its name", libc::SIOCGIFNAME, |request| {
        request.ifr_ifru.ifru_ifindex = index as libc::c_int;
    }) {
        Ok(reply) => Ok(Some(ifreq::name_of(&reply))),
        Err(e) if e.source.raw_os_error() == Some(libc::ENODEV) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Returns true if the interface is administratively up.
///
/// # Errors
/// There is no such interface.
pub fn is_up(name: &str) -> Result<bool> {
    Ok(i32::from(flags(name)?) & libc::IFF_UP != 0)
}

/// Returns true if the interface is up and something is plugged in at its other end, as far as its driver knows (`IFF_RUNNING`).
///
/// # Errors
/// There is no such interface.
pub fn is_running(name: &str) -> Result<bool> {
    let both = libc::IFF_UP | libc::IFF_RUNNING;
    Ok(i32::from(flags(name)?) & both == both)
}

/// Brings the interface up or down.
///
/// # Errors
/// No permission, or no such interface.
pub fn set_up(name: &str, up: bool) -> Result<()> {
    let bit = libc::IFF_UP as libc::c_short;
    let old = flags(name)?;
    let new = if up { old | bit } else { old & !bit };
    let action = if up { "bringing it up" } else { "taking it down" };
    call(name, action, libc::SIOCSIFFLAGS, |r| r.ifr_ifru.ifru_flags = new).map(drop)
}

fn flags(name: &str) -> Result<libc::c_short> {
    let reply = call(name, "reading its flags", libc::SIOCGIFFLAGS, |_| {})?;
    // SAFETY: SIOCGIFFLAGS has just written this member; any bit pattern is a short.
    Ok(unsafe { reply.ifr_ifru.ifru_flags })
}

/// Returns the interface's MTU, the size of its largest IP packet, in bytes.
///
/// # Errors
/// There is no such interface.
pub fn mtu(name: &str) -> Result<u32> {
    let reply = call(name, "reading its MTU", libc::SIOCGIFMTU, |_| {})?;
    // SAFETY: SIOCGIFMTU has just written this member; any bit pattern is an int.
    Ok(u32::try_from(unsafe { reply.ifr_ifru.ifru_mtu }).unwrap_or(0))
}

/// Sets the interface's MTU in bytes. A tap accepts 68 to 65521; IPv6 needs at least 1280.
///
/// # Errors
/// No permission, no such interface, or an MTU that it does not accept.
pub fn set_mtu(name: &str, mtu: u32) -> Result<()> {
    // A number that does not fit becomes -1, which the kernel refuses.
    let value = libc::c_int::try_from(mtu).unwrap_or(-1);
    call(name, &format!("setting MTU {mtu}"), libc::SIOCSIFMTU, |r| r.ifr_ifru.ifru_mtu = value).map(drop)
}

/// Returns the interface's Ethernet address.
///
/// # Errors
/// There is no such interface.
pub fn mac(name: &str) -> Result<[u8; 6]> {
    let reply = call(name, "reading its MAC address", libc::SIOCGIFHWADDR, |_| {})?;
    // SAFETY: SIOCGIFHWADDR has just written this member, a sockaddr of plain bytes.
    let address = unsafe { reply.ifr_ifru.ifru_hwaddr };
    Ok(std::array::from_fn(|i| address.sa_data[i] as u8))
}

/// Sets the interface's Ethernet address.
///
/// # Errors
/// No permission, no such interface, or an address no interface may have (multicast or all zero).
pub fn set_mac(name: &str, mac: [u8; 6]) -> Result<()> {
    let text = mac.map(|b| format!("{b:02x}")).join(":");
    call(name, &format!("setting MAC address {text}"), libc::SIOCSIFHWADDR, |r| {
        let mut address = libc::sockaddr { sa_family: libc::ARPHRD_ETHER, sa_data: [0; 14] };
        for (to, from) in address.sa_data.iter_mut().zip(mac) {
            *to = from as libc::c_char;
        }
        r.ifr_ifru.ifru_hwaddr = address;
    })
    .map(drop)
}

/// Has the interface take packets for all Ethernet addresses until the descriptor that is returned, and all its copies, are closed.
///
/// # Errors
/// No permission (CAP_NET_RAW).
pub fn hold_promiscuous(name: &str, index: u32) -> Result<OwnedFd> {
    let error = |source: io::Error| InterfaceError {
        name: name.to_owned(),
        action: "making it promiscuous".to_owned(),
        source,
    };
    // Without a protocol it gets no packet itself.
    let socket =
        rustix::net::socket_with(AddressFamily::PACKET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
            .map_err(|errno| error(errno.into()))?;
    let request = libc::packet_mreq {
        mr_ifindex: index as libc::c_int,
        mr_type: libc::PACKET_MR_PROMISC as libc::c_ushort,
        mr_alen: 0,
        mr_address: [0; 8],
    };
    // SAFETY: the option takes this structure, of this size.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_ADD_MEMBERSHIP,
            std::ptr::from_ref(&request).cast(),
            size_of_val(&request) as libc::socklen_t,
        )
    };
    if set < 0 { Err(error(io::Error::last_os_error())) } else { Ok(socket) }
}

/// Returns the capacity of the interface's transmit queue in packets.
///
/// # Errors
/// There is no such interface.
pub fn tx_queue_len(name: &str) -> Result<u32> {
    let reply = call(name, "reading its queue length", libc::SIOCGIFTXQLEN, |_| {})?;
    // SAFETY: SIOCGIFTXQLEN has just written this member (`ifr_qlen`, an int at the same place).
    Ok(u32::try_from(unsafe { reply.ifr_ifru.ifru_metric }).unwrap_or(0))
}

/// Sets the capacity of the interface's transmit queue in packets. For a tap that is the queue from which its reader
/// reads.
///
/// # Errors
/// No permission, or no such interface.
pub fn set_tx_queue_len(name: &str, packets: u32) -> Result<()> {
    let value = libc::c_int::try_from(packets).unwrap_or(libc::c_int::MAX);
    // `ifr_qlen` is the same int of the union as `ifr_metric`.
    call(name, &format!("setting queue length {packets}"), libc::SIOCSIFTXQLEN, |r| {
        r.ifr_ifru.ifru_metric = value;
    })
    .map(drop)
}

/// Returns the interface's first IPv4 address and its prefix length in bits, or `None` if it has no address.
///
/// # Errors
/// There is no such interface.
pub fn ipv4_address(name: &str) -> Result<Option<(Ipv4Addr, u8)>> {
    let address = match call(name, "reading its address", libc::SIOCGIFADDR, |_| {}) {
        Ok(reply) => ipv4_of(&reply),
        Err(e) if e.source.raw_os_error() == Some(libc::EADDRNOTAVAIL) => return Ok(None),
        Err(e) => return Err(e),
    };
    let mask = ipv4_of(&call(name, "reading its netmask", libc::SIOCGIFNETMASK, |_| {})?);
    Ok(Some((address, mask.to_bits().leading_ones() as u8)))
}

/// Adds an address with a prefix length in bits to the interface. It can be used at once, as an IPv6 address is not
/// checked for duplicates. Adding an address twice is not an error. The kernel removes IPv6 addresses when the
/// interface goes down.
///
/// # Errors
/// No permission, no such interface, a prefix that is too long, or IPv6 is disabled.
pub fn add_address(name: &str, address: IpAddr, prefix: u8) -> Result<()> {
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let attempt = || {
        if prefix > longest {
            let text = format!("a prefix has at most {longest} bits");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        netlink::add_address(known_index(name)?, address, prefix)
    };
    let action = || format!("giving it {address}/{prefix}");
    attempt().map_err(|source| InterfaceError { name: name.to_owned(), action: action(), source })
}

/// Returns all addresses of the interface with their prefix lengths in bits.
///
/// # Errors
/// There is no such interface, or netlink sockets cannot be had.
pub fn addresses(name: &str) -> Result<Vec<(IpAddr, u8)>> {
    let attempt = || netlink::addresses(known_index(name)?);
    let action = || "reading its addresses".to_owned();
    attempt().map_err(|source| InterfaceError { name: name.to_owned(), action: action(), source })
}

/// Removes an address with a prefix length in bits from the interface. Removing an address that is not there is not an error.
///
/// # Errors
/// No permission, or no such interface.
pub fn remove_address(name: &str, address: IpAddr, prefix: u8) -> Result<()> {
    let attempt = || netlink::remove_address(known_index(name)?, address, prefix);
    let action = || format!("removing {address}/{prefix} from it");
    attempt().map_err(|source| InterfaceError { name: name.to_owned(), action: action(), source })
}

/// Returns the index of the bridge of the kernel (or bond, or the like) of which the interface is a port, if it is one.
///
/// # Errors
/// There is no such interface, or netlink sockets cannot be had.
pub fn master(name: &str) -> Result<Option<u32>> {
    let attempt = || netlink::master(known_index(name)?);
    let action = || "asking for its bridge".to_owned();
    attempt().map_err(|source| InterfaceError { name: name.to_owned(), action: action(), source })
}

/// Makes the interface a port of no bridge of the kernel. If it is none already nothing changes.
///
/// # Errors
/// No permission, or no such interface.
pub fn leave_bridge(name: &str) -> Result<()> {
    let attempt = || netlink::set_master(known_index(name)?, 0);
    let action = || "leaving its bridge".to_owned();
    attempt().map_err(|source| InterfaceError { name: name.to_owned(), action: action(), source })
}

/// Makes the interface a port of a bridge of the kernel, and of no other one any more. If it is one already nothing changes.
///
/// # Errors
/// No permission, one of the two does not exist, or `bridge` is none.
pub fn join_bridge(name: &str, bridge: &str) -> Result<()> {
    let attempt = || netlink::set_master(known_index(name)?, known_index(bridge)?);
    attempt().map_err(|source| {
        let source = match source.raw_os_error() {
            Some(libc::EOPNOTSUPP) => io::Error::other(format!("{bridge} is no bridge")),
            _ => source,
        };
        InterfaceError { name: name.to_owned(), action: format!("joining the bridge {bridge}"), source }
    })
}

/// Prevents the kernel from sending IPv6 packets by itself on this interface: no router solicitations, no
/// link-local address, no detection of duplicates. It must be called before the interface goes up. Errors are
/// ignored: it makes a test link quieter, and nothing depends on it.
pub fn quiet_ipv6(name: &str) {
    if !ifreq::is_valid_name(name) {
        return; // it becomes part of a path
    }
    // addr_gen_mode 1: no link-local address.
    for (key, value) in [("accept_dad", "0"), ("router_solicitations", "0"), ("addr_gen_mode", "1")] {
        let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/{key}"), value);
    }
}

/// Returns the index of an interface that must be there.
fn known_index(name: &str) -> io::Result<u32> {
    index(name).map_err(|e| e.source)?.ok_or_else(no_such_interface)
}

fn no_such_interface() -> io::Error {
    io::Error::from_raw_os_error(libc::ENODEV)
}

fn ipv4_of(reply: &libc::ifreq) -> Ipv4Addr {
    // SAFETY: callers pass the reply of an address request, which wrote this sockaddr.
    let data = unsafe { reply.ifr_ifru.ifru_addr.sa_data };
    Ipv4Addr::new(data[2] as u8, data[3] as u8, data[4] as u8, data[5] as u8)
}

/// Makes one request about the interface `name`, with the argument set by `fill`, and returns the reply. It is only for
/// requests whose argument is an `ifreq` without pointers in it, such as those used above.
fn call(
    name: &str,
    action: &str,
    request: libc::c_ulong,
    fill: impl FnOnce(&mut libc::ifreq),
) -> Result<libc::ifreq> {
    let attempt = || {
        // No interface can have a name that does not fit into a request.
        let mut argument = ifreq::for_name(name).ok_or_else(no_such_interface)?;
        fill(&mut argument);
        // Questions about addresses are IPv4's own. All others are the device layer's, which any socket leads to: a Unix one can be had
        // where no other may be made (`sandbox`).
        let (family, kind) = match request {
            libc::SIOCGIFADDR | libc::SIOCGIFNETMASK => (AddressFamily::INET, SocketType::DGRAM),
            _ => (AddressFamily::UNIX, SocketType::STREAM),
        };
        let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        // SAFETY: every request of this module takes an ifreq without an address inside.
        unsafe { ifreq::ioctl(socket, request as libc::Ioctl, &mut argument) }?;
        Ok(argument)
    };
    attempt().map_err(|source| InterfaceError { name: name.to_owned(), action: action.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tap::{Tap, TapConfig};
    use crate::testing::in_new_net;
    use std::net::UdpSocket;

    #[test]
    fn settings_read_back() {
        in_new_net(|| {
            let _tap = Tap::open(&TapConfig::new("t0")).unwrap();
            assert!(!is_up("t0").unwrap());
            set_mtu("t0", 9000).unwrap();
            set_mac("t0", [2, 0, 0, 0, 0, 0xfe]).unwrap();
            set_tx_queue_len("t0", 4321).unwrap();
            assert_eq!(ipv4_address("t0").unwrap(), None);
            add_address("t0", "10.1.2.3".parse().unwrap(), 20).unwrap();
            set_up("t0", true).unwrap();
            assert!(is_up("t0").unwrap());
            assert_eq!(mtu("t0").unwrap(), 9000);
            assert_eq!(mac("t0").unwrap(), [2, 0, 0, 0, 0, 0xfe]);
            assert_eq!(tx_queue_len("t0").unwrap(), 4321);
            assert_eq!(ipv4_address("t0").unwrap(), Some((Ipv4Addr::new(10, 1, 2, 3), 20)));
            set_up("t0", false).unwrap();
            assert!(!is_up("t0").unwrap());
        });
    }

    #[test]
    fn prefixes_from_none_to_all_bits() {
        in_new_net(|| {
            let taps = ["t0", "t1", "t2", "t3"].map(|name| Tap::open(&TapConfig::new(name)).unwrap());
            for (tap, prefix) in taps.iter().zip([32, 31, 1, 0]) {
                let address = Ipv4Addr::new(10, 1, 2, 3);
                for _ in 0..2 {
                    add_address(tap.name(), address.into(), prefix).unwrap();
                }
                assert_eq!(ipv4_address(tap.name()).unwrap(), Some((address, prefix)));
            }
            assert!(add_address("t0", "10.1.2.3".parse().unwrap(), 33).is_err());
            assert!(add_address("t0", "fd00::1".parse().unwrap(), 129).is_err());
        });
    }

    #[test]
    fn an_ipv6_address_is_usable_at_once() {
        in_new_net(|| {
            let _tap = Tap::open(&TapConfig::new("t0")).unwrap();
            set_up("t0", true).unwrap();
            for address in ["fd00::1", "fd00::2", "fd00::1"] {
                add_address("t0", address.parse().unwrap(), 64).unwrap();
                // An address that is still being checked cannot be bound to.
                UdpSocket::bind((address, 0)).unwrap();
            }
        });
    }

    #[test]
    fn a_quiet_interface_has_no_address_it_was_not_given() {
        in_new_net(|| {
            let count = || {
                let table = std::fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap();
                table.lines().filter(|line| line.ends_with("t0")).count()
            };
            let _tap = Tap::open(&TapConfig::new("t0")).unwrap();
            quiet_ipv6("t0");
            set_up("t0", true).unwrap();
            assert_eq!(count(), 0);
            add_address("t0", "fd00::1".parse().unwrap(), 64).unwrap();
            assert_eq!(count(), 1);
        });
    }

    #[test]
    fn errors_name_interface_action_and_remedy() {
        in_new_net(|| {
            assert_eq!(index("nope").unwrap(), None);
            assert_eq!(index("a-name-too-long-for-linux").unwrap(), None);
            let text = set_mtu("nope", 1500).unwrap_err().to_string();
            assert!(text.starts_with("interface nope: setting MTU 1500: "), "{text}");
            assert!(text.contains("no such interface in this network namespace"), "{text}");
            let _tap = Tap::open(&TapConfig::new("t0")).unwrap();
            assert!(set_mtu("t0", u32::MAX).is_err());
            assert!(set_mac("t0", [1, 0, 0, 0, 0, 0]).is_err());
        });
    }
}
