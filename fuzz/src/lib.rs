//! Fuzz targets: an input is a script by which a hostile peer and the code under test take turns.
//!
//! | module | what it holds |
//! |---|---|
//! | [`script`] | bytes to operations and back |
//! | [`guest`] | guest memory in which the peer also writes between two loads |
//! | [`ring`] | how an input chooses a ring |
//! | [`pen`] | the hostile driver |
//! | [`oracle`] | a second reader of rings, to compare with |
//! | [`device`], [`driver`], [`net`], [`control`], [`mod@session`] | the targets for VIRTIO |
//! | [`mod@forward`] | the target for the switch between its ports |
//! | [`mod@filter`] | the target for filter programs of captures |
//! | [`mod@firewall`] | the target for firewalls of ports |
//! | [`mod@helper`] | the target for the privileged helper |
//! | [`mod@handover`] | the target for the state that another process hands over |
//! | [`mod@reload`] | the target for differences between configurations |
//! | [`mod@netback`], [`mod@netfront`], [`mod@store`], [`mod@xenbus`] | the targets for Xen |
//! | [`seeds`] | scenarios that reach deep, from which the fuzzer starts |
//!
//! The targets are plain functions: only the programs in `targets/` know libFuzzer.
#![forbid(unsafe_code)]

pub mod control;
pub mod device;
pub mod driver;
pub mod filter;
pub mod firewall;
pub mod forward;
pub mod guest;
pub mod handover;
pub mod helper;
pub mod net;
pub mod netback;
pub mod netfront;
pub mod oracle;
pub mod pen;
pub mod reload;
pub mod ring;
pub mod script;
pub mod seeds;
pub mod session;
pub mod store;
pub mod xenbus;

/// A target: runs an input and says how far it got. It panics when something is wrong.
pub type Target = fn(&[u8]) -> ring::Reached;

/// All targets with their names, in the order of the modules.
pub const TARGETS: [(&str, Target); 18] = [
    ("split_device", device::split),
    ("packed_device", device::packed),
    ("split_driver", driver::split),
    ("packed_driver", driver::packed),
    ("net_transmitq", net::transmitq),
    ("net_receiveq", net::receiveq),
    ("vhost_user_session", session::session),
    ("control_queue", control::queue),
    ("switch_forward", forward::forward),
    ("capture_filter", filter::filter),
    ("firewall", firewall::firewall),
    ("privileged_helper", helper::helper),
    ("handed_state", handover::handover),
    ("config_changes", reload::reload),
    ("netback", netback::netback),
    ("netfront", netfront::netfront),
    ("xenstore", store::store),
    ("xenbus", xenbus::xenbus),
];
