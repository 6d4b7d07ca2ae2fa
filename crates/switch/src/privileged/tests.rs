use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;

use proptest::prelude::*;
use ringferry_sys::socket::{Listener, MAX_FDS};
use ringferry_sys::testing::may;

use super::*;
use crate::config::FeatureToggles;
use crate::rules::Rules;

/// A folder with a configuration, sockets and files that the helper must not touch, and the charter of the
/// configuration.
struct Fixture {
    folder: tempfile::TempDir,
    config: Config,
    charter: Charter,
}

impl Fixture {
    fn new() -> Fixture {
        let folder = tempfile::tempdir().unwrap();
        let text = "\
socket_directories = ['HERE/machines']
# Rack 7.
[[port]]
kind = 'vhost-user'
socket = 'HERE/listen.sock'  # of vm0
name = 'vm0'
vlan = 10
[[port]]
kind = 'vhost-user'
name = 'vm1'
socket = 'HERE/vm1.sock'
mode = 'connect'
";
        let here = folder.path().to_str().unwrap();
        let path = folder.path().join("rf.toml");
        fs::write(&path, text.replace("HERE", here)).unwrap();
        fs::write(folder.path().join("precious"), "precious").unwrap();
        fs::create_dir(folder.path().join("elsewhere")).unwrap();
        fs::create_dir(folder.path().join("machines")).unwrap();
        let config = Config::builder().file(&path).port_flag("tap:rf0").build().unwrap();
        let charter = Charter::of(&config, &folder.path().join("control"));
        Fixture { folder, config, charter }
    }

    fn port(&self, name: &str) -> &PortConfig {
        self.config.ports.iter().find(|port| port.name == name).unwrap()
    }

    /// The names in the folder, what is in the directories in it, and the ports of the configuration, without what can change while they are open.
    fn state(&self) -> (Vec<String>, Vec<String>, Vec<PortConfig>) {
        let names = |directory: &Path| {
            let entries = fs::read_dir(directory).unwrap();
            let mut names: Vec<_> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        let mut ports = Config::from_file(&self.folder.path().join("rf.toml")).unwrap().ports;
        for port in &mut ports {
            (port.rules, port.mtu, port.workers) = (Rules::default(), None, Vec::new());
            if let PortKind::VhostUser(vhost) = &mut port.kind {
                (vhost.queue_size, vhost.mac, vhost.features) = (None, None, FeatureToggles::default());
            }
        }
        assert_eq!(fs::read_to_string(self.folder.path().join("precious")).unwrap(), "precious");
        (names(self.folder.path()), names(&self.folder.path().join("elsewhere")), ports)
    }

    /// A port with its socket at `place` in the folder.
    fn new_port(&self, place: &str, keys: &str) -> PortConfig {
        let socket = self.folder.path().join(place);
        let flag = format!("vhost-user:{}{keys}", socket.display());
        Config::builder().port_flag(&flag).build().unwrap().ports.remove(0)
    }

    /// Privileges with a helper in a thread.
    fn helper(&self) -> (Privileges, std::thread::JoinHandle<io::Result<()>>) {
        let (ours, theirs) = Stream::pair().unwrap();
        let thread = std::thread::spawn(move || serve(theirs, |_| false));
        (Privileges::helper(ours, &self.charter).unwrap(), thread)
    }
}

#[test]
fn a_helper_connects_keeps_and_tidies_as_the_process_itself_would() {
    let fixture = Fixture::new();
    let (helper, thread) = fixture.helper();
    let elsewhere = Path::new("/not/looked/at");
    assert!(helper.are_elsewhere() && !Privileges::default().are_elsewhere());

    let path = fixture.folder.path().join("vm1.sock");
    let error = helper.connect("vm1", elsewhere).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error}");
    let listener = Listener::bind(&path).unwrap();
    let stream = helper.connect("vm1", elsewhere).unwrap();
    let peer = listener.wait().unwrap();
    stream.send(b"hello", &[]).unwrap();
    let mut bytes = [0; 16];
    assert_eq!(peer.recv(&mut bytes, &mut Vec::new()).unwrap().bytes, 5);

    let edit = Edit::set(&["vlan=20".to_owned(), "isolated=on".to_owned()]).unwrap();
    let edited = fixture.port("vm0").edited(&edit).unwrap();
    let path = fixture.folder.path().join("rf.toml");
    assert_eq!(
        helper.keep(elsewhere, &edit, &edited, &mut || ()),
        Ok(Kept { path: path.clone(), same: true })
    );
    assert_eq!(Config::from_file(&path).unwrap().ports[0], edited);
    // So are other settings that can change while a port is open, and what is unset goes.
    let more = Edit::set(&["mtu=9000", "csum=off"].map(str::to_owned)).unwrap();
    let edited = edited.edited(&more).unwrap();
    assert!(helper.keep(elsewhere, &more, &edited, &mut || ()).is_ok_and(|kept| kept.same));
    assert_eq!(Config::from_file(&path).unwrap().ports[0], edited);
    let less = Edit::unset(&["mtu", "csum"].map(str::to_owned)).unwrap();
    let edited = edited.edited(&less).unwrap();
    assert!(helper.keep(elsewhere, &less, &edited, &mut || ()).is_ok_and(|kept| kept.same));
    let text = fs::read_to_string(&path).unwrap();
    assert!(!text.contains("mtu") && !text.contains("csum"), "{text}");
    // An edit that the file would be refused for is refused in the same words as without a helper.
    let mine = Edit::set(&["vlan=10".to_owned(), "static_macs=52:54:00:00:00:01".to_owned()]).unwrap();
    let edited = fixture.port("vm0").edited(&mine).unwrap();
    assert!(helper.keep(elsewhere, &mine, &edited, &mut || ()).is_ok());
    let taken = Edit::set(&["static_macs=52:54:00:00:00:01@10".to_owned()]).unwrap();
    let edited = fixture.port("vm1").edited(&taken).unwrap();
    let refusal = Privileges::default().keep(&path, &taken, &edited, &mut || ());
    assert!(matches!(&refusal, Err(NotKept::Refused(_))), "{refusal:?}");
    assert_eq!(helper.keep(elsewhere, &taken, &edited, &mut || ()), refusal);

    // Sockets with a listener stay, and so do files that are no sockets.
    let mut stale = Listener::bind(fixture.folder.path().join("listen.sock")).unwrap();
    stale.leave_file();
    let mut control = Listener::bind(fixture.folder.path().join("control")).unwrap();
    control.leave_file();
    drop(stale);
    // Nor is the control socket made anew, before it is gone.
    let path_of_control = fixture.folder.path().join("control");
    assert!(helper.control_socket(&path_of_control).unwrap_err().contains("is in use by a running program"));
    fs::remove_file(&path_of_control).unwrap();
    let control = helper.control_socket(&path_of_control).unwrap();
    assert!(Stream::connect(&path_of_control).is_ok() && !control.is_file_gone());
    helper.tidy();
    assert!(!fixture.folder.path().join("listen.sock").exists());
    assert!(fixture.folder.path().join("control").exists() && path.exists());
    drop(helper);
    thread.join().unwrap().unwrap();
}

/// The kernel passes none for a user without privileges of whose descriptors too many lie unread in sockets.
#[test]
fn l_a_helper_whose_descriptors_the_kernel_does_not_pass_on_says_so_and_goes_on() {
    if !may("needs root, to have another user", rustix::process::geteuid().is_root()) {
        return;
    }
    let fixture = Fixture::new();
    let path = fixture.folder.path().join("vm1.sock");
    let listener = Listener::bind(&path).unwrap();
    for open in [fixture.folder.path(), &path] {
        fs::set_permissions(open, fs::Permissions::from_mode(0o777)).unwrap();
    }
    let (ours, theirs) = Stream::pair().unwrap();
    let (full, is_full) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        serve(theirs, |_| {
            // Of this thread alone. No process has this user.
            let user = rustix::thread::Uid::from_raw(0x7ffe_0000 | std::process::id());
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            let mut pairs = Vec::new();
            let refused = loop {
                let pair = Stream::pair().unwrap();
                pair.0.set_nonblocking(true).unwrap();
                let fds = [pair.0.as_fd(); MAX_FDS];
                let error = std::iter::repeat_with(|| pair.0.send(&[0], &fds)).find_map(Result::err).unwrap();
                pairs.push(pair);
                if error.kind() != io::ErrorKind::WouldBlock {
                    break error;
                }
            };
            assert_eq!(refused.kind(), io::ErrorKind::QuotaExceeded);
            full.send(pairs).unwrap();
            false
        })
    });
    let helper = Privileges::helper(ours, &fixture.charter).unwrap();
    let pairs = is_full.recv().unwrap();
    let error = helper.connect("vm1", &path).unwrap_err().to_string();
    assert!(error.contains("lie unread"), "{error}");
    drop(pairs);
    helper.connect("vm1", &path).unwrap();
    drop((helper, listener));
    thread.join().unwrap().unwrap();
}

#[test]
fn what_the_configuration_does_not_say_is_refused() {
    let mut fixture = Fixture::new();
    let (helper, thread) = fixture.helper();
    let path = fixture.folder.path().join("listen.sock");
    let _listener = Listener::bind(&path).unwrap();
    // The switch listens on its sockets; it has no business to connect to them.
    for port in ["vm0", "rf0", "vm2", "", path.to_str().unwrap(), "../vm1"] {
        assert!(helper.connect(port, &path).is_err(), "{port}");
    }
    let before = fs::read_to_string(fixture.folder.path().join("rf.toml")).unwrap();
    let edit = Edit::set(&["vlan=20".to_owned()]).unwrap();
    let edited = fixture.port("rf0").edited(&edit).unwrap();
    assert!(helper.keep(&path, &edit, &edited, &mut || ()).is_err(), "given by a flag");
    let rules = edited.rules;
    let whole = fixture.port("vm0").clone();
    for keys in [&["socket"][..], &["vlan", "kind"], &["[[port]]"], &["vlan = 1\nsocket"]] {
        let keys: Vec<_> = keys.iter().map(|key| (*key).to_owned()).collect();
        for (set, unset) in [(keys.clone(), Vec::new()), (Vec::new(), keys)] {
            let port = written(&PortConfig { rules: rules.clone(), ..whole.clone() });
            let (reply, _) = fixture.charter.answer(Request::Keep { port, set, unset });
            assert!(matches!(reply, Reply::Failed { .. }), "{reply:?}");
        }
    }
    let two = Config { file: None, ..fixture.config.clone() }.dump();
    let vlan = vec!["vlan".to_owned()];
    let (reply, _) = fixture.charter.answer(Request::Keep { port: two, set: vlan, unset: Vec::new() });
    assert!(matches!(reply, Reply::Failed { .. }), "{reply:?}");
    // A tap may be renamed into no other, and its interface is set up as the configuration has it and not otherwise.
    let tap = fixture.port("rf0").clone();
    for key in ["mac=52:54:00:00:00:01", "bridge=br0", "address=10.0.0.1/8", "up=on"] {
        let edit = Edit::set(&[key.to_owned()]).unwrap();
        let edited = tap.edited(&edit).unwrap();
        for (port, before) in [(&edited, &tap), (&tap, &edited)] {
            let error = helper.set_up(port, Some(before)).unwrap_err().to_string();
            assert!(error.contains("only as its configuration file has them"), "{error}");
        }
        let kept = helper.keep(&path, &edit, &edited, &mut || ());
        assert!(
            matches!(&kept, Err(NotKept::Because(why)) if why.contains("only as its configuration")),
            "{kept:?}"
        );
    }
    assert_eq!(fs::read_to_string(fixture.folder.path().join("rf.toml")).unwrap(), before);
    drop(helper);
    thread.join().unwrap().unwrap();
}

/// Somebody has stopped the process, or its file system does not answer: whoever only asks is told nothing, and nobody waits for it.
#[test]
fn a_question_that_is_not_answered_at_once_is_given_up_and_the_helper_is_not() {
    let fixture = Fixture::new();
    let (ours, theirs) = Stream::pair().unwrap();
    let (go_on, stopped) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let mut connection = Connection::new(theirs);
        let _charter = connection.receive::<Charter>(MAX_REPLY).unwrap();
        connection.send(&Reply::Done, &[]).unwrap();
        let answer = |connection: &mut Connection, reply| {
            let request = connection.receive::<Request>(MAX_REPLY).unwrap().unwrap().0;
            connection.send(&reply, &[]).unwrap();
            request
        };
        let settings = |word: &str| Reply::Astray { settings: vec![word.to_owned()] };
        stopped.recv().unwrap();
        let questions = [answer(&mut connection, settings("late")), answer(&mut connection, Reply::Done)];
        assert!(matches!(questions, [Request::Astray { .. }, Request::Close { .. }]), "{questions:?}");
        answer(&mut connection, settings("in time"));
    });
    let helper = Privileges::helper(ours, &fixture.charter).unwrap();
    // Of a port without an interface it is not even asked.
    for port in ["vm0", "rf0", "rf0"] {
        assert!(helper.astray(fixture.port(port)).is_empty());
    }
    go_on.send(()).unwrap();
    helper.close("vm0", &mut || ()).unwrap();
    assert_eq!(helper.astray(fixture.port("rf0")), ["in time"]);
    thread.join().unwrap();
}

#[test]
fn without_its_helper_a_switch_says_why_things_are_not_done() {
    let fixture = Fixture::new();
    let (ours, theirs) = Stream::pair().unwrap();
    let thread = std::thread::spawn(move || {
        let mut connection = Connection::new(theirs);
        let _charter = connection.receive::<Charter>(MAX_REPLY).unwrap();
        connection.send(&Reply::Done, &[]).unwrap();
    });
    let helper = Privileges::helper(ours, &fixture.charter).unwrap();
    thread.join().unwrap();
    let edit = Edit::set(&["vlan=20".to_owned()]).unwrap();
    for _ in 0..2 {
        let error = helper.connect("vm1", Path::new("")).unwrap_err().to_string();
        assert_eq!(
            error,
            "the privileged helper has ended: have `ringferry run --replace` take over, which starts another, or restart the switch"
        );
        let kept = helper.keep(Path::new(""), &edit, fixture.port("vm0"), &mut || ());
        assert_eq!(kept, Err(NotKept::Because(error)));
        helper.tidy();
    }
}

#[test]
fn a_helper_opens_ports_where_the_configuration_has_some_and_keeps_them() {
    let mut fixture = Fixture::new();
    let before = fixture.state();
    let path = fixture.folder.path().join("rf.toml");
    let (helper, thread) = fixture.helper();
    for (place, keys, admitted) in [
        ("vm2.sock", "", true),
        ("machines/vm3.sock", "", true),
        ("machines/vm4.sock", ",mode=connect", true),
        ("vm5.sock", ",mode=connect", false),
        ("elsewhere/vm6.sock", "", false),
        ("machines/../elsewhere/vm7.sock", "", false),
        ("precious", ",name=precious", false),
    ] {
        let port = fixture.new_port(place, keys);
        let opened = helper.open(&port, 2, &mut || ());
        assert_eq!(opened.is_ok(), admitted, "{place}{keys}: {:?}", opened.err());
        assert_eq!(helper.keep_port(&path, &port, &mut || ()).is_ok(), admitted, "{place}{keys}");
        if admitted {
            assert!(helper.open(&port, 2, &mut || ()).is_err(), "it is open already");
            let read = helper.read(&path, &mut || ()).unwrap();
            assert_eq!(read.ports.last(), Some(&port));
            assert_eq!(read.ports.last(), Config::from_file(&path).unwrap().ports.last());
        }
    }
    // What can change while it is open may be another than when it was opened; the rest may not.
    let port = fixture.new_port("vm8.sock", "");
    let _ = helper.open(&port, 2, &mut || ()).unwrap();
    let elsewhere = PortConfig { name: port.name.clone(), ..fixture.new_port("vm9.sock", "") };
    assert!(helper.keep_port(&path, &elsewhere, &mut || ()).is_err());
    let kept = helper.keep_port(&path, &PortConfig { name: "other".to_owned(), ..port.clone() }, &mut || ());
    assert!(kept.is_err(), "{kept:?}");
    let rules = Rules { isolated: true, ..Rules::default() };
    helper.keep_port(&path, &PortConfig { rules, mtu: Some(9000), ..port }, &mut || ()).unwrap();

    for (name, file) in [("vm2", "vm2.sock"), ("vm8", "vm8.sock"), ("vm3", "machines/vm3.sock"), ("vm4", "")]
    {
        helper.close(name, &mut || ()).unwrap();
        assert!(!fixture.folder.path().join(file).is_file(), "{name}");
        helper.forget_port(&path, name, &mut || ()).unwrap();
        assert!(helper.forget_port(&path, name, &mut || ()).is_err(), "it is gone");
    }
    assert!(helper.connect("vm4", &path).is_err());
    assert_eq!(fixture.state(), before);
    // A port that the file has meanwhile is opened wherever it is.
    let port = fixture.new_port("elsewhere/vm6.sock", "");
    crate::config::keep_port(&path, &port).unwrap();
    let _ = helper.open(&port, 2, &mut || ()).unwrap();
    assert!(fixture.folder.path().join("elsewhere/vm6.sock").exists());
    // The file is read anew, mistakes included.
    fs::write(&path, "[[port]]\nkind = 'tap'\n").unwrap();
    let error = helper.read(&path, &mut || ()).unwrap_err();
    assert!(error.contains("rf.toml:1: port.tap: must be given"), "{error}");
    drop(helper);
    thread.join().unwrap().unwrap();
    // The next start would attach to the one, and connect to the sockets of the other.
    for (flag, reason) in [
        ("tap:lo", "the interface lo exists"),
        ("xen-vif:process,broker=/b,store=/s", "the sandbox keeps the switch from the sockets of a broker"),
    ] {
        let port = Config::builder().port_flag(flag).build().unwrap().ports.remove(0);
        let (reply, fds) = fixture.charter.answer(Request::Open { port: written(&port), workers: 1 });
        assert!(matches!(&reply, Reply::Failed { text, .. } if text.starts_with(reason)), "{reply:?}");
        assert!(fds.is_empty());
        let (reply, _) = fixture.charter.answer(Request::KeepPort { port: written(&port) });
        assert!(matches!(&reply, Reply::Failed { .. }), "{reply:?}");
    }
}

#[test]
fn a_link_in_the_place_of_a_socket_leads_nowhere() {
    let fixture = Fixture::new();
    let (helper, thread) = fixture.helper();
    let other = Listener::bind(fixture.folder.path().join("elsewhere/other.sock")).unwrap();
    for (name, link) in [("vm1", "vm1.sock"), ("vm3", "machines/vm3.sock")] {
        let link = fixture.folder.path().join(link);
        std::os::unix::fs::symlink(other.path().unwrap(), &link).unwrap();
        if name != "vm1" {
            let _ =
                helper.open(&fixture.new_port("machines/vm3.sock", ",mode=connect"), 1, &mut || ()).unwrap();
        }
        for privileges in [&helper, &Privileges::default()] {
            let error = privileges.connect(name, &link).unwrap_err().to_string();
            assert!(error.contains("is a symbolic link"), "{error}");
        }
        assert!(other.accept().unwrap().is_none(), "{name}");
    }
    drop(helper);
    thread.join().unwrap().unwrap();
}

/// Generates the requests that a switch that was taken over may send: of the right shape, with any content.
fn request() -> impl Strategy<Value = Request> {
    let name = prop_oneof![
        Just("vm0".to_owned()),
        Just("vm1".to_owned()),
        Just("rf0".to_owned()),
        "[ -~]{0,20}",
        Just("precious".to_owned()),
    ];
    let key = prop_oneof![
        3 => prop::sample::select(vec!["vlan", "trunk", "native", "isolated", "rate_in", "allowed_macs", "max_macs", "mtu", "queue_size", "csum", "tso"])
            .prop_map(str::to_owned),
        1 => prop::sample::select(vec!["socket", "kind", "name", "control", "port"]).prop_map(str::to_owned),
        1 => "[ -~\n]{0,20}",
    ];
    let rule = prop_oneof![
        (0..5000_u16).prop_map(|vid| format!("vlan = {vid}\n")),
        Just("isolated = true\n".to_owned()),
        Just("queue_size = 64\n".to_owned()),
        Just("csum = false\n".to_owned()),
        Just("trunk = '1-9'\n".to_owned()),
        Just("allowed_macs = ['52:54:00:00:00:01']\n".to_owned()),
        Just("control = '/etc/shadow'\n".to_owned()),
        Just("[[port]]\nkind = 'tap'\ntap = 'x'\n".to_owned()),
        "[ -~\n]{0,30}",
    ];
    let place = prop_oneof![
        Just("/precious"),
        Just("HERE/precious"),
        Just("HERE/rf.toml"),
        Just("HERE/listen.sock"),
        Just("HERE/elsewhere/x.sock"),
        Just("HERE/machines/../elsewhere/x.sock"),
        Just("HERE/listen.sock\'\nmode = \'connect"),
    ];
    let port = (name.clone(), place, prop::collection::vec(rule, 0..4)).prop_map(|(name, place, rules)| {
        format!("[[port]]\nkind = 'vhost-user'\nsocket = '{place}'\nname = '{name}'\n{}", rules.concat())
    });
    prop_oneof![
        1 => name.clone().prop_map(|port| Request::Connect { port }),
        4 => (port.clone(), prop::collection::vec(key.clone(), 0..4), prop::collection::vec(key, 0..2))
            .prop_map(|(port, set, unset)| Request::Keep { port, set, unset }),
        2 => (port.clone(), any::<usize>()).prop_map(|(port, workers)| Request::Open { port, workers }),
        2 => port.clone().prop_map(|port| Request::KeepPort { port }),
        1 => Just(Request::Open { port: "[[port]]\nkind = 'tap'\ntap = 'lo'\n".to_owned(), workers: 1 }),
        1 => name.prop_map(|port| Request::Close { port }),
        1 => Just(Request::Read),
        1 => port.prop_map(|port| Request::CanOpen { port }),
        1 => Just(Request::Tidy),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// For all requests: no file comes, goes or changes but the configuration's rules, and connections are
    /// made only to sockets of the configuration.
    #[test]
    fn no_request_leads_out_of_the_charter(requests in prop::collection::vec(request(), 1..8)) {
        let mut fixture = Fixture::new();
        let before = fixture.state();
        let here = fixture.folder.path().to_str().unwrap().to_owned();
        let listener = Listener::bind(fixture.folder.path().join("listen.sock")).unwrap();
        for mut request in requests {
            if let Request::Open { port, .. } | Request::KeepPort { port } | Request::Keep { port, .. } = &mut request {
                *port = port.replace("HERE", &here);
            }
            let connects = matches!(&request, Request::Connect { .. });
            let (reply, fds) = fixture.charter.answer(request);
            // Nothing listens at the one socket that the helper may connect to, and the ports asked for lie where they must not.
            prop_assert!(fds.is_empty() && !(connects && reply == Reply::Done), "{:?}", reply);
        }
        // Tidying has checked for a listener; nothing else may have connected there.
        while let Some(stream) = listener.accept().unwrap() {
            prop_assert_eq!(stream.recv(&mut [0; 8], &mut Vec::new()).unwrap().bytes, 0);
        }
        drop(listener);
        prop_assert_eq!(fixture.state(), before);
    }

    /// For all bytes, first or after a charter, the helper ends or answers, and changes nothing.
    #[test]
    fn no_bytes_confuse_the_helper(
        chartered in any::<bool>(),
        parts in prop::collection::vec(
            prop_oneof![
                prop::collection::vec(any::<u8>(), 0..60),
                "[\\[\\]{}\":,a-zA-Z0-9 ]{0,60}\n".prop_map(String::into_bytes),
                Just(b"\"Tidy\"\n".to_vec()),
                Just(b"{\"Connect\":{\"port\":\"vm1\"}}\n".to_vec()),
                Just(b"{\"Connect\":{\"port\":\"vm1\",\"path\":\"/etc\"}}\n".to_vec()),
            ],
            0..6,
        ),
    ) {
        let fixture = Fixture::new();
        let before = fixture.state();
        let (ours, theirs) = Stream::pair().unwrap();
        let thread = std::thread::spawn(move || drop(serve(theirs, |_| false)));
        if chartered {
            let mut connection = Connection::new(ours);
            connection.send(&fixture.charter, &[]).unwrap();
            prop_assert_eq!(connection.receive::<Reply>(MAX_REPLY).unwrap().unwrap().0, Reply::Done);
            // All bytes are sent in one write: the helper may close at any of them.
            let _ = connection.send_bytes(&parts.concat());
        } else {
            let _ = ours.send(&[parts.concat(), b"\n".to_vec()].concat(), &[]);
        }
        prop_assert!(thread.join().is_ok());
        prop_assert_eq!(fixture.state(), before);
    }
}
