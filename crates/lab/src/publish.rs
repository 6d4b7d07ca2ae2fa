//! `ringferry lab all --publish DIR`: every experiment, one page each, and an index that begins with what is missed.
//!
//! The time is shared out by how much each experiment has to measure in a round; one that has all its rounds early leaves what is left to those behind it. An experiment's result is written as soon
//! as it is there (`DIR/NAME.json`), so a run that was interrupted goes on with the first experiment whose result is not there or not complete. The pages are made from the results alone, all of them each time.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::experiment::{Defaults, Experiment, Source};
use crate::experiments;
use crate::machine::Machine;
use crate::output::Output;
use crate::report::markdown;
use crate::results::Results;
use crate::session::{self, LabError, Request};
use crate::stop::Stop;

/// The experiments to run, the time for them, and the folder for the pages.
#[derive(Clone, Debug, Default)]
pub struct Publication {
    pub folder: PathBuf,
    /// For all experiments together.
    pub budget: Duration,
    /// Experiments to measure, by name; all when empty.
    pub only: Vec<String>,
    /// The program `ringferry`, if not the one beside the lab or in `PATH`.
    pub program: Option<PathBuf>,
    /// Measure without probes of the machine.
    pub no_probe: bool,
    /// The command line, word by word, for the record.
    pub command: Vec<String>,
}

/// Measures what is not there yet and writes all pages. Returns true if nothing failed and nobody stopped it.
///
/// # Errors
/// See [`LabError`]; experiments that were measured before stay written.
pub fn publish(publication: &Publication, stop: &Stop) -> Result<bool, LabError> {
    let folder = &publication.folder;
    fs::create_dir_all(folder).map_err(|error| {
        LabError::Usage(format!(
            "--publish {}: {error}: choose a folder that you may write to",
            folder.display()
        ))
    })?;
    let chosen = chosen(&publication.only)?;
    let here = Machine::here();
    let mut to_do = Vec::new();
    for experiment in &chosen {
        match have(folder, experiment.as_ref(), &here) {
            Some(_) => eprintln!("{}: measured before", experiment.name()),
            None => to_do.push((experiment, weight(experiment.as_ref(), publication)?)),
        }
    }
    let end = Instant::now() + publication.budget;
    let mut left: f64 = to_do.iter().map(|(_, weight)| weight).sum();
    let mut fine = true;
    for (at, (experiment, weight)) in to_do.iter().enumerate() {
        let share = end.saturating_duration_since(Instant::now()).mul_f64(weight / left.max(*weight));
        left -= weight;
        eprintln!(
            "{} ({} of {}): {} minutes",
            experiment.name(),
            at + 1,
            to_do.len(),
            (share.as_secs_f64() / 60.0).ceil()
        );
        let request = Request {
            experiment: experiment.name().into(),
            budget: Some(share),
            json: Some(json(folder, experiment.name())),
            program: publication.program.clone(),
            no_probe: publication.no_probe,
            command: publication.command.clone(),
            no_plot: true,
            ..Request::default()
        };
        let results = session::measure(&request, stop, &mut io::sink())?;
        fine &= results.complete && !results.failed();
        if !results.complete {
            break;
        }
    }
    pages(folder)?;
    Ok(fine)
}

/// Writes a page for every result that is there, and the index.
fn pages(folder: &Path) -> Result<(), LabError> {
    let mut all = Vec::new();
    for experiment in experiments::all() {
        let file = json(folder, experiment.name());
        if !file.is_file() {
            continue;
        }
        let results = Results::read(&file)?;
        Output::open(&folder.join(format!("{}.md", experiment.name())))?.write(&markdown::page(&results))?;
        all.push(results);
    }
    Ok(Output::open(&folder.join("README.md"))?.write(&markdown::index(&all))?)
}

fn json(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("{name}.json"))
}

fn chosen(only: &[String]) -> Result<Vec<Box<dyn Experiment>>, LabError> {
    if only.is_empty() {
        return Ok(experiments::all());
    }
    only.iter().map(|name| session::find(name)).collect()
}

/// The result of an earlier run, if it is complete and of this program on this machine.
fn have(folder: &Path, experiment: &dyn Experiment, here: &Machine) -> Option<Results> {
    let results = Results::read(&json(folder, experiment.name())).ok()?;
    let of = |machine: &Machine| {
        let Machine { cpu, kernel, ringferry, commit, build, .. } = machine;
        [cpu.clone(), Some(kernel.clone()), Some(ringferry.clone()), commit.clone(), Some(build.clone())]
    };
    (results.complete && of(&results.machine) == of(here)).then_some(results)
}

/// About how many seconds a run of everything takes that an experiment has to measure.
fn weight(experiment: &dyn Experiment, publication: &Publication) -> Result<f64, LabError> {
    let plan = experiment.plan(&session::setup(experiment, publication.program.as_deref())?)?;
    let measured = plan.rows.iter().filter(|row| matches!(row.source, Source::Measured(_)));
    let runs: BTreeSet<String> = measured.map(|row| row.run.clone().unwrap_or_else(|| row.name())).collect();
    let Defaults { seconds, set_up, .. } = experiment.defaults();
    Ok(runs.len() as f64 * (seconds + set_up))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_before_is_kept_if_it_is_complete_and_of_this_program() {
        let folder = tempfile::tempdir().unwrap();
        let request = Request {
            experiment: "fdb".into(),
            runs: Some(1),
            seconds: Some(0.001),
            filters: vec!["entries=16$".into()],
            no_probe: true,
            json: Some(json(folder.path(), "fdb")),
            ..Request::default()
        };
        let stop = Stop::new();
        let allowed = ringferry_sys::cpu::allowed().unwrap();
        let mut results = session::measure(&request, &stop, &mut io::sink()).unwrap();
        // It pins the thread that it runs on: the next experiment has all processors again.
        assert_eq!(ringferry_sys::cpu::allowed().unwrap(), allowed);
        let (fdb, here) = (session::find("fdb").unwrap(), Machine::here());
        assert!(have(folder.path(), fdb.as_ref(), &here).is_some());
        let other = Machine { commit: Some("another".into()), ..here.clone() };
        assert!(have(folder.path(), fdb.as_ref(), &other).is_none());
        results.complete = false;
        fs::write(json(folder.path(), "fdb"), serde_json::to_string(&results).unwrap()).unwrap();
        assert!(have(folder.path(), fdb.as_ref(), &here).is_none());
        assert!(have(folder.path(), session::find("ring").unwrap().as_ref(), &here).is_none());
    }

    #[test]
    fn pages_are_made_of_the_results_that_are_there() {
        let folder = tempfile::tempdir().unwrap();
        let publication = Publication {
            folder: folder.path().join("results"),
            budget: Duration::from_millis(1),
            only: vec!["fdb".into()],
            no_probe: true,
            ..Publication::default()
        };
        assert!(publish(&publication, &Stop::new()).unwrap());
        let page = |name: &str| fs::read_to_string(publication.folder.join(name)).unwrap();
        assert!(page("fdb.md").starts_with("# ringferry lab fdb"), "{}", page("fdb.md"));
        assert!(page("README.md").contains("[fdb](fdb.md)"), "{}", page("README.md"));
        // Nothing was measured in no time, and that is said first.
        assert!(page("README.md").contains("without values"), "{}", page("README.md"));
        let error = publish(&Publication { only: vec!["fdbs".into()], ..publication }, &Stop::new());
        assert!(matches!(error, Err(LabError::Unknown { .. })));
    }
}
