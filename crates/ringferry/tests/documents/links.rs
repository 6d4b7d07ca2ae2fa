//! Every relative link of every page leads to a file that exists, and its anchor to a heading of that page.

use std::path::Path;

use super::markdown::Page;

/// Lists what is wrong with the links of `page`, which lies at `path` below `root`.
fn dead_links(root: &Path, path: &str, page: &Page) -> Vec<String> {
    let mut found = Vec::new();
    for link in &page.links {
        // Some pages are also documentation of a crate; rustdoc checks their links to items.
        let elsewhere = ["://", "mailto:", "::"].iter().any(|sign| link.target.contains(sign));
        if elsewhere {
            continue;
        }
        let (file, anchor) = link.target.split_once('#').unwrap_or((&link.target, ""));
        let place = root.join(path);
        let target = if file.is_empty() { place } else { place.parent().unwrap().join(file) };
        let problem = if !target.exists() {
            "there is no such file"
        } else if !anchor.is_empty() && !anchors(&target).iter().any(|name| name == anchor) {
            "there is no such heading"
        } else {
            continue;
        };
        found.push(format!("{path}:{}: {}: {problem}", link.line, link.target));
    }
    found
}

fn anchors(page: &Path) -> Vec<String> {
    Page::parse(&std::fs::read_to_string(page).unwrap()).anchors
}

#[test]
fn no_link_is_dead() {
    let root = super::root();
    let found: Vec<_> = super::pages()
        .iter()
        .flat_map(|path| dead_links(&root, path, &Page::parse(&super::read(path))))
        .collect();
    assert!(found.is_empty(), "dead links:\n  {}", found.join("\n  "));
}

#[test]
fn dead_links_are_found() {
    let directory = tempfile::tempdir().unwrap();
    let text = "# Top\n[a](#top) [b](#bottom)\n[c](other.md) [d](page.md#top) [e](page.md#nowhere)\n";
    std::fs::write(directory.path().join("page.md"), text).unwrap();
    let found = dead_links(directory.path(), "page.md", &Page::parse(text));
    assert_eq!(
        found,
        [
            "page.md:2: #bottom: there is no such heading",
            "page.md:3: other.md: there is no such file",
            "page.md:3: page.md#nowhere: there is no such heading",
        ]
    );
}
