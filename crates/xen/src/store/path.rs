//! Paths of nodes in the store: their syntax, and the places of devices. These are pure functions.

use crate::domain::DomId;

/// Longest absolute path in bytes (`XENSTORE_ABS_PATH_MAX`).
pub const MAX_ABSOLUTE: usize = 3072;

/// Longest path relative to a domain's own node, in bytes (`XENSTORE_REL_PATH_MAX`).
pub const MAX_RELATIVE: usize = 2048;

/// The error for a text that is not a path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a path of the store: use letters, digits and -_@ between single slashes, at most {MAX_RELATIVE} bytes \
     ({MAX_ABSOLUTE} from / on)"
)]
pub struct PathError(pub String);

/// Checks that a text is a path: `/`, or names between single slashes, from `/` on or relative to
/// the domain's own node. Names that begin with `@` belong to special watches.
///
/// # Errors
/// [`PathError`] with the text, if it is not a path.
pub fn check(path: &str) -> Result<(), PathError> {
    let (names, most) = match path.strip_prefix('/') {
        Some(names) => (names, MAX_ABSOLUTE),
        None => (path, MAX_RELATIVE),
    };
    let good = path == "/" || path.len() <= most && names.split('/').all(is_name);
    good.then_some(()).ok_or_else(|| PathError(path.to_owned()))
}

/// Returns true if a text may be the name of one node.
pub fn is_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'@'))
}

/// Returns the path of the node `name` below `base`.
pub fn join(base: &str, name: &str) -> String {
    format!("{}/{name}", base.trim_end_matches('/'))
}

/// Returns the path of the node above; `None` for `/` and for a single relative name.
pub fn parent(path: &str) -> Option<&str> {
    let (parent, name) = path.rsplit_once('/')?;
    match (parent, name) {
        ("", "") => None,
        ("", _) => Some("/"),
        _ => Some(parent),
    }
}

/// Returns true if `path` is `base` or lies below it.
pub fn is_within(path: &str, base: &str) -> bool {
    base == "/" && path.starts_with('/')
        || path.strip_prefix(base).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Returns the path of a domain's own node, at which its relative paths begin.
pub fn domain(id: DomId) -> String {
    format!("/local/domain/{id}")
}

/// Returns the path of a device's front end: in `front`'s tree, of this class (`vif`) and number.
pub fn frontend(front: DomId, class: &str, device: u32) -> String {
    format!("/local/domain/{front}/device/{class}/{device}")
}

/// Returns the path of a device's back end: in `back`'s tree, for the same device of `front`.
pub fn backend(back: DomId, class: &str, front: DomId, device: u32) -> String {
    format!("/local/domain/{back}/backend/{class}/{front}/{device}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_names_between_single_slashes() {
        for good in ["/", "/a", "/a/b-c_D/0", "a", "device/vif/0", "@introduceDomain"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        let long = format!("/{}", "a".repeat(MAX_ABSOLUTE));
        for bad in ["", "//", "/a/", "a/", "/a//b", "/a b", "/a.b", "/ä", "/a\0", &long, &long[1..]] {
            assert!(check(bad).is_err(), "{bad}");
        }
        assert_eq!(check(&long[..MAX_ABSOLUTE]), Ok(()));
    }

    #[test]
    fn parents_and_children() {
        assert_eq!((join("/", "a"), join("/a", "b")), ("/a".into(), "/a/b".into()));
        assert_eq!((parent("/"), parent("/a"), parent("/a/b")), (None, Some("/"), Some("/a")));
        assert_eq!((parent("a"), parent("a/b")), (None, Some("a")));
        assert!(is_within("/a/b", "/a") && is_within("/a", "/a") && is_within("/a", "/"));
        assert!(!is_within("/ab", "/a") && !is_within("/", "/a"));
    }

    #[test]
    fn devices_lie_where_xen_keeps_them() {
        assert_eq!(frontend(DomId(3), "vif", 1), "/local/domain/3/device/vif/1");
        assert_eq!(backend(DomId(0), "vif", DomId(3), 1), "/local/domain/0/backend/vif/3/1");
    }
}
