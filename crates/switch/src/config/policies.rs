//! The policies of firewalls: files in a directory beside the configuration, which are read when a port names one.
//!
//! A policy is `NAME.policy` in the directory `policies`, and the files of its sets lie there, too. Ports that name the same one share it.

use std::io;
use std::path::Component;

use ringferry_firewall::{Mistakes, Policy, Source};

use super::*;

/// Upper bound on a file in bytes: a million prefixes.
const MAX_FILE: u64 = 24 << 20;

/// Checks the name of a policy, which becomes part of a file's.
pub(crate) fn check_policy_name(name: &str) -> Result<(), String> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let starts = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    match starts && name.len() <= MAX_PORT_NAME && name.chars().all(fits) {
        true => Ok(()),
        false => Err(format!(
            "{name:?} is no name of a policy: letters, digits and -_. with a letter or digit first, and neither its directory nor .policy"
        )),
    }
}

/// Returns the directory of the policies of a configuration file, if that does not name one.
pub(crate) fn policies_beside(file: &Path) -> PathBuf {
    file.with_file_name("policies")
}

/// Reads a file of the directory of policies.
///
/// # Errors
/// It cannot be read, is no file, is too large, or lies elsewhere.
pub(crate) fn read_policy_file(directory: &Path, file: &str) -> io::Result<String> {
    let other = |text: String| Err(io::Error::other(text));
    let mut parts = Path::new(file).components().peekable();
    if parts.peek().is_none() || !parts.all(|part| matches!(part, Component::Normal(_))) {
        return other(format!("it is not in the directory of policies, {}", directory.display()));
    }
    let path = directory.join(file);
    let metadata = std::fs::metadata(&path)?;
    if !metadata.is_file() {
        return other("it is no file".to_owned());
    }
    if metadata.len() > MAX_FILE {
        return other(format!("it has more than {} MiB", MAX_FILE >> 20));
    }
    std::fs::read_to_string(path)
}

/// Reads the policies that ports name, each once, with `open`, which reads a file of the directory of policies by name. Of each port whose policy cannot be read
/// nothing is changed.
///
/// # Errors
/// All mistakes in all of them.
pub(crate) fn load<'p>(
    ports: impl IntoIterator<Item = &'p mut PortConfig>,
    open: &mut dyn FnMut(&str) -> io::Result<String>,
) -> Result<(), ConfigError> {
    let mut read = BTreeMap::<String, Option<Arc<Policy>>>::new();
    let mut problems = Vec::new();
    for port in ports {
        let Some(firewall) = &mut port.rules.firewall else { continue };
        let policy = read.entry(firewall.name.clone()).or_insert_with(|| {
            let file = format!("{}.policy", firewall.name);
            let read = match open(&file) {
                Ok(text) => ringferry_firewall::read(&file, &text, open).map_err(problems_of),
                Err(error) => {
                    let message = format!(
                        "cannot be read: {error} (port {} has the firewall {})",
                        port.name, firewall.name
                    );
                    Err(vec![Place::new(&file, None).problem("", message)])
                }
            };
            read.map(Arc::new).map_err(|found| problems.extend(found)).ok()
        });
        if let Some(policy) = policy {
            firewall.policy = Some(Arc::clone(policy));
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(ConfigError { problems }) }
}

/// Makes the policies of ports of their texts, which another process has read.
///
/// # Errors
/// As for [`load`].
pub(crate) fn load_from<'p>(
    ports: impl IntoIterator<Item = &'p mut PortConfig>,
    sources: &BTreeMap<String, Source>,
) -> Result<(), ConfigError> {
    for port in ports {
        let Some(name) = port.rules.firewall.as_ref().map(|firewall| firewall.name.clone()) else { continue };
        let source = sources.get(&name);
        let file = format!("{name}.policy");
        load([port], &mut |wanted| {
            let text =
                source.and_then(
                    |source| if wanted == file { Some(&source.text) } else { source.files.get(wanted) },
                );
            text.cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
        })?;
    }
    Ok(())
}

fn problems_of(Mistakes(mistakes): Mistakes) -> Vec<Problem> {
    let problem = |mistake: ringferry_firewall::Mistake| {
        let line = Some(mistake.line).filter(|line| *line > 0);
        Place::new(&mistake.file, line).problem("", mistake.message)
    };
    mistakes.into_iter().map(problem).collect()
}
