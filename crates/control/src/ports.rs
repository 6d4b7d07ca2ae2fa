//! Ports that come and go: the answers to `ringferry ctl add`, `remove` and `reload`.

use serde::{Deserialize, Serialize};

use crate::rules::{kept, notes_to_text};

/// The outcome of adding or removing a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PortChange {
    /// The port.
    pub port: String,
    /// The action, as far as it was carried out.
    pub done: PortAction,
    /// True if the configuration file says the same, so that it holds after the next start, too.
    pub persistent: bool,
    /// The file, or the reason why it does not say so, for people.
    pub note: String,
    /// Remarks on ports, a sentence each, for people: on each thing that is strange now and was not before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// An action on a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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
    /// Returns the outcome, without notes.
    pub fn new(port: &str, done: PortAction, persistent: bool, note: String) -> PortChange {
        PortChange { port: port.to_owned(), done, persistent, note, notes: Vec::new() }
    }

    /// Says in two lines what was done and whether it is kept, and each note in one more.
    pub fn to_text(&self) -> String {
        let PortChange { port, done, persistent, note, notes } = self;
        if *done == PortAction::Nothing {
            return format!("{port}: {note}\n");
        }
        let notes = notes_to_text(notes);
        // Not that the port is.
        let what = if *done == PortAction::Removed { "the removal is " } else { "" };
        format!("{port} {}\n{what}{}: {note}\n{notes}", done.participle(), kept(*persistent))
    }
}

impl PortAction {
    /// The action as a participle: what a port is that it was done with.
    pub fn participle(self) -> &'static str {
        match self {
            PortAction::Added => "added",
            PortAction::Removed => "removed",
            PortAction::Changed => "changed",
            PortAction::Replaced => "opened anew",
            PortAction::Nothing => "left as it is",
        }
    }
}

/// The plan of a reload, and its outcome if it was carried out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Reload {
    /// The configuration file.
    pub file: String,
    /// True if nothing was done.
    pub dry_run: bool,
    /// The ports that are not as the file has them, in the order in which they are served.
    pub steps: Vec<ReloadStep>,
    /// The wires that are not as the file has them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub wires: Vec<WireStep>,
    /// Settings that the file has changed and that need a restart.
    pub restart: Vec<String>,
    /// Faults of ports that are as the file has them, which no reload mends: the name and the fault of each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<String>,
    /// Ports that are in no file, and stay open.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<String>,
    /// Remarks on ports, a sentence each, for people: on each thing that is strange as the file has it, or, of a reload that was carried out, that was not so before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// The part of a reload that is about one port. Either all of it is done, or the port is as it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReloadStep {
    /// The port.
    pub port: String,
    /// The action on the port.
    pub action: PortAction,
    /// The differences of the port, for people.
    pub what: String,
    /// The reason why it was not done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The part of a reload that is about one wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WireStep {
    /// The wire.
    pub wire: String,
    /// The action on the wire: it is added, removed or changed.
    pub action: PortAction,
    /// The differences of the wire, for people.
    pub what: String,
}

impl PortAction {
    /// Returns what stands before it in a plan.
    fn sign(self) -> char {
        match self {
            PortAction::Added => '+',
            PortAction::Removed => '-',
            PortAction::Changed | PortAction::Replaced => '~',
            PortAction::Nothing => ' ',
        }
    }
}

impl Reload {
    /// Returns true if something could not be done.
    pub fn has_failed(&self) -> bool {
        self.steps.iter().any(|step| step.error.is_some())
    }

    /// Writes the plan: a line for each port, and for each setting that needs a restart.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for ReloadStep { port, action, what, error } in &self.steps {
            text += &format!("{} {port}: {what}\n", action.sign());
            if let Some(error) = error {
                text += &format!("  not done: {error}\n");
            }
        }
        for WireStep { wire, action, what } in &self.wires {
            text += &format!("{} wire {wire}: {what}\n", action.sign());
        }
        for setting in &self.restart {
            text += &format!("! {setting}; this needs a stop and a start\n");
        }
        for fault in &self.faults {
            text += &format!("? {fault}; no reload mends that: `ringferry ctl why` says more\n");
        }
        for port in &self.beside {
            text += &format!(
                "  {port} is not in {}, and stays: it goes with the switch, unless a flag of its start has it\n",
                self.file
            );
        }
        text += &notes_to_text(&self.notes);
        text + &self.summary()
    }

    /// Sums the plan up in a line.
    fn summary(&self) -> String {
        let counted =
            |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let failed = self.steps.iter().filter(|step| step.error.is_some()).count();
        let counts = [(self.steps.len(), "port"), (self.wires.len(), "wire")];
        let all: Vec<_> = counts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| counted(*count, what))
            .collect();
        if all.is_empty() {
            return match self.faults.is_empty() && self.beside.is_empty() {
                true => format!("all ports are as {} has them\n", self.file),
                false => format!("nothing differs from what {} has\n", self.file),
            };
        }
        if self.dry_run {
            return format!("{} would change; nothing was done\n", all.join(" and "));
        }
        if failed == 0 {
            let have = if counts.iter().map(|(count, _)| count).sum::<usize>() == 1 { "has" } else { "have" };
            return format!("{} {have} changed\n", all.join(" and "));
        }
        let done = self.steps.len() - failed;
        let wires = if self.wires.is_empty() {
            String::new()
        } else {
            format!(", and {} changed", counted(self.wires.len(), "wire"))
        };
        format!("{} changed, {failed} could not{wires}\n", counted(done, "port"))
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
        reload.wires = vec![WireStep {
            wire: "w".to_owned(),
            action: PortAction::Changed,
            what: "another thing".to_owned(),
        }];
        reload.restart = vec!["workers is 1, not 2".to_owned()];
        assert!(reload.has_failed());
        assert_eq!(
            reload.to_text(),
            "- a: a thing\n~ b: a thing\n+ c: a thing\n  not done: no room\n~ wire w: another thing\n! workers is 1, not 2; this needs a stop and a start\n\
             2 ports changed, 1 could not, and 1 wire changed\n"
        );
        reload.faults = vec!["d: the interface was renamed".to_owned()];
        let faults_only =
            Reload { steps: Vec::new(), wires: Vec::new(), restart: Vec::new(), ..reload.clone() };
        assert!(
            faults_only
                .to_text()
                .ends_with("`ringferry ctl why` says more\nnothing differs from what rf.toml has\n")
        );
        assert!(reload.to_text().contains("\n? d: the interface was renamed; no reload mends that"));
        let beside = Reload { faults: Vec::new(), beside: vec!["e".to_owned()], ..faults_only };
        assert_eq!(
            beside.to_text(),
            "  e is not in rf.toml, and stays: it goes with the switch, unless a flag of its start has it\n\
             nothing differs from what rf.toml has\n"
        );
        reload.steps.truncate(1);
        assert!(reload.to_text().ends_with("1 port and 1 wire have changed\n") && !reload.has_failed());
        reload.dry_run = true;
        assert!(reload.to_text().ends_with("1 port and 1 wire would change; nothing was done\n"));
        reload.wires.clear();
        assert!(reload.to_text().ends_with("1 port would change; nothing was done\n"));
    }

    #[test]
    fn a_change_says_whether_it_is_kept() {
        let change = |done, persistent| PortChange::new("vm0", done, persistent, "in rf.toml".to_owned());
        assert_eq!(change(PortAction::Added, true).to_text(), "vm0 added\nkept: in rf.toml\n");
        assert_eq!(
            change(PortAction::Removed, false).to_text(),
            "vm0 removed\nthe removal is not kept when the switch ends: in rf.toml\n"
        );
        assert_eq!(change(PortAction::Nothing, true).to_text(), "vm0: in rf.toml\n");
    }
}
