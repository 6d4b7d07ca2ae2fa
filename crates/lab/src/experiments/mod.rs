//! The experiments there are. A new one is a module here and a line in [`all`].

pub mod costs;
pub mod fdb;
pub mod forward;
pub mod grants;
mod lookups;
mod network;
pub mod offloads;
mod ovs;
pub mod peers;
pub mod queues;
pub mod replace;
pub mod ring;
pub mod rxbuf;
mod shared;
pub mod switch;
mod taps;
pub mod tenants;
pub mod txmap;
mod valgrind;

use crate::experiment::Experiment;

/// All experiments, in the order they are listed.
pub fn all() -> Vec<Box<dyn Experiment>> {
    vec![
        Box::new(ring::Ring),
        Box::new(costs::Costs),
        Box::new(peers::Peers),
        Box::new(txmap::Txmap),
        Box::new(forward::Forward),
        Box::new(rxbuf::Rxbuf),
        Box::new(queues::Queues),
        Box::new(grants::Grants),
        Box::new(switch::Switch),
        Box::new(tenants::Tenants),
        Box::new(replace::Replace),
        Box::new(fdb::Database),
        Box::new(offloads::Offloads),
    ]
}

/// A folder for the sockets and files of one run, removed with the value. By its name one can tell whose it was if the lab was killed.
fn folder() -> std::io::Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix("ringferry-lab-").tempdir()
}
