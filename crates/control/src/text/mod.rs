//! How a terminal is written to: one table and one way to shorten numbers, for every command.

mod table;
mod units;

pub use table::Table;
pub use units::{duration, humane};
