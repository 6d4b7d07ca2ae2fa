//! Numbers of users and groups, by their names in `/etc/passwd` and `/etc/group`.
//!
//! The files are read directly, so that a process in a sandbox needs nothing but these two files. Names that only another service knows
//! (LDAP, systemd's dynamic users) are not found; a number always works.

use std::fs;
use std::path::Path;

/// The file with the users.
pub const USERS: &str = "/etc/passwd";

/// The file with the groups.
pub const GROUPS: &str = "/etc/group";

/// Returns the number of a user, who is given by name or by number.
///
/// # Errors
/// A sentence that says what to do, if there is no such user.
pub fn user(name: &str) -> Result<u32, String> {
    find(name, "user", USERS)
}

/// Returns the number of a group, which is given by name or by number.
///
/// # Errors
/// A sentence that says what to do, if there is no such group.
pub fn group(name: &str) -> Result<u32, String> {
    find(name, "group", GROUPS)
}

fn find(name: &str, what: &str, file: &str) -> Result<u32, String> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let text = fs::read_to_string(Path::new(file)).map_err(|error| format!("{file}: {error}"))?;
    number_in(&text, name)
        .ok_or_else(|| format!("there is no {what} {name:?} in {file}: use one that is there, or a number"))
}

/// Finds a name in lines `NAME:PASSWORD:NUMBER:...`.
fn number_in(text: &str, name: &str) -> Option<u32> {
    let numbers = text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == name).then(|| fields.nth(1)?.parse().ok())?
    });
    numbers.into_iter().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_found() {
        assert_eq!((user("root"), group("root")), (Ok(0), Ok(0)));
        assert_eq!((user("1234"), group("4321")), (Ok(1234), Ok(4321)));
        let text = "# local\nroot:x:0:0:root:/root:/bin/sh\nodd:x:y:\n+nis\nkvm:x:108:a,b\n";
        assert_eq!(number_in(text, "kvm"), Some(108));
        assert_eq!(["odd", "+nis", "kv"].map(|name| number_in(text, name)), [None; 3]);
        let error = group("no such group").unwrap_err();
        assert!(error.starts_with("there is no group \"no such group\" in /etc/group"), "{error}");
    }
}
