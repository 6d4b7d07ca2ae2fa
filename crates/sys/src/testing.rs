//! Ground to stand on for this crate's own tests.

use crate::namespace;

/// Runs `test` in a network namespace of its own, on a thread of its own. Where that takes rights we lack,
/// says so and does nothing, unless `CI=true`, where nothing may be left out.
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
