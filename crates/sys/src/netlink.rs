//! The netlink requests of this crate: the addresses of an interface, and the interface of which it is a port (rtnetlink(7)).
//!
//! Each request opens a socket of its own and closes it. The older ioctl is not sufficient, as it cannot turn off
//! the detection of duplicate IPv6 addresses, which delays the use of an address.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Size in bytes of `struct nlmsghdr`.
const HEADER: usize = 16;

/// Adds `address` to the interface with index `index`. An address that is there already is not an error. An IPv6
/// address is not checked for duplicates.
pub(crate) fn add_address(index: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // struct ifaddrmsg: family, prefix length, flags, scope (0: global), interface.
    let mut body = vec![family as u8, prefix, 0, 0];
    body.extend_from_slice(&index.to_ne_bytes());
    match address {
        IpAddr::V4(address) => {
            attribute(&mut body, libc::IFA_LOCAL, &address.octets());
            attribute(&mut body, libc::IFA_ADDRESS, &address.octets());
            if prefix < 31 {
                let broadcast = Ipv4Addr::from_bits(address.to_bits() | u32::MAX >> prefix);
                attribute(&mut body, libc::IFA_BROADCAST, &broadcast.octets());
            }
        }
        IpAddr::V6(address) => {
            attribute(&mut body, libc::IFA_LOCAL, &address.octets());
            attribute(&mut body, libc::IFA_ADDRESS, &address.octets());
            attribute(&mut body, libc::IFA_FLAGS, &libc::IFA_F_NODAD.to_ne_bytes());
        }
    }
    request(libc::RTM_NEWADDR, libc::NLM_F_CREATE | libc::NLM_F_REPLACE, &body)
}

/// Removes `address` from the interface with index `index`. An address that is not there is not an error.
pub(crate) fn remove_address(index: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut body = vec![family as u8, prefix, 0, 0];
    body.extend_from_slice(&index.to_ne_bytes());
    match address {
        IpAddr::V4(address) => attribute(&mut body, libc::IFA_LOCAL, &address.octets()),
        IpAddr::V6(address) => attribute(&mut body, libc::IFA_LOCAL, &address.octets()),
    }
    match request(libc::RTM_DELADDR, 0, &body) {
        Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => Ok(()),
        result => result,
    }
}

/// Returns the addresses of the interface with index `index`, with their prefix lengths.
pub(crate) fn addresses(index: u32) -> io::Result<Vec<(IpAddr, u8)>> {
    // struct ifaddrmsg of all zeros: those of every family and interface.
    let socket = send(libc::RTM_GETADDR, libc::NLM_F_DUMP, &[0; 8])?;
    let mut all = Vec::new();
    // The kernel sends what fits into so many bytes at a time.
    let mut reply = vec![0; 32 * 1024];
    loop {
        let (len, _) = rustix::net::recv(&socket, &mut reply[..], RecvFlags::empty())?;
        let mut rest = &reply[..len];
        while let Some(size) =
            word(rest, 0).map(|size| size as usize).filter(|size| (HEADER..=rest.len()).contains(size))
        {
            let kind = u16::from_ne_bytes([rest[4], rest[5]]);
            let body = &rest[HEADER..size];
            match libc::c_int::from(kind) {
                libc::NLMSG_DONE => return Ok(all),
                libc::NLMSG_ERROR => return outcome(body).map(|()| all),
                _ if word(body, 4) == Some(index) => all.extend(address_of(body)),
                _ => {}
            }
            rest = rest.get(size.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

/// The address of a message of the kernel's about one (struct ifaddrmsg and its attributes), with its prefix length.
fn address_of(message: &[u8]) -> Option<(IpAddr, u8)> {
    let prefix = *message.get(1)?;
    let mut found = None;
    for (kind, value) in Attributes(message.get(8..)?) {
        let address = match value.len() {
            4 => <[u8; 4]>::try_from(value).ok().map(IpAddr::from),
            16 => <[u8; 16]>::try_from(value).ok().map(IpAddr::from),
            _ => None,
        };
        // Its own one; an interface without a peer has no other, and of IPv6 that is all there is.
        match kind {
            libc::IFA_LOCAL => return Some((address?, prefix)),
            libc::IFA_ADDRESS => found = address,
            _ => {}
        }
    }
    Some((found?, prefix))
}

/// A number of four bytes in a message.
fn word(message: &[u8], at: usize) -> Option<u32> {
    message.get(at..at + 4).map(|bytes| u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

/// Makes the interface with index `index` a port of the one with index `master`, or of none with 0. A port of another one leaves that first; if it
/// is one of `master` already nothing is done.
pub(crate) fn set_master(index: u32, master: u32) -> io::Result<()> {
    let mut body = about_link(index);
    attribute(&mut body, libc::IFLA_MASTER, &master.to_ne_bytes());
    request(libc::RTM_NEWLINK, 0, &body)
}

/// Returns the index of the interface of which the one with index `index` is a port, if it is one.
pub(crate) fn master(index: u32) -> io::Result<Option<u32>> {
    let socket = send(libc::RTM_GETLINK, 0, &about_link(index))?;
    // An interface is described in one or two kilobytes.
    let mut reply = vec![0; 32 * 1024];
    let (len, _) = rustix::net::recv(&socket, &mut reply[..], RecvFlags::empty())?;
    let message = reply[..len].get(HEADER..).unwrap_or_default();
    if libc::c_int::from(u16::from_ne_bytes([reply[4], reply[5]])) == libc::NLMSG_ERROR {
        return outcome(message).map(|()| None);
    }
    // After struct ifinfomsg.
    let attributes = Attributes(message.get(16..).unwrap_or_default());
    Ok(attributes.filter(|(kind, _)| *kind == libc::IFLA_MASTER).find_map(|(_, value)| word(value, 0)))
}

/// Returns the begin of a request about the interface with index `index`.
fn about_link(index: u32) -> Vec<u8> {
    // struct ifinfomsg: family, padding, type, index, flags, changed flags.
    let mut body = vec![0; 4];
    body.extend_from_slice(&index.to_ne_bytes());
    body.extend_from_slice(&[0; 8]);
    body
}

/// The attributes of a message, with their kinds.
struct Attributes<'m>(&'m [u8]);

impl<'m> Iterator for Attributes<'m> {
    type Item = (u16, &'m [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        // struct rtattr: length with these four bytes, kind.
        let &[a, b, c, d] = self.0.get(..4)? else { return None };
        let (len, kind) = (usize::from(u16::from_ne_bytes([a, b])), u16::from_ne_bytes([c, d]));
        let value = self.0.get(4..len)?;
        self.0 = self.0.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    }
}

/// Appends a `struct rtattr` and its value, padded to four bytes.
fn attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let len = (4 + value.len()) as u16; // values here have at most 16 bytes
    body.extend_from_slice(&len.to_ne_bytes());
    body.extend_from_slice(&kind.to_ne_bytes());
    body.extend_from_slice(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

/// Sends one request and reads the kernel's answer, which is queued before the send returns.
fn request(kind: u16, flags: libc::c_int, body: &[u8]) -> io::Result<()> {
    let socket = send(kind, flags | libc::NLM_F_ACK, body)?;
    let mut reply = [0u8; 1024];
    let (len, _) = rustix::net::recv(&socket, &mut reply[..], RecvFlags::empty())?;
    outcome(reply[..len].get(HEADER..).unwrap_or_default())
}

/// What a struct nlmsgerr says, which begins with the negated error number.
fn outcome(message: &[u8]) -> io::Result<()> {
    match word(message, 0) {
        Some(0) => Ok(()),
        Some(error) => Err(io::Error::from_raw_os_error((error as i32).saturating_neg())),
        None => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Sends one request on a socket of its own, which is returned.
fn send(kind: u16, flags: libc::c_int, body: &[u8]) -> io::Result<OwnedFd> {
    let flags = (flags | libc::NLM_F_REQUEST) as u16;
    let mut message = Vec::with_capacity(HEADER + body.len());
    message.extend_from_slice(&((HEADER + body.len()) as u32).to_ne_bytes());
    message.extend_from_slice(&kind.to_ne_bytes());
    message.extend_from_slice(&flags.to_ne_bytes());
    message.extend_from_slice(&[0; 8]); // sequence number, sender: one request per socket needs neither
    message.extend_from_slice(body);

    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None, // NETLINK_ROUTE is 0
    )?;
    // Messages from a netlink socket that is not connected go to the kernel.
    rustix::net::send(&socket, &message, SendFlags::empty())?;
    Ok(socket)
}
