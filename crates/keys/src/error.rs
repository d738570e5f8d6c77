//! What can be wrong with keys and the folder that holds them.

use crate::{BadName, Name};
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Why keys cannot be used or changed.
#[derive(Debug, Error)]
pub enum KeyError {
    #[error("there is no folder for keys: set HOME or XDG_CONFIG_HOME to an absolute path")]
    NoHome,
    #[error("{path} cannot be used: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path} is {why}: keys are kept where nobody else reads or writes (chmod go= {path})")]
    NotPrivate { path: PathBuf, why: &'static str },
    #[error("{path} is damaged: {why}; remove it, and make or add the key again")]
    Damaged { path: PathBuf, why: String },
    #[error(
        "{path} is damaged: {why}; {name} gets no devices until `kedge keys limit {name}` has \
         written it anew"
    )]
    BadLimits { path: PathBuf, name: Name, why: String },
    #[error(
        "all users from {first} to {last} are keys' already, of this server or of another on this \
         machine: set more aside (--users)"
    )]
    NoUser { first: u32, last: u32 },
    #[error(
        "{path} says {user}, who is none of those that --users sets aside: name them as before"
    )]
    UserBeyond { path: PathBuf, user: u32 },
    #[error("{path} has more than {max} files: remove those that you do not know")]
    TooMany { path: PathBuf, max: usize },
    #[error("{max} keys are pinned already: `kedge keys revoke NAME` takes one back")]
    TooManyKeys { max: usize },
    #[error(
        "{path} says {user}, who is a user of another folder of keys on this machine: remove the \
         file, and the name gets another user"
    )]
    UserTaken { path: PathBuf, user: u32 },
    #[error("it cannot be noted whose the user {user} is: {source}")]
    NotClaimed { user: u32, source: io::Error },
    #[error("you have no key as yet: `kedge keys new` makes one")]
    NoIdentity,
    #[error(
        "you have a key already, valid until {until}: --replace makes another, which everybody who \
         has the old one must be given anew"
    )]
    HasIdentity { until: String },
    #[error("a key cannot be made: {why}")]
    NotMade { why: String },
    #[error("{why}: give what `kedge keys show` prints there")]
    NoCertificate { why: String },
    #[error(
        "there is a private key in it: nobody else may have that. Give what `kedge keys show` \
         prints, and if the file has left its machine, replace the key (`kedge keys new --replace`)"
    )]
    PrivateInside,
    #[error("this certificate has expired on {on}: its owner makes another (`kedge keys new`)")]
    Expired { on: String },
    #[error(
        "there is a key of the name {0} already: `kedge keys revoke {0}` takes it back, or choose \
         another name"
    )]
    Taken(Name),
    #[error("this certificate is known already, as {0}")]
    Known(Name),
    #[error(
        "this certificate, of {0}, has been revoked: its owner makes another (`kedge keys new \
         --replace`)"
    )]
    Revoked(Name),
    #[error("there is no key of the name {0}: `kedge keys list` shows those that there are")]
    Missing(Name),
    #[error(transparent)]
    BadName(#[from] BadName),
}
