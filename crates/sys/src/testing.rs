//! Support for this crate's own tests.

use crate::namespace;

/// Runs `test` on a new thread in a new network namespace. Without the permission for that it prints a message and
/// skips the test, or panics if `CI=true`, where no test may be skipped.
pub(crate) fn in_new_net(test: impl FnOnce() + Send) {
    let outcome = std::thread::scope(|scope| {
        scope
            .spawn(|| match namespace::unshare_net() {
                Ok(()) => test(),
                Err(e) if std::env::var_os("CI").is_some_and(|ci| ci == "true") => panic!("{e}"),
                Err(e) => eprintln!("skipped: {e}"),
            })
            .join()
    });
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}
