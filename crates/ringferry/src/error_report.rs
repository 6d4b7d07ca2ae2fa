//! Errors as JSON, where the answer would have been JSON.

use ringferry_control::ControlError;

/// The reason why there is no answer.
#[derive(Debug, serde::Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ErrorReport {
    /// The reason, for people.
    pub error: String,
    /// The reason, for programs.
    pub kind: ErrorKind,
}

/// The kind of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    /// The switch refuses what it was asked for.
    Refused,
    /// Nobody listens on the control socket.
    NotRunning,
    /// The control socket is another user's.
    NoPermission,
    /// The switch does not answer in time.
    Silent,
    /// Whoever listens does not know such requests: a guest, or another version.
    NotSupported,
    /// An option has a value that cannot be used.
    Usage,
    /// The connection failed, the answer makes no sense, or a file cannot be written.
    Failed,
}

impl ErrorKind {
    /// The kind of an error of the control socket.
    pub fn of(error: &ControlError) -> ErrorKind {
        match error {
            ControlError::Refused(_) => ErrorKind::Refused,
            ControlError::NotRunning(_) => ErrorKind::NotRunning,
            ControlError::Permission(_) => ErrorKind::NoPermission,
            ControlError::Silent { .. } => ErrorKind::Silent,
            ControlError::Garbled { .. } | ControlError::Os { .. } => ErrorKind::Failed,
        }
    }

    /// The text that goes with the kind of an error of the control socket: that the switch refuses is what the kind says.
    pub fn text(error: &ControlError) -> String {
        match error {
            ControlError::Refused(why) => why.clone(),
            error => error.to_string(),
        }
    }
}
