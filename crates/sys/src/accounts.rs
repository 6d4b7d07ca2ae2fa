//! Numbers of users and groups, by their names in `/etc/passwd` and `/etc/group`.
//!
//! The files are read directly, so that a process in a sandbox needs nothing but these two files. Names that only another service knows
//! (LDAP, systemd's dynamic users) are not found; a number always works.
//!
//! Whoever adds a user or a group puts a new file in the place of the old one, and a sandbox that admits a file admits that very file. So a process that
//! confines itself has a [thread](read_by_a_thread) read them that may read whatever is in `/etc`, and nothing else, with no more rights than anybody.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::{fs, io, thread};

use crate::sandbox::{Access, confine_thread};

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

/// The thread that reads the files, if there is one.
static READER: OnceLock<Mutex<Reader>> = OnceLock::new();

/// What is said to that thread, and what it answers.
struct Reader {
    files: Sender<&'static str>,
    texts: Receiver<io::Result<String>>,
}

impl Reader {
    fn read(&self, file: &'static str) -> io::Result<String> {
        let gone = |_| io::Error::other("the thread that reads it has ended");
        self.files.send(file).map_err(|error| gone(error.to_string()))?;
        self.texts.recv().map_err(|error| gone(error.to_string()))?
    }
}

/// Has a thread read the files from now on, for the rest of the process's life. Call it before the process enters its sandbox: the thread has
/// its own when this returns.
///
/// # Errors
/// There can be no thread; the files are read directly then.
pub fn read_by_a_thread() -> io::Result<()> {
    let (files, asked) = channel::<&'static str>();
    let (answer, texts) = channel();
    let (confined, is_confined) = channel();
    thread::Builder::new().name("accounts".to_owned()).spawn(move || {
        // Without any of it the thread is what the process is.
        let _ = confine_thread(&[(PathBuf::from("/etc"), Access::READ)]);
        let _ = confined.send(());
        for file in asked {
            let _ = answer.send(fs::read_to_string(Path::new(file)));
        }
    })?;
    let _ = is_confined.recv();
    let _ = READER.set(Mutex::new(Reader { files, texts }));
    Ok(())
}

fn find(name: &str, what: &str, file: &'static str) -> Result<u32, String> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let text = match READER.get() {
        Some(reader) => reader.lock().unwrap_or_else(PoisonError::into_inner).read(file),
        None => fs::read_to_string(Path::new(file)),
    };
    let text = text.map_err(|error| format!("{file}: {error}"))?;
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
    fn the_thread_that_reads_them_reads_nothing_else_and_no_secrets() {
        let thread = thread::spawn(|| {
            let missing = confine_thread(&[(PathBuf::from("/etc"), Access::READ)]);
            [USERS, GROUPS, "/etc/shadow", "/proc/self/status"]
                .map(|file| (missing.is_empty(), fs::read_to_string(file).is_ok()))
        });
        let [users, groups, secrets, other] = thread.join().unwrap();
        assert!(users.1 && groups.1 && !secrets.1);
        // Where the kernel has Landlock.
        assert!(!users.0 || !other.1);
    }

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
