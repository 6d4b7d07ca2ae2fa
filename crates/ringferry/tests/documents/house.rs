//! Compares the house and the arrows of ARCHITECTURE.md with the crates and dependencies that `cargo metadata` lists.
//!
//! Both are in blocks of `text`. The house is the indented list below `crates/`: one crate a line, the highest first. An arrow is a line
//! `from ─► to, to` for dependencies of the product, or `from ┄► to, to` for those that only its tests and examples have.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use super::markdown::Page;

const PRODUCT: &str = "─►";
const TESTS: &str = "┄►";

/// One dependency between two crates of the workspace, as ARCHITECTURE.md draws it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Arrow {
    from: String,
    head: &'static str,
    to: String,
}

impl std::fmt::Display for Arrow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {}", self.from, self.head, self.to)
    }
}

/// The crates by the folder they lie in, in the order of the picture, and the arrows between them.
#[derive(Debug, Default)]
struct Picture {
    crates: Vec<String>,
    arrows: BTreeSet<Arrow>,
}

/// Reads the picture in the section "The house" of `page`.
fn drawn(page: &str) -> Picture {
    let page = page.split_once("\n## The house\n").expect("a section \"The house\"").1;
    let page = page.split("\n#").next().unwrap();
    let mut picture = Picture::default();
    let pictures = Page::parse(page).blocks;
    let lines = || pictures.iter().filter(|block| block.language == "text").flat_map(|block| &block.lines);
    // A crate's line has two spaces in front of its name; deeper ones continue a description, less deep ones end the list.
    let house = lines().skip_while(|line| *line != "crates/").skip(1);
    for line in house.take_while(|line| line.starts_with("  ")) {
        if let Some(name) = line.strip_prefix("  ").filter(|rest| !rest.starts_with(' ')) {
            picture.crates.push(name.split_whitespace().next().unwrap().to_owned());
        }
    }
    for line in lines() {
        for head in [PRODUCT, TESTS] {
            // Two arrows may share a line, three spaces or more apart, so a list ends where such a gap is.
            let mut rest = line.as_str();
            while let Some((before, after)) = rest.split_once(head) {
                let from = before.trim_end_matches(['─', '┄', ' ']).rsplit(' ').next().unwrap();
                let end = after.find("   ").unwrap_or(after.len());
                for to in
                    after[..end].split(',').map(str::trim).filter(|to| !to.is_empty() && !to.starts_with('('))
                {
                    picture.arrows.insert(Arrow { from: from.to_owned(), head, to: to.to_owned() });
                }
                rest = &after[end..];
            }
        }
    }
    picture
}

/// Asks cargo for the crates of the workspace and their dependencies on each other.
fn real() -> Picture {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(super::root())
        .output()
        .expect("cargo metadata");
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let folders: BTreeMap<&str, &str> = packages
        .iter()
        .map(|package| {
            let manifest = package["manifest_path"].as_str().unwrap();
            (package["name"].as_str().unwrap(), manifest.rsplit('/').nth(1).unwrap())
        })
        .collect();
    let mut picture =
        Picture { crates: folders.values().map(|&folder| folder.to_owned()).collect(), ..Picture::default() };
    for package in packages {
        let from = folders[package["name"].as_str().unwrap()];
        for dependency in package["dependencies"].as_array().unwrap() {
            let Some(&to) = folders.get(dependency["name"].as_str().unwrap()) else { continue };
            let head = if dependency["kind"] == "dev" { TESTS } else { PRODUCT };
            // A crate that is its own dev-dependency, to turn a feature on, needs no arrow.
            if from != to {
                picture.arrows.insert(Arrow { from: from.to_owned(), head, to: to.to_owned() });
            }
        }
    }
    // What the product has, its tests have as well.
    let product: BTreeSet<Arrow> =
        picture.arrows.iter().filter(|arrow| arrow.head == PRODUCT).cloned().collect();
    picture.arrows.retain(|arrow| {
        arrow.head == PRODUCT || !product.contains(&Arrow { head: PRODUCT, ..arrow.clone() })
    });
    picture
}

/// Lists how the two pictures differ, one sentence each.
fn differences(drawn: &Picture, real: &Picture) -> Vec<String> {
    let mut found = Vec::new();
    for name in real.crates.iter().filter(|name| !drawn.crates.contains(name)) {
        found.push(format!("crates/{name} is missing from the house"));
    }
    for name in drawn.crates.iter().filter(|name| !real.crates.contains(name)) {
        found.push(format!("the house has {name}, which is no folder of crates/ with a package"));
    }
    for arrow in real.arrows.difference(&drawn.arrows) {
        found.push(format!("missing arrow: {arrow}"));
    }
    for arrow in drawn.arrows.difference(&real.arrows) {
        found.push(format!("extra arrow: {arrow} (no Cargo.toml has this dependency)"));
    }
    let floor = |name: &str| drawn.crates.iter().position(|other| other == name);
    for arrow in drawn.arrows.iter().filter(|arrow| arrow.head == PRODUCT) {
        if let (Some(from), Some(to)) = (floor(&arrow.from), floor(&arrow.to))
            && from >= to
        {
            found.push(format!(
                "this arrow points up: {arrow} (move {} below {} in the house)",
                arrow.to, arrow.from
            ));
        }
    }
    found
}

#[test]
fn the_house_and_its_arrows_are_those_of_cargo_metadata() {
    let found = differences(&drawn(&super::read("ARCHITECTURE.md")), &real());
    assert!(found.is_empty(), "ARCHITECTURE.md, \"The house\", is not true:\n  {}", found.join("\n  "));
}

#[test]
fn a_picture_that_is_not_true_is_found() {
    let page = "
## The house

```text
crates/
  top        the program
             and more of it
  side       a twin
  base       all stand on it
tests/x      not a crate

top ──► base     side ──► base
top ┄┄► side
```

## Another section

```text
base ──► top
```
";
    let good = drawn(page);
    assert_eq!(good.crates, ["top", "side", "base"]);
    assert_eq!(
        good.arrows.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["side ─► base", "top ─► base", "top ┄► side"]
    );
    assert!(differences(&good, &drawn(page)).is_empty());

    let changed = |from: &str, to: &str| differences(&drawn(&page.replace(from, to)), &good);
    assert_eq!(
        changed("top ──► base  ", "top ──► side  "),
        ["missing arrow: top ─► base", "extra arrow: top ─► side (no Cargo.toml has this dependency)"]
    );
    assert_eq!(changed("top ┄┄► side", ""), ["missing arrow: top ┄► side"]);
    assert_eq!(changed("  side       a twin\n", ""), ["crates/side is missing from the house"]);
    assert_eq!(
        changed("  base  ", "  more       nothing\n  base  "),
        ["the house has more, which is no folder of crates/ with a package"]
    );
    let upside_down = page.replace("  top  ", "  base  ").replace("  base       all", "  top       all");
    assert_eq!(
        differences(&drawn(&upside_down), &drawn(&upside_down)),
        [
            "this arrow points up: side ─► base (move base below side in the house)",
            "this arrow points up: top ─► base (move base below top in the house)"
        ]
    );
}
