//! The schemas of what the lab writes as JSON, in docs/schema/: `UPDATE_EXPECT=1 cargo test -p ringferry-lab schemas` writes them from the types that are written.

use ringferry_rig::schema::{assert_committed, files};

use crate::list::List;
use crate::results::Results;
use crate::versus::Versus;

/// The version in the name of a schema, `ringferry-lab/1`.
fn version(schema: &str) -> &str {
    schema.rsplit('/').next().unwrap()
}

#[test]
fn the_files_in_docs_are_what_the_lab_writes() {
    assert_committed::<Results>("lab", version(crate::results::SCHEMA), "ringferry lab NAME");
    assert_committed::<Versus>("lab-compare", version(crate::versus::SCHEMA), "ringferry lab compare");
    assert_committed::<List>("lab-list", version(crate::list::SCHEMA), "ringferry lab list");
    let of_lab: Vec<String> = files().into_iter().filter(|name| name.starts_with("lab")).collect();
    assert_eq!(of_lab, ["lab", "lab-compare", "lab-list"]);
}
