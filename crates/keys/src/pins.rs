//! Who is let in: whoever shows a pinned certificate, byte for byte.

use crate::certificate::{Certificate, Fingerprint, Validity, date};
use crate::{BadName, Name};
use thiserror::Error;

/// The certificates that are pinned, and those that were.
#[derive(Debug, Clone, Default)]
pub struct Pins {
    pub(crate) pinned: Vec<(Name, Certificate)>,
    pub(crate) revoked: Vec<(Name, Certificate)>,
}

/// Why the other end's certificate is refused here.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    #[error(
        "the other end shows a certificate that is not pinned here ({0}): if it is whom you mean, \
         `kedge keys add NAME FILE` pins it"
    )]
    Unknown(Fingerprint),
    #[error("the certificate of {0} has been revoked here")]
    Revoked(Name),
    #[error("the certificate of {name} has expired on {on}: its owner makes another")]
    Expired { name: Name, on: String },
    #[error(
        "the certificate of {name} is valid from {from} only: are both machines' clocks right?"
    )]
    Early { name: Name, from: String },
    #[error(
        "{expected} shows the certificate of {shown}: connect to that by its own name, or find out \
         who answers there"
    )]
    Another { expected: Name, shown: Name },
}

impl Pins {
    /// Returns whether nobody is pinned.
    pub fn is_empty(&self) -> bool {
        self.pinned.is_empty()
    }

    /// Returns whether somebody is pinned under a name.
    pub fn has(&self, name: &Name) -> bool {
        self.pinned.iter().any(|(known, _)| known == name)
    }

    /// Returns as whom a server at `HOST:PORT` is pinned: with its port, where several are on one
    /// host, or without.
    ///
    /// # Errors
    /// The host is no name that could be pinned.
    pub fn name_of(&self, server: &str) -> Result<Name, BadName> {
        let with_port = server.parse().ok().filter(|name| self.has(name));
        let (host, _) = server.rsplit_once(':').unwrap_or((server, ""));
        with_port.map_or_else(|| host.trim_matches(['[', ']']).parse(), Ok)
    }

    /// Returns which certificate is pinned under a name.
    pub fn fingerprint(&self, name: &Name) -> Option<Fingerprint> {
        let found = self.pinned.iter().find(|(known, _)| known == name);
        found.map(|(_, certificate)| certificate.fingerprint())
    }

    /// Returns whether a certificate is still pinned under a name, and not revoked under any.
    pub fn counts(&self, name: &Name, certificate: Fingerprint) -> bool {
        let revoked = self.revoked.iter().any(|(_, known)| known.fingerprint() == certificate);
        !revoked && self.fingerprint(name) == Some(certificate)
    }

    /// Returns whose a certificate is, if its owner may connect at `now`, in seconds since 1970,
    /// and is the `expected` one.
    ///
    /// # Errors
    /// It is not pinned or was revoked, is not in its time, or is another one's.
    pub fn judge(&self, shown: &[u8], expected: Option<&Name>, now: u64) -> Result<Name, Refusal> {
        let is_it = |known: &&(Name, Certificate)| known.1.der().as_ref() == shown;
        // Revocation counts before anything else, whatever is pinned.
        if let Some((name, _)) = self.revoked.iter().find(is_it) {
            return Err(Refusal::Revoked(name.clone()));
        }
        let found = self.pinned.iter().find(is_it);
        let (name, known) = found.ok_or_else(|| Refusal::Unknown(Fingerprint::of(shown)))?;
        let name = name.clone();
        if let Some(expected) = expected.filter(|expected| **expected != name) {
            return Err(Refusal::Another { expected: expected.clone(), shown: name });
        }
        match known.validity(now) {
            Validity::Valid => Ok(name),
            Validity::Early => Err(Refusal::Early { name, from: date(known.valid_from()) }),
            Validity::Expired => Err(Refusal::Expired { name, on: date(known.valid_until()) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{certificate, name};

    #[test]
    fn each_refusal_has_its_own_words() {
        let (begin, end) = (1_700_000_000, 1_800_000_000);
        let known = certificate("alice", begin, end);
        let old = certificate("bob", begin, end);
        let pins = Pins {
            pinned: vec![(name("alice"), known.clone()), (name("carol"), old.clone())],
            revoked: vec![(name("bob"), old.clone())],
        };
        let judge = |shown: &Certificate, expected: Option<&str>, now| {
            let expected = expected.map(name);
            pins.judge(shown.der(), expected.as_ref(), now).map_err(|it| it.to_string())
        };
        assert_eq!(judge(&known, None, begin), Ok(name("alice")));
        assert_eq!(judge(&known, Some("alice"), end), Ok(name("alice")));
        for (shown, expected, now, said) in [
            (&known, None, end + 1, "of alice has expired on 2027-01-15T08:00:00Z"),
            (&known, None, begin - 1, "of alice is valid from 2023-11-14T22:13:20Z only"),
            (&known, Some("carol"), begin, "carol shows the certificate of alice"),
            // Also where it is pinned again.
            (&old, None, begin, "of bob has been revoked"),
            (&certificate("alice", begin, end), None, begin, "not pinned here (SHA256:"),
        ] {
            let refused = judge(shown, expected, now).unwrap_err();
            assert!(refused.contains(said), "{refused}");
        }
        let counts = |of: &str, shown: &Certificate| pins.counts(&name(of), shown.fingerprint());
        assert!(counts("alice", &known));
        assert!(!counts("carol", &known), "another's name");
        assert!(!counts("carol", &old), "revoked, though pinned");
        assert!(!counts("alice", &certificate("alice", begin, end)), "another key of the name");
    }
}
