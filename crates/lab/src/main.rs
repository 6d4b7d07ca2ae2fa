//! `ringferry-lab`, which `ringferry lab` runs: the command line of the laboratory. The work is done by the library.
#![forbid(unsafe_code)]

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{ArgAction, Args, Parser, Subcommand};
use ringferry_lab::experiment::{Experiment, Source};
use ringferry_lab::experiments;
use ringferry_lab::list::List;
use ringferry_lab::publish::{self, Publication};
use ringferry_lab::session::{self, LabError, Request};
use ringferry_lab::stop::Stop;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

const EXAMPLES: &str = "\
Examples:
  ringferry lab list                                 what can be measured
  ringferry lab list ring                            its rows and options
  ringferry lab ring --html ring.html                measure, and draw
  ringferry lab ring --filter 'ring=split.*batch=32' some rows only
  ringferry lab ring --option buffers=10000000 --filter 'mode=polling ring=split order=any chain=direct batch=1 '
                                                     the published benchmark
  ringferry lab ring --filter batch=1 --aa 20        is a row no different from itself here?
  ringferry lab all --publish docs/results           everything, a page each, in under two hours
  ringferry lab ring --json new.json && ringferry lab compare old.json new.json

Exit status: 0 fine, 1 a run failed, 2 the command line or a file is wrong.";

/// Measures data paths, compares the results, and draws them.
#[derive(Debug, Parser)]
#[command(name = "ringferry-lab", bin_name = "ringferry lab", version)]
#[command(args_conflicts_with_subcommands = true, arg_required_else_help = true, after_help = EXAMPLES)]
struct Cli {
    /// Log more: -v for what each message of a front end does, -vv for everything. RUST_LOG overrides it.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,
    #[command(subcommand)]
    command: Option<LabCommand>,
    #[command(flatten)]
    measure: MeasureArgs,
}

#[derive(Debug, Subcommand)]
enum LabCommand {
    /// The experiments, or the rows and options of one.
    List {
        /// An experiment whose rows and options to list.
        name: Option<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Runs every experiment and writes a page for each.
    All {
        /// The folder of the pages. What an earlier, interrupted run has written there is not measured again.
        #[arg(long, value_name = "DIR")]
        publish: PathBuf,
        /// Minutes for all experiments together.
        #[arg(long, value_name = "MINUTES", default_value_t = 110)]
        minutes: u64,
        /// Only this experiment; may be given several times.
        #[arg(long, value_name = "NAME")]
        only: Vec<String>,
        /// The program `ringferry` to measure, if not the one beside this or in PATH.
        #[arg(long, value_name = "PATH")]
        program: Option<PathBuf>,
        /// Measure without probes of the machine.
        #[arg(long)]
        no_probe: bool,
    },
    /// Compares two results of one experiment: new against old.
    Compare {
        /// Result of an earlier `lab NAME --json FILE`.
        old: PathBuf,
        /// Result of a later one.
        new: PathBuf,
        /// Write the comparison as JSON; `-` is standard output.
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// Write the comparison as a self-contained HTML page.
        #[arg(long, value_name = "FILE")]
        html: Option<PathBuf>,
    },
    /// A process that an experiment starts for itself.
    #[command(hide = true)]
    Child {
        #[arg(long)]
        program: PathBuf,
        name: String,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

#[derive(Debug, Args)]
struct MeasureArgs {
    /// The experiment to run; see `ringferry lab list`.
    name: Option<String>,
    /// Rounds, after one for warming up. Each measures a row twice in every block that it is in.
    #[arg(long, value_name = "N")]
    runs: Option<usize>,
    /// End after so many seconds, whatever the number of rounds.
    #[arg(long, value_name = "S")]
    budget: Option<u64>,
    /// Compare each row with itself so many times, each time by --runs blocks, and count what is called proven.
    #[arg(long, value_name = "TIMES")]
    aa: Option<usize>,
    /// Measure without probes of the machine: every block counts, wherever the processors were.
    #[arg(long)]
    no_probe: bool,
    /// Seconds per run.
    #[arg(long, value_name = "S")]
    seconds: Option<f64>,
    /// Only rows whose name matches this regular expression; may be given several times.
    #[arg(long, value_name = "REGEX")]
    filter: Vec<String>,
    /// Processors to pin to, the most important first.
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    cpus: Vec<usize>,
    /// A setting of the experiment; may be given several times.
    #[arg(long, value_name = "NAME=VALUE")]
    option: Vec<String>,
    /// Write the result as JSON; `-` is standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the result as a self-contained HTML page.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// The program `ringferry` to measure, if not the one beside this or in PATH.
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
    /// Print numbers without ministat's plots.
    #[arg(long)]
    no_plot: bool,
    /// Level of all intervals: 80, 90, 95, 98, 99 or 99.5.
    #[arg(long, value_name = "PER CENT")]
    confidence: Option<f64>,
    /// Where the order of the rows and all else that is random starts from.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let level = match cli.verbose {
        0 => LevelFilter::INFO,
        1 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let asked = std::env::var("RUST_LOG").ok().and_then(|text| text.parse::<Targets>().ok());
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .with_target(false);
    let filter = asked.unwrap_or_else(|| Targets::new().with_default(level));
    tracing_subscriber::registry().with(filter).with(lines).init();
    run(&cli).map_or_else(
        |error| match error {
            // A reader that has seen enough (`| head`).
            LabError::Print(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
            error => {
                eprintln!("ringferry-lab: {error}");
                ExitCode::from(error.exit_code())
            }
        },
        ExitCode::from,
    )
}

/// Runs the command; the exit status is for the shell.
fn run(args: &Cli) -> Result<u8, LabError> {
    let out = &mut io::stdout().lock();
    match &args.command {
        Some(LabCommand::List { name, json }) => list(name.as_deref(), *json, out).map(|()| 0),
        Some(LabCommand::Compare { old, new, json, html }) => {
            session::compare([old, new], json.as_deref(), html.as_deref(), out).map(|_| 0)
        }
        Some(LabCommand::All { publish, minutes, only, program, no_probe }) => {
            let publication = Publication {
                folder: publish.clone(),
                budget: Duration::from_secs(60 * minutes),
                only: only.clone(),
                program: program.clone(),
                no_probe: *no_probe,
                command: std::env::args().collect(),
            };
            Ok(u8::from(!publish::publish(&publication, &Stop::watch()?)?))
        }
        Some(LabCommand::Child { program, name, args }) => {
            session::find(name)?.child(program, args)?;
            Ok(0)
        }
        None => measure(&args.measure, out),
    }
}

fn measure(args: &MeasureArgs, out: &mut impl Write) -> Result<u8, LabError> {
    let Some(name) = &args.name else {
        return Err(LabError::Usage("name an experiment: see `ringferry lab list`".into()));
    };
    let request = Request {
        experiment: name.clone(),
        runs: args.runs,
        budget: args.budget.map(Duration::from_secs),
        aa: args.aa,
        no_probe: args.no_probe,
        seconds: args.seconds,
        seed: args.seed,
        confidence: args.confidence,
        cpus: args.cpus.clone(),
        filters: args.filter.clone(),
        options: args.option.clone(),
        json: args.json.clone(),
        html: args.html.clone(),
        program: args.program.clone(),
        no_plot: args.no_plot,
        command: std::env::args().collect(),
    };
    let results = session::measure(&request, &Stop::watch()?, out)?;
    Ok(results.failed().into())
}

fn list(name: Option<&str>, as_json: bool, out: &mut impl Write) -> Result<(), LabError> {
    let listed: Vec<Box<dyn Experiment>> = match name {
        Some(name) => vec![session::find(name)?],
        None => experiments::all(),
    };
    if as_json {
        let text = serde_json::to_string_pretty(&List::of(&listed)?).map_err(io::Error::from)?;
        writeln!(out, "{text}")?;
        return Ok(());
    }
    for experiment in &listed {
        writeln!(out, "{:<10} {}", experiment.name(), experiment.about())?;
        let defaults = experiment.defaults();
        writeln!(out, "{:10} --runs {} --seconds {}", "", defaults.runs, defaults.seconds)?;
        for option in experiment.options() {
            writeln!(out, "{:10} --option {}=...: {}", "", option.name, option.help)?;
        }
        if name.is_some() {
            for row in experiment.plan(&session::setup(experiment.as_ref(), None)?)?.rows {
                let missing = match &row.source {
                    Source::Missing(missing) => format!("   missing: {}", missing.reason),
                    Source::Measured(_) => String::new(),
                };
                writeln!(out, "  {}{missing}", row.name())?;
            }
        }
    }
    Ok(())
}
