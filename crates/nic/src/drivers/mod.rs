//! Drivers that need no device.
//!
//! | driver | what is sent | what is received | for |
//! |---|---|---|---|
//! | [`null`] | is gone at once | nothing | what the framework itself costs |
//! | [`loopback`] | comes back | what was sent | tests; and to read, before writing a driver |

pub mod loopback;
pub mod null;
