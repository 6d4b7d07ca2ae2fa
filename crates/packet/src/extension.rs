//! IPv6 extension headers (RFC 8200, 4): which there are, and how long each of them is. Whoever looks for what lies
//! behind them walks them here.

use crate::ether::be16;

/// Extension headers that are skipped at most. RFC 8200 knows six kinds, one of which may occur twice; eight leaves
/// room for a kind unknown today.
pub const MAX_EXTENSIONS: usize = 8;

/// Options for every router (RFC 8200, 4.3).
pub const HOP_BY_HOP: u8 = 0;
/// Routing header (RFC 8200, 4.4).
pub const ROUTING: u8 = 43;
/// Fragment header (RFC 8200, 4.5).
pub const FRAGMENT: u8 = 44;
/// Authentication header (RFC 4302).
pub const AUTHENTICATION: u8 = 51;
/// Options for the destination (RFC 8200, 4.6).
pub const DESTINATION_OPTIONS: u8 = 60;
/// Mobility header (RFC 6275, 6.1).
pub const MOBILITY: u8 = 135;
/// Host identity protocol (RFC 7401, 5.1).
pub const HOST_IDENTITY: u8 = 139;
/// Shim6 (RFC 5533, 5.1).
pub const SHIM6: u8 = 140;

/// Fragment offset and more-fragments flag.
const PART: u16 = 0xfff9;

/// An extension header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension {
    /// What follows it: another, or the transport protocol.
    pub next: u8,
    /// Its bytes, which may lie beyond the prefix.
    pub len: usize,
    /// Whether the packet is a part of a larger one; unknown where the prefix ends before it says so. A lone ("atomic")
    /// fragment is a whole packet.
    pub fragment: Option<bool>,
}

/// The prefix of a frame ends in front of an extension header's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut;

impl Extension {
    /// The header of type `kind` that begins at `at`; `None` if that is a transport protocol, or nothing known.
    #[inline]
    pub fn read(kind: u8, prefix: &[u8], at: usize) -> Option<Result<Self, Cut>> {
        // Bytes that the length field counts beyond the first eight; a fragment header has no such field.
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
