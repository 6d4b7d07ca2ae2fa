//! Statistics: what a row's values say, and what two rows' values say about each other.
//!
//! | module | idea |
//! |---|---|
//! | [`summary`] | N, extremes, median, mean, standard deviation, quartiles |
//! | [`distribution`] | quantiles of Student's t, exact and as ministat's table has them |
//! | [`paired`] | rows against baselines by what both did in the same blocks: bootstrap, verdict |
//! | [`line`](mod@line) | cost against distance |
//! | [`compare`] | Student's and Welch's tests and the ratio of means of two sets that were not measured in pairs |
//! | [`ministat`] | the text and the plot that FreeBSD's ministat prints |
//! | [`format`](mod@format) | numbers as C's `%g` writes them |

pub mod compare;
pub mod distribution;
pub mod format;
pub mod line;
pub mod ministat;
pub mod paired;
pub mod summary;

pub use compare::{Comparison, Verdict};
pub use distribution::Confidence;
pub use line::Line;
pub use paired::{Pair, Paired};
pub use summary::Summary;
