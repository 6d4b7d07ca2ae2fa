//! How ringferry measures itself: experiments, statistics and reports.
//!
//! | module | what it holds |
//! |---|---|
//! | [`experiment`] | what an experiment, a row and a run are: the interface to plug into |
//! | [`experiments`] | the experiments there are |
//! | `frames` | frames that are known again, and what is wrong with one |
//! | [`list`] | the experiments for programs |
//! | [`labels`] | labelled parameters, which rows are named by |
//! | [`schedule`] | runs rows in blocks, with a warm-up and A/A rows |
//! | [`probe`] | what the machine did around each sample: the distance of the processors, stolen time |
//! | [`stats`] | summaries, paired comparisons of blocks, lines, Student's and Welch's tests, ministat's output |
//! | [`results`] | the document a session leaves behind, and its JSON schema |
//! | [`versus`] | two results of one experiment against each other |
//! | [`report`] | results for people: text and HTML |
//! | [`output`] | files written as a whole |
//! | [`publish`] | all experiments, one page each |
//! | [`session`] | from what the user asked for to files and a report |
//! | [`machine`] | facts about the machine and the program |
//! | [`progress`] | the bar on standard error |
//! | [`stop`] | Ctrl-C |
#![forbid(unsafe_code)]
// Not published: a comment says what its name does not, or is not there.
#![allow(missing_docs)]

pub mod experiment;
pub mod experiments;
mod frames;
pub mod labels;
pub mod list;
pub mod machine;
pub mod output;
pub mod probe;
pub mod progress;
pub mod publish;
pub mod report;
pub mod results;
pub mod schedule;
#[cfg(test)]
mod schemas;
pub mod session;
pub mod stats;
pub mod stop;
pub mod versus;
