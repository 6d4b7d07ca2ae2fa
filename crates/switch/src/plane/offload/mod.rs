//! Offloads between ports that differ in them: work that a receiver cannot do is done in software, and packets are
//! merged for a receiver that gains from it.
//!
//! | file | idea |
//! |---|---|
//! | `gso` | checksums are finished and large frames cut, for a receiver that takes neither |
//! | `gro` | packets of a flow become one frame, for a receiver that takes segmentation offloads |
//! | `pmtu` | the ICMP error for the sender of a packet that does not fit |

pub(crate) mod gro;
pub(crate) mod gso;
pub(crate) mod pmtu;
#[cfg(test)]
pub(crate) mod testing;
