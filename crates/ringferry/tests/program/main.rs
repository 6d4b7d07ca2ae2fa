//! The program as its users meet it: `ringferry` is started, guests made of our own driver half plug
//! in over vhost-user and send raw Ethernet frames. No root needed, except where a test says so.
//!
//! | file | what is tested |
//! |---|---|
//! | [`forwarding`] | which frame goes where, unharmed, whatever was negotiated; counters add up |
//! | [`offloads`] | every set of offloads to every other, and to a tap |
//! | [`lifecycle`] | coming and going: reconnects, restarts, signals, memory and ring changes, inherited sockets |
//! | [`replace`] | a running switch that another process replaces, and what goes along |
//! | [`replace_killed`] | either of the two processes is killed at any moment of that |
//! | [`replace_steps`] | a test stands between the two: kills at each step, and programs of other versions |
//! | [`restart`] | a switch killed under load, with every kind of ring |
//! | [`workers`] | queue pairs of one guest on several threads |
//! | [`migration`] | live migration: what is written to a guest is in the dirty log |
//! | [`mirror`] | mirrors, links that are taken down, addresses that are forgotten or made static |
//! | [`metrics`] | what scrapers get, and what they cannot do to each other |
//! | [`hostile`] | front ends and guests that break the rules harm only themselves |
//! | [`hostile_back_end`] | back ends that break the rules hold up no guest |
//! | [`bad_input`] | what cannot work is refused with one line that says what to do |
//! | [`capture`] | packets as Wireshark reads them, and what a capture cannot do to a switch |
//! | [`dpdk`] | our driver half against DPDK's `net_vhost` (needs Debian's dpdk-dev) |
//! | [`xdp`] | an interface of the host, by AF_XDP |
//! | [`xen`] | Xen guests on the same switch: forwarding, restarts on either side, several queues, hostile front ends |
//! | [`channels`] | several queue pairs, and their number changing under traffic |
//! | [`ports`] | ports that are added and removed while the switch runs, and the configuration read again |
//! | [`firewall`] | what a guest reaches behind a firewall, policies that change, and those with mistakes |
//! | [`rules`] | rules of ports: live changes, kept in the file, and obeyed |
//! | [`rules_kernel`] | rules of taps, and of guests, whose kernel has other ideas |
//! | [`sandbox`] | what the switch gives up, what it still does, and its helper |
//! | [`straight`] | large frames of a tap, which the kernel writes to where they are read |
//! | [`tenants`] | what one guest or front end does to the others: their frames and answers come while the attack goes on |
//! | [`trace`] | what would become of a frame, and what becomes of one |
//! | [`why`] | what `ringferry ctl why` says of ports that carry nothing, and of loads |
//! | [`wires`] | wires between two ports, and their impairments |
//! | [`json`] | what every command prints with `--json` is as docs/schema/ says |
//! | [`top`] | the screens of `ringferry top` on a terminal, and how it leaves that behind |
//! | [`page`] | what a browser gets, and who gets nothing |
//! | [`demo`] | `ringferry demo` works and leaves nothing behind |
//!
//! [`kernels`] is what several of them have: a guest with a kernel of its own. What else they stand on is the crate `ringferry-rig`.
#![forbid(unsafe_code)]

mod bad_input;
mod capture;
mod channels;
mod completion;
mod demo;
mod dpdk;
mod firewall;
mod forwarding;
mod hostile;
mod hostile_back_end;
mod json;
mod keep;
mod kernels;
mod lifecycle;
mod metrics;
mod migration;
mod mirror;
mod offloads;
mod page;
mod ports;
mod reload_faults;
mod replace;
mod replace_killed;
mod replace_steps;
mod restart;
mod rules;
mod rules_kernel;
mod sandbox;
mod straight;
mod tenants;
mod top;
mod trace;
mod why;
mod wires;
mod workers;
mod xdp;
mod xen;
