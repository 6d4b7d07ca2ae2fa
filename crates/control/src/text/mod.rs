//! How a terminal is written to: one table and one way to shorten numbers, for every command of the program.
//!
//! The table is ours: what the kept crates (`comfy-table`, `tabled`) add to it are borders, colours and wrapped cells, none of which
//! survives `| grep`; and without those ours is shorter than their set-up.

mod printable;
mod table;
mod units;
mod wrap;

pub use printable::printable;
pub use table::Table;
pub use units::{bit_rate, duration, micros, scaled, short_count, short_rate};
pub use wrap::wrap;
