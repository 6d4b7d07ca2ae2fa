//! Where the control socket is when nobody says.

use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Where system-wide instances keep their sockets.
pub const SYSTEM_DIRECTORY: &str = "/run/ringferry";

/// The variable that says where the control socket is, for `run` and whoever asks it alike.
pub const VARIABLE: &str = "RINGFERRY_CONTROL";

/// Where the control socket is when no option says: `$RINGFERRY_CONTROL`, else `/run/ringferry/control.sock` for root, else
/// `$XDG_RUNTIME_DIR/ringferry.sock`, else `/tmp/ringferry-UID/control.sock`, in a directory that is the user's alone.
pub fn default_path() -> PathBuf {
    if let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
        return path.into();
    }
    if rustix::process::geteuid().is_root() {
        return Path::new(SYSTEM_DIRECTORY).join("control.sock");
    }
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|directory| !directory.is_empty()) {
        Some(directory) => Path::new(&directory).join("ringferry.sock"),
        None => private_directory().join("control.sock"),
    }
}

/// Anybody can make anything in `/tmp`, so a socket there has a directory of which the owner can be looked at before it is believed.
fn private_directory() -> PathBuf {
    PathBuf::from(format!("/tmp/ringferry-{}", rustix::process::geteuid().as_raw()))
}

/// Makes the directory of the socket `path` if it is one of those that [`default_path`] names. That it could not be made is seen when the socket is
/// bound. Whoever is to remove the socket in a sandbox needs it before, as rights to a directory can be given only when it exists.
pub fn make_directory(path: &Path) {
    let Some(directory) = path.parent() else { return };
    if directory == Path::new(SYSTEM_DIRECTORY) {
        let _ = std::fs::create_dir(directory);
    } else if directory == private_directory() {
        let _ = std::fs::DirBuilder::new().mode(0o700).create(directory);
    }
}

/// Returns true if [`make_directory`] makes this directory for the socket `path`, as far as rights can tell.
pub fn makes_directory(path: &Path, directory: &Path) -> bool {
    let is_made = match directory == Path::new(SYSTEM_DIRECTORY) {
        true => rustix::process::geteuid().is_root(),
        false => directory == private_directory(),
    };
    is_made && path.parent() == Some(directory)
}

/// Looks whether the socket `path`, if it is in the user's directory in `/tmp`, can be another user's.
///
/// # Errors
/// It can; the message says what to do.
pub(crate) fn check_directory(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(directory) if directory == private_directory() => check_private(directory),
        _ => Ok(()),
    }
}

fn check_private(directory: &Path) -> io::Result<()> {
    let found = std::fs::symlink_metadata(directory)?;
    let own = found.uid() == rustix::process::geteuid().as_raw();
    if found.is_dir() && own && found.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "{} is not a directory of this user alone, so another user may have made the socket: \
         choose another path with --control, or set XDG_RUNTIME_DIR",
        directory.display()
    )))
}

/// Looks whether the process that listens at `path`, one of user `listens`, can be an impostor: anybody can make a socket in `/tmp`, or a directory there that has one, and be asked, told of a
/// change, or have a successor take over. Root and this process's user are believed everywhere; others where nobody but root, this user and who owns the directories on the way can have put a socket.
///
/// # Errors
/// It can; the message says what to do.
pub(crate) fn check_listener(path: &Path, listens: u32) -> io::Result<()> {
    let own = rustix::process::geteuid().as_raw();
    if listens == 0 || listens == own {
        return Ok(());
    }
    let directory =
        path.parent().filter(|directory| *directory != Path::new("")).unwrap_or_else(|| Path::new("."));
    let directory = directory.canonicalize()?;
    let mut child = std::fs::symlink_metadata(path)?;
    for parent in directory.ancestors() {
        let found = std::fs::metadata(parent)?;
        // In a sticky one nobody puts something of his in the place of another's.
        let kept = found.mode() & STICKY != 0 && [0, own].contains(&child.uid());
        if found.mode() & EVERYBODY_WRITES != 0 && !kept {
            return Err(io::Error::other(format!(
                "user {listens} listens there, and {} is everybody's to write, so it may not be the switch: \
                 ask as that user (sudo -u '#{listens}'), or have the switch listen in a directory of its own",
                parent.display()
            )));
        }
        child = found;
    }
    Ok(())
}

/// Of the mode of a directory: files in it are their owners' to remove.
const STICKY: u32 = 0o1000;

/// Of the mode of a directory: everybody may make files in it.
const EVERYBODY_WRITES: u32 = 0o002;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_directory_is_made_for_the_control_socket_in_it_alone() {
        let system = Path::new(SYSTEM_DIRECTORY);
        assert_eq!(makes_directory(&system.join("c.sock"), system), rustix::process::geteuid().is_root());
        assert!(makes_directory(&private_directory().join("c.sock"), &private_directory()));
        assert!(!makes_directory(Path::new("/elsewhere/c.sock"), system));
        assert!(!makes_directory(Path::new("/elsewhere/c.sock"), Path::new("/elsewhere")));
    }

    #[test]
    fn only_a_directory_of_this_user_alone_is_believed() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("own");
        assert_eq!(check_private(&directory).unwrap_err().kind(), io::ErrorKind::NotFound);
        std::fs::DirBuilder::new().mode(0o700).create(&directory).unwrap();
        check_private(&directory).unwrap();

        let link = place.path().join("link");
        symlink(&directory, &link).unwrap();
        check_private(&link).unwrap_err();
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o755)).unwrap();
        let error = check_private(&directory).unwrap_err();
        assert!(error.to_string().contains("choose another path with --control"), "{error}");
        if rustix::process::geteuid().is_root() {
            std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o700)).unwrap();
            std::os::unix::fs::chown(&directory, Some(1), None).unwrap();
            check_private(&directory).unwrap_err();
        }
    }

    #[test]
    fn a_stranger_is_believed_only_where_not_everybody_may_listen() {
        // In /tmp, of which the sticky bit keeps this directory this user's.
        let place = tempfile::tempdir().unwrap();
        let (path, own) = (place.path().join("control"), rustix::process::geteuid().as_raw());
        std::fs::write(&path, "").unwrap();
        let stranger = own + 1;
        for (mode, users, is_believed) in [
            (0o755, [0, own, stranger], [true; 3]),
            (0o775, [0, own, stranger], [true; 3]),
            // The file is this user's.
            (0o1777, [0, own, stranger], [true; 3]),
            (0o777, [0, own, stranger], [true, true, false]),
        ] {
            std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(users.map(|user| check_listener(&path, user).is_ok()), is_believed, "{mode:o}");
        }
        let error = check_listener(&path, stranger).unwrap_err().to_string();
        assert!(error.contains(&format!("sudo -u '#{stranger}'")), "{error}");
        check_listener(Path::new("/nowhere/control"), stranger).unwrap_err();
        if own != 0 {
            eprintln!("skipped in part: only root can make a directory that is another user's");
            return;
        }
        // A stranger's directory, in one where everybody may have made it.
        std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o1777)).unwrap();
        let theirs = place.path().join("theirs");
        std::fs::create_dir(&theirs).unwrap();
        std::fs::write(theirs.join("control"), "").unwrap();
        check_listener(&theirs.join("control"), stranger).unwrap();
        std::os::unix::fs::chown(&theirs, Some(stranger), None).unwrap_or_else(|error| panic!("{error}"));
        check_listener(&theirs.join("control"), stranger).unwrap_err();
    }

    #[test]
    fn paths_that_somebody_chose_are_theirs() {
        check_directory(Path::new("/tmp/ringferry.sock")).unwrap();
        check_directory(Path::new("control")).unwrap();
    }
}
