use proptest::collection::{btree_set, vec};
use proptest::option;
use proptest::prelude::*;

use super::*;

fn read(text: &str) -> Result<Config, ConfigError> {
    Config::builder().toml("rf.toml", text).build()
}

/// Parses the rules of a tap with these lines, which start at line 4.
fn rules(lines: &str) -> Result<Rules, String> {
    let config = read(&format!("[[port]]\nkind = 'tap'\ntap = 'a'\n{lines}\n"));
    let config = config.map_err(|error| error.to_string())?;
    assert_eq!(read(&config.dump()).unwrap(), config, "{}", config.dump());
    Ok(config.ports[0].rules.clone())
}

/// Returns the only problem of such a tap.
fn problem(lines: &str) -> String {
    let problem = rules(lines).expect_err("accepted");
    assert_eq!(problem.lines().count(), 1, "{problem}");
    problem
}

fn flag(keys: &str) -> Result<Rules, String> {
    let spec = format!("tap:a,{keys}").parse::<PortSpec>();
    spec.map(|spec| spec.port.rules).map_err(|error| error.to_string())
}

const fn mac(last: u8) -> Mac {
    Mac([0x52, 0x54, 0, 0, 0, last])
}

fn rate(per_second: u64, burst: u64) -> Option<Rate> {
    Some(Rate { per_second, burst })
}

fn network_of(text: &str) -> Network {
    network(text).unwrap()
}

#[test]
fn every_rule_is_read_the_same_from_a_file_and_a_flag() {
    let wanted = Rules {
        vlans: Vlans::Access(10),
        isolated: true,
        quarantine: Some("rf1".to_owned()),
        forward_reserved: true,
        max_macs: Some(8),
        static_macs: vec![(mac(1), 10), (mac(2), 10)],
        guard: Some(Guard {
            macs: vec![mac(1)],
            ips: Some(["10.0.0.2", "10.1.0.0/16", "fd00::/64"].map(network_of).to_vec()),
        }),
        firewall: Some(FirewallRule { name: "web".to_owned(), policy: None }),
        storm: rate(1000, 2000),
        rate_in: Limits { packets: rate(100_000, 500), bytes: rate(125_000_000, 1 << 20) },
        rate_out: Limits { packets: rate(2_500_000, 600), bytes: rate(312_500_000, 1_000_000) },
        weight: 4,
        wire: None,
    };
    let file = r#"
vlan = 10
isolated = true
quarantine = "rf1"
reserved = "forward"
max_macs = 8
static_macs = ["52:54:00:00:00:01", "52:54:00:00:00:02@10"]
allowed_macs = ["52:54:00:00:00:01"]
allowed_ips = ["10.0.0.2", "10.1.0.0/16", "fd00::/64"]
firewall = "web"
storm = "1kpps"
storm_burst = 2000
rate_in = "1gbit"
rate_in_burst = "1mib"
rate_in_packets = "100kpps"
rate_in_packets_burst = 500
rate_out = "2.5Gbit"
rate_out_burst = "1mb"
rate_out_packets = "2.5mpps"
rate_out_packets_burst = 600
weight = 4"#;
    assert_eq!(rules(file).unwrap(), wanted);
    let keys = "vlan=10,isolated=yes,quarantine=rf1,reserved=forward,max_macs=8,static_macs=52:54:00:00:00:01,52:54:00:00:00:02@10,\
                allowed_macs=52:54:00:00:00:01,allowed_ips=10.0.0.2,10.1.0.0/16,fd00::/64,firewall=web,storm=1kpps,storm_burst=2000,\
                rate_in=1gbit,rate_in_burst=1mib,rate_in_packets=100kpps,rate_in_packets_burst=500,rate_out=2.5gbit,\
                rate_out_burst=1mb,rate_out_packets=2.5mpps,rate_out_packets_burst=600,weight=4";
    assert_eq!(flag(keys).unwrap(), wanted);
    assert_eq!(rules("").unwrap(), Rules::default());
}

/// Frames without a tag have a place where all VLANs do, and none where only some were asked for.
#[test]
fn trunks_name_their_vlans_and_the_native_one() {
    let trunk =
        |allowed: Option<&[Vid]>, native| Vlans::Trunk { allowed: allowed.map(<[Vid]>::to_vec), native };
    for (lines, wanted) in [
        ("trunk = [20, 10]", trunk(Some(&[10, 20]), None)),
        ("trunk = [10, '20-23']\nnative = 5", trunk(Some(&[10, 20, 21, 22, 23]), Some(5))),
        ("trunk = [1, 4094]\nnative = 0", trunk(Some(&[1, 4094]), Some(0))),
        ("trunk = [10]\nnative = 'none'", trunk(Some(&[10]), None)),
        ("trunk = ['10']", trunk(Some(&[10]), None)),
        ("trunk = 'all'", trunk(None, Some(0))),
        ("trunk = 'all'\nnative = 5", trunk(None, Some(5))),
        ("trunk = 'all'\nnative = 'none'", trunk(None, None)),
        ("vlan = 0", Vlans::Access(0)),
        ("vlan = 4094", Vlans::Access(4094)),
    ] {
        assert_eq!(rules(lines).unwrap().vlans, wanted, "{lines}");
    }
    assert_eq!(
        flag("trunk=10,20-21,native=none,isolated=on").unwrap().vlans,
        trunk(Some(&[10, 20, 21]), None)
    );
    assert_eq!(flag("trunk=all,native=7").unwrap().vlans, trunk(None, Some(7)));
}

#[test]
fn vlans_that_make_no_sense_are_refused() {
    for (lines, wanted) in [
        ("vlan = 4095", "rf.toml:4: port.vlan: 4095 is outside 0 to 4094"),
        ("vlan = 'ten'", "rf.toml:4: port.vlan: \"ten\" is not a whole number"),
        (
            "vlan = 10\ntrunk = [20]",
            "rf.toml:5: port.trunk: cannot be given with vlan: a port is in one VLAN, or a trunk of several",
        ),
        (
            "native = 5",
            "rf.toml:4: port.native: only goes with trunk: say which VLANs the port carries, or trunk = \"all\"",
        ),
        ("trunk = [10]\nnative = 'any'", "rf.toml:5: port.native: \"any\" is not a whole number"),
        ("trunk = [10]\nnative = 4095", "rf.toml:5: port.native: 4095 is outside 0 to 4094"),
        ("trunk = []", "rf.toml:4: port.trunk: names no VLAN: a port that carries nothing is of no use"),
        ("trunk = [10, 20, '5-10']", "rf.toml:4: port.trunk: names a VLAN twice"),
        ("trunk = 10", "rf.toml:4: port.trunk: 10 is not a list: write [10]"),
        ("trunk = '10,20-29'", "rf.toml:4: port.trunk: \"10,20-29\" is not a list: write [10, \"20-29\"]"),
    ] {
        assert_eq!(problem(lines), wanted, "{lines}");
    }
    for wrong in ["0", "4095", "-1", "'9-5'", "'1-'", "'x'", "'+1'", "true", "[10]", "99999999999999999999"] {
        let problem = problem(&format!("trunk = [{wrong}]"));
        assert!(
            problem.starts_with("rf.toml:4: port.trunk: ") && problem.contains("is neither a VLAN"),
            "{problem}"
        );
    }
}

#[test]
fn static_addresses_are_in_a_vlan_of_their_port() {
    let statics = |lines: &str| rules(lines).map(|rules| rules.static_macs);
    let address = "static_macs = ['52:54:00:00:00:01']";
    let tagged = "static_macs = ['52:54:00:00:00:01@20']";
    assert_eq!(statics(address).unwrap(), [(mac(1), 0)]);
    assert_eq!(statics(tagged).unwrap(), [(mac(1), 20)]);
    assert_eq!(statics(&format!("vlan = 7\n{address}")).unwrap(), [(mac(1), 7)]);
    assert_eq!(statics(&format!("trunk = [20]\nnative = 5\n{address}")).unwrap(), [(mac(1), 5)]);
    assert_eq!(statics("static_macs = 'none'").unwrap(), []);
    for (lines, part) in [
        (&*format!("vlan = 7\n{tagged}"), "is in a VLAN that the port does not carry"),
        (&format!("trunk = [10]\n{tagged}"), "is in a VLAN that the port does not carry"),
        (&format!("trunk = [10]\n{address}"), "write 52:54:00:00:00:01@VLAN"),
        ("static_macs = ['52:54:00:00:00:01@4095']", "is not a VLAN, 0 to 4094"),
        ("static_macs = ['52:54:00:00:00:01@']", "is not a VLAN, 0 to 4094"),
        ("static_macs = ['01:00:5e:00:00:01']", "is not the address of one station"),
        ("static_macs = ['52:54:00:00:00:01', '52:54:00:00:00:01@0']", "twice"),
        ("static_macs = [1]", "1 is not a string in quotes"),
        ("static_macs = '52:54:00:00:00:01'", "is not a list: write ["),
    ] {
        let problem = problem(lines);
        assert!(problem.contains("port.static_macs: ") && problem.contains(part), "{problem}");
    }
}

#[test]
fn an_address_is_static_on_one_port() {
    let two = |one: &str, other: &str| {
        let [one, other] = [("a", one), ("b", other)].map(|(name, statics)| {
            format!("[[port]]\nkind = 'tap'\ntap = '{name}'\nstatic_macs = ['{statics}']\n")
        });
        read(&format!("{one}{other}")).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(two("52:54:00:00:00:01", "52:54:00:00:00:02"), Ok(()));
    assert_eq!(two("52:54:00:00:00:01@5", "52:54:00:00:00:01@6"), Ok(()));
    assert_eq!(
        two("52:54:00:00:00:01", "52:54:00:00:00:01@0").unwrap_err(),
        "rf.toml:5: port: the static address 52:54:00:00:00:01 in VLAN 0 is already used by rf.toml:1"
    );
    let xen = |keys: &str| flag_of(&format!("xen-vif:xen,static_macs=52:54:00:00:00:01{keys}"));
    assert!(xen(",vif=5.0").is_ok());
    assert!(xen("").unwrap_err().contains("static_macs: only goes with vif"));
}

fn flag_of(text: &str) -> Result<PortConfig, String> {
    text.parse::<PortSpec>().map(|spec| spec.port).map_err(|error| error.to_string())
}

#[test]
fn every_kind_of_port_may_have_rules() {
    for kind in ["vhost-user:/a.sock", "tap:a", "xen-vif:xen"] {
        let port = flag_of(&format!("{kind},vlan=7,allowed_macs=52:54:00:00:00:01,mtu=1400")).unwrap();
        assert_eq!((port.rules.vlans, port.mtu), (Vlans::Access(7), Some(1400)), "{kind}");
    }
}

#[test]
fn guards_name_addresses_and_networks() {
    let guard = |lines: &str| rules(lines).map(|rules| rules.guard);
    let macs = "allowed_macs = ['52:54:00:00:00:01', '52:54:00:00:00:02']";
    let two = vec![mac(1), mac(2)];
    assert_eq!(guard(macs).unwrap(), Some(Guard { macs: two.clone(), ips: None }));
    let none = Some(Guard { macs: two.clone(), ips: Some(vec![]) });
    assert_eq!(guard(&format!("{macs}\nallowed_ips = []")).unwrap(), none);
    assert_eq!(guard(&format!("{macs}\nallowed_ips = 'none'")).unwrap(), none);
    assert_eq!(guard("allowed_macs = 'none'").unwrap(), Some(Guard::default()));
    let ips = guard(&format!("{macs}\nallowed_ips = ['0.0.0.0/0', '10.0.0.2/32', '::/0', 'fd00::1']"));
    let wanted = [("0.0.0.0", 0), ("10.0.0.2", 32), ("::", 0), ("fd00::1", 128)];
    let wanted = wanted.map(|(address, bits)| Network { address: address.parse().unwrap(), bits });
    assert_eq!(ips.unwrap().unwrap().ips.unwrap(), wanted);
    assert!(
        problem("allowed_ips = ['10.0.0.2']")
            .starts_with("rf.toml:4: port.allowed_ips: needs allowed_macs: whoever")
    );
    for (ip, part) in [
        ("10.0.0.256", "is not an IP address or network"),
        ("10.0.0.0/33", "is not an IP address or network"),
        ("10.0.0.0/", "is not an IP address or network"),
        ("fd00::/129", "is not an IP address or network"),
        ("fd00::/+6", "is not an IP address or network"),
        ("10.1.2.3/16", "write 10.1.0.0/16"),
        ("fd00::1/64", "write fd00::/64"),
    ] {
        let problem = problem(&format!("{macs}\nallowed_ips = ['{ip}']"));
        assert!(problem.starts_with("rf.toml:5: port.allowed_ips: ") && problem.contains(part), "{problem}");
    }
    assert!(problem("allowed_macs = ['x']").contains("is not an Ethernet address"));
    assert!(problem("allowed_macs = ['52:54:00:00:00:01','52:54:00:00:00:01']").contains("twice"));
}

#[test]
fn rates_have_units_and_bursts_of_their_own() {
    let bytes = |lines: &str| rules(lines).map(|rules| rules.rate_in.bytes);
    assert_eq!(bytes("rate_in = '1gbit'").unwrap(), rate(125_000_000, 1_250_000), "that of 10 ms");
    assert_eq!(bytes("rate_in = '8mbit'").unwrap(), rate(1_000_000, 256 << 10), "four frames of 64 KiB");
    assert_eq!(bytes("rate_in = '1500000bit'").unwrap(), bytes("rate_in = '1.5mbit'").unwrap());
    assert_eq!(bytes("rate_in = '1kbit'\nrate_in_burst = '72kib'").unwrap(), rate(125, 72 << 10));
    let packets = |lines: &str| rules(lines).map(|rules| rules.rate_out.packets);
    assert_eq!(packets("rate_out_packets = '1mpps'").unwrap(), rate(1_000_000, 10_000));
    assert_eq!(packets("rate_out_packets = '1pps'").unwrap(), rate(1, 256));
    assert_eq!(rules("storm = '50pps'").unwrap().storm, rate(50, 50), "those of a second");
    for (lines, wanted) in [
        ("rate_in = 5", "port.rate_in: 5 is not a string in quotes"),
        (
            "rate_in = '5'",
            "port.rate_in: \"5\" is not a number with one of the units tbit, gbit, mbit, kbit, bit",
        ),
        ("rate_in = '5mbps'", "is not a number with one of the units tbit,"),
        ("rate_in = '5 mbit'", "is not a number with one of the units tbit,"),
        ("rate_in = 'mbit'", "is not a number with one of the units tbit,"),
        ("rate_in = '-5mbit'", "is not a number with one of the units tbit,"),
        ("rate_in = '1.2.3mbit'", "is not a number with one of the units tbit,"),
        ("rate_in = '.mbit'", "is not a number with one of the units tbit,"),
        ("rate_in = '1.mbit'", "is not a number with one of the units tbit,"),
        ("rate_in = '99999999999999999999999gbit'", "is not a number with one of the units tbit,"),
        ("rate_in = '9999999999999999gbit'", "is outside 1kbit to 1tbit"),
        ("rate_in = '1.0005kbit'", "\"1.0005kbit\" is not a whole number of the unit bit"),
        ("rate_in = '0bit'", "port.rate_in: \"0bit\" is outside 1kbit to 1tbit"),
        ("rate_in = '2tbit'", "port.rate_in: \"2tbit\" is outside 1kbit to 1tbit"),
        ("rate_in_burst = '1mib'", "rf.toml:4: port.rate_in_burst: only goes with rate_in"),
        (
            "rate_in = '1gbit'\nrate_in_burst = '71kib'",
            "rf.toml:5: port.rate_in_burst: \"71kib\" is outside 72kib to 4gib",
        ),
        (
            "rate_in = '1gbit'\nrate_in_burst = '1mbit'",
            "is not a number with one of the units gib, mib, kib, gb, mb, kb, b",
        ),
        (
            "rate_in_packets = '1gbit'",
            "port.rate_in_packets: \"1gbit\" is not a number with one of the units mpps,",
        ),
        ("rate_out_packets = '0pps'", "port.rate_out_packets: \"0pps\" is outside 1pps to 1000mpps"),
        ("rate_out_packets = '1pps'\nrate_out_packets_burst = 5", "5 is outside 128 to 1000000000"),
        ("rate_out_packets_burst = 500", "port.rate_out_packets_burst: only goes with rate_out_packets"),
        ("storm = '1000'", "port.storm: \"1000\" is not a number with one of the units mpps, kpps, pps"),
        ("storm_burst = 5", "port.storm_burst: only goes with storm"),
        ("storm = '1kpps'\nstorm_burst = '5'", "port.storm_burst: \"5\" is not a whole number"),
        ("max_macs = -1", "rf.toml:4: port.max_macs: -1 is outside 0 to 1048576"),
        ("isolated = 1", "rf.toml:4: port.isolated: 1 is neither true nor false"),
        ("isolate = true", "rf.toml:4: port.isolate: is not a key of a tap port: did you mean isolated?"),
    ] {
        let problem = problem(lines);
        assert!(problem.contains(wanted), "{problem}");
    }
}

fn port(lines: &str) -> PortConfig {
    read(&format!("[[port]]\nkind = 'tap'\ntap = 'a'\n{lines}\n")).unwrap().ports.remove(0)
}

fn set(port: &PortConfig, settings: &[&str]) -> Result<PortConfig, String> {
    let settings: Vec<_> = settings.iter().map(|&setting| setting.to_owned()).collect();
    Edit::set(&settings).and_then(|edit| port.edited(&edit)).map_err(|error| error.to_string())
}

fn unset(port: &PortConfig, keys: &[&str]) -> Result<PortConfig, String> {
    let keys: Vec<_> = keys.iter().map(|&key| key.to_owned()).collect();
    Edit::unset(&keys).and_then(|edit| port.edited(&edit)).map_err(|error| error.to_string())
}

#[test]
fn edits_change_what_they_name_and_nothing_else() {
    let before =
        port("vlan = 10\nisolated = true\nrate_in = '1gbit'\nrate_in_burst = '1mib'\nstorm = '10pps'");
    let is =
        |after: Result<PortConfig, String>, lines: &str| assert_eq!(after.unwrap(), port(lines), "{lines}");
    is(
        set(&before, &["vlan=20", "max_macs=3"]),
        "vlan = 20\nisolated = true\nmax_macs = 3\nrate_in = '1gbit'\nrate_in_burst = '1mib'\nstorm = '10pps'",
    );
    is(set(&port(""), &["isolated=on", "isolated=on"][..1]), "isolated = true");
    is(set(&port("isolated = true"), &["isolated=off"]), "");
    is(set(&port("static_macs = ['52:54:00:00:00:01']"), &["static_macs=none"]), "");
    // A port is either in one VLAN or a trunk, and never both or neither on the way.
    is(set(&port("vlan = 10"), &["trunk=10,20-29", "native=10"]), "trunk = [10, '20-29']\nnative = 10");
    is(set(&port("trunk = [10]\nnative = 5"), &["vlan=10"]), "vlan = 10");
    is(set(&port("trunk = [10]\nnative = 5"), &["trunk=all"]), "trunk = 'all'\nnative = 5");
    // Static addresses without a VLAN of their own move with the frames without a tag to their new VLAN.
    is(
        set(&port("vlan = 10\nstatic_macs = ['52:54:00:00:00:01']"), &["vlan=20"]),
        "vlan = 20\nstatic_macs = ['52:54:00:00:00:01']",
    );
    // Those of a trunk stay in theirs, if that has been the native one meanwhile, too.
    let uplink = port("trunk = [10, 20]\nstatic_macs = ['52:54:00:00:00:fe@10']");
    let native = set(&uplink, &["native=10"]).unwrap();
    assert_eq!(native.rules.static_macs, uplink.rules.static_macs);
    assert_eq!(set(&native, &["native=20"]).unwrap().rules.static_macs, uplink.rules.static_macs);
    assert_eq!(unset(&native, &["native"]).unwrap(), uplink);
    is(unset(&before, &["rate_in", "vlan"]), "isolated = true\nstorm = '10pps'");
    is(unset(&port("trunk = [10]\nnative = 5"), &["trunk"]), "");
    is(unset(&port("isolated = true"), &["vlan"]), "isolated = true");
    // Other settings change in the same way.
    is(
        set(&port("mtu = 1500\nbridge = 'br0'"), &["mtu=9000", "vlan=7"]),
        "mtu = 9000\nbridge = 'br0'\nvlan = 7",
    );
    is(unset(&port("mtu = 1500\nbridge = 'br0'\nup = true"), &["mtu", "bridge"]), "up = true");
}

#[test]
fn what_holds_by_default_follows_the_key_that_it_depends_on() {
    let guest = |keys: &str| {
        let text = format!("[[port]]\nkind = 'vhost-user'\nsocket = '/a'\n{keys}");
        read(&text).unwrap().ports.remove(0)
    };
    assert_eq!(set(&guest(""), &["csum=off"]).unwrap(), guest("csum = false"));
    assert_eq!(unset(&guest("csum = false"), &["csum"]).unwrap(), guest(""));
    assert_eq!(set(&guest("tso = false"), &["csum=off"]).unwrap(), guest("csum = false"));
    let error = set(&guest("csum = false"), &["tso=on"]).unwrap_err();
    assert!(error.starts_with("tso: needs csum"), "{error}");
}

#[test]
fn each_key_says_what_a_change_of_it_does() {
    let [tap, guest] = ["tap:a", "vhost-user:/a"]
        .map(|flag| Config::builder().port_flag(flag).build().unwrap().ports.remove(0));
    for (key, of_tap, of_guest) in [
        ("vlan", Some(Effect::Live), Some(Effect::Live)),
        ("worker", Some(Effect::Live), Some(Effect::Live)),
        // A tap has no front end that could have agreed on another value.
        ("mtu", Some(Effect::Live), Some(Effect::NextConnection)),
        ("mac", Some(Effect::Live), Some(Effect::NextConnection)),
        ("tso", None, Some(Effect::NextConnection)),
        ("bridge", Some(Effect::Live), None),
        ("socket", None, Some(Effect::Reopen)),
        ("queues", Some(Effect::Reopen), None),
        ("name", Some(Effect::Reopen), Some(Effect::Reopen)),
    ] {
        assert_eq!((tap.effect(key), guest.effect(key)), (of_tap, of_guest), "{key}");
    }
}

#[test]
fn edits_that_make_no_sense_are_refused() {
    let port = port("vlan = 10\nallowed_macs = ['52:54:00:00:00:01']\nallowed_ips = ['10.0.0.2']");
    for (settings, wanted) in [
        (&["vlan=4095"][..], "vlan: 4095 is outside 0 to 4094"),
        (&["vlan"], "\"vlan\": is not KEY=VALUE"),
        (&["vlan=1", "vlan=2"], "vlan: is given twice"),
        (&["native=5"], "native: only goes with trunk"),
        (&["vlan=1", "trunk=all"], "trunk: cannot be given with vlan"),
        (&["queues=2"], "queues: can change only when the port is opened anew"),
        (&["csum=off"], "csum: is a key of vhost-user and xen-vif ports, and this is a tap port"),
        (
            &["vlan=10,20"],
            "vlan: \"10,20\" is not one whole number: several VLANs are a trunk, as in trunk=10",
        ),
        (&["vlan="], "vlan: \"\" is no value: `ringferry ctl unset` takes a key back"),
        (&["rate_in=none"], "rate_in: \"none\" is no value: `ringferry ctl unset` takes a key back"),
        (
            &["rate_out_packets=0"],
            "rate_out_packets: \"0\" is no value: `ringferry ctl unset` takes a key back",
        ),
        (&["storm=off"], "storm: \"off\" is no value: `ringferry ctl unset` takes a key back"),
        (&["isolated=1"], "isolated: 1 is neither on nor off"),
        (&["mtuu=9000"], "mtuu: is not a setting that can change while the port is open: did you mean mtu?"),
        (&["mtu=1"], "mtu: 1 is outside 68 to 65535"),
        (&["rate_in_burst=1mib"], "rate_in_burst: only goes with rate_in"),
        (&[], "nothing is to be set"),
    ] {
        let error = set(&port, settings).unwrap_err();
        assert!(error.starts_with(wanted), "{error}");
    }
    assert_eq!(set(&port, &["vlan=5000", "isolated=x", "max_macs=y"]).unwrap_err().lines().count(), 3);
    assert!(
        unset(&port, &["tap"]).unwrap_err().starts_with("tap: can change only when the port is opened anew")
    );
    assert!(
        unset(&port, &["queue_size"]).unwrap_err().starts_with("queue_size: is a key of vhost-user ports")
    );
    assert!(unset(&port, &["mtuu"]).unwrap_err().contains("did you mean mtu?"));
    assert!(unset(&port, &["allowed_macs"]).unwrap_err().starts_with("allowed_ips: needs allowed_macs"));
    assert!(unset(&port, &[]).unwrap_err().starts_with("nothing is to be unset"));
}

fn a_mac() -> impl Strategy<Value = Mac> {
    (1u8..=255, any::<[u8; 4]>()).prop_map(|(last, [a, b, c, d])| Mac([0x52, a, b, c, d, last]))
}

fn a_network() -> impl Strategy<Value = Network> {
    let v4 = (any::<u32>(), 0u8..=32).prop_map(|(address, bits)| (IpAddr::V4(address.into()), bits));
    let v6 = (any::<u128>(), 0u8..=128).prop_map(|(address, bits)| (IpAddr::V6(address.into()), bits));
    prop_oneof![v4, v6].prop_map(|(address, bits)| Network { address: masked(address, bits.into()), bits })
}

fn vlans() -> impl Strategy<Value = Vlans> {
    let allowed = btree_set(1..=MAX_VID, 1..40).prop_map(|vids| vids.into_iter().collect::<Vec<_>>());
    let rows = (1..=MAX_VID, 1..=MAX_VID).prop_map(|(a, b)| (a.min(b)..=a.max(b)).collect::<Vec<_>>());
    prop_oneof![
        (0..=MAX_VID).prop_map(Vlans::Access),
        (option::of(prop_oneof![allowed, rows]), option::of(0..=MAX_VID))
            .prop_map(|(allowed, native)| Vlans::Trunk { allowed, native }),
    ]
}

fn a_rate(of: Of) -> impl Strategy<Value = Option<Rate>> {
    let (range, bursts) = match of {
        Of::Bytes => (BITS, BURST_BYTES),
        Of::Packets => (PACKETS, BURST_PACKETS),
        Of::Flooded => (PACKETS, BURST_STORM),
    };
    let rates = range.start().div_ceil(of.scale())..=range.end() / of.scale();
    let burst = option::of(bursts);
    option::of((rates, burst).prop_map(move |(per_second, burst)| Rate {
        per_second,
        burst: burst.unwrap_or_else(|| of.burst(per_second)),
    }))
}

fn limits() -> impl Strategy<Value = Limits> {
    (a_rate(Of::Packets), a_rate(Of::Bytes)).prop_map(|(packets, bytes)| Limits { packets, bytes })
}

fn any_rules() -> impl Strategy<Value = Rules> {
    let statics = vec((a_mac(), any::<prop::sample::Index>()), 0..5);
    let networks = vec(a_network(), 0..5).prop_map(|mut all| {
        all.sort_by_key(|network| (network.address, network.bits));
        all.dedup();
        all
    });
    let guard = option::of((btree_set(a_mac(), 0..5), option::of(networks)));
    let guard =
        guard.prop_map(|guard| guard.map(|(macs, ips)| Guard { macs: macs.into_iter().collect(), ips }));
    let firewall = option::of("[a-z0-9][a-z0-9_.-]{0,20}")
        .prop_map(|name| name.map(|name| FirewallRule { name, policy: None }));
    let guard = (guard, firewall);
    let apart = (any::<bool>(), option::of("[a-zA-Z0-9_.:@-]{1,20}"), any::<bool>());
    let plain = (vlans(), apart, option::of(0..=1u32 << 20), statics);
    (plain, guard, a_rate(Of::Flooded), limits(), limits(), 1..=MAX_WEIGHT).prop_map(
        |(
            (vlans, (isolated, quarantine, forward_reserved), max_macs, statics),
            (guard, firewall),
            storm,
            rate_in,
            rate_out,
            weight,
        )| {
            let mut vids: Vec<Vid> = (0..=MAX_VID).filter(|vid| carries(&vlans, *vid)).collect();
            vids.extend(own(&vlans));
            let mut static_macs: Vec<_> =
                statics.into_iter().map(|(mac, at)| (mac, vids[at.index(vids.len())])).collect();
            static_macs.sort();
            static_macs.dedup();
            Rules {
                vlans,
                isolated,
                quarantine,
                forward_reserved,
                max_macs,
                static_macs,
                guard,
                firewall,
                storm,
                rate_in,
                rate_out,
                weight,
                wire: None,
            }
        },
    )
}

proptest! {
    #[test]
    fn rules_written_are_read_as_the_same(rules in any_rules()) {
        let mut config = read("[[port]]\nkind = 'tap'\ntap = 'a'\n").unwrap();
        config.ports[0].rules = rules;
        prop_assert_eq!(&read(&config.dump()).unwrap(), &config, "{}", config.dump());
    }

    /// Every edit starts from the rules of the running port, so they must survive an edit that changes
    /// nothing.
    #[test]
    fn an_edit_of_one_key_leaves_the_others(rules in any_rules()) {
        let mut port = port("");
        port.rules = rules;
        let isolated = PortConfig { rules: Rules { isolated: true, ..port.rules.clone() }, ..port.clone() };
        prop_assert_eq!(set(&port, &["isolated=on"]), Ok(isolated));
    }

    #[test]
    fn no_text_is_too_odd_for_a_value(text in "\\PC*", key in prop::sample::select(RulesKeys::KEYS.iter().map(|key| key.name).collect::<Vec<_>>())) {
        // The test only asks for an answer; most edits are refused.
        let _ = set(&port(""), &[&format!("{key}={text}")]);
    }
}
