//! Landlock: which files the process may still open.

use std::path::PathBuf;

use bitflags::bitflags;
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};

bitflags! {
    /// What may be done in a place.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Access: u8 {
        /// Reading files and directories.
        const READ = 1;
        /// Writing to files that exist, devices and their ioctls included.
        const WRITE = 1 << 1;
        /// Making files.
        const MAKE = 1 << 2;
        /// Removing files and sockets, and replacing them by files made there.
        const REMOVE = 1 << 3;
        /// Making sockets.
        const SOCKETS = 1 << 4;
    }
}

/// The newest interface of the kernel that is asked for, Linux 6.12; what an older one lacks is left out.
const NEWEST: ABI = ABI::V6;

/// Restricts the calling thread and those that it starts to `places`.
pub(super) fn restrict(places: &[(PathBuf, Access)]) -> Result<(), String> {
    match ruleset(places) {
        Ok(RulesetStatus::FullyEnforced) => Ok(()),
        Ok(RulesetStatus::PartiallyEnforced) => {
            Err("this kernel knows it only in part; Linux 6.12 has all that is asked for".to_owned())
        }
        Ok(RulesetStatus::NotEnforced) => Err("this kernel has none, or it is turned off \
             (CONFIG_SECURITY_LANDLOCK, and lsm= on its command line)"
            .to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn ruleset(places: &[(PathBuf, Access)]) -> Result<RulesetStatus, RulesetError> {
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    let rules = places.iter().try_fold(rules, |rules, (path, access)| -> Result<_, RulesetError> {
        // What does not exist cannot be named; it may come later, and is then out of reach.
        let Ok(place) = PathFd::new(path) else { return Ok(rules) };
        let directory = rustix::fs::fstat(&place).is_ok_and(|stat| {
            rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::Directory
        });
        let mut rights = rights(*access);
        if !directory {
            rights &= AccessFs::from_file(NEWEST);
        }
        let rules = rules.add_rule(PathBeneath::new(&place, rights))?;
        // A rule is about an inode, and procfs makes new ones when it has forgotten some; those in use it does not forget.
        if rustix::fs::fstatfs(&place).is_ok_and(|stat| stat.f_type == libc::PROC_SUPER_MAGIC) {
            std::mem::forget(place);
        }
        Ok(rules)
    })?;
    Ok(rules.restrict_self()?.ruleset)
}

fn rights(access: Access) -> BitFlags<AccessFs> {
    let mut rights = BitFlags::empty();
    if access.contains(Access::READ) {
        rights |= AccessFs::ReadFile | AccessFs::ReadDir;
    }
    if access.contains(Access::WRITE) {
        rights |= AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev;
    }
    if access.contains(Access::MAKE) {
        rights |= BitFlags::from(AccessFs::MakeReg);
    }
    if access.contains(Access::REMOVE) {
        rights |= BitFlags::from(AccessFs::RemoveFile);
    }
    if access.contains(Access::SOCKETS) {
        rights |= BitFlags::from(AccessFs::MakeSock);
    }
    rights
}
