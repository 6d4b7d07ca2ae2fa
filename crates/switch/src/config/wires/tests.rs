use super::*;
use crate::impairments::DEFAULT_LIMIT;

/// A file with three taps, and this behind them.
fn read(rest: &str) -> Result<Config, ConfigError> {
    let ports = ["r1", "r2", "r3"].map(|tap| format!("[[port]]\nkind = 'tap'\ntap = '{tap}'\n")).concat();
    Config::builder().toml("rf.toml", &format!("{ports}{rest}")).build()
}

fn wires(rest: &str) -> Vec<Wire> {
    read(rest).unwrap_or_else(|error| panic!("{rest}: {error}")).wires
}

fn one(rest: &str) -> Wire {
    let [wire] = wires(&format!("[[wire]]\nports = ['r1', 'r2']\n{rest}")).try_into().unwrap();
    wire
}

/// The only thing wrong with a file.
fn refused(rest: &str) -> String {
    let error = read(rest).map(|config| panic!("accepted: {:?}", config.wires)).unwrap_err();
    let [problem] = &error.problems[..] else { panic!("{rest}: {error}") };
    problem.to_string()
}

fn percent(percent: u32) -> Share {
    Share::of_billionths(percent * 10_000_000).unwrap()
}

#[test]
fn a_wire_that_says_nothing_has_a_name_and_no_impairments() {
    let wire = one("");
    assert_eq!(wire.name, "r1--r2");
    assert_eq!((wire.seed, &wire.ports), (None, &["r1".to_owned(), "r2".to_owned()]));
    assert!(wire.directions.iter().all(Impairments::is_none));
    assert_eq!(wire.directions[0].limit, DEFAULT_LIMIT);
}

#[test]
fn every_key_of_a_wire_is_read_for_both_directions_or_for_one() {
    let wire = one(
        "name = 'backbone'\nseed = 42\ndelay = '10ms'\njitter = '500us'\ndistribution = 'pareto'\nloss = '0.1%'\n\
                    duplicate = '0.5%'\nreorder = '25%'\ngap = 5\ncorrupt = '0.0000001%'\nrate = '100mbit'\nlimit = 50\nlimit_bytes = '1mib'\n\
                    [wire.b_to_a]\nloss = 'gemodel 1% 10%'\ndelay = '0s'\nreorder = '0%'\ngap = 1",
    );
    assert_eq!((wire.name.as_str(), wire.seed), ("backbone", Some(42)));
    let a = Impairments {
        delay: 10_000_000,
        jitter: 500_000,
        distribution: Distribution::Pareto,
        loss: Loss::Random(Share::of_billionths(1_000_000).unwrap()),
        duplicate: Share::of_billionths(5_000_000).unwrap(),
        reorder: percent(25),
        gap: 5,
        corrupt: Share::of_billionths(1).unwrap(),
        rate: Some(100_000_000),
        limit: 50,
        limit_bytes: 1 << 20,
    };
    let loss = Loss::GilbertElliott {
        to_bad: percent(1),
        to_good: percent(10),
        in_bad: Share::ALL,
        in_good: Share::NONE,
    };
    assert_eq!(wire.directions[0], a);
    assert_eq!(wire.directions[1].loss, loss);
    assert_eq!((wire.directions[1].delay, wire.directions[1].rate), (0, a.rate));
}

#[test]
fn losses_are_written_as_tc_has_them() {
    let all = |text: &str| one(&format!("loss = {text:?}")).directions[0].loss;
    assert_eq!(all("0%"), Loss::None);
    assert_eq!(all("100%"), Loss::Random(Share::ALL));
    let four = Loss::GilbertElliott {
        to_bad: percent(1),
        to_good: percent(10),
        in_bad: percent(70),
        in_good: Share::of_billionths(1_000_000).unwrap(),
    };
    assert_eq!(all("gemodel 1% 10% 70% 0.1%"), four);
    assert_eq!(all("gemodel,1%,10%,70%,0.1%"), four);
    let [p, rest] = [percent(1), percent(99)];
    assert_eq!(
        all("gemodel 1%"),
        Loss::GilbertElliott { to_bad: p, to_good: rest, in_bad: Share::ALL, in_good: Share::NONE }
    );
}

/// Each mistake is one line, with its place, its key and what would do.
#[test]
fn what_is_wrong_is_said_in_a_line() {
    let wire = "[[wire]]\nports = ['r1', 'r2']\n";
    for (rest, said) in [
        (
            "[[wire]]\ndelay = '1ms'",
            "rf.toml:10: wire.ports: must be given: the two ports that the wire joins",
        ),
        ("[[wire]]\nports = ['r1']", "rf.toml:11: wire.ports: must be two: a wire has two ends"),
        ("[[wire]]\nports = ['r1', 'r1']", "names \"r1\" twice"),
        ("[[wire]]\nports = 'r1,r2'", "write [\"r1\", \"r2\"]"),
        (
            "[[wire]]\nports = ['r1', 'r4']",
            "rf.toml:10: wire.ports: there is no port \"r4\": add it, or take the wire out",
        ),
        ("[wire]\nports = ['r1', 'r2']", "rf.toml:10: wire: must be an array of tables: write [[wire]]"),
        (&format!("{wire}delay = 10"), "rf.toml:12: wire.delay: 10 is not a string in quotes"),
        (&format!("{wire}delay = '10'"), "\"10\" is not a number with one of the units s, ms, us, ns"),
        (&format!("{wire}delay = '61s'"), "\"61s\" is outside 0s to 60s"),
        (&format!("{wire}loss = '0.1'"), "\"0.1\" is not a share such as \"0.1%\""),
        (&format!("{wire}loss = '101%'"), "\"101%\" is not a share"),
        (&format!("{wire}loss = 'gemodel'"), "\"gemodel\" needs at least the probability"),
        (&format!("{wire}loss = 'gemodel 1% 2% 3% 4% 5%'"), "has more than the four probabilities"),
        (&format!("{wire}reorder = '1%'"), "rf.toml:12: wire.reorder: needs delay"),
        (&format!("{wire}delay = '1ms'\ngap = 2"), "wire.gap: needs reorder"),
        (&format!("{wire}distribution = 'normal'"), "wire.distribution: needs jitter"),
        (
            &format!("{wire}distribution = 'poisson'\njitter = '1ms'"),
            "is not a distribution; known: \"uniform\", \"normal\"",
        ),
        (&format!("{wire}limit = 10"), "wire.limit: needs rate"),
        (&format!("{wire}dely = '1ms'"), "wire.dely: is not a key of [[wire]]: did you mean delay?"),
        (&format!("{wire}vlan = 10"), "wire.vlan: is not a key of [[wire]], but one of the rules of a port"),
        (
            &format!("{wire}[wire.a_to_b]\nname = 'x'"),
            "wire.a_to_b.name: is not a key of a direction of a wire, but one of the keys of every port",
        ),
        (&format!("{wire}[wire.a_to_b]\nreorder = '1%'"), "rf.toml:13: wire.a_to_b.reorder: needs delay"),
        (&format!("{wire}a_to_b = 1"), "wire.a_to_b: must be a table: write [wire.a_to_b]"),
        (
            &format!("{wire}[[wire]]\nports = ['r2', 'r3']"),
            "rf.toml:12: wire.ports: \"r2\" is an end of the wire \"r1--r2\" already",
        ),
        ("[[wire]]\nname = 'x y'\nports = ['r1', 'r2']", "is not the name of a wire"),
    ] {
        let problem = refused(rest);
        assert!(problem.contains(said), "{rest}: {problem}");
        assert!(!problem.contains('\n'));
    }
    let twice = format!("{wire}name = 'w'\n[[wire]]\nname = 'w'\nports = ['r3', 'r2']");
    let error = read(&twice).unwrap_err().to_string();
    assert!(error.contains("wire.name: the name \"w\" is already used by rf.toml:10"), "{error}");
}

#[test]
fn rules_that_no_wire_knows_are_named_with_their_port_and_the_wire() {
    for rule in [
        "vlan = 10",
        "isolated = true",
        "storm = '1kpps'",
        "allowed_macs = ['52:54:00:00:00:01']",
        "rate_out = '1gbit'",
        "quarantine = 'r3'",
        "max_macs = 1",
    ] {
        let rest =
            format!("[[port]]\nkind = 'tap'\ntap = 'r4'\n{rule}\n[[wire]]\nname = 'w'\nports = ['r1', 'r4']");
        let (problem, key) = (refused(&rest), rule.split(' ').next().unwrap());
        let said = format!("wire.ports: port r4 has {key}, which an end of the wire w cannot have");
        assert!(
            problem.contains(&said) && problem.contains("take it away from the port, or take the wire out"),
            "{problem}"
        );
    }
    let rest = "[[port]]\nkind = 'tap'\ntap = 'r4'\nweight = 4\n[[wire]]\nports = ['r1', 'r4']";
    assert_eq!(wires(rest).len(), 1, "a share of a worker is something else");
    let rest = "[[port]]\nkind = 'xen-vif'\nprovider = 'xen'\n[[wire]]\nports = ['r1', 'xen']";
    assert!(refused(rest).contains("\"xen\" stands for several interfaces"));
}

/// What is dumped makes the same wires, and has nothing twice.
#[test]
fn wires_are_written_as_they_are_read() {
    for rest in [
        "[[wire]]\nports = ['r1', 'r2']",
        "[[wire]]\nports = ['r1', 'r2']\ndelay = '10ms'\nloss = 'gemodel 1% 10% 70% 0.1%'",
        "[[wire]]\nports = ['r3', 'r2']\nname = 'w'\nseed = 7\ndelay = '1500us'\nrate = '1gbit'\n[wire.a_to_b]\nloss = '0.5%'\n[wire.b_to_a]\ndelay = '0s'\nlimit_bytes = '128mib'",
        "[[wire]]\nports = ['r1', 'r2']\njitter = '1ms'\n[wire.a_to_b]\ndistribution = 'normal'\n",
    ] {
        let config = read(rest).unwrap();
        let dump = config.dump();
        let again =
            Config::builder().toml("dump", &dump).build().unwrap_or_else(|error| panic!("{dump}{error}"));
        assert_eq!(again.wires, config.wires, "{dump}");
        let [wire] = &config.wires[..] else { panic!() };
        assert_eq!(Wire::of_text(&wire.to_text()).as_ref(), Ok(wire));
    }
    let wire = one("delay = '10ms'\n[wire.a_to_b]\nloss = '0.5%'");
    let expected = "\n[[wire]]\nname = \"r1--r2\"\nports = [\"r1\", \"r2\"]\ndelay = \"10ms\"\n\n[wire.a_to_b]\nloss = \"0.5%\"\n";
    assert_eq!(wire.to_text(), expected);
}

#[test]
fn a_wire_is_edited_in_both_directions_or_in_one() {
    let wire = one("delay = '10ms'\njitter = '1ms'\ndistribution = 'normal'");
    let settings = |all: &[&str]| all.iter().map(|one| (*one).to_owned()).collect::<Vec<_>>();
    let edited = wire.edited(&settings(&["delay=20ms", "loss=1%"]), None).unwrap();
    for direction in &edited.directions {
        assert_eq!(
            (direction.delay, direction.jitter, direction.loss),
            (20_000_000, 1_000_000, Loss::Random(percent(1)))
        );
    }
    let edited = wire.edited(&settings(&["rate=1gbit", "seed=3"]), Some("r2")).unwrap();
    assert_eq!(
        (edited.directions[0].rate, edited.directions[1].rate, edited.seed),
        (None, Some(1_000_000_000), Some(3))
    );
    // Without jitter there is nothing to be distributed.
    let edited = wire.edited(&settings(&["jitter=0ms"]), None).unwrap();
    assert_eq!(edited.directions[0].distribution, Distribution::Uniform);
    assert!(edited.without_impairments(None).unwrap().directions.iter().all(Impairments::is_none));
    assert!(!edited.without_impairments(Some("r1")).unwrap().directions[1].is_none());
    for (all, from, said) in [
        (&["delay=fast"][..], None, "delay: \"fast\" is not a number with one of the units"),
        (&["delay"], None, "is not KEY=VALUE"),
        (&[], None, "nothing is to be set"),
        (&["delay=1ms", "delay=2ms"], None, "is given twice"),
        (&["name=x"], None, "name: is not a key of a wire that can be set"),
        (&["loss=1%"], Some("r3"), "\"r3\" is no end of the wire \"r1--r2\", which joins r1 and r2"),
        (&["gap=2"], None, "gap: needs reorder"),
    ] {
        let error = wire.edited(&settings(all), from).unwrap_err().to_string();
        assert!(error.contains(said) && !error.contains('\n'), "{all:?}: {error}");
    }
}

/// A reload carries out what the file says of wires, and leaves those alone that are in no file.
#[test]
fn a_file_that_is_read_again_changes_its_own_wires() {
    let of_file = |rest: &str| {
        let config = read(rest).unwrap();
        let file = ConfigFile::of(Path::new("/rf.toml"), &config, BTreeMap::new(), BTreeSet::new());
        Config { file: Some(file), ..config }
    };
    let names =
        |changes: changes::Changes| changes.wires.into_iter().map(|wire| wire.name).collect::<Vec<_>>();
    let before = of_file("[[wire]]\nname = 'w'\nports = ['r1', 'r2']");
    let now = of_file("[[wire]]\nname = 'v'\nports = ['r1', 'r3']");
    assert_eq!(names(before.changes(&now).unwrap()), ["v"]);
    let beside = Config { file: of_file("").file, ..before };
    let error = beside.changes(&now).unwrap_err();
    assert!(error.contains("\"r1\" is an end of the wire \"v\" already"), "{error}");
    assert_eq!(names(beside.changes(&of_file("")).unwrap()), ["w"]);
}

proptest::proptest! {
    #[test]
    fn shares_are_written_as_they_are_read(billionths in 0..=1_000_000_000u32) {
        let all = Share::of_billionths(billionths).unwrap();
        proptest::prop_assert_eq!(share(&percent_text(all)), Ok(all));
    }
}

fn percent_text(share: Share) -> String {
    super::percent(share)
}
