//! Statistics: what a row's values say, and what two rows' values say about each other.
//!
//! | module | idea |
//! |---|---|
//! | [`summary`] | N, extremes, median, mean, standard deviation, quartiles |
//! | [`distribution`] | quantiles of Student's t, exact and as ministat's table has them |
//! | [`compare`] | Student's and Welch's tests, the ratio of means, the verdict |
//! | [`ministat`] | the text and the plot that FreeBSD's ministat prints |
//! | [`format`](mod@format) | numbers as C's `%g` writes them |

pub mod compare;
pub mod distribution;
pub mod format;
pub mod ministat;
pub mod summary;

pub use compare::{Comparison, Verdict};
pub use distribution::Confidence;
pub use summary::Summary;
