//! IPv6 extension headers (RFC 8200, 4): the known types, and parsing of one header.
//!
//! The functions are pure. A parser walks the chain of headers by calling [`Extension::read`] until it returns `None`,
//! at most [`MAX_EXTENSIONS`] times.

use crate::ether::be16;

/// Largest number of extension headers that are skipped. RFC 8200 defines six kinds, one of which may occur twice; eight
/// leaves room for a new kind.
pub const MAX_EXTENSIONS: usize = 8;

/// Options for every router (RFC 8200, 4.3).
pub const HOP_BY_HOP: u8 = 0;
/// Routing header (RFC 8200, 4.4).
pub const ROUTING: u8 = 43;
/// Fragment header (RFC 8200, 4.5).
pub const FRAGMENT: u8 = 44;
/// Authentication header of IPsec (RFC 4302).
pub const AUTHENTICATION: u8 = 51;
/// Options for the destination (RFC 8200, 4.6).
pub const DESTINATION_OPTIONS: u8 = 60;
/// Mobility header (RFC 6275, 6.1).
pub const MOBILITY: u8 = 135;
/// Host identity protocol (RFC 7401, 5.1).
pub const HOST_IDENTITY: u8 = 139;
/// Shim6 header for multihoming (RFC 5533, 5.1).
pub const SHIM6: u8 = 140;

/// Mask of the fragment offset and the more-fragments flag.
const PART: u16 = 0xfff9;

/// A parsed extension header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension {
    /// Type of the next header: another extension header, or the transport protocol.
    pub next: u8,
    /// Length of this header in bytes; it may end beyond the prefix.
    pub len: usize,
    /// True if the packet is a fragment; `None` if the prefix ends before the field that tells. An atomic fragment
    /// (RFC 6946) is a whole packet.
    pub fragment: Option<bool>,
}

/// The error for a prefix that ends before the length of an extension header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut;

impl Extension {
    /// Parses the header of type `kind` at offset `at`. Returns `None` if `kind` is not an extension header: a
    /// transport protocol, or unknown.
    #[inline]
    pub fn read(kind: u8, prefix: &[u8], at: usize) -> Option<Result<Self, Cut>> {
        // Unit in bytes of the length field, which does not count the first eight bytes; a fragment header has none.
        let unit = match kind {
            HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS | MOBILITY | HOST_IDENTITY | SHIM6 => 8,
            AUTHENTICATION => 4,
            FRAGMENT => 0,
            _ => return None,
        };
        let Some(&[next, units]) = prefix.get(at..at + 2) else { return Some(Err(Cut)) };
        let fragment = match kind {
            FRAGMENT => be16(prefix, at + 2).map(|bits| bits & PART != 0),
            _ => Some(false),
        };
        Some(Ok(Self { next, len: usize::from(units) * unit + 8, fragment }))
    }
}
