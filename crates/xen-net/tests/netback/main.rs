//! The back end against a front end of a few lines, over the fake: packets in every mode, and front ends that break the
//! rules.

mod fetch;
mod front;
mod hostile;
mod pages;
mod process;
mod receive;
mod send;
