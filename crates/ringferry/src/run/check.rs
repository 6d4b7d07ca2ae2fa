//! `ringferry run --check`: what is wrong with a configuration, or strange about it.

use std::io::{self, Write};

use ringferry_switch::config::ConfigError;
use serde::Serialize;

use super::Error;
use crate::run_args::RunArgs;

/// The result of a check.
#[derive(Debug, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Checked {
    /// True if a switch would start with it here: there are no problems.
    valid: bool,
    /// Number of its ports. Absent where problems keep them from being counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    ports: Option<usize>,
    /// The reasons why no switch would start.
    problems: Vec<Problem>,
    /// Remarks on what is strange, and keeps no switch from starting.
    notes: Vec<String>,
}

/// One thing that is wrong.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
struct Problem {
    /// Where it is: `ringferry.toml:12`, or the flag as typed. Empty for what is missing everywhere, or on this host.
    place: String,
    /// The key, such as `port.mtu`. Empty if it is not about one key.
    key: String,
    /// The mistake, and what would be right.
    message: String,
}

/// Checks the file and the flags, and prints what was found.
///
/// # Errors
/// No switch would start: [`Error::Config`] or [`Error::Missing`].
pub(super) fn check(args: &RunArgs) -> Result<(), Error> {
    let (checked, result) = match args.config() {
        Err(error) => (Checked { problems: problems(&error), ..Checked::default() }, Err(error.into())),
        Ok(config) => {
            let missing = config.missing();
            let is_missing = |message: &String| Problem {
                place: String::new(),
                key: String::new(),
                message: message.clone(),
            };
            let problems: Vec<_> = missing.names.iter().map(is_missing).collect();
            let directories = missing
                .directories
                .iter()
                .map(|note| format!("{note}: a switch that is started finds it, or does not start"));
            let notes = directories.chain(config.oddities()).collect();
            let checked =
                Checked { valid: problems.is_empty(), ports: Some(config.ports.len()), problems, notes };
            let names = missing.names.join("\n");
            (checked, if names.is_empty() { Ok(()) } else { Err(Error::Missing(names)) })
        }
    };
    // A reader that has gone needs no answer.
    let _ = checked.print(args.json);
    result
}

fn problems(error: &ConfigError) -> Vec<Problem> {
    let problems = error.problems.iter().map(|problem| Problem {
        place: problem.place.clone(),
        key: problem.key.clone(),
        message: problem.message.clone(),
    });
    problems.collect()
}

impl Checked {
    /// Problems are the program's error, which is printed at its end.
    fn print(&self, as_json: bool) -> io::Result<()> {
        if as_json {
            return writeln!(io::stdout(), "{}", serde_json::to_string(self)?);
        }
        for note in &self.notes {
            writeln!(io::stderr(), "note: {note}")?;
        }
        match self.ports.filter(|_| self.valid) {
            Some(1) => writeln!(io::stdout(), "the configuration is valid; it has 1 port"),
            Some(ports) => writeln!(io::stdout(), "the configuration is valid; it has {ports} ports"),
            None => Ok(()),
        }
    }
}
