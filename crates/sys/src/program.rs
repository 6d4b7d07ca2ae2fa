//! Where programs are: beside the running one, or in `PATH`.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Where a program is that is installed together with the running one: in the same folder, else in `PATH`.
pub fn find(name: &str) -> Option<PathBuf> {
    let own = env::current_exe().ok();
    look(name, own.as_deref().and_then(Path::parent), env::var_os("PATH").as_deref())
}

/// Where a program is, if a folder of `PATH` has it.
pub fn installed(name: &str) -> Option<PathBuf> {
    look(name, None, env::var_os("PATH").as_deref())
}

/// The first file of that name in the folder and in those of the path.
fn look(name: &str, folder: Option<&Path>, path: Option<&OsStr>) -> Option<PathBuf> {
    let folders = path.into_iter().flat_map(env::split_paths);
    folder.map(Path::to_owned).into_iter().chain(folders).map(|at| at.join(name)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_folder_comes_before_the_path_and_the_path_is_taken_in_order() {
        let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
        let [own, first, second] = [0, 1, 2].map(|at| folders[at].path());
        let path = env::join_paths([first, second]).unwrap();
        let found = || look("tool", Some(own), Some(&path));
        assert_eq!(found(), None);
        // A folder of that name is no program.
        std::fs::create_dir(first.join("tool")).unwrap();
        std::fs::write(second.join("tool"), "").unwrap();
        assert_eq!(found(), Some(second.join("tool")));
        std::fs::write(own.join("tool"), "").unwrap();
        assert_eq!(found(), Some(own.join("tool")));
        assert_eq!(look("tool", None, Some(&path)), Some(second.join("tool")));
        assert_eq!(look("tool", None, None), None);
    }
}
