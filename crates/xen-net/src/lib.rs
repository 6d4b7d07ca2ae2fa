#![forbid(unsafe_code)]
//! Both halves of the Xen network interface: [`netfront`], a driver of the framework in `ringferry-nic`, and [`netback`].

pub mod bus;
pub mod events;
pub mod netback;
pub mod netfront;
pub mod offload;
