//! Support for this crate's own tests.

use crate::namespace;

/// Returns true if a test may run that needs something special. Where it may not, says so; with `CI=true` nothing is left out.
pub(crate) fn may(what: &str, possible: bool) -> bool {
    let ci = std::env::var_os("CI").is_some_and(|ci| ci == "true");
    assert!(possible || !ci, "{what}, and CI=true allows no test to be skipped");
    if !possible {
        eprintln!("skipped: {what}");
    }
    possible
}

/// Runs `test` on a new thread in a new network namespace. Without the permission for that it prints a message and
/// skips the test, or panics if `CI=true`, where no test may be skipped.
pub(crate) fn in_new_net(test: impl FnOnce() + Send) {
    let outcome = std::thread::scope(|scope| {
        scope
            .spawn(|| match namespace::unshare_net() {
                Ok(()) => test(),
                Err(e) => drop(may(&e.to_string(), false)),
            })
            .join()
    });
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}
