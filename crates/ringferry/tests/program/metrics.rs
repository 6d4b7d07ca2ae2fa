//! `ringferry metrics`: what scrapers get of a running switch, and what those that behave badly cannot do to the others.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use ringferry_rig::guest::converse;
use ringferry_rig::process::{PATIENCE, Process, eventually, may};
use ringferry_rig::ready::Ready;
use ringferry_rig::switch::{Place, ringferry};
use ringferry_sys::process::Spawn;
use rustix::process::Signal;

use crate::lifecycle::bystanders;
use crate::replace::replace;

const REQUEST: &str = "GET /metrics HTTP/1.1\r\nHost: switch\r\n\r\n";

/// Most connections of the program (`MAX_CONNECTIONS`), and more than all other descriptors that it has.
const CONNECTIONS: usize = 256;
const OTHERS: usize = 32;

fn start(place: &Place, words: &[&str]) -> Process {
    serve("metrics", place, words)
}

/// Starts `ringferry metrics`, or `page`, for the switch of a place; it listens at a socket of the place of that name and at a port of loopback.
pub fn serve(what: &str, place: &Place, words: &[&str]) -> Process {
    let mut command = ringferry();
    command.arg(what).arg("--control").arg(place.control()).args(words);
    command.arg("--listen").arg(place.socket(what)).args(["--listen", "127.0.0.1:0"]);
    let mut options = Spawn::default();
    let ready = Ready::of(&mut command, &mut options).unwrap();
    let process = Process::start(&mut command, options);
    assert!(ready.wait(PATIENCE).unwrap(), "not ready: {:#?}", process.log());
    process
}

/// The address of loopback at which it listens, at the port that the kernel has chosen.
pub fn address(server: &Process) -> String {
    let found = || {
        let log = server.log();
        let address = log.iter().find_map(|line| Some(&line[line.rfind("127.0.0.1:")?..]))?;
        Some(address.trim_matches('"').to_owned())
    };
    eventually("the address is logged", found)
}

#[track_caller]
pub fn stop(mut process: Process) {
    process.signal(Signal::TERM);
    let (status, _) = process.wait();
    assert!(status.success(), "{status}: {:#?}", process.log());
}

fn connect(place: &Place) -> UnixStream {
    let stream = UnixStream::connect(place.socket("metrics")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// An answer: its first line, its other lines, and what follows them.
pub struct Response {
    pub status: String,
    pub head: String,
    pub body: String,
}

impl Response {
    #[track_caller]
    fn read(mut from: impl Read) -> Response {
        let mut text = String::new();
        from.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
        let (status, head) = head.split_once("\r\n").unwrap();
        Response { status: status.to_owned(), head: head.to_owned(), body: body.to_owned() }
    }

    /// The whole page: as long as its head says.
    #[track_caller]
    pub fn page(self) -> String {
        assert_eq!(self.status, "HTTP/1.1 200 OK", "{}", self.body);
        assert!(self.head.contains(&format!("Content-Length: {}\r\n", self.body.len())), "{}", self.head);
        self.body
    }
}

#[track_caller]
pub fn ask(mut stream: impl Read + Write, request: &str) -> Response {
    stream.write_all(request.as_bytes()).unwrap();
    Response::read(stream)
}

/// The series of a page, with their values.
fn series(page: &str) -> BTreeMap<&str, f64> {
    let samples = page.lines().filter(|line| !line.starts_with('#'));
    samples
        .map(|line| line.rsplit_once(' ').unwrap())
        .map(|(name, value)| (name, value.parse().unwrap()))
        .collect()
}

#[test]
fn a_scraper_gets_what_ctl_shows_in_the_format_it_asks_for() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    converse(&mut a, &mut b, 0, 20);
    let metrics = start(&place, &["--queues"]);
    let mode = std::fs::metadata(place.socket("metrics")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);

    let answer = ask(connect(&place), REQUEST);
    assert!(
        answer.head.contains("Content-Type: text/plain; version=0.0.4; charset=utf-8"),
        "{}",
        answer.head
    );
    let page = answer.page();
    let found = series(&page);
    let port = switch.port("a");
    for (counter, name) in
        [("rx_packets", "rx_packets"), ("tx_packets", "tx_packets"), ("rx_bytes", "rx_bytes")]
    {
        let name = format!("ringferry_port_{name}_total{{port=\"a\"}}");
        assert_eq!(found.get(&*name), Some(&(port.counters[counter] as f64)), "{name} of {page}");
    }
    assert!(port.counters["rx_packets"] >= 20);
    assert_eq!(found.get("ringferry_port_up{port=\"b\"}"), Some(&1.0));
    assert_eq!(
        found.get("ringferry_queue_rx_packets_total{port=\"a\",pair=\"0\"}"),
        Some(&(port.counters["rx_packets"] as f64))
    );
    assert!(found["ringferry_worker_sleep_seconds_total{worker=\"0\"}"] > 0.0, "{page}");

    // The other format has the same series, and says where it ends.
    let open =
        ask(connect(&place), "GET / HTTP/1.1\r\nAccept: application/openmetrics-text; version=1.0.0\r\n\r\n");
    assert!(open.head.contains("application/openmetrics-text; version=1.0.0"), "{}", open.head);
    let open = open.page();
    assert!(open.ends_with("\n# EOF\n"), "{open}");
    assert!(series(&open).keys().eq(found.keys()), "{open}");

    let by_tcp = |request: &str| ask(TcpStream::connect(address(&metrics)).unwrap(), request);
    let of_tcp = by_tcp(&REQUEST.replace("switch", "localhost")).page();
    assert!(series(&of_tcp).keys().eq(found.keys()), "{of_tcp}");
    // A browser that a name of another site has led here.
    assert!(by_tcp(REQUEST).status.contains("403"));

    let mut half_closed = connect(&place);
    half_closed.write_all(REQUEST.as_bytes()).unwrap();
    half_closed.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(series(&Response::read(half_closed).page()).keys().eq(found.keys()));

    let head = ask(connect(&place), "HEAD /metrics HTTP/1.1\r\n\r\n");
    assert_eq!((head.status.as_str(), head.body.as_str()), ("HTTP/1.1 200 OK", ""));
    assert_eq!(ask(connect(&place), "GET /other HTTP/1.1\r\n\r\n").status, "HTTP/1.1 404 Not Found");
    // No more than is read: what is left in the socket when it is closed would reach us as a reset.
    let long = format!("{:x<1$}", "GET / HTTP/1.1\r\nX: ", 8 * 1024);
    assert_eq!(ask(connect(&place), &long).status, "HTTP/1.1 431 Request Header Fields Too Large");
    stop(metrics);
    assert!(!place.socket("metrics").exists());
    switch.stop();
}

#[test]
fn scrapers_that_say_nothing_or_read_nothing_hold_up_nobody() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let metrics = start(&place, &[]);
    let kept: Vec<UnixStream> = (0..3 * CONNECTIONS)
        .map(|number| {
            let mut stream = connect(&place);
            // One that is silent, one in the middle of its request, one that never reads; those that were replaced meanwhile refuse.
            let said: &str = ["", &REQUEST[..20], REQUEST][number % 3];
            let _ = stream.write_all(said.as_bytes());
            stream
        })
        .collect();
    for _ in 0..20 {
        let page = ask(connect(&place), REQUEST).page();
        assert_eq!(series(&page).get("ringferry_port_up{port=\"a\"}"), Some(&0.0), "{page}");
    }
    let open = metrics.descriptors().len();
    assert!(open <= CONNECTIONS + OTHERS, "{open} descriptors");
    drop(kept);
    eventually("they are gone", || (metrics.descriptors().len() < OTHERS).then_some(()));

    // All at once, and each gets a whole page.
    let mut all: Vec<_> = (0..200).map(|_| connect(&place)).collect();
    all.iter_mut().for_each(|stream| stream.write_all(REQUEST.as_bytes()).unwrap());
    for stream in all {
        let page = Response::read(stream).page();
        assert!(series(&page).contains_key("ringferry_uptime_seconds"), "{page}");
    }
    stop(metrics);
    switch.stop();
}

#[test]
fn scrapes_go_on_when_the_switch_is_replaced_and_say_why_not_when_it_is_gone() {
    let place = Place::new();
    let mut switch = place.switch(&["a", "b"]);
    let (mut a, mut b) = bystanders(&switch);
    converse(&mut a, &mut b, 0, 20);
    let metrics = start(&place, &[]);
    let packets = || {
        let page = ask(connect(&place), REQUEST).page();
        series(&page)["ringferry_port_rx_packets_total{port=\"a\"}"]
    };
    let before = packets();
    assert!(before >= 20.0, "{before}");
    let next = place.start(&mut replace(&place), Vec::new());
    let (status, _) = switch.process.wait();
    assert!(status.success(), "{status}");
    assert_eq!(packets(), before);
    next.stop();
    let answer = eventually("the page is no more", || {
        let answer = ask(connect(&place), REQUEST);
        answer.status.contains("503").then_some(answer)
    });
    assert!(answer.body.contains("no ringferry is running"), "{}", answer.body);
    let again = place.switch(&["a"]);
    eventually("the page is back", || ask(connect(&place), REQUEST).status.contains("200").then_some(()));
    stop(metrics);
    again.stop();
}

#[test]
fn a_switch_that_is_stopped_is_named_by_ctl_and_by_scrapes() {
    let place = Place::new();
    let mut switch = place.switch(&["a"]);
    let metrics = start(&place, &[]);
    let pid = switch.process.pid();
    switch.process.signal(Signal::STOP);
    eventually("it is stopped", || {
        std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") T ").then_some(())
    });
    let why =
        format!("its process {pid} is stopped (SIGSTOP, or a debugger): `kill -CONT {pid}` has it go on");
    std::thread::scope(|scope| {
        // Before a scraper gives up it hears why.
        let scrape = scope.spawn(|| ask(connect(&place), REQUEST));
        let ask = |timeout: &str| {
            let mut command = ringferry();
            command.arg("ctl").arg("--control").arg(place.control()).args(["--timeout", timeout, "show"]);
            let output = command.output().unwrap();
            assert_eq!(output.status.code(), Some(1));
            String::from_utf8(output.stderr).unwrap()
        };
        let words = ask("1");
        assert!(words.contains(&why) && !words.contains("still waiting"), "{words}");
        let words = ask("3");
        let waits = format!("still waiting for an answer on {}: {why}", place.control().display());
        assert!(words.contains(&waits), "{words}");
        let answer = scrape.join().unwrap();
        assert!(
            answer.status.contains("503") && answer.body.contains(&why),
            "{} {}",
            answer.status,
            answer.body
        );
    });
    metrics.until_logged("scrapers get 503");
    switch.process.signal(Signal::CONT);
    eventually("scrapers are served", || ask(connect(&place), REQUEST).status.contains("200").then_some(()));
    metrics.until_logged("the switch answers again");
    stop(metrics);
    switch.stop();
}

#[test]
fn other_hosts_read_nothing_unless_they_are_allowed_to() {
    let place = Place::new();
    let switch = place.switch(&["a"]);
    let mut command = ringferry();
    command.arg("metrics").arg("--control").arg(place.control()).args(["--listen", "0.0.0.0:0"]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("--public allows it"), "{said}");
    let mut command = ringferry();
    command.arg("metrics").arg("--control").arg(place.control()).arg("--once");
    let output = command.output().unwrap();
    let page = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && series(&page).contains_key("ringferry_port_up{port=\"a\"}"), "{page}");
    switch.stop();
}

/// What is in `contrib/prometheus/`.
fn contributed(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib/prometheus").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The expressions of the dashboard, with values for its variables.
fn of_dashboard() -> Vec<String> {
    let dashboard: serde_json::Value =
        serde_json::from_str(&contributed("ringferry-dashboard.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().unwrap());
    let expressions = targets.map(|target| target["expr"].as_str().unwrap());
    expressions
        .map(|text| text.replace("$__rate_interval", "5m").replace("$instance", ".*").replace("$port", ".*"))
        .collect()
}

/// The metrics that an expression names.
fn named(expression: &str) -> impl Iterator<Item = &str> {
    let words = expression.split(|character: char| !(character.is_ascii_alphanumeric() || character == '_'));
    words.filter(|word| word.starts_with("ringferry_"))
}

#[test]
fn alerts_and_the_dashboard_ask_for_what_there_is() {
    let place = Place::new();
    let switch = place.switch(&["a", "b"]);
    let output = ringferry().arg("metrics").arg("--control").arg(place.control()).arg("--once").output();
    let page = String::from_utf8(output.unwrap().stdout).unwrap();
    let there: BTreeSet<&str> =
        series(&page).into_keys().map(|name| name.split('{').next().unwrap()).collect();
    let rules = contributed("ringferry.rules.yml");
    let of_rules = rules.lines().filter_map(|line| line.trim().strip_prefix("expr: ")).map(str::to_owned);
    let expressions: Vec<String> = of_rules.chain(of_dashboard()).collect();
    assert!(expressions.len() > 15, "{expressions:#?}");
    for expression in &expressions {
        for name in named(expression) {
            assert!(there.contains(name), "{name} of {expression} is not served: {there:#?}");
        }
    }
    switch.stop();
}

/// Whether Prometheus's own checker is there, or a test may be skipped.
fn may_check() -> bool {
    let found = Command::new("promtool").arg("--version").output().is_ok();
    may("promtool is not there (of Debian's package prometheus)", found)
}

#[track_caller]
fn promtool(words: &[&str], file: &Path) {
    let output = Command::new("promtool").args(words).arg(file).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}

#[test]
fn promtool_reads_every_expression_and_alerts_are_raised_by_what_they_are_for() {
    if !may_check() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut rules = String::from("groups:\n- name: dashboard\n  rules:\n");
    for (number, expression) in of_dashboard().into_iter().enumerate() {
        let expression = serde_json::Value::from(expression);
        writeln!(rules, "  - record: panel:{number}\n    expr: {expression}").unwrap();
    }
    let file = folder.path().join("dashboard.yml");
    std::fs::write(&file, rules).unwrap();
    promtool(&["check", "rules"], &file);
    std::fs::write(folder.path().join("ringferry.rules.yml"), contributed("ringferry.rules.yml")).unwrap();
    let file = folder.path().join("test.yml");
    std::fs::write(&file, ALERTS).unwrap();
    promtool(&["test", "rules"], &file);
}

/// Half an hour of two ports and two workers. a is as it should be; b is down, and drops packets; c was taken down on purpose, and drops what a rule
/// asks for. Worker 0 has no rest and packets in each round, worker 1 polls in vain.
const ALERTS: &str = r#"
rule_files: [ringferry.rules.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'up{job="ringferry", instance="h"}', values: '1x10 0x20'}
      - {series: 'ringferry_port_up{instance="h", port="a"}', values: '1x30'}
      - {series: 'ringferry_port_up{instance="h", port="b"}', values: '0x30'}
      - {series: 'ringferry_port_up{instance="h", port="c"}', values: '0x30'}
      - {series: 'ringferry_port_state{instance="h", port="c", state="admin-down"}', values: '1x30'}
      - {series: 'ringferry_port_state{instance="h", port="b", state="admin-down"}', values: '0x30'}
      - {series: 'ringferry_port_state{instance="h", port="b", state="broken"}', values: '1x30'}
      - {series: 'ringferry_port_dropped_packets_total{instance="h", port="b", reason="no-receive-buffers"}', values: '0+600x30'}
      - {series: 'ringferry_port_dropped_packets_total{instance="h", port="c", reason="rate-out"}', values: '0+600x30'}
      - {series: 'ringferry_port_dropped_packets_total{instance="h", port="c", reason="tx-too-big"}', values: '0+600x30'}
      - {series: 'ringferry_worker_busy_seconds_total{instance="h", worker="0"}', values: '0+58x30'}
      - {series: 'ringferry_worker_busy_seconds_total{instance="h", worker="1"}', values: '0+50x30'}
      - {series: 'ringferry_troubles{instance="h"}', values: '1x30'}
      - {series: 'ringferry_fdb_addresses{instance="h", port="a"}', values: '50x30'}
      - {series: 'ringferry_fdb_addresses{instance="h", port="b"}', values: '45x30'}
      - {series: 'ringferry_fdb_capacity_addresses{instance="h"}', values: '100x30'}
      - {series: 'ringferry_port_stalled_seconds{instance="h", port="a"}', values: '0x30'}
      - {series: 'ringferry_port_stalled_seconds{instance="h", port="b"}', values: '0+60x30'}
      - {series: 'ringferry_fdb_changes_total{instance="h", change="moved"}', values: '0+60x30'}
      - {series: 'ringferry_worker_run_delay_seconds_total{instance="h", worker="0"}', values: '0+0.5x30'}
      - {series: 'ringferry_worker_run_delay_seconds_total{instance="h", worker="1"}', values: '0+30x30'}
      - {series: 'ringferry_port_fault{instance="h", port="c"}', values: '1x30'}
      - {series: 'ringferry_port_connections_total{instance="h", port="a"}', values: '1x30'}
      - {series: 'ringferry_port_connections_total{instance="h", port="c"}', values: '0+1x30'}
      - {series: 'ringferry_uptime_seconds{instance="h"}', values: '0+60x10 0+60x5 0+60x5 0+60x5'}
    promql_expr_test:
      - {expr: 'count by (alertname, port, reason, worker) (ALERTS{alertstate="firing"})', eval_time: 5m, exp_samples: [
          {labels: '{alertname="RingferryPortFault", port="c"}', value: 1},
          {labels: '{alertname="RingferryPortDown", port="b"}', value: 1},
          {labels: '{alertname="RingferryPortBroken", port="b"}', value: 1},
          {labels: '{alertname="RingferryGuestStalled", port="b"}', value: 1},
          {labels: '{alertname="RingferryTroubled"}', value: 1},
          {labels: '{alertname="RingferryAddressMoves"}', value: 1},
          {labels: '{alertname="RingferryAddressTableFull"}', value: 1}]}
      - {expr: 'count by (alertname, port, reason, worker) (ALERTS{alertstate="firing"})', eval_time: 25m, exp_samples: [
          {labels: '{alertname="RingferryDown"}', value: 1},
          {labels: '{alertname="RingferryPortDown", port="b"}', value: 1},
          {labels: '{alertname="RingferryPortBroken", port="b"}', value: 1},
          {labels: '{alertname="RingferryDrops", port="b", reason="no-receive-buffers"}', value: 1},
          {labels: '{alertname="RingferryDrops", port="c", reason="tx-too-big"}', value: 1},
          {labels: '{alertname="RingferryPortFault", port="c"}', value: 1},
          {labels: '{alertname="RingferryReconnects", port="c"}', value: 1},
          {labels: '{alertname="RingferryRestarts"}', value: 1},
          {labels: '{alertname="RingferryWorkerSaturated", worker="0"}', value: 1},
          {labels: '{alertname="RingferryWorkerDelayed", worker="1"}', value: 1},
          {labels: '{alertname="RingferryGuestStalled", port="b"}', value: 1},
          {labels: '{alertname="RingferryTroubled"}', value: 1},
          {labels: '{alertname="RingferryAddressMoves"}', value: 1},
          {labels: '{alertname="RingferryAddressTableFull"}', value: 1}]}
"#;
