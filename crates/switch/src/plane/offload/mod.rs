//! Offloads between ports that do not have the same: what one receiver lacks is done here, what it gains from is added.
//!
//! | file | idea |
//! |---|---|
//! | `gso` | checksums are finished and large frames cut, for a receiver that takes neither |
//! | `gro` | packets of a flow become one frame, for a receiver that takes segmentation offloads |
//! | `pmtu` | what a sender is told whose packet does not fit |

pub(crate) mod gro;
pub(crate) mod gso;
pub(crate) mod pmtu;
#[cfg(test)]
pub(crate) mod testing;
