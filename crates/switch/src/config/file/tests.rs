use std::process::Command;

use super::*;

const FILE: &str = "\
# The switch of rack 7.
control = '/run/rf.sock'   # not the default

[[port]]
kind = 'tap'
tap = 'up'  # to the world

# A tenant.
[[port]]
name = \"vm0\"
kind = 'vhost-user'
socket = '/run/vm0.sock'
vlan   = 10   # marketing
# Agreed on with them.
rate_in = \"1gbit\"
mtu = 1500
# Two of theirs are enough.
max_macs = 2

# Timing.
[switch]
mac_age_seconds = 60
# The end.
";

struct Kept {
    directory: tempfile::TempDir,
    port: PortConfig,
}

impl Kept {
    fn of(text: &str) -> Kept {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("rf.toml"), text).unwrap();
        let config = Config::from_file(&directory.path().join("rf.toml")).unwrap();
        let port = config.ports.into_iter().find(|port| port.name == "vm0").unwrap();
        Kept { directory, port }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("rf.toml")
    }

    fn text(&self) -> String {
        fs::read_to_string(self.path()).unwrap()
    }

    fn edit(&mut self, edit: Result<Edit, ConfigError>) -> Result<bool, KeepError> {
        let edit = edit.unwrap();
        self.port = self.port.edited(&edit).unwrap();
        keep(&self.path(), &edit, &self.port).map(|kept| kept.same)
    }

    fn set(&mut self, settings: &[&str]) -> Result<bool, KeepError> {
        self.edit(Edit::set(&settings.iter().map(|&text| text.to_owned()).collect::<Vec<_>>()))
    }

    fn unset(&mut self, keys: &[&str]) -> Result<bool, KeepError> {
        self.edit(Edit::unset(&keys.iter().map(|&text| text.to_owned()).collect::<Vec<_>>()))
    }

    /// Returns the reason why the last edit was not kept; checks that no other file was left behind.
    fn not_kept(&self, result: Result<bool, KeepError>) -> String {
        match result {
            Err(KeepError::NotKept(why)) => why,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn keys_are_changed_where_they_are_and_comments_stay() {
    let mut kept = Kept::of(FILE);
    assert_eq!(kept.set(&["vlan=20", "isolated=on", "allowed_macs=52:54:00:00:00:01"]), Ok(true));
    let wanted = FILE
        .replace("vlan   = 10   #", "vlan   = 20   #")
        .replace("max_macs = 2\n", "max_macs = 2\nisolated = true\nallowed_macs = [\"52:54:00:00:00:01\"]\n");
    assert_eq!(kept.text(), wanted);
    let names: Vec<_> =
        fs::read_dir(kept.directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["rf.toml"], "nothing is left beside the file");
}

#[test]
fn comments_before_a_key_outlive_it() {
    let mut kept = Kept::of(FILE);
    assert_eq!(kept.unset(&["rate_in", "vlan"]), Ok(true));
    let without = FILE.replace("vlan   = 10   # marketing\n", "").replace("rate_in = \"1gbit\"\n", "");
    assert_eq!(kept.text(), without);
    assert_eq!(kept.unset(&["max_macs"]), Ok(true));
    let without = without.replace("max_macs = 2\n", "");
    assert_eq!(kept.text(), without);
    // No table follows, so the comment goes to the end of the file.
    let tail = "[[port]]\nname = 'vm0'\nkind = 'tap'\ntap = 'a'\n# Why.\nisolated = true\n# The end.\n";
    let mut kept = Kept::of(tail);
    assert_eq!(kept.unset(&["isolated"]), Ok(true));
    assert_eq!(kept.text(), tail.replace("isolated = true\n", ""));
}

#[test]
fn one_of_two_ways_to_be_in_vlans_replaces_the_other() {
    let mut kept = Kept::of(FILE);
    assert_eq!(kept.set(&["trunk=10,20-29", "native=10"]), Ok(true));
    assert!(!kept.text().contains("vlan   ="), "{}", kept.text());
    assert!(kept.text().contains("trunk = [10, \"20-29\"]\nnative = 10\n"), "{}", kept.text());
    assert_eq!(kept.set(&["trunk=all", "native=0"]), Ok(true));
    assert!(
        !kept.text().contains("trunk") && !kept.text().contains("native"),
        "what is the default is not written"
    );
}

#[test]
fn ports_in_one_line_are_edited_too() {
    let mut kept =
        Kept::of("port = [{ kind = 'tap', tap = 'a' }, { name = 'vm0', kind = 'tap', tap = 'b' }] # all\n");
    assert_eq!(kept.set(&["vlan=7"]), Ok(true));
    assert_eq!(
        kept.text(),
        "port = [{ kind = 'tap', tap = 'a' }, { name = 'vm0', kind = 'tap', tap = 'b' , vlan = 7 }] # all\n"
    );
    assert_eq!(kept.unset(&["vlan"]), Ok(true));
    assert!(!kept.text().contains("vlan"));
}

#[test]
fn what_people_wrote_meanwhile_stays() {
    let mut kept = Kept::of(FILE);
    let more = "[[port]]\nkind = 'tap'\ntap = 'new'\n";
    fs::write(
        kept.path(),
        format!("{more}{}", FILE.replace("control = '/run/rf.sock'", "").replace("= 2\n", "= 3\n")),
    )
    .unwrap();
    assert_eq!(kept.set(&["vlan=20"]), Ok(false), "max_macs is not the one in force");
    let text = kept.text();
    assert!(
        text.starts_with(more) && text.contains("max_macs = 3\n") && text.contains("vlan   = 20   #"),
        "{text}"
    );
}

#[test]
fn files_that_cannot_take_an_edit_are_left_alone() {
    let mut kept = Kept::of(FILE);
    let broken = FILE.replace("mtu = 1500", "mtu = 1500000");
    fs::write(kept.path(), &broken).unwrap();
    let why = kept.set(&["vlan=20"]);
    let why = kept.not_kept(why);
    assert!(
        why.starts_with("it has changed since") && why.contains("rf.toml:16: port.mtu: 1500000"),
        "{why}"
    );
    assert_eq!(kept.text(), broken);
    let renamed = FILE.replace("\"vm0\"", "\"vm1\"");
    fs::write(kept.path(), &renamed).unwrap();
    let why = kept.set(&["vlan=20"]);
    assert!(kept.not_kept(why).ends_with("has no such port any more"));
    assert_eq!(kept.text(), renamed);
    fs::remove_file(kept.path()).unwrap();
    let fifo = Command::new("mkfifo").arg(kept.path()).status().unwrap();
    assert!(fifo.success());
    let why = kept.set(&["vlan=20"]);
    assert!(kept.not_kept(why).ends_with("is not a file that could be written"));
    fs::remove_file(kept.path()).unwrap();
    let why = kept.set(&["vlan=20"]);
    assert!(kept.not_kept(why).contains("rf.toml: cannot be read: No such file"));
}

/// The rules in force would be accepted; with the rest of the file they are not.
#[test]
fn edits_that_the_file_cannot_have_are_refused() {
    let mut kept = Kept::of(FILE);
    let meanwhile = FILE.replace("max_macs = 2", "static_macs = [\"52:54:00:00:00:09@10\"]");
    fs::write(kept.path(), &meanwhile).unwrap();
    let Err(KeepError::Refused(error)) = kept.set(&["vlan=20"]) else { panic!("kept") };
    assert!(error.to_string().contains("static_macs: \"52:54:00:00:00:09@10\" is in a VLAN that"), "{error}");
    assert_eq!(kept.text(), meanwhile);
}

#[test]
fn the_file_keeps_its_permissions_and_links_to_it_stay() {
    let mut kept = Kept::of(FILE);
    let real = kept.directory.path().join("real.toml");
    fs::rename(kept.path(), &real).unwrap();
    std::os::unix::fs::symlink("real.toml", kept.path()).unwrap();
    fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).unwrap();
    let owner = 12345;
    // Only root may give files away, and keep those of others as they are.
    let given = std::os::unix::fs::chown(&real, Some(owner), Some(owner)).is_ok();
    assert_eq!(kept.set(&["vlan=20"]), Ok(true));
    assert!(fs::symlink_metadata(kept.path()).unwrap().is_symlink());
    let after = fs::metadata(&real).unwrap();
    assert_eq!(after.mode() & 0o7777, 0o640);
    assert!(!given || (after.uid(), after.gid()) == (owner, owner));
    assert!(kept.text().contains("vlan   = 20"));
}

fn port(flag: &str) -> PortConfig {
    Config::builder().port_flag(flag).build().unwrap().ports.remove(0)
}

#[test]
fn a_port_is_added_at_the_end_with_the_keys_that_matter() {
    let kept = Kept::of(FILE);
    let new = port("vhost-user:/run/vm1.sock,vlan=20,rate_in=1gbit,mac=52:54:00:00:00:01");
    keep_port(&kept.path(), &new).unwrap();
    let table = "
[[port]]
kind = \"vhost-user\"
name = \"vm1\"
socket = \"/run/vm1.sock\"
mac = \"52:54:00:00:00:01\"
vlan = 20
rate_in = \"1gbit\"
";
    // Tables of one kind stay together, so the port stands behind the last one.
    let wanted = FILE.replace("max_macs = 2\n", &format!("max_macs = 2\n{table}"));
    assert_eq!(kept.text(), wanted);
    assert_eq!(Config::from_file(&kept.path()).unwrap().ports.last(), Some(&new));
    // A name or socket that the file has already.
    let error = keep_port(&kept.path(), &port("vhost-user:/run/vm0.sock,name=x")).unwrap_err();
    assert!(matches!(error, KeepError::Refused(_)), "{error}");
    assert_eq!(kept.text(), wanted);
}

#[test]
fn a_port_is_removed_with_the_comment_that_is_about_it() {
    let kept = Kept::of(FILE);
    forget_port(&kept.path(), "vm0").unwrap();
    let (before, rest) = FILE.split_once("# A tenant.").unwrap();
    let (_, after) = rest.split_once("max_macs = 2\n\n").unwrap();
    assert_eq!(kept.text(), format!("{before}{after}"));
    // What stands at the head of the file is not about its first port.
    let head = "# Rack 7.\n\n# The world.\n[[port]]\nkind = 'tap'\ntap = 'up'\n";
    fs::write(kept.path(), head).unwrap();
    forget_port(&kept.path(), "up").unwrap();
    assert_eq!(kept.text().trim_end(), "# Rack 7.");
    keep_port(&kept.path(), &port("tap:again")).unwrap();
    assert_eq!(Config::from_file(&kept.path()).unwrap().ports[0].name, "again");
    assert!(matches!(forget_port(&kept.path(), "up"), Err(KeepError::NotKept(_))));
}

#[test]
fn ports_in_one_line_come_and_go_too() {
    let kept =
        Kept::of("port = [{ kind = 'tap', tap = 'a' }, { name = 'vm0', kind = 'tap', tap = 'b' }] # all\n");
    keep_port(&kept.path(), &port("tap:c")).unwrap();
    forget_port(&kept.path(), "a").unwrap();
    let names: Vec<_> =
        Config::from_file(&kept.path()).unwrap().ports.into_iter().map(|port| port.name).collect();
    assert_eq!(names, ["vm0", "c"]);
    assert!(kept.text().ends_with("# all\n"));
}

#[test]
fn ports_of_drop_in_files_are_edited_where_they_are() {
    let mut kept = Kept::of(FILE);
    let directory = kept.directory.path().join("rf.d");
    fs::create_dir(&directory).unwrap();
    let drop_in = directory.join("vm7.toml");
    fs::write(&drop_in, "# Theirs.\n[[port]]\nkind = 'tap'\ntap = 'vm7'\n").unwrap();
    kept.port = port("tap:vm7");
    let edit = Edit::set(&["vlan=7".to_owned()]).unwrap();
    let edited = kept.port.edited(&edit).unwrap();
    let path = drop_in.clone();
    assert_eq!(keep(&kept.path(), &edit, &edited), Ok(super::Kept { path, same: true }));
    assert!(fs::read_to_string(&drop_in).unwrap().ends_with("tap = 'vm7'\nvlan = 7\n"));
    let read = Config::from_file(&kept.path()).unwrap().file.unwrap();
    assert_eq!(read.with_port("vm7"), Some(drop_in.as_path()));
    assert_eq!((read.with_port("vm0"), read.with_port("x")), (Some(kept.path().as_path()), None));
    assert_eq!(forget_port(&kept.path(), "vm7").as_ref(), Ok(&drop_in));
    assert_eq!(fs::read_to_string(&drop_in).unwrap(), "");
    assert_eq!(kept.text(), FILE);
}

#[test]
fn what_another_file_has_already_is_refused() {
    let mut kept = Kept::of(FILE);
    let directory = kept.directory.path().join("rf.d");
    fs::create_dir(&directory).unwrap();
    // How many workers there are is the main file's to say.
    let theirs = "[[port]]\nkind = 'tap'\ntap = 'vm7'\nworker = 15\nqueues = 1\nvlan = 10\nstatic_macs = ['52:54:00:00:00:07']\n";
    fs::write(directory.join("vm7.toml"), theirs).unwrap();
    fs::write(kept.path(), FILE.replace("[switch]\n", "[switch]\nworkers = 16\n")).unwrap();
    let before = kept.text();
    for flag in ["tap:vm7", "tap:vm7,name=x", "tap:x,name=vm7", "tap:x,vlan=10,static_macs=52:54:00:00:00:07"]
    {
        let error = keep_port(&kept.path(), &port(flag)).unwrap_err();
        assert!(
            matches!(&error, KeepError::Refused(error) if error.to_string().contains("already used")),
            "{error}"
        );
    }
    let taken = kept.set(&["static_macs=52:54:00:00:00:07"]);
    assert!(matches!(taken, Err(KeepError::Refused(_))), "{taken:?}");
    assert_eq!(kept.text(), before);
    keep_port(&kept.path(), &port("tap:x")).unwrap();
    assert!(Config::from_file(&kept.path()).is_ok());
}
