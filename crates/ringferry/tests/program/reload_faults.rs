//! What goes wrong while the configuration file is read again or written: a helper that hangs or is killed, a disk that is full, a directory that is
//! gone, no descriptors. Each test says what must hold afterwards: guests that are connected notice nothing, each port is as it was or as the file has
//! it, the answer says which, and the next reload does the rest.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ringferry_control::{self as control, Answer, Reload, Request};
use ringferry_rig::guest::{Guest, Options, acquaint, converse};
use ringferry_rig::process::{eventually, may};
use ringferry_rig::switch::{Place, Switch, ringferry};
use ringferry_sys::process::is_root;
use rustix::process::{Pid, Signal, kill_process};

use crate::lifecycle::{bystanders, limit_descriptors};
use crate::sandbox::helpers;

/// A configuration with the ports `a` and `b`, and as many more.
fn configuration(place: &Place, more: usize) -> String {
    let names = ["a", "b"].into_iter().map(str::to_owned).chain((0..more).map(|number| format!("m{number}")));
    let tables =
        names.map(|name| format!("[[port]]\nkind = 'vhost-user'\nsocket = {:?}\n", place.socket(&name)));
    tables.collect()
}

/// A switch with a configuration file and the ports `a` and `b`.
fn start(place: &Place) -> Switch<'_> {
    let file = place.path().join("rf.toml");
    fs::write(&file, configuration(place, 0)).unwrap();
    place.start(ringferry().arg("run").arg(file).arg("--control").arg(place.control()), Vec::new())
}

/// Writes the file with so many more ports and has it read again, by a client that waits in the background.
fn reload(place: &Place, more: usize) -> std::thread::JoinHandle<Result<Reload, String>> {
    fs::write(place.path().join("rf.toml"), configuration(place, more)).unwrap();
    let control = place.control();
    std::thread::spawn(move || match control::call(&control, &Request::Reload { dry_run: false }) {
        Ok(Answer::Reloaded(reload)) => Ok(reload),
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.to_string()),
    })
}

fn names(switch: &Switch<'_>) -> Vec<String> {
    switch.show().ports.into_iter().map(|port| port.name).collect()
}

/// The helper of a switch, if there can be one.
fn helper(switch: &Switch<'_>) -> Option<Pid> {
    let helper = helpers(switch.process.pid()).first().copied();
    if may("sandbox", helper.is_some()) { Pid::from_raw(helper? as i32) } else { None }
}

#[test]
fn while_the_helper_hangs_front_ends_come_go_and_talk() {
    let place = Place::new();
    let switch = start(&place);
    let (mut a, mut b) = bystanders(&switch);
    let Some(helper) = helper(&switch) else { return switch.stop() };
    for step in 0..2_usize {
        kill_process(helper, Signal::STOP).unwrap();
        let reloading = reload(&place, step + 1);
        let text = fs::read_to_string(place.path().join("rf.toml")).unwrap();
        // The control plane answers what a front end asks when it connects; the client of the reload still waits.
        for round in 0..20 {
            drop(b);
            b = Guest::plug(switch.connect("b"), 2, Options::default());
            acquaint(&mut [&mut a, &mut b]);
            converse(&mut a, &mut b, round, 20);
        }
        assert!(!reloading.is_finished());
        kill_process(helper, Signal::CONT).unwrap();
        let done = reloading.join().unwrap().unwrap();
        assert!(!done.has_failed() && done.steps.len() == 1, "{done:?}");
        assert_eq!(names(&switch).len(), 3 + step);
        assert_eq!(fs::read_to_string(place.path().join("rf.toml")).unwrap(), text);
        converse(&mut a, &mut b, 50, 20);
    }
    assert_eq!(switch.port("a").counters["connections"], 1);
    switch.stop();
}

#[test]
fn a_helper_that_is_killed_in_the_middle_leaves_each_port_as_it_was_or_as_it_is_to_be() {
    const MORE: usize = 300;
    let place = Place::new();
    let switch = start(&place);
    let (mut a, mut b) = bystanders(&switch);
    let Some(helper) = helper(&switch) else { return switch.stop() };
    let reloading = reload(&place, MORE);
    switch.process.until_logged("reload: added");
    kill_process(helper, Signal::KILL).unwrap();
    let reload = reloading.join().unwrap().unwrap();
    let (failed, done): (Vec<_>, Vec<_>) = reload.steps.iter().partition(|step| step.error.is_some());
    assert!(!failed.is_empty() && !done.is_empty() && reload.steps.len() == MORE);
    for step in failed {
        assert_eq!(
            step.error.as_deref(),
            Some(
                "the privileged helper has ended: have `ringferry run --replace` take over, which starts another, or restart the switch"
            )
        );
    }
    let there = ["a", "b"].into_iter().chain(done.iter().map(|step| step.port.as_str())).collect::<Vec<_>>();
    assert_eq!(names(&switch), there);
    // What came is of use, and what was there before has noticed nothing.
    let mut new = switch.plug(&done[0].port, 3, Options::default());
    acquaint(&mut [&mut a, &mut b, &mut new]);
    converse(&mut a, &mut new, 0, 20);
    converse(&mut a, &mut b, 0, 20);
    // A further one changes nothing and says why.
    let again = self::reload(&place, 1).join().unwrap();
    assert_eq!(
        again,
        Err("the switch refuses: the privileged helper has ended: have `ringferry run --replace` take over, which starts another, or restart the switch".to_owned())
    );
    assert_eq!(names(&switch), there);
    // A port can still go, and its rules can change; neither is kept.
    let answer = place.ctl(&["remove", &done[0].port]);
    assert!(answer.contains("not kept when the switch ends: the privileged helper has ended"), "{answer}");
    let socket = place.socket(&done[0].port);
    assert!(answer.contains(&format!("nobody could remove the file of its socket: rm {}", socket.display())));
    assert!(socket.exists());
    let answer = place.ctl(&["set", "a", "isolated=on", "mtu=9000"]);
    assert!(answer.contains("not kept when the switch ends: the privileged helper has ended"), "{answer}");
    switch.stop();
}

#[test]
fn without_descriptors_a_reload_adds_nothing_and_the_next_one_does() {
    let place = Place::new();
    let switch = start(&place);
    let (mut a, mut b) = bystanders(&switch);
    let descriptors = || -> Vec<u64> {
        let fds = fs::read_dir(format!("/proc/{}/fd", switch.process.pid())).unwrap();
        fds.map(|fd| fd.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect()
    };
    // The client takes one while it waits; there is room for one port, and not for two.
    let free = |count: usize| {
        let used = descriptors();
        (0..).filter(|number| !used.contains(number)).nth(count).unwrap()
    };
    let before = eventually("what was passed is closed", || {
        let before = descriptors();
        (switch.process.is_asleep() && descriptors() == before).then_some(before.len())
    });
    let limit = limit_descriptors(&switch, Some(free(2)));
    let reload = reload(&place, 30).join().unwrap();
    limit_descriptors(&switch, limit);
    match reload {
        Ok(reload) => {
            let failed = reload.steps.iter().filter(|step| step.error.is_some()).count();
            assert!(failed > 0 && names(&switch).len() == 2 + 30 - failed, "{reload:?}");
        }
        // There was not even room for what the helper would have passed.
        Err(error) => assert!(error.contains("helper"), "{error}"),
    }
    converse(&mut a, &mut b, 0, 20);
    if helpers(switch.process.pid()).is_empty() {
        assert_eq!(names(&switch), ["a", "b"]);
        return switch.stop();
    }
    let rest = self::reload(&place, 30).join().unwrap().unwrap();
    assert!(!rest.has_failed() && names(&switch).len() == 32, "{rest:?}");
    let none = self::reload(&place, 0).join().unwrap().unwrap();
    assert!(!none.has_failed() && none.steps.len() == 30, "{none:?}");
    eventually("nothing is leaked", || (descriptors().len() <= before).then_some(()));
    switch.stop();
}

#[test]
fn a_directory_that_is_gone_fails_its_port_and_no_other() {
    let place = Place::new();
    fs::create_dir(place.path().join("more")).unwrap();
    let switch = start(&place);
    let (mut a, mut b) = bystanders(&switch);
    let table = |name: &str| format!("[[port]]\nkind = 'vhost-user'\nsocket = {:?}\n", place.socket(name));
    let text = [configuration(&place, 1), table("more/c"), table("d")].concat();
    fs::write(place.path().join("rf.toml"), text).unwrap();
    fs::remove_dir(place.path().join("more")).unwrap();
    let reload = || match control::call(&place.control(), &Request::Reload { dry_run: false }) {
        Ok(Answer::Reloaded(reload)) => reload,
        other => panic!("{other:?}"),
    };
    let found = reload();
    let failed: Vec<_> =
        found.steps.iter().filter(|step| step.error.is_some()).map(|step| step.port.as_str()).collect();
    assert_eq!((failed, found.steps.len()), (vec!["c"], 3));
    assert_eq!(names(&switch), ["a", "b", "m0", "d"]);
    // The next one tries that port alone.
    let again = reload();
    assert!(again.has_failed() && again.steps.len() == 1, "{again:?}");
    converse(&mut a, &mut b, 0, 20);
    switch.stop();
}

/// A file system of 64 KiB, unmounted when dropped.
pub struct Disk(PathBuf);

impl Disk {
    pub fn mount(at: PathBuf) -> Option<Disk> {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"]).arg(&at).stderr(Stdio::null());
        mount.status().is_ok_and(|status| status.success()).then_some(Disk(at))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// Fills the file system of a directory.
fn fill(directory: &Path) {
    let filler = directory.join("filler");
    let _ = fs::write(&filler, vec![0; 1 << 20]);
    assert!(fs::metadata(&filler).unwrap().len() < 1 << 20, "the disk is full");
}

#[test]
fn on_a_full_disk_changes_hold_and_are_not_kept() {
    let place = Place::new();
    let disk = place.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let mounted = is_root().then(|| Disk::mount(disk.clone())).flatten();
    if !may("mount a tmpfs", mounted.is_some()) {
        return;
    }
    let file = disk.join("rf.toml");
    let text = configuration(&place, 0);
    fs::write(&file, &text).unwrap();
    let switch =
        place.start(ringferry().arg("run").arg(&file).arg("--control").arg(place.control()), Vec::new());
    let (mut a, mut b) = bystanders(&switch);
    fill(&disk);
    let flag = format!("vhost-user:{}", place.socket("c").display());
    for (words, done) in [
        (&["set", "a", "mtu=9000"][..], "mtu=9000"),
        (&["set", "a", "max_macs=9"], "max_macs=9"),
        (&["assign", "a", "0", "0"], "Steering of a"),
        (&["add", &flag], "c added"),
        (&["remove", "c"], "c removed"),
    ] {
        let answer = place.ctl(words);
        assert!(answer.contains(done) && answer.contains("not kept when the switch ends: "), "{answer}");
        // The old file is whole, and nothing is left beside it.
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
        let mut left: Vec<_> = fs::read_dir(&disk).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["filler", "rf.toml"]);
    }
    // With room again the same is kept; a reload before that takes back what was not.
    fs::remove_file(disk.join("filler")).unwrap();
    assert!(place.ctl(&["reload"]).starts_with("~ a: max_macs unset, mtu 9000 -> unset"));
    assert!(place.ctl(&["set", "a", "max_macs=9"]).contains("kept: in "));
    converse(&mut a, &mut b, 0, 20);
    switch.stop();
}
