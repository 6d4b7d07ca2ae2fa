//! Completion in a real shell, with the script that the program writes.

use std::process::Command;

use ringferry_rig::switch::{Place, ringferry};

/// What bash would offer for the last of these words.
fn offered(share: &Place, words: &[&str]) -> Vec<String> {
    let script = share.path().join("bash-completion/completions/ringferry");
    let mut bash = Command::new("bash");
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_ringferry")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    bash.arg("-c").arg(
        "source \"$0\"; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); _clap_complete_ringferry ringferry \"${!#}\" '' 2>/dev/null
         printf '%s\\n' \"${COMPREPLY[@]}\"",
    );
    let output = bash.arg(script).args(words).env("PATH", path).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| line.trim_end().to_owned()).filter(|line| !line.is_empty()).collect()
}

#[test]
fn a_shell_offers_the_ports_of_the_switch_that_the_line_is_about() {
    let place = Place::new();
    assert!(ringferry().arg("manuals").arg(place.path()).status().unwrap().success());
    let control = place.control();
    let control = control.to_str().unwrap();
    let ctl =
        |words: &[&str]| offered(&place, &[&["ringferry", "ctl", "--control", control], words].concat());
    assert_eq!(ctl(&["why", "v"]), [""; 0], "and nothing is printed where no switch answers");
    let _switch = place.switch(&["vm1", "vm2", "uplink"]);
    assert_eq!(ctl(&["why", "v"]), ["vm1", "vm2"]);
    assert_eq!(ctl(&["trace", "vm1", "u"]), ["uplink"]);
    assert_eq!(ctl(&["mirror", "add", "vm1", ""]).iter().filter(|word| !word.starts_with('-')).count(), 3);
    assert_eq!(ctl(&["set", "vm1", "static"]), ["static_macs="]);
    assert_eq!(ctl(&["unset", "vm1", "rate_in_b"]), ["rate_in_burst"]);
    assert_eq!(ctl(&["mir"]), ["mirror"]);
    let capture = |ports: &str| offered(&place, &["ringferry", "capture", "--control", control, ports]);
    assert_eq!(capture("vm1,u"), ["vm1,uplink"]);
    let top: Vec<_> = offered(&place, &["ringferry", "top", "--control", control, "vm2"]);
    assert_eq!(top, ["vm2"]);
    assert_eq!(offered(&place, &["ringferry", "priv"]), [""; 0], "what is hidden is not offered");
}
