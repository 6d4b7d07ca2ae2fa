//! Drivers that need no device. Tests and experiments create them and attach queues to them as to real ones.
//!
//! | driver | a packet that is sent | packets received | purpose |
//! |---|---|---|---|
//! | [`null`] | is completed at once | none | measuring the cost of the framework itself |
//! | [`loopback`] | is received again | those sent | tests; an example to read before writing a driver |

pub mod loopback;
pub mod null;
