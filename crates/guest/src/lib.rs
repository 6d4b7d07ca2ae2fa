#![doc = include_str!("../README.md")]
//!
//! # In detail
//!
//! The two commands of the program that run as a front end. Each has a module with its command line (a set of `clap` options), an error, and a function
//! `run`, which the program calls once from its main thread and which returns when the command is over. `run` owns everything that it makes: the tap,
//! the connection to the back end, the rings and their memory, the threads of queue pairs, and signals, which it takes over from the process.
//!
//! | module | contents | owner of |
//! |---|---|---|
//! | [`guest`] | `ringferry guest`: a tap and a vhost-user back end | see there |
//! | [`netfront`] | `ringferry netfront`: a tap and a Xen back end | the tap, the front-end driver and its session |
//! | `tap` | what both do with their tap: set-up, checks of what a back end wrote before the kernel gets it | nothing |
//! | `backoff` | how long both wait before they connect again | nothing |
//!
//! They are a crate of their own, as they move packets: this crate is compiled for speed and the program's own for size.
#![forbid(unsafe_code)]

mod backoff;
pub mod guest;
pub mod netfront;
mod tap;
