use super::*;

fn no_files(_: &str) -> io::Result<String> {
    Err(io::Error::from(io::ErrorKind::NotFound))
}

fn policy(text: &str) -> Policy {
    read("web.policy", text, &mut no_files).unwrap()
}

fn mistakes(text: &str) -> String {
    read("web.policy", text, &mut no_files).unwrap_err().to_string()
}

#[test]
fn a_policy_that_says_nothing_denies_all() {
    let policy = policy("# nothing\n\n");
    assert_eq!(policy.draft(), &Draft::default());
    assert_eq!(policy.draft().defaults, [Action::Deny; 2]);
}

#[test]
fn every_line_is_read() {
    let text = "\
egress allow
ingress deny   # closed
dry-run on
dhcp deny
flows 1000
ethertype 0x88f7,0x22f0
set net 10.0.0.0/8 !10.1.0.0/16
set net fd00::/8
deny out to private
allow out to @net
allow in tcp port 80,8000-8010 from 198.51.100.0/24, @net
allow both icmp
allow out proto 47 to 192.0.2.1
deny both
";
    let policy = policy(text);
    let draft = policy.draft();
    assert_eq!((draft.defaults, draft.dry_run, draft.dhcp), ([Action::Allow, Action::Deny], true, false));
    assert_eq!((draft.flows, draft.ether_types.as_slice()), (1000, &[0x88f7, 0x22f0][..]));
    assert_eq!(draft.rules.len(), 6);
    let rule = &draft.rules[2];
    assert_eq!(
        (rule.action, rule.directions, rule.protocol),
        (Action::Allow, [false, true], Protocol::Number(6))
    );
    assert_eq!((rule.line, rule.ports.as_slice()), (11, &[80..=80, 8000..=8010][..]));
    assert_eq!(rule.text, "allow in tcp port 80,8000-8010 from 198.51.100.0/24, @net");
    assert_eq!(draft.rules[5].protocol, Protocol::Any);
    // One number for each set, however often it is named.
    assert!(matches!(&draft.rules[1].remote, Remote::Sets(sets) if sets[..] == [0]));
    assert!(matches!(&rule.remote, Remote::Sets(sets) if sets.contains(&0) && sets.len() == 2));
    assert_eq!(draft.sets[0].len(), 3);
}

#[test]
fn each_mistake_has_its_line_and_says_what_to_do() {
    let cases = [
        ("allow", "a rule says out or in next"),
        ("permit out", "\"permit\" begins no line of a policy; known: allow, deny"),
        ("allow up", "\"up\" is no direction: write out"),
        ("allow out http", "\"http\" is no protocol: write tcp"),
        ("allow out tcp port", "port takes ports"),
        ("allow out tcp port 99999", "\"99999\" is no port"),
        ("allow out tcp port 9-1", "the range 9-1 ends before it begins"),
        ("allow out icmp port 8", "ports need tcp, udp or sctp in front of them"),
        ("allow out port 8", "ports need tcp, udp or sctp in front of them"),
        ("allow out to", "to takes addresses"),
        ("allow in to 10.0.0.1", "write from"),
        ("allow out from 10.0.0.1", "write to"),
        ("allow out to @none", "there is no set \"none\" before this line"),
        ("allow out to 10.0.0.1/8", "write 10.0.0.0/8"),
        ("allow out to !10.0.0.1", "it has no meaning in a rule"),
        ("allow out to 10.0.0.1 please", "\"please\" is none of the other ends"),
        ("allow out to example.com", "names need a line `resolver ADDRESS`"),
        ("deny out to example.com", "names are for allow out alone"),
        ("allow in from example.com", "names are for allow out alone"),
        ("allow out to *.com", "is no name, such as example.com"),
        ("allow out to 10.0.0.300", "is not an IP address"),
        ("resolver", "resolver takes the addresses of name servers"),
        ("resolver example.com", "is no address of a name server"),
        ("allow out proto 256", "proto takes a number"),
        ("allow out tcp tcp", "\"tcp\" is not understood here"),
        ("set", "set needs a name and addresses"),
        ("set a", "set a has no addresses"),
        ("set 1a 10.0.0.1", "is no name of a set"),
        ("allow out to @private", "write it without @"),
        ("allow out tcp port 80, 443", "a list has no blanks"),
        ("set private 10.0.0.1", "give this set another name"),
        ("set a file gone.txt", "gone.txt: cannot be read"),
        ("egress maybe", "egress is allow or deny"),
        ("egress allow\negress deny", "egress was said in line 3 already"),
        ("dry-run yes", "dry-run is on or off"),
        ("flows 3", "flows takes one number, 256 to"),
        ("ethertype 0x0800", "cannot pass as a whole"),
        ("ethertype 5", "is no type of frames"),
    ];
    for (text, wanted) in cases {
        let all = mistakes(&format!("# one\n\n{text}\n"));
        let line = 2 + text.lines().count();
        assert!(all.starts_with(&format!("web.policy:{line}: ")), "{text}: {all}");
        assert!(all.contains(wanted), "{text}: {all}");
        assert_eq!(all.lines().count(), 1, "{text}: {all}");
    }
}

#[test]
fn all_mistakes_are_told_but_for_those_of_a_file_that_is_none() {
    assert_eq!(mistakes("allow\nset\nflows\n").lines().count(), 3);
    let many = mistakes(&"what\n".repeat(1000));
    assert_eq!(many.lines().count(), MAX_MISTAKES + 1);
    assert!(many.ends_with("web.policy: there are further mistakes"), "{many}");
}

#[test]
fn sets_are_read_from_files_with_their_own_lines() {
    let mut open = |name: &str| match name {
        "good" => Ok("# by hand\n10.0.0.0/8\n\n!10.1.0.0/16 # ours\nfd00::/8\n".to_owned()),
        "bad" => Ok("10.0.0.0/8\n\n".repeat(2355) + "10.0.0.300\n"),
        _ => Err(io::Error::from(io::ErrorKind::NotFound)),
    };
    let good = read("p", "set net file good\nallow out to @net\n", &mut open).unwrap();
    assert_eq!(good.draft().sets[0].len(), 3);
    let mut none =
        |name: &str| Ok(if name == "none" { "# nobody now\nnone\n" } else { "\u{feff}# lost\n" }.to_owned());
    assert!(read("p", "set net file none\n", &mut none).is_ok());
    let lost = read("p", "set net file lost\n", &mut none).unwrap_err().to_string();
    assert_eq!(lost, "p:1: lost: has no addresses; if that is meant, write the line none into it");
    let bad = read("p", "\nset net file bad\n", &mut open).unwrap_err().to_string();
    assert_eq!(
        bad,
        "bad:4711: \"10.0.0.300\" is not an IP address or network, such as 10.0.0.2, 10.1.0.0/16 or fd00::/64 (a set in line 2 of p)"
    );
}

#[test]
fn there_are_bounds() {
    let rules = "allow out\n".repeat(MAX_RULES + 1);
    assert!(mistakes(&rules).contains("there are more than 1000 rules"));
    let long = format!("allow out to {}\n", "10.0.0.1 ".repeat(100));
    assert!(policy(&long).draft().rules[0].text.len() <= MAX_TEXT + 3);
}
