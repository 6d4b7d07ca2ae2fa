use proptest::prelude::*;

use super::*;

const FULL: &str = r#"
control = "/run/ringferry/control.sock"

[switch]
mac_age_seconds = 60
mac_table_size = 1024
poll_microseconds = 20
workers = 3

[[port]]
name = "vm0"
kind = "vhost-user"
socket = "/run/ringferry/vm0.sock"
mode = "connect"
mtu = 9000
queue_size = 512
mac = "52:54:00:00:00:01"
mergeable = false
uso = false

[[port]]
kind = "vhost-user"
activation = "vm1"

[[port]]
kind = "vhost-user"
fd = 5

[[port]]
kind = "tap"
tap = "rf0"
existing = true
offloads = false
queues = 4

[[port]]
kind = "tap"
fd = 7
"#;

fn read(text: &str) -> Result<Config, ConfigError> {
    Config::builder().toml("rf.toml", text).build()
}

/// Returns the only problem of `text`.
fn problem(text: &str) -> String {
    let error = read(text).expect_err("accepted");
    assert_eq!(error.problems.len(), 1, "{error}");
    error.to_string()
}

/// Returns the only problem of a vhost-user port with these further lines, which start at line 4.
fn vm_problem(lines: &str) -> String {
    problem(&format!("[[port]]\nkind = \"vhost-user\"\nsocket = \"/a.sock\"\n{lines}\n"))
}

fn flag(text: &str) -> Result<PortConfig, String> {
    text.parse::<PortSpec>().map(|spec| spec.port).map_err(|error| error.to_string())
}

#[test]
fn every_key_is_read() {
    let config = read(FULL).unwrap();
    assert_eq!(config.control.as_deref(), Some(Path::new("/run/ringferry/control.sock")));
    assert_eq!(
        config.switch,
        SwitchConfig {
            mac_age_seconds: 60,
            mac_table_size: 1024,
            poll_microseconds: 20,
            workers: Some(3),
            ..SwitchConfig::default()
        }
    );
    let names: Vec<_> = config.ports.iter().map(|port| port.name.as_str()).collect();
    assert_eq!(names, ["vm0", "vm1", "fd5", "rf0", "fd7"]);
    assert_eq!(config.ports[0].mtu, Some(9000));
    assert_eq!(
        config.ports[0].kind,
        PortKind::VhostUser(VhostUserConfig {
            endpoint: VhostUserEndpoint::Connect("/run/ringferry/vm0.sock".into()),
            access: AccessConfig::default(),
            queue_size: Some(512),
            mac: Some(Mac([0x52, 0x54, 0, 0, 0, 1])),
            features: FeatureToggles { mergeable: false, uso: false, ..FeatureToggles::default() },
        })
    );
    let endpoint = |port: &PortConfig| match &port.kind {
        PortKind::VhostUser(vhost_user) => vhost_user.endpoint.clone(),
        _ => panic!("no virtual machine"),
    };
    assert_eq!(endpoint(&config.ports[1]), VhostUserEndpoint::Activation("vm1".into()));
    assert_eq!(endpoint(&config.ports[2]), VhostUserEndpoint::Fd(5));
    let existing = TapSource::Name { name: "rf0".into(), existing: Some(true) };
    assert_eq!(
        config.ports[3].kind,
        PortKind::Tap(TapConfig {
            source: existing,
            offloads: false,
            queues: Some(4),
            link: LinkConfig::default()
        })
    );
    assert_eq!(
        config.ports[4].kind,
        PortKind::Tap(TapConfig {
            source: TapSource::Fd(7),
            offloads: true,
            queues: None,
            link: LinkConfig::default()
        })
    );
}

#[test]
fn dump_reads_back_the_same() {
    let config = read(FULL).unwrap();
    assert_eq!(read(&config.dump()).unwrap(), config, "{}", config.dump());
    let odd = Config::builder().port_flag("vhost-user:/tmp/a \"b\\c\t.sock,name=x,csum=off").build().unwrap();
    assert_eq!(read(&odd.dump()).unwrap(), odd, "{}", odd.dump());
}

#[test]
fn defaults_are_those_documented() {
    let config = read("[[port]]\nkind = 'vhost-user'\nsocket = '/run/vm-1.sock'").unwrap();
    assert_eq!(config.switch, SwitchConfig::default());
    let port = &config.ports[0];
    assert_eq!((port.name.as_str(), port.mtu), ("vm-1", None));
    let endpoint = VhostUserEndpoint::Listen("/run/vm-1.sock".into());
    let expected = VhostUserConfig {
        endpoint,
        access: AccessConfig::default(),
        queue_size: None,
        mac: None,
        features: FeatureToggles::default(),
    };
    assert_eq!(port.kind, PortKind::VhostUser(expected));
}

#[test]
fn a_port_begins_with_a_worker_that_there_is() {
    let with = |workers: u16, keys: &str| {
        read(&format!("[switch]\nworkers = {workers}\n[[port]]\nkind = 'tap'\ntap = 'rf0'\n{keys}\n"))
    };
    let config = with(3, "queues = 1\nworker = 2").unwrap();
    assert_eq!(config.ports[0].workers, [2]);
    assert!(config.dump().contains("worker = 2\n"), "{}", config.dump());
    // As `ctl assign` has kept it when there were more workers, which is no reason not to start.
    let config = with(2, "queues = 1\nworker = 2").unwrap();
    let [odd] = config.oddities().try_into().unwrap();
    assert!(odd.starts_with("port rf0: there is no worker 2: the switch has 2, from 0 on"), "{odd}");
    assert_eq!(config.ports[0].owners().of(0, 2), 0);
    let error = Config::builder().workers(2).port_flag("tap:rf0,queues=1,worker=2").build().unwrap_err();
    let error = error.to_string();
    assert!(
        error.starts_with("--port tap:rf0,queues=1,worker=2: port.worker: there is no worker 2"),
        "{error}"
    );
    for queues in ["", "queues = 2"] {
        let error = with(2, &format!("worker = 1\n{queues}")).unwrap_err().to_string();
        assert!(error.starts_with("rf.toml:6: port.worker: only goes with queues = 1"), "{error}");
    }
}

fn xen(lines: &str) -> Result<XenVifConfig, ConfigError> {
    let config = read(&format!("[[port]]\nkind = 'xen-vif'\n{lines}"))?;
    match &config.ports[0].kind {
        PortKind::XenVif(vif) => {
            assert_eq!(read(&config.dump()).unwrap(), config, "{}", config.dump());
            Ok(vif.clone())
        }
        _ => panic!("no Xen guest"),
    }
}

#[test]
fn xen_ports_have_providers_classes_and_interfaces() {
    let plain = xen("").unwrap();
    assert_eq!((&plain.provider, plain.class.as_str(), plain.only), (&XenProvider::Xen, "vif", None));
    assert!(plain.persistent && plain.static_grants && plain.gso);
    let process = "provider = 'process'\nbroker = '/b'\nstore = '/s'\ndomain = 3\nclass = 'rf'\nvif = '5.1'\n\
                   transfer = 'map'\npages = 64\nqueues = 4\ncsum = false\nname = 'web'";
    let vif = xen(process).unwrap();
    let (broker, store) = ("/b".into(), "/s".into());
    assert_eq!(vif.provider, XenProvider::Process { broker, store, domain: 3 });
    assert_eq!((vif.only, vif.transfer), (Some(VifName { domain: 5, device: 1 }), Transfer::Map));
    assert_eq!((vif.pages, vif.queues, vif.csum, vif.gso), (64, Some(4), false, false));
    let problem = |lines: &str| xen(lines).unwrap_err().to_string();
    assert!(problem("broker = '/b'").contains("only goes with provider"));
    assert!(problem("provider = 'process'\nbroker = '/b'").contains("port.store: must be given"));
    assert!(problem("gso = true\nsg = false").contains("needs sg and csum"));
    assert!(problem("vif = '5'").contains("write DOMAIN.DEVICE"));
    assert!(problem("vif = '40000.0'").contains("write DOMAIN.DEVICE"));
    assert!(problem("class = 'a/b'").contains("is not a class"));
    assert!(problem("pages = 65535").contains("is outside"));
    assert_eq!(flag("xen-vif:xen,queues=2").unwrap().name, "xen");
    assert_eq!(flag("xen-vif:xen,vif=7.2").unwrap().name, "xen7.2");
}

#[test]
fn an_interface_has_one_port() {
    let both = |one: &str, two: &str| {
        Config::builder()
            .port_flag(&format!("xen-vif:xen,name=a{one}"))
            .port_flag(&format!("xen-vif:xen,name=b{two}"))
            .build()
    };
    assert!(both(",vif=5.0", ",vif=5.1").is_ok());
    assert!(both("", ",class=other").is_ok());
    for (one, two) in [("", ""), ("", ",vif=5.0"), (",vif=5.0", ""), (",vif=5.0", ",vif=5.0")] {
        assert!(both(one, two).unwrap_err().to_string().contains("is already used by"), "{one} {two}");
    }
}

#[test]
fn problem_names_file_line_and_key() {
    assert_eq!(vm_problem("\nmtu = 70000"), "rf.toml:5: port.mtu: 70000 is outside 68 to 65535");
    assert_eq!(vm_problem("worker = 16"), "rf.toml:4: port.worker: 16 is outside 0 to 15");
    assert_eq!(vm_problem("mtu = -1"), "rf.toml:4: port.mtu: -1 is outside 68 to 65535");
    assert_eq!(vm_problem("mtu = \"9000\""), "rf.toml:4: port.mtu: \"9000\" is not a whole number");
    assert_eq!(vm_problem("mtu = 1.5"), "rf.toml:4: port.mtu: float is not a whole number");
    assert_eq!(vm_problem("mtu = 0x11111"), "rf.toml:4: port.mtu: 69905 is outside 68 to 65535");
    assert_eq!(vm_problem("queue_size = 100"), "rf.toml:4: port.queue_size: 100 is not a power of two");
    assert_eq!(vm_problem("csum = 1"), "rf.toml:4: port.csum: 1 is neither true nor false");
    assert_eq!(
        vm_problem("mode = 'serve'"),
        "rf.toml:4: port.mode: \"serve\" is not a mode; known: \"listen\", \"connect\""
    );
    assert_eq!(
        problem("[switch]\nmac_table_size = 1\n[[port]]\nkind = 'tap'\ntap = 'a'"),
        "rf.toml:2: switch.mac_table_size: 1 is outside 64 to 1048576"
    );
}

/// A folder with a configuration file of this text, and drop-in files.
fn folder(main: &str, drop_ins: &[(&str, &str)]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rf.toml");
    std::fs::write(&path, main).unwrap();
    std::fs::create_dir(folder.path().join("rf.d")).unwrap();
    for (name, text) in drop_ins {
        std::fs::write(folder.path().join("rf.d").join(name), text).unwrap();
    }
    (folder, path)
}

fn tap(name: &str) -> String {
    format!("[[port]]\nkind = 'tap'\ntap = '{name}'\n")
}

#[test]
fn drop_in_files_add_ports_in_the_order_of_their_names() {
    let (_folder, path) = folder(
        &tap("main"),
        &[
            ("b.toml", &tap("b")),
            ("a.toml", &tap("a")),
            (".c.toml", "no"),
            ("d.toml~", "no"),
            ("e.txt", "no"),
        ],
    );
    let config = Config::from_file(&path).unwrap();
    let names: Vec<_> = config.ports.iter().map(|port| port.name.as_str()).collect();
    assert_eq!(names, ["main", "a", "b"]);
    assert_eq!(config.file.unwrap().ports, names);
    let (folder, path) =
        folder(&tap("x"), &[("y.toml", &tap("x")), ("z.toml", "control = '/c'\n[[port]]\n")]);
    let problems = Config::from_file(&path).unwrap_err().problems;
    let directory = folder.path().join("rf.d");
    let place = |name: &str, line: u8| format!("{}:{line}", directory.join(name).display());
    let places: Vec<_> = problems.iter().map(|problem| problem.place.clone()).collect();
    assert_eq!(places[..2], [place("z.toml", 1), place("z.toml", 2)]);
    assert!(problems[0].to_string().contains("control: belongs in the main configuration file"));
    assert!(places.contains(&place("y.toml", 1)), "the tap x is already used by the main file");
}

/// A port whose file became something else would be removed by a reload.
#[test]
fn a_drop_in_that_is_no_file_is_refused() {
    let (folder, path) = folder(&tap("main"), &[]);
    std::fs::create_dir(folder.path().join("rf.d/x.toml")).unwrap();
    let error = Config::from_file(&path).unwrap_err().to_string();
    assert!(error.contains("rf.d/x.toml: is no file, as a drop-in file has to be"), "{error}");
}

#[test]
fn only_a_file_may_have_no_port() {
    let (_folder, path) = folder("[switch]\nworkers = 1\n", &[]);
    let config = Config::from_file(&path).unwrap();
    assert_eq!(config.ports, []);
    assert!(config.oddities()[0].starts_with("there is no port: "), "{:?}", config.oddities());
    assert!(Config::builder().build().is_err());
}

#[test]
fn a_port_that_is_to_be_added_is_new_or_the_same() {
    let config =
        Config::builder().port_flag("tap:rf0").port_flag("vhost-user:/s/vm0.sock,vlan=5").build().unwrap();
    let add = |text: &str| config.to_add(text, 2);
    assert_eq!(add("tap:rf1,name=x").map(|(port, new)| (port.name, new)), Ok(("x".to_owned(), true)));
    assert_eq!(add("vhost-user:/s/vm0.sock,vlan=5"), Ok((config.ports[1].clone(), false)));
    for (text, error) in [
        (
            "vhost-user:/s/vm0.sock,vlan=6,mtu=9000",
            "there is another port \"vm0\": mtu is unset, not 9000, vlan is 5, not 6; remove it first, or give this one another name",
        ),
        ("tap:rf0,name=x", "tap:rf0,name=x: port: the tap rf0 is already used by port \"rf0\""),
        ("tap:rf1,mtuu=9", "tap:rf1,mtuu=9: mtuu: is not a key of a tap port: did you mean mtu?"),
        ("tap:rf1,queues=1,worker=2", "tap:rf1,queues=1,worker=2: port.worker: there is no worker 2"),
    ] {
        let found = add(text).unwrap_err();
        assert!(found.starts_with(error), "{found}");
    }
}

#[test]
fn what_a_file_has_changed_is_told_port_by_port() {
    let [kept, gone, other, ruled] = ["kept", "gone", "other", "ruled"].map(tap);
    let (_folder, path) = folder(&[kept.clone(), gone, other.clone(), ruled.clone()].concat(), &[]);
    let running = Config::builder().file(&path).port_flag("tap:flag").build().unwrap();
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        Config::from_file(&path).unwrap()
    };
    assert!(running.changes(&Config::from_file(&path).unwrap()).unwrap().is_empty());
    let text = [
        "[switch]\nmac_age_seconds = 60\n",
        &other,
        "mtu = 9000\nqueues = 2\n",
        &kept,
        &tap("new"),
        &ruled,
        "vlan = 7\n",
    ];
    let changes = running.changes(&read(&text.concat())).unwrap();
    let names = |ports: &[PortConfig]| ports.iter().map(|port| port.name.clone()).collect::<Vec<_>>();
    assert_eq!(changes.removed, ["gone"]);
    assert_eq!(names(&changes.replaced), ["other"]);
    assert_eq!(names(&changes.changed), ["ruled"]);
    assert_eq!(names(&changes.added), ["new"]);
    assert_eq!(changes.restart, ["mac_age_seconds = 60"]);
    assert_eq!(changes.order, ["other", "kept", "new", "ruled", "flag"]);
    // A new port that has what one of a flag has.
    let conflict = running.changes(&read("[[port]]\nkind = 'tap'\ntap = 'flag'\nname = 'x'\n"));
    assert!(conflict.unwrap_err().ends_with("the tap flag is already used by port \"flag\""));
}

#[test]
fn a_file_that_may_be_half_of_one_removes_nothing_whichever_it_is() {
    let (folder, path) = folder(&tap("main"), &[("a.toml", &tap("a")), ("b.toml", &tap("b"))]);
    let drop_in = |name: &str| folder.path().join("rf.d").join(name);
    let mut running = Config::from_file(&path).unwrap();
    let changes = |running: &Config| running.changes(&Config::from_file(&path).unwrap());
    for file in [path.clone(), drop_in("a.toml")] {
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, "").unwrap();
        let error = changes(&running).unwrap_err();
        assert!(error.contains(&format!("{} has no port any more", file.display())), "{error}");
        std::fs::write(&file, text).unwrap();
    }
    std::fs::rename(folder.path().join("rf.d"), folder.path().join("away")).unwrap();
    let error = changes(&running).unwrap_err();
    assert!(error.contains("rf.d is not there any more, which has the port a"), "{error}");
    std::fs::rename(folder.path().join("away"), folder.path().join("rf.d")).unwrap();
    // Ports that are in other files by now.
    let texts = [&path, &drop_in("a.toml")].map(|file| std::fs::read_to_string(file).unwrap());
    std::fs::write(&path, "").unwrap();
    std::fs::write(drop_in("a.toml"), texts.concat()).unwrap();
    assert_eq!(changes(&running).unwrap().removed, [""; 0]);
    std::fs::write(&path, &texts[0]).unwrap();
    std::fs::write(drop_in("a.toml"), &texts[1]).unwrap();
    // A drop-in file that is gone is how a machine goes, and one that `ctl remove` has left empty says nothing.
    std::fs::remove_file(drop_in("b.toml")).unwrap();
    assert_eq!(changes(&running).unwrap().removed, ["b"]);
    std::fs::write(drop_in("a.toml"), "").unwrap();
    running.file.as_mut().unwrap().forget("a");
    running.ports.retain(|port| port.name != "a");
    assert_eq!(changes(&running).unwrap().removed, ["b"]);
}

#[test]
fn an_assignment_is_the_list_of_workers_that_says_so_and_no_longer_than_needed() {
    let port = |worker: &str| {
        let text = format!("[[port]]\nkind = 'vhost-user'\nsocket = '/a'\n{worker}");
        Config::builder().toml("rf.toml", &text).workers(4).build().unwrap().ports.remove(0)
    };
    for (before, queue, worker, after) in [
        ("", 0, 0, ""),
        ("", 0, 2, "worker = [2, 1]"),
        ("", 2, 0, "worker = [0, 1, 0, 3]"),
        ("worker = 2", 1, 3, "worker = 2"),
        ("worker = 3", 1, 3, "worker = [3, 3, 1]"),
        ("worker = [3, 3]", 1, 0, "worker = [3, 0, 0]"),
        ("worker = [2, 1]", 0, 0, ""),
    ] {
        let assigned = port(before).assigned(queue, worker, 4);
        for other in 0..MAX_WORKERS {
            let wanted = if other == queue { worker.into() } else { port(before).owners().of(other, 4) };
            assert_eq!(assigned.owners().of(other, 4), wanted, "{before:?}: pair {other} after {queue}");
        }
        assert_eq!(assigned, port(after), "{before:?}");
    }
}

/// A file with some of six ports, in any order, each with some keys.
fn some_ports() -> impl Strategy<Value = Vec<(u8, &'static str)>> {
    let keys = prop::sample::select(vec![
        "",
        "vlan = 5\n",
        "isolated = true\n",
        "mtu = 9000\n",
        "queues = 1\nworker = 1\n",
        "queues = 1\n",
        "bridge = 'br0'\nmtu = 1400\n",
    ]);
    let ports = prop::sample::subsequence((0..6_u8).collect::<Vec<_>>(), 0..=6).prop_shuffle();
    (ports, prop::collection::vec(keys, 6))
        .prop_map(|(ports, keys)| ports.into_iter().map(|port| (port, keys[usize::from(port)])).collect())
}

proptest! {
    /// For any two files, with and without ports of flags: the changes make of the first what the second says, touch no port that is the
    /// same in both, and are none when they have been carried out.
    #[test]
    fn changes_of_a_file_lead_to_what_it_says(before in some_ports(), after in some_ports(), flags in 0..3_usize) {
        let file = |ports: &[(u8, &str)]| {
            let tables = ports.iter().map(|(port, keys)| format!("{}{keys}", tap(&format!("p{port}"))));
            let text = tables.collect::<String>();
            let config = Config::builder().may_be_empty().toml("rf.toml", &text).workers(2).build().unwrap();
            let path = Path::new("/rf.toml");
            let blank = config.ports.is_empty().then(|| path.to_owned()).into_iter().collect();
            Config { file: Some(ConfigFile::of(path, &config, BTreeMap::new(), blank)), ..config }
        };
        let flags: Vec<_> = (0..flags).map(|flag| file(&[(10 + flag as u8, "")]).ports.remove(0)).collect();
        let mut running = file(&before);
        running.ports.extend(flags.iter().cloned());
        let read = file(&after);
        if after.is_empty() && !before.is_empty() {
            // Half of a file is no order to remove everything.
            prop_assert!(running.changes(&read).is_err());
            return Ok(());
        }
        let changes = running.changes(&read).unwrap();
        let touched = changes.removed.iter().chain(changes.replaced.iter().chain(&changes.changed).map(|port| &port.name));
        for name in touched {
            let same = read.ports.iter().any(|port| port.name == *name && running.ports.contains(port));
            prop_assert!(!same, "{} is touched for nothing", name);
        }
        running.ports.retain(|port| !changes.removed.contains(&port.name));
        for changed in changes.replaced.iter().chain(&changes.changed) {
            let there = running.ports.iter_mut().find(|port| port.name == changed.name).unwrap();
            prop_assert_eq!(there.can_become(changed), changes.changed.contains(changed));
            *there = changed.clone();
        }
        running.ports.extend(changes.added.iter().cloned());
        running.ports.sort_by_key(|port| changes.order.iter().position(|name| *name == port.name));
        running.file.clone_from(&read.file);
        prop_assert_eq!(&running.ports, &[read.ports.clone(), flags].concat());
        prop_assert!(running.changes(&read).unwrap().is_empty());
    }
}

#[test]
fn unknown_keys_and_kinds_are_refused() {
    // Whoever is told what was meant is not told the other forty.
    assert_eq!(
        vm_problem("mtuu = 1").lines().next(),
        Some("rf.toml:4: port.mtuu: is not a key of a vhost-user port: did you mean mtu?")
    );
    assert!(
        vm_problem("offloads = true")
            .starts_with("rf.toml:4: port.offloads: is not a key of a vhost-user port, but one of the keys of a tap port; known: kind,")
    );
    assert!(problem("x = 1\n[[port]]\nkind = 'tap'\ntap = 'a'").starts_with(
        "rf.toml:1: x: is not a key; known: control, socket_directories, policies, switch, port"
    ));
    assert_eq!(
        problem("[[port]]\nkind = 'veth'"),
        "rf.toml:2: port.kind: \"veth\" is not a kind of port; known: \"vhost-user\", \"tap\", \"xen-vif\", \"xdp\""
    );
    assert_eq!(problem("\n[[port]]\nname = 'a'"), "rf.toml:2: port.kind: must be given");
}

#[test]
fn tables_of_the_wrong_shape_are_refused() {
    assert_eq!(
        problem("[port]\nkind = 'tap'"),
        "rf.toml:1: port: must be an array of tables: write [[port]]"
    );
    assert_eq!(problem("port = [1]"), "rf.toml:1: port: must be a table: write [[port]]");
    assert_eq!(
        problem("switch = 3\n[[port]]\nkind = 'tap'\ntap = 'a'"),
        "rf.toml:1: switch: must be a table: [switch]"
    );
}

#[test]
fn syntax_error_names_the_line() {
    assert!(problem("[switch]\nmac_age_seconds = = 3\n").starts_with("rf.toml:2: "));
    assert_eq!(problem("a = 'x'\n\na = 'y'\n"), "rf.toml:3: duplicate key, in \"a = 'y'\"");
    let hint = "; texts are in quotes, numbers have no zero in front, and what is on or off is true or false";
    for line in
        ["kind = tap", "mac = 52:54:00:00:00:01", "address = [10.0.0.1/24]", "vlan = 010", "isolated = on"]
    {
        let found = problem(&format!("[[port]]\n{line}\n"));
        assert!(
            found.starts_with("rf.toml:2: ") && found.ends_with(&format!(", in {line:?}{hint}")),
            "{found}"
        );
    }
}

#[test]
fn endpoints_exclude_each_other() {
    assert_eq!(vm_problem("fd = 5"), "rf.toml:1: port.fd: cannot be given with socket: choose one");
    assert_eq!(
        problem("[[port]]\nkind = 'vhost-user'\nname = 'a'"),
        "rf.toml:1: port.socket: must be given, or another of socket, fd, activation"
    );
    assert!(
        problem("[[port]]\nkind = 'vhost-user'\nfd = 5\nmode = 'listen'")
            .starts_with("rf.toml:4: port.mode: only goes with socket")
    );
    assert!(
        problem("[[port]]\nkind = 'tap'\nfd = 5\nexisting = true")
            .starts_with("rf.toml:4: port.existing: only goes with tap")
    );
}

#[test]
fn paths_names_and_addresses_are_checked() {
    let socket = |length: usize| {
        format!("[[port]]\nname='a'\nkind = 'vhost-user'\nsocket = '/{}'", "a".repeat(length - 1))
    };
    assert!(read(&socket(107)).is_ok());
    assert!(
        problem(&socket(108))
            .starts_with("rf.toml:4: port.socket: the socket path has 108 bytes, 107 are possible")
    );
    let tap = |name: &str| format!("[[port]]\nname='a'\nkind = 'tap'\ntap = {name:?}");
    assert!(read(&tap("fifteen-bytes-x")).is_ok());
    assert!(problem(&tap("sixteen-bytes-xx")).contains("port.tap: \"sixteen-bytes-xx\" has 16 bytes"));
    for name in ["a/b", "a b", "a:b", "tap%d", "..", "a\tb"] {
        assert!(problem(&tap(name)).starts_with("rf.toml:4: port.tap: "), "{name}");
    }
    assert_eq!(problem(&tap("")), "rf.toml:4: port.tap: is empty");
    assert_eq!(vm_problem("name = ''"), "rf.toml:4: port.name: is empty");
    for name in ["a b", "ä", "a\\n"] {
        assert!(vm_problem(&format!("name = \"{name}\"")).starts_with("rf.toml:4: port.name: "), "{name}");
    }
    for mac in [
        "52:54:00:00:00",
        "52:54:00:00:00:00:00",
        "52-54-00-00-00-00",
        "5:54:00:00:00:00",
        "01:00:00:00:00:00",
        "00:00:00:00:00:00",
    ] {
        assert!(vm_problem(&format!("mac = '{mac}'")).starts_with("rf.toml:4: port.mac: "), "{mac}");
    }
    for fd in [0, 2, -1] {
        let message = problem(&format!("[[port]]\nkind = 'tap'\nfd = {fd}"));
        assert_eq!(message, format!("rf.toml:3: port.fd: {fd} is outside 3 to 2147483647"));
    }
}

/// VIRTIO 1.4, 5.1.3.1: segmentation offloads require checksum offload.
#[test]
fn segmentation_needs_checksums() {
    let features = |text| match flag(text).unwrap().kind {
        PortKind::VhostUser(vhost_user) => vhost_user.features,
        _ => panic!("no virtual machine"),
    };
    let without = features("vhost-user:/a,csum=off");
    assert!(!without.csum && !without.tso && !without.uso && without.mergeable);
    assert!(flag("vhost-user:/a,csum=off,tso=on").unwrap_err().contains(": tso: needs csum"));
}

#[test]
fn ports_must_not_share_anything() {
    let two = |a: &str, b: &str| problem(&format!("[[port]]\n{a}\n\n[[port]]\n{b}\n"));
    let vm = |name: &str, path: &str| format!("name = '{name}'\nkind = 'vhost-user'\nsocket = '{path}'");
    let tap = |name: &str, what: &str| format!("name = '{name}'\nkind = 'tap'\n{what}");
    assert_eq!(
        two(&vm("a", "/1"), &vm("a", "/2")),
        "rf.toml:6: port: the name \"a\" is already used by rf.toml:1"
    );
    assert_eq!(
        two(&vm("a", "/1"), &vm("b", "//1")),
        "rf.toml:6: port: the socket //1 is already used by rf.toml:1"
    );
    assert_eq!(
        two(&tap("a", "tap = 't'"), &tap("b", "tap = 't'")),
        "rf.toml:6: port: the tap t is already used by rf.toml:1"
    );
    assert_eq!(
        two(&tap("a", "fd = 5"), &tap("b", "fd = 5")),
        "rf.toml:6: port: file descriptor 5 is already used by rf.toml:1"
    );
    let control = problem(&format!("control = '/1'\n[[port]]\n{}", vm("a", "/1")));
    assert_eq!(control, "rf.toml:2: port: the socket /1 is already used by rf.toml:1");
}

#[test]
fn every_problem_is_reported() {
    let error =
        read("x = 1\n[switch]\nmac_age_seconds = 0\n[[port]]\nkind = 'tap'\nmtu = 1\n[[port]]\nkind = 'x'")
            .unwrap_err();
    let lines: Vec<_> = error.problems.iter().map(|problem| problem.place.as_str()).collect();
    assert_eq!(lines, ["rf.toml:1", "rf.toml:3", "rf.toml:4", "rf.toml:6", "rf.toml:8"], "{error}");
    assert_eq!(error.to_string().lines().count(), 5);
}

#[test]
fn no_port_is_an_error_with_a_remedy() {
    assert!(problem("[switch]").starts_with("no port is configured: add a [[port]] table"));
}

#[test]
fn unreadable_file_is_named() {
    let error = Config::from_file(Path::new("/nonexistent/rf.toml")).unwrap_err().to_string();
    assert_eq!(error, "/nonexistent/rf.toml: cannot be read: No such file or directory (os error 2)");
}

#[test]
fn flags_say_the_same_as_a_file() {
    let config = Config::builder()
        .control(Path::new("/run/ringferry/control.sock"))
        .port_flag(
            "vhost-user:/run/ringferry/vm0.sock,mode=connect,mtu=9000,name=vm0,queue_size=512,\
             mac=52:54:00:00:00:01,mergeable=off,uso=no",
        )
        .port_flag("vhost-user-activation:vm1")
        .port_flag("vhost-user-fd:5")
        .port_flag("tap:rf0,existing=yes,offloads=false,queues=4")
        .port_flag("tap-fd:7")
        .build()
        .unwrap();
    assert_eq!(config.ports, read(FULL).unwrap().ports);
}

#[test]
fn flags_and_file_merge_and_are_checked_together() {
    let file = "control = '/c'\n[[port]]\nkind = 'tap'\ntap = 'rf0'\n";
    let merge =
        |flag: &str| Config::builder().toml("rf.toml", file).control(Path::new("/d")).port_flag(flag).build();
    let config = merge("tap:rf1").unwrap();
    assert_eq!((config.control, config.ports.len()), (Some("/d".into()), 2));
    assert_eq!(
        merge("tap:rf0,name=x").unwrap_err().to_string(),
        "--port tap:rf0,name=x: port: the tap rf0 is already used by rf.toml:2"
    );
}

#[test]
fn descriptors_of_the_program_are_not_for_ports() {
    let error = Config::builder().reserve_fd("--ready-fd", 7).port_flag("tap-fd:7").build().unwrap_err();
    assert_eq!(error.to_string(), "--port tap-fd:7: port: file descriptor 7 is already used by --ready-fd 7");
}

#[test]
fn problem_in_a_flag_quotes_it() {
    assert_eq!(flag("tap:rf0,mtu=9").unwrap_err(), "--port tap:rf0,mtu=9: mtu: 9 is outside 68 to 65535");
    assert_eq!(
        flag("tap:rf0,mtu=+99").unwrap_err(),
        "--port tap:rf0,mtu=+99: mtu: \"+99\" is not a whole number"
    );
    assert!(flag("tap:rf0,big").unwrap_err().starts_with("--port tap:rf0,big: \"big\": is not KEY=VALUE"));
    assert_eq!(
        flag("tap:rf0,mtu=99,mtu=100").unwrap_err(),
        "--port tap:rf0,mtu=99,mtu=100: mtu: is given twice"
    );
    assert!(flag("veth:a").unwrap_err().starts_with("--port veth:a: must start with vhost-user:PATH, "));
    assert!(flag("/a.sock").unwrap_err().contains("must start with"));
    assert_eq!(flag("tap:").unwrap_err(), "--port tap:: tap: is empty");
    assert!(
        flag("vhost-user:/tmp/my vm.sock")
            .unwrap_err()
            .contains(": name: must be given here: \"my vm\" is not a port name")
    );
    assert!(flag("vhost-user-fd:x").unwrap_err().contains(": fd: \"x\" is not a whole number"));
}

/// Whatever kind they are of: keys that a table cannot have are found after those that it has.
#[test]
fn mistakes_are_named_in_the_order_of_their_lines() {
    let text =
        "[switch]\nworkerz = 1\nworkers = 'two'\n[[port]]\nkind = 'tap'\ntap = 'a'\nmtuu = 9\nmtu = 1\n";
    let error = Config::builder().toml("rf.toml", text).build().unwrap_err();
    let lines: Vec<_> = error.problems.iter().map(|problem| problem.place.as_str()).collect();
    assert_eq!(lines, ["rf.toml:2", "rf.toml:3", "rf.toml:7", "rf.toml:8"], "{error}");
}
