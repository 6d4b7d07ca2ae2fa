//! Where the control socket is when nobody says.

use std::path::{Path, PathBuf};

/// Where system-wide instances keep their sockets.
pub const SYSTEM_DIRECTORY: &str = "/run/ringferry";

/// Where the control socket is when nobody says: `/run/ringferry/control.sock` for root, else
/// `$XDG_RUNTIME_DIR/ringferry.sock`, else `/tmp/ringferry-UID.sock`.
pub fn default_path() -> PathBuf {
    let user = rustix::process::geteuid();
    if user.is_root() {
        return Path::new(SYSTEM_DIRECTORY).join("control.sock");
    }
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|directory| !directory.is_empty()) {
        Some(directory) => Path::new(&directory).join("ringferry.sock"),
        None => PathBuf::from(format!("/tmp/ringferry-{}.sock", user.as_raw())),
    }
}
