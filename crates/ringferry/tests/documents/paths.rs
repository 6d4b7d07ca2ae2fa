//! Every file that ARCHITECTURE.md, SECURITY.md and CONTRIBUTING.md name exists. They name files as people do, by the end of the path:
//! `worker.rs`, `switch/src/switch.rs`, `hostile_{split,packed}.rs`.

use std::path::Path;

/// Words of a line that name a Rust file, with braces taken apart.
fn files(line: &str) -> Vec<String> {
    let part = |c: char| c.is_alphanumeric() || "_-./{}*,".contains(c);
    let words = line.split(|c| !part(c)).flat_map(|word| {
        // A comma ends a name unless it is within braces.
        if word.contains('{') { vec![word] } else { word.split(',').collect() }
    });
    words.filter(|word| word.trim_end_matches([',', '.']).ends_with(".rs")).flat_map(expand).collect()
}

fn expand(word: &str) -> Vec<String> {
    let word = word.trim_end_matches([',', '.']);
    match word.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?))) {
        Some((before, (list, after))) => list.split(',').map(|one| format!("{before}{one}{after}")).collect(),
        None => vec![word.to_owned()],
    }
}

/// All Rust files below a folder, as paths that begin with `/`.
fn rust_files(folder: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path.to_str().unwrap().to_owned());
        }
    }
}

fn missing(page: &str, known: &[String]) -> Vec<String> {
    let lines = page
        .lines()
        .enumerate()
        .flat_map(|(at, line)| files(line).into_iter().map(move |file| (at + 1, file)));
    // With a star it is a group of files: what is before and behind must be in one path.
    let exists = |file: &str| match file.split_once('*') {
        Some((before, after)) => known.iter().any(|path| path.contains(before) && path.ends_with(after)),
        None => known.iter().any(|path| path.ends_with(&format!("/{file}"))),
    };
    lines.filter(|(_, file)| !exists(file)).map(|(line, file)| format!("line {line}: {file}")).collect()
}

#[test]
fn files_that_pages_name_exist() {
    let mut known = Vec::new();
    for folder in ["crates", "fuzz/src", "fuzz/targets"] {
        rust_files(&super::root().join(folder), &mut known);
    }
    let mut found = Vec::new();
    for page in ["ARCHITECTURE.md", "SECURITY.md", "CONTRIBUTING.md"] {
        found.extend(missing(&super::read(page), &known).iter().map(|missing| format!("{page}, {missing}")));
    }
    assert!(found.is_empty(), "files that do not exist:\n  {}", found.join("\n  "));
}

#[test]
fn names_of_files_are_found_in_prose() {
    let known =
        ["/r/crates/switch/src/plane/worker.rs", "/r/crates/ring/tests/loom_split.rs"].map(str::to_owned);
    let page =
        "see worker.rs, plane/worker.rs (`loom_{split,packed}.rs`)\nring/tests/loom_*.rs and config.rs.";
    assert_eq!(missing(page, &known), ["line 1: loom_packed.rs", "line 2: config.rs"]);
}
