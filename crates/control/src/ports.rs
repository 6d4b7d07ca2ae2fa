//! Ports that come and go: the answers to `ringferry ctl add`, `remove` and `reload`.

use serde::{Deserialize, Serialize};

/// What became of a port that was to be added or removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortChange {
    /// The port.
    pub port: String,
    /// What was done.
    pub done: PortAction,
    /// Whether the configuration file says the same, so that it holds after the next start, too.
    pub persistent: bool,
    /// Where it is kept, or why it is not, for people.
    pub note: String,
}

/// What was done with a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortAction {
    /// It was added.
    Added,
    /// It was removed.
    Removed,
    /// Its rules were changed; packets went on.
    Changed,
    /// It was removed and added with other settings.
    Replaced,
    /// Nothing: there was such a port already, or none to be removed.
    Nothing,
}

impl PortChange {
    /// What was done, and whether it is kept.
    pub fn to_text(&self) -> String {
        let PortChange { port, note, .. } = self;
        let done = match self.done {
            PortAction::Added => "added",
            PortAction::Removed => "removed",
            PortAction::Changed => "changed",
            PortAction::Replaced => "replaced",
            PortAction::Nothing => return format!("{port}: {note}\n"),
        };
        let kept = if self.persistent { "kept" } else { "not kept when the switch ends" };
        format!("{port} {done}\n{kept}: {note}\n")
    }
}

/// What a reload does, or would do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reload {
    /// The configuration file.
    pub file: String,
    /// True if nothing was done.
    pub dry_run: bool,
    /// The ports that are not as the file has them, in the order in which they are served.
    pub steps: Vec<ReloadStep>,
    /// Settings that the file has changed and that need a restart.
    pub restart: Vec<String>,
}

/// What a reload does with one port. Either all of it is done, or the port is as it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReloadStep {
    /// The port.
    pub port: String,
    /// What is done.
    pub action: PortAction,
    /// What of the port is different, for people.
    pub what: String,
    /// Why it was not done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Reload {
    /// Returns true if something could not be done.
    pub fn has_failed(&self) -> bool {
        self.steps.iter().any(|step| step.error.is_some())
    }

    /// The plan: a line for each port, and for each setting that needs a restart.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for ReloadStep { port, action, what, error } in &self.steps {
            let sign = match action {
                PortAction::Added => '+',
                PortAction::Removed => '-',
                PortAction::Changed | PortAction::Replaced => '~',
                PortAction::Nothing => ' ',
            };
            text += &format!("{sign} {port}: {what}\n");
            if let Some(error) = error {
                text += &format!("  not done: {error}\n");
            }
        }
        for setting in &self.restart {
            text += &format!("! {setting}; this needs a restart\n");
        }
        let failed = self.steps.iter().filter(|step| step.error.is_some()).count();
        text + &match (self.steps.len(), self.dry_run) {
            (0, _) => format!("all ports are as {} has them\n", self.file),
            (count, true) => format!("{count} of the ports would change; nothing was done\n"),
            (count, false) => {
                let done = match count - failed {
                    1 => "1 port has changed".to_owned(),
                    done => format!("{done} ports have changed"),
                };
                if failed > 0 { format!("{done}, {failed} could not\n") } else { done + "\n" }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(port: &str, action: PortAction, error: Option<&str>) -> ReloadStep {
        let error = error.map(str::to_owned);
        ReloadStep { port: port.to_owned(), action, what: "a thing".to_owned(), error }
    }

    #[test]
    fn a_plan_says_what_is_done_what_is_not_and_what_needs_a_restart() {
        let mut reload = Reload { file: "rf.toml".to_owned(), ..Reload::default() };
        assert_eq!(reload.to_text(), "all ports are as rf.toml has them\n");
        reload.steps = vec![
            step("a", PortAction::Removed, None),
            step("b", PortAction::Replaced, None),
            step("c", PortAction::Added, Some("no room")),
        ];
        reload.restart = vec!["workers is 1, not 2".to_owned()];
        assert!(reload.has_failed());
        assert_eq!(
            reload.to_text(),
            "- a: a thing\n~ b: a thing\n+ c: a thing\n  not done: no room\n! workers is 1, not 2; this needs a restart\n\
             2 ports have changed, 1 could not\n"
        );
        reload.steps.truncate(1);
        assert!(reload.to_text().ends_with("1 port has changed\n") && !reload.has_failed());
        reload.dry_run = true;
        assert!(reload.to_text().ends_with("1 of the ports would change; nothing was done\n"));
    }

    #[test]
    fn a_change_says_whether_it_is_kept() {
        let change = |done, persistent| PortChange {
            port: "vm0".to_owned(),
            done,
            persistent,
            note: "in rf.toml".to_owned(),
        };
        assert_eq!(change(PortAction::Added, true).to_text(), "vm0 added\nkept: in rf.toml\n");
        assert_eq!(
            change(PortAction::Removed, false).to_text(),
            "vm0 removed\nnot kept when the switch ends: in rf.toml\n"
        );
        assert_eq!(change(PortAction::Nothing, true).to_text(), "vm0: in rf.toml\n");
    }
}
