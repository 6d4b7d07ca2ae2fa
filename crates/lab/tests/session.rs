//! Whole sessions with experiments made for the purpose: what is printed, written, read back, compared
//! and drawn.

use std::path::Path;

use ringferry_lab::experiment::{
    Better, Defaults, Experiment, Missing, OptionSpec, Peer, Plan, Published, Row, RowError, Sample, Setup,
};
use ringferry_lab::labels::Labels;
use ringferry_lab::probe::Blind;
use ringferry_lab::progress::Progress;
use ringferry_lab::report::{html, markdown, text};
use ringferry_lab::results::{BoundVerdict, ReadError, Results, SCHEMA};
use ringferry_lab::session::{self, LabError, Request, measure_with};
use ringferry_lab::stats::Verdict;
use ringferry_lab::stop::Stop;
use ringferry_lab::versus::{Versus, VersusError};

/// Rows whose values are known: the shadowed ones cost three quarters.
struct Known {
    /// Added to all values.
    shift: f64,
    /// Requested during the third round.
    stop_in: Option<usize>,
}

impl Experiment for Known {
    fn name(&self) -> &'static str {
        "known"
    }

    fn about(&self) -> &'static str {
        "rows with <known> values & no surprises"
    }

    fn options(&self) -> &'static [OptionSpec] {
        &[OptionSpec { name: "broken", help: "adds a row that fails" }]
    }

    fn defaults(&self) -> Defaults {
        Defaults { runs: 6, seconds: 0.001, set_up: 0.0 }
    }

    fn plan(&self, setup: &Setup) -> Result<Plan, RowError> {
        let mut plan = Plan::default();
        for batch in [1u32, 8, 64] {
            for shadow in ["off", "on"] {
                let base = f64::from(batch).recip() * 100.0 * if shadow == "on" { 0.75 } else { 1.0 };
                let (shift, stop_in) = (self.shift, self.stop_in);
                let labels = Labels::new().with("batch", batch).with("shadow", shadow);
                let mut row = Row::measured(labels.clone(), "ns/buffer", Better::Lower, move |run| {
                    if stop_in == Some(run.round) {
                        run.stop.request();
                        return Err(RowError::Stopped);
                    }
                    // A little scatter that is the same for all rows of a round.
                    Ok(Sample::new(base * (1.0 + 0.001 * (run.seed % 8) as f64) + shift).with("drops", 0.0))
                })
                .in_group("rings")
                .counting(|_| Ok([("loads/buffer".to_owned(), 12.25)].into()));
                if shadow == "on" {
                    let figure = Published::new("elsewhere", 217.0, "ns/buffer", "a <paper>");
                    row = row.against(Some(labels.with("shadow", "off"))).published([figure]);
                }
                plan.rows.push(row);
            }
        }
        let labels = Labels::new().with("peer", "testpmd");
        let row =
            Row::measured(labels, "Mpps", Better::Higher, |_| Err(RowError::failed("it is not installed")));
        plan.rows.push(row.unless(Some(("it is not installed", Some("dpdk")))));
        if setup.options.contains_key("broken") {
            let labels = Labels::new().with("row", "broken");
            plan.rows.push(Row::measured(labels, "Mpps", Better::Higher, |_| {
                Err(RowError::failed("the port is busy: stop what uses it"))
            }));
        }
        plan.missing.push(Missing {
            name: "stores".into(),
            reason: "no tool".into(),
            package: Some("valgrind".into()),
        });
        plan.peers.push(Peer { name: "peer".into(), version: "1.2".into() });
        plan.notes.push("a note".into());
        plan.published.push(Published::new("as a whole", 2.5, "s", "a paper"));
        Ok(plan)
    }
}

const KNOWN: Known = Known { shift: 0.0, stop_in: None };

fn request() -> Request {
    Request { experiment: "known".into(), command: vec!["lab".into(), "known".into()], ..Request::default() }
}

fn run(experiment: &Known, request: &Request) -> Result<(Results, String), LabError> {
    let mut out = Vec::new();
    let results =
        measure_with(experiment, request, &mut Blind, &mut Progress::silent(), &Stop::new(), &mut out)?;
    Ok((results, String::from_utf8(out).unwrap()))
}

/// Elements of HTML that have no end.
const VOID: [&str; 2] = ["meta", "br"];

/// Checks that tags are nested and closed, attributes quoted, and that nothing is fetched.
fn well_formed(page: &str) {
    let body = page.strip_prefix("<!DOCTYPE html>").expect("a doctype");
    let mut open: Vec<&str> = Vec::new();
    for part in body.split('<').skip(1) {
        let (tag, text) = part.split_once('>').expect("a closed tag");
        assert!(!text.contains('&') || text.split('&').skip(1).all(|rest| rest.contains(';')), "{text}");
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
        let name = tag.split([' ', '/', '\n']).find(|name| !name.is_empty()).unwrap();
        if let Some(closed) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(closed), "in {:?}", &open);
        } else if !VOID.contains(&name) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?}");
    for fetched in ["http:", "https:", "src=", "<script", "<link", "@import", "url("] {
        assert!(!page.contains(fetched), "{fetched}");
    }
    assert!(page.contains("prefers-color-scheme: dark") && page.contains("width=device-width"));
    assert_eq!(page.matches("<svg ").count(), page.matches("<title id=").count());
    assert_eq!(page.matches("<svg ").count(), page.matches("<desc id=").count());
    let ids: Vec<&str> = page.split(" id=\"").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    let mut unique = ids.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), ids.len(), "{ids:?}");
    assert!(!page.contains("NaN") && !page.contains("inf\""));
}

#[test]
fn a_result_survives_the_way_through_json() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("result.json");
    let (results, _) = run(&KNOWN, &Request { json: Some(path.clone()), ..request() }).unwrap();
    assert!(results.complete && !results.failed());
    let back = Results::read(&path).unwrap();
    assert_eq!(back, results);
    assert_eq!(back.schema, SCHEMA);
    assert_eq!(back.rows.len(), 6 + 1 + 1, "six rows, the first again, and one missing");
    assert_eq!(back.rows[0].values.len(), 2 * 6);
    assert_eq!((back.blocks.len(), back.rows[0].blocks.len()), (3 * 6, 2 * 6));
    assert_eq!(back.rows[0].counts["loads/buffer"], 12.25);
    assert_eq!(back.rows[0].extra["drops"], [0.0; 12]);
}

#[test]
fn rows_are_compared_with_their_baselines_and_the_noise_is_shown() {
    let (results, report) = run(&KNOWN, &request()).unwrap();
    let on = results.comparison("batch=8 shadow=on").unwrap();
    assert_eq!((on.baseline.as_str(), on.noise_floor), ("batch=8 shadow=off", false));
    assert_eq!(on.comparison.verdict, Verdict::Faster);
    assert!((on.comparison.ratio.unwrap().value - 0.75).abs() < 1e-9);
    let floor = results.comparison("batch=1 shadow=off again=A/A").unwrap();
    assert!(floor.noise_floor);
    assert_eq!(floor.comparison.verdict, Verdict::NoDifferenceProven);
    for expected in [
        "Difference at 95.0% confidence\n\t-3.1",
        "(Student's t, pooled s = ",
        "\t(Welch: -3.1",
        "In 6 blocks: -25.00 % [-25.00, -25.00]",
        "Without probes of the processors' distance: 18 blocks.",
        "rings (ns/buffer, lower is better)",
        "faster",
        "A/A: 1 row measured twice",
        "217 ns/buffer",
        "published",
        "missing: it is not installed (apt install dpdk)",
        "stores: missing: no tool (apt install valgrind)",
        "12.25",
        "a note",
    ] {
        assert!(report.contains(expected), "{expected}\n{report}");
    }
    assert!(report.contains("|x") || report.contains("+--"), "a plot");
    let (_, plain) = run(&KNOWN, &Request { no_plot: true, ..request() }).unwrap();
    assert!(!plain.contains("+--") && plain.contains("Difference at 95.0% confidence"));
}

#[test]
fn the_page_is_well_formed_and_holds_everything() {
    let (results, _) = run(&KNOWN, &Request { options: vec!["broken=yes".into()], ..request() }).unwrap();
    let page = html::page(&results);
    well_formed(&page);
    for expected in [
        "median over batch",
        "all values",
        "&lt;known&gt; values &amp; no surprises",
        "a &lt;paper&gt;",
        "it is not installed",
        "<td>dpdk</td>",
        "the port is busy",
        "published",
        "▲ faster",
        "pooled s",
        "1.2",
    ] {
        assert!(page.contains(expected), "{expected}");
    }
}

#[test]
fn a_page_of_a_repository_begins_with_what_is_missed_and_has_published_figures_beside_ours() {
    let (results, _) = run(&KNOWN, &Request { options: vec!["broken=yes".into()], ..request() }).unwrap();
    let page = markdown::page(&results);
    let at = |text: &str| page.find(text).unwrap_or_else(|| panic!("{text}\n{page}"));
    let order = [
        "## Missed\n",
        "- failed 2 times: `row=broken`: the port is busy",
        "- not measured: `peer=testpmd`: it is not installed",
        "## Published figures beside ours",
        "| elsewhere | 217 ns/buffer | a &lt;paper> | `batch=1 shadow=on` | 75.",
        "| as a whole | 2.5 s | a paper |  | no row of ours is the same |",
        "## rings",
        "| `batch=1 shadow=off` |",
        "| -25.00 % [-25.00, -25.00] | faster | 12.25 |",
        "## How",
    ];
    assert!(order.map(at).is_sorted(), "{page}");
    let index = markdown::index(&[results]);
    assert!(index.contains("- [known](known.md): failed 2 times"), "{index}");
    assert!(index.contains("| 3 | 3 | 0 | 0 | 0 of 0 |"), "{index}");
}

#[test]
fn a_row_that_fails_is_told_and_the_session_is_not_lost() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("result.json");
    let request = Request { options: vec!["broken=1".into()], json: Some(path.clone()), ..request() };
    let (results, report) = run(&KNOWN, &request).unwrap();
    assert!(results.failed());
    assert!(report.contains("failed: row=broken, round 1: the port is busy"), "{report}");
    assert_eq!(Results::read(&path).unwrap().row("batch=1 shadow=on").unwrap().values.len(), 12);
}

#[test]
fn ctrl_c_leaves_partial_results_in_all_files() {
    let folder = tempfile::tempdir().unwrap();
    let [json, page] = ["r.json", "r.html"].map(|name| folder.path().join(name));
    let request = Request { json: Some(json.clone()), html: Some(page.clone()), runs: Some(9), ..request() };
    let (_, report) = run(&Known { stop_in: Some(7), ..KNOWN }, &request).unwrap();
    let results = Results::read(&json).unwrap();
    assert!(!results.complete && !results.failed());
    let measured = results.rows.iter().filter(|row| row.missing.is_none());
    assert!(measured.clone().count() > 0 && measured.clone().all(|row| row.values.len() == 12));
    assert_eq!(results.comparison("batch=1 shadow=on").unwrap().comparison.verdict, Verdict::Faster);
    assert!(report.contains("partial results"));
    assert!(markdown::page(&results).contains("## Missed\n\n- interrupted: these are partial results\n"));
    let page = std::fs::read_to_string(page).unwrap();
    well_formed(&page);
    assert!(page.contains("partial results"));
}

#[test]
fn results_stopped_before_the_first_value_can_be_shown_too() {
    let (results, report) = run(&Known { stop_in: Some(0), ..KNOWN }, &request()).unwrap();
    assert!(results.comparisons.is_empty() && report.contains("no values"));
    well_formed(&html::page(&results));
}

#[test]
fn two_results_are_compared_row_by_row() {
    let (old, _) = run(&KNOWN, &request()).unwrap();
    let filters = vec!["batch=8".into(), "batch=64".into()];
    let slow = Known { shift: 5.0, ..KNOWN };
    let (mut new, _) = run(&slow, &Request { filters, runs: Some(6), ..request() }).unwrap();
    new.machine.kernel = "Linux of the future".into();
    let versus = Versus::new(&old, &new).unwrap();
    let names: Vec<_> = versus.rows.iter().map(|row| row.name.as_str()).collect();
    assert!(names.contains(&"batch=8 shadow=on") && !names.contains(&"batch=1 shadow=on"), "{names:?}");
    assert!(versus.rows.iter().all(|row| row.comparison.verdict == Verdict::Slower));
    assert!(versus.only_old.contains(&"batch=1 shadow=on".to_owned()));
    assert!(versus.warnings.iter().any(|warning| warning.contains("Linux of the future")));
    let text = versus.text();
    assert!(text.contains("slower") && text.contains("only in the old results: batch=1"), "{text}");
    let page = html::versus_page(&versus, &old, &new);
    well_formed(&page);
    assert!(page.contains("▼ slower"));
    let json = serde_json::to_string(&versus).unwrap();
    assert_eq!(serde_json::from_str::<Versus>(&json).unwrap(), versus);
}

#[test]
fn results_that_have_nothing_in_common_are_not_compared() {
    let (old, _) = run(&KNOWN, &request()).unwrap();
    let mut other = old.clone();
    other.experiment = "peers".into();
    assert!(matches!(Versus::new(&old, &other), Err(VersusError::Experiments { .. })));
    let mut renamed = old.clone();
    for row in &mut renamed.rows {
        row.unit = "Mpps".into();
    }
    assert_eq!(Versus::new(&old, &renamed), Err(VersusError::NothingInCommon));
}

#[test]
fn a_file_of_another_schema_is_refused_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    let error = |path: &Path| Results::read(path).unwrap_err();
    let future = file("future", r#"{"schema": "ringferry-lab/2"}"#);
    assert!(matches!(error(&future), ReadError::Schema { .. }));
    assert!(error(&future).to_string().contains("measure again with this version"));
    assert!(matches!(error(&file("none", "{}")), ReadError::Schema { .. }));
    assert!(matches!(error(&file("text", "hello")), ReadError::Json { .. }));
    assert!(matches!(error(&file("half", r#"{"schema": "ringferry-lab/1"}"#)), ReadError::Json { .. }));
    assert!(matches!(error(Path::new("/nonexistent/file")), ReadError::Io { .. }));
}

#[test]
fn readers_ignore_members_they_do_not_know() {
    let (results, _) = run(&KNOWN, &request()).unwrap();
    let document = serde_json::to_string(&results).unwrap();
    let document =
        document.replacen('{', r#"{"later":1,"#, 1).replace(r#""rows":[{"#, r#""rows":[{"later":[],"#);
    assert_eq!(document.matches("later").count(), 2);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), document).unwrap();
    assert_eq!(Results::read(file.path()).unwrap(), results);
}

#[test]
fn a_request_that_makes_no_sense_measures_nothing() {
    let cases: [(&str, Request); 9] = [
        ("--runs 0", Request { runs: Some(0), ..request() }),
        ("--seconds 0", Request { seconds: Some(0.0), ..request() }),
        ("--seconds NaN", Request { seconds: Some(f64::NAN), ..request() }),
        ("--confidence 97", Request { confidence: Some(97.0), ..request() }),
        ("--cpus 1023", Request { cpus: vec![1023], ..request() }),
        ("--filter (", Request { filters: vec!["(".into()], ..request() }),
        ("no row", Request { filters: vec!["ring=round".into()], ..request() }),
        ("no option buffers", Request { options: vec!["buffers=1".into()], ..request() }),
        ("NAME=VALUE", Request { options: vec!["buffers".into()], ..request() }),
    ];
    for (message, request) in cases {
        // Were anything measured, this would ask to stop.
        let error = run(&Known { stop_in: Some(0), ..KNOWN }, &request).err().unwrap();
        assert!(error.to_string().contains(message), "{error}");
        assert_eq!(error.exit_code(), 2);
    }
    let Err(error) = session::find("rings") else { panic!("no such experiment") };
    assert!(error.to_string().contains("ring, "), "{error}");
}

#[test]
fn an_unwritable_file_is_found_before_anything_is_measured() {
    let request = Request { json: Some("/nonexistent/r.json".into()), ..request() };
    let stop = Stop::new();
    let never = Known { stop_in: Some(0), ..KNOWN };
    let error = measure_with(&never, &request, &mut Blind, &mut Progress::silent(), &stop, &mut Vec::new())
        .unwrap_err();
    assert!(error.to_string().contains("/nonexistent/r.json") && error.exit_code() == 2);
    assert!(!stop.requested(), "something was measured");
}

#[test]
fn too_few_runs_prove_nothing() {
    let (results, _) = run(&KNOWN, &Request { runs: Some(2), ..request() }).unwrap();
    assert!(results.comparisons.iter().all(|found| found.comparison.verdict == Verdict::TooFewRuns));
    assert!(text::report(&results, true).contains("too few runs"));
    well_formed(&html::page(&results));
}

/// Rows with a bound of 10 each: their values, the first of which is what the others are compared with.
struct Bounded(&'static [f64]);

impl Experiment for Bounded {
    fn name(&self) -> &'static str {
        "bounded"
    }

    fn about(&self) -> &'static str {
        "rows that keep their bounds or do not"
    }

    fn plan(&self, _: &Setup) -> Result<Plan, RowError> {
        let labels = |at: usize| Labels::new().with("attack", at);
        let row = |(at, &value): (usize, &f64)| {
            Row::measured(labels(at), "µs", Better::Lower, move |_| Ok(Sample::new(value)))
                .against((at > 0).then(|| labels(0)))
                .bound(Some(10.0))
        };
        Ok(Plan { rows: self.0.iter().enumerate().map(row).collect(), ..Plan::default() })
    }
}

fn bounded(values: &'static [f64]) -> Results {
    let request = Request { runs: Some(2), seconds: Some(0.001), ..request() };
    measure_with(
        &Bounded(values),
        &request,
        &mut Blind,
        &mut Progress::silent(),
        &Stop::new(),
        &mut Vec::new(),
    )
    .unwrap()
}

#[test]
fn a_baseline_over_its_own_bound_is_told_of_and_what_is_compared_with_it_is_not_blamed() {
    let results = bounded(&[12.5, 9.0, 20.0]);
    let verdict = |name: &str| results.bound_verdict(results.row(name).unwrap());
    assert_eq!(verdict("attack=0"), Some(BoundVerdict::Exceeded));
    assert_eq!(verdict("attack=1"), Some(BoundVerdict::Kept));
    assert_eq!(verdict("attack=2"), Some(BoundVerdict::ExceededByBaselineToo));
    let [warning] = &results.warnings[..] else { panic!("{:?}", results.warnings) };
    for part in ["attack=0 is over its bound by itself", "12.5 µs", "10 µs", "the 2 rows compared with it"]
    {
        assert!(warning.contains(part), "{part}: {warning}");
    }
    let (report, page) = (text::report(&results, false), html::page(&results));
    well_formed(&page);
    for text in [&report, &page] {
        assert!(text.contains(warning.as_str()), "{text}");
        assert_eq!(text.matches("10: exceeded by the baseline, too").count(), 1, "{text}");
    }
    let json = serde_json::to_value(&results).unwrap();
    assert_eq!(json["warnings"], serde_json::json!([warning]));
}

#[test]
fn what_exceeds_its_bound_beside_a_baseline_that_keeps_it_is_blamed_without_a_warning() {
    let results = bounded(&[10.0, 10.5]);
    assert_eq!(results.bound_verdict(results.row("attack=1").unwrap()), Some(BoundVerdict::Exceeded));
    assert!(results.warnings.is_empty(), "{:?}", results.warnings);
    let report = text::report(&results, false);
    assert!(report.contains("10: exceeded") && !report.contains("WARNING"), "{report}");
    assert!(serde_json::to_value(&results).unwrap().get("warnings").is_none());
}
