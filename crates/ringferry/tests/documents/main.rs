//! Checks that the documents say what is so: what a page draws, lists, links to or tells the reader to type is compared
//! with the workspace it is part of. These tests need no root and no network, and take a second.

mod commands;
mod house;
mod links;
mod markdown;
mod paths;
mod reasons;

use std::path::{Path, PathBuf};

/// The root of the repository.
fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).canonicalize().unwrap()
}

/// Reads a file of the repository. `path` is relative to its root.
fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Paths of all pages, relative to the root and in order. Folders that builds and test suites make are left out.
fn pages() -> Vec<String> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let (path, name) = (entry.path(), entry.file_name());
            let made = ["target", "work", "corpus", "artifacts"].iter().any(|made| name == *made);
            if entry.file_type().unwrap().is_dir() && !made && !name.to_string_lossy().starts_with('.') {
                walk(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    walk(&root(), &mut found);
    let mut pages: Vec<_> =
        found.iter().map(|path| path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned()).collect();
    pages.sort();
    pages
}
