//! A session: from what the user asked for to results that are printed and written.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use regex::Regex;

use crate::experiment::{Experiment, Plan, RowError, Setup};
use crate::experiments;
use crate::machine::{self, Machine};
use crate::output::{Output, OutputError};
use crate::probe::{self, Watch};
use crate::progress::Progress;
use crate::report::{html, text, words};
use crate::results::{ReadError, Results, SCHEMA, Settings, compare_rows, cost_line, repetitions};
use crate::schedule::{self, Schedule};
use crate::stats::{Confidence, paired};
use crate::stop::Stop;
use crate::versus::{Versus, VersusError};

/// The seed unless the user gives one: any will do, and the same one makes sessions alike.
pub const SEED: u64 = 1;

/// The program whose switch, guests and traffic are measured.
const PROGRAM: &str = "ringferry";

/// The rows to measure, how to measure them, and the files to write.
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub experiment: String,
    /// Rounds, if not the experiment's default.
    pub runs: Option<usize>,
    /// How long to go on, whatever the number of rounds, if there is a limit.
    pub budget: Option<Duration>,
    /// Compare each row with itself so many times, each time as a session of [`Request::runs`] rounds would.
    pub aa: Option<usize>,
    /// Measure without probes of the machine: no block is rejected.
    pub no_probe: bool,
    /// Seconds per run, if not the experiment's default.
    pub seconds: Option<f64>,
    /// Seed of order and runs, if not [`SEED`].
    pub seed: Option<u64>,
    /// Confidence in per cent, if not 95.
    pub confidence: Option<f64>,
    /// Processors to pin to, if not all that are allowed.
    pub cpus: Vec<usize>,
    /// The rows: regular expressions on their names, any of which may match.
    pub filters: Vec<String>,
    /// Settings of the experiment, `NAME=VALUE`.
    pub options: Vec<String>,
    pub json: Option<PathBuf>,
    pub html: Option<PathBuf>,
    /// The program `ringferry`, if not the one beside the lab or in `PATH`.
    pub program: Option<PathBuf>,
    /// Leave ministat's plots out.
    pub no_plot: bool,
    /// The command line, word by word, for the record.
    pub command: Vec<String>,
}

/// Why a session did not take place, or its results were lost.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// No experiment of that name.
    #[error("there is no experiment {name}: try {}", known.join(", "))]
    Unknown {
        /// The name that was asked for.
        name: String,
        /// The names that there are.
        known: Vec<&'static str>,
    },
    /// An argument that makes no sense.
    #[error("{0}")]
    Usage(String),
    /// The experiment cannot be planned.
    #[error(transparent)]
    Plan(#[from] RowError),
    /// A file cannot be written.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// A file cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Results that cannot be compared.
    #[error(transparent)]
    Versus(#[from] VersusError),
    /// The report cannot be printed.
    #[error("cannot print the report: {0}")]
    Print(#[from] io::Error),
}

impl LabError {
    /// 2 for what the user can put right on the command line, 1 for the rest.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Print(_) => 1,
            _ => 2,
        }
    }
}

/// The experiment of that name.
///
/// # Errors
/// [`LabError::Unknown`].
pub fn find(name: &str) -> Result<Box<dyn Experiment>, LabError> {
    let mut all = experiments::all();
    match all.iter().position(|experiment| experiment.name() == name) {
        Some(at) => Ok(all.swap_remove(at)),
        None => {
            let known = all.iter().map(|experiment| experiment.name()).collect();
            Err(LabError::Unknown { name: name.into(), known })
        }
    }
}

/// Measures, prints to `out`, writes the files. The results say whether a row failed.
///
/// # Errors
/// See [`LabError`]; nothing was measured unless it is an output that failed in the end.
pub fn measure(request: &Request, stop: &Stop, out: &mut impl Write) -> Result<Results, LabError> {
    let experiment = find(&request.experiment)?;
    if request.no_probe {
        return measure_with(
            experiment.as_ref(),
            request,
            &mut probe::Blind,
            &mut Progress::stderr(),
            stop,
            out,
        );
    }
    let cpus = settings(experiment.as_ref(), request)?.cpus;
    let mut machine = probe::Machine::new(&cpus);
    if !experiment.goes_with_distance() {
        machine = machine.at_any_distance();
    }
    measure_with(experiment.as_ref(), request, &mut machine, &mut Progress::stderr(), stop, out)
}

/// [`measure`] for a given experiment, with somebody to watch the machine.
///
/// # Errors
/// See [`measure`].
pub fn measure_with(
    experiment: &dyn Experiment,
    request: &Request,
    watch: &mut dyn Watch,
    progress: &mut Progress,
    stop: &Stop,
    out: &mut impl Write,
) -> Result<Results, LabError> {
    let settings = settings(experiment, request)?;
    let seconds = Duration::from_secs_f64(settings.seconds);
    let setup = Setup {
        seconds,
        cpus: settings.cpus.clone(),
        options: settings.options.clone(),
        lab: std::env::current_exe()?,
        program: program(request.program.as_deref())?,
    };
    let mut plan = experiment.plan(&setup)?;
    let filters = filters(&settings.filters)?;
    schedule::filter(&mut plan, &filters);
    if plan.rows.is_empty() {
        return Err(LabError::Usage(format!(
            "no row of `lab {}` matches --filter: see `ringferry lab list {}`",
            request.experiment, request.experiment
        )));
    }
    let json = request.json.as_deref().map(Output::open).transpose()?;
    let page = request.html.as_deref().map(Output::open).transpose()?;
    let allowed = ringferry_sys::cpu::allowed()?;
    let results = run(experiment, request, settings, plan, watch, progress, stop);
    // A row may have pinned this thread, and another experiment may follow.
    ringferry_sys::cpu::restrict_current_thread(&allowed)?;
    // Files first: a terminal that went away must not take the results with it.
    let alone = json.as_ref().is_some_and(Output::is_stdout) || page.as_ref().is_some_and(Output::is_stdout);
    if let Some(json) = json {
        json.write(&to_json(&results)?)?;
    }
    if let Some(page) = page {
        page.write(&html::page(&results))?;
    }
    if !alone {
        out.write_all(text::report(&results, !request.no_plot).as_bytes())?;
    }
    Ok(results)
}

/// Where `ringferry` is: where the user says, else beside the lab or in `PATH`, else where it would be built.
///
/// # Errors
/// The user names something that is no file; or the lab does not know where it is itself.
pub fn program(given: Option<&Path>) -> Result<PathBuf, LabError> {
    match given {
        Some(path) if path.is_file() => Ok(path.to_owned()),
        Some(path) => Err(LabError::Usage(format!("--program {}: there is no such file", path.display()))),
        None => match ringferry_sys::program::find(PROGRAM) {
            Some(found) => Ok(found),
            None => Ok(std::env::current_exe()?.with_file_name(PROGRAM)),
        },
    }
}

/// The setup of a plan when nothing is going to be measured, or not yet.
///
/// # Errors
/// See [`program`].
pub fn setup(experiment: &dyn Experiment, given: Option<&Path>) -> Result<Setup, LabError> {
    Ok(Setup {
        seconds: Duration::from_secs_f64(experiment.defaults().seconds),
        cpus: ringferry_sys::cpu::allowed()?,
        options: BTreeMap::new(),
        lab: std::env::current_exe()?,
        program: program(given)?,
    })
}

fn run(
    experiment: &dyn Experiment,
    request: &Request,
    mut settings: Settings,
    mut plan: Plan,
    watch: &mut dyn Watch,
    progress: &mut Progress,
    stop: &Stop,
) -> Results {
    let blocks_each = settings.runs;
    let schedule = Schedule {
        rounds: settings.runs * request.aa.unwrap_or(1),
        seconds: Duration::from_secs_f64(settings.seconds),
        seed: settings.seed,
        cpus: settings.cpus.clone(),
        only_again: request.aa.is_some(),
        until: request.budget.map(|budget| Instant::now() + budget),
    };
    let machine = Machine::here();
    let (started, clock) = (machine::now(), Instant::now());
    let measured = schedule::run(&mut plan.rows, &schedule, watch, progress, stop);
    let (mut rows, blocks) = (measured.rows, measured.blocks);
    settings.runs = measured.rounds;
    for row in &mut rows {
        row.line = cost_line(row, &blocks, settings.confidence);
    }
    let warnings = words::overrun_baselines(&rows);
    Results {
        schema: SCHEMA.into(),
        experiment: experiment.name().into(),
        about: experiment.about().into(),
        command: request.command.clone(),
        started,
        elapsed_seconds: clock.elapsed().as_secs_f64(),
        complete: measured.complete,
        comparisons: compare_rows(&rows, &blocks, settings.confidence),
        repetitions: request
            .aa
            .map(|_| repetitions(&rows, &blocks, blocks_each, settings.confidence))
            .unwrap_or_default(),
        blocks,
        rejected: measured.rejected,
        settings,
        machine,
        peers: plan.peers,
        notes: plan.notes,
        published: plan.published,
        missing: plan.missing,
        rows,
        warnings,
    }
}

/// Compares two results files, prints to `out`, writes the files.
///
/// # Errors
/// See [`LabError`].
pub fn compare(
    [old, new]: [&Path; 2],
    json: Option<&Path>,
    page: Option<&Path>,
    out: &mut impl Write,
) -> Result<Versus, LabError> {
    let (old, new) = (Results::read(old)?, Results::read(new)?);
    let versus = Versus::new(&old, &new)?;
    let json = json.map(Output::open).transpose()?;
    let page = page.map(Output::open).transpose()?;
    let alone = json.as_ref().is_some_and(Output::is_stdout) || page.as_ref().is_some_and(Output::is_stdout);
    if let Some(json) = json {
        json.write(&to_json(&versus)?)?;
    }
    if let Some(page) = page {
        page.write(&html::versus_page(&versus, &old, &new))?;
    }
    if !alone {
        out.write_all(versus.text().as_bytes())?;
    }
    Ok(versus)
}

fn to_json(document: &impl serde::Serialize) -> Result<String, LabError> {
    let text = serde_json::to_string_pretty(document).map_err(io::Error::from)?;
    Ok(text + "\n")
}

fn filters(texts: &[String]) -> Result<Vec<Regex>, LabError> {
    let compile = |text: &String| {
        Regex::new(text).map_err(|error| LabError::Usage(format!("--filter {text}: {error}")))
    };
    texts.iter().map(compile).collect()
}

fn settings(experiment: &dyn Experiment, request: &Request) -> Result<Settings, LabError> {
    let usage = |text: String| Err(LabError::Usage(text));
    let defaults = experiment.defaults();
    let runs = request.runs.unwrap_or(defaults.runs);
    if !(1..=10_000).contains(&runs) {
        return usage(format!("--runs {runs}: between 1 and 10000"));
    }
    let seconds = request.seconds.unwrap_or(defaults.seconds);
    if !(0.001..=86_400.0).contains(&seconds) {
        return usage(format!("--seconds {seconds}: between 0.001 and 86400"));
    }
    let percent = request.confidence.unwrap_or(95.0);
    let Some(confidence) = Confidence::from_percent(percent) else {
        return usage(format!("--confidence {percent}: one of 80, 90, 95, 98, 99, 99.5"));
    };
    let fewest = paired::fewest(confidence);
    if request.aa.is_some() && runs < fewest {
        return usage(format!(
            "--aa with --runs {runs}: fewer than {fewest} blocks prove nothing at {percent} %"
        ));
    }
    let allowed = ringferry_sys::cpu::allowed()?;
    if let Some(cpu) = request.cpus.iter().find(|cpu| !allowed.contains(cpu)) {
        return usage(format!("--cpus {cpu}: this process may use {allowed:?} only"));
    }
    let cpus = if request.cpus.is_empty() { allowed } else { request.cpus.clone() };
    let mut options = BTreeMap::new();
    for option in &request.options {
        let Some((name, value)) = option.split_once('=') else {
            return usage(format!("--option {option}: write NAME=VALUE"));
        };
        if !experiment.options().iter().any(|known| known.name == name) {
            let known: Vec<_> = experiment.options().iter().map(|known| known.name).collect();
            return usage(format!("`lab {}` has no option {name}: {known:?}", experiment.name()));
        }
        options.insert(name.into(), value.into());
    }
    Ok(Settings {
        runs,
        seconds,
        seed: request.seed.unwrap_or(SEED),
        confidence,
        cpus,
        filters: request.filters.clone(),
        options,
    })
}
