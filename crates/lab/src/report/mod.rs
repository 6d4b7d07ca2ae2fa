//! Results for people.
//!
//! | module | idea |
//! |---|---|
//! | [`text`] | tables and ministat's output for a terminal |
//! | `distance` | distances of the processors, what was rejected, and what rows did at each distance |
//! | `extra` | the other figures of rows |
//! | [`table`] | columns of text |
//! | [`html`] | one self-contained page |
//! | [`markdown`] | pages of a repository, what is missed first |
//! | [`svg`] | the plots of that page |
//! | [`words`] | how numbers, names and verdicts are worded in both |

mod distance;
mod extra;
pub mod html;
pub mod markdown;
pub mod svg;
pub mod table;
pub mod text;
pub mod words;
