//! The keys of this user: his own, those that are pinned, and those that he has revoked.

use crate::certificate::{Certificate, date};
use crate::error::KeyError;
use crate::folder::Folder;
use crate::identity::Identity;
use crate::limits::{BadLimits, Limits};
use crate::{Name, Pins};
use std::collections::HashSet;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The file of one's own key pair, and how those of others end.
const OWN: &str = "own.pem";
const PINNED: &str = ".pinned";
const REVOKED: &str = ".revoked";
/// The limits of a name.
const LIMITS: &str = ".limits";
/// The user as whom proxies of a name run.
const USER: &str = ".user";
/// Keys that may be pinned at a time: what connections are compared with.
const MAX_KEYS: usize = 4096;
/// Clocks of two machines may differ by so much, in seconds.
const SKEW: u64 = 24 * 3600;

/// A folder of keys, which need not be there as yet.
#[derive(Debug, Clone)]
pub struct Keys {
    path: PathBuf,
}

/// What a key is to its user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    Own,
    Pinned(Name),
    Revoked(Name),
}

impl Keys {
    /// Returns this user's: in `$XDG_CONFIG_HOME/kedge/keys`, else `~/.config/kedge/keys`.
    ///
    /// # Errors
    /// Neither variable has an absolute path.
    pub fn of_user() -> Result<Keys, KeyError> {
        let variable = |name| std::env::var_os(name).map(PathBuf::from);
        let config = variable("XDG_CONFIG_HOME").filter(|path| path.is_absolute());
        let home = || variable("HOME").filter(|path| path.is_absolute());
        let config = config.or_else(|| Some(home()?.join(".config")));
        Ok(Keys::at(config.ok_or(KeyError::NoHome)?.join("kedge/keys")))
    }

    /// Returns those in a folder.
    pub fn at(path: PathBuf) -> Keys {
        Keys { path }
    }

    /// Makes this user's own key pair, whose certificate says `label` and lasts so long.
    ///
    /// # Errors
    /// There is one that is not to be replaced; or it cannot be written.
    pub fn make(
        &self,
        label: &str,
        lasts: Duration,
        replace: bool,
    ) -> Result<Certificate, KeyError> {
        let folder = Folder::make(&self.path)?;
        let until = now().saturating_add(lasts.as_secs());
        let text = Identity::make(label, now().saturating_sub(SKEW), until)?;
        if !folder.write(OWN, text.as_bytes(), replace)? {
            let until = date(self.identity()?.certificate().valid_until());
            return Err(KeyError::HasIdentity { until });
        }
        self.identity().map(|identity| identity.certificate().clone())
    }

    /// Returns this user's own key pair.
    ///
    /// # Errors
    /// There is none, or its file is damaged or open to others.
    pub fn identity(&self) -> Result<Identity, KeyError> {
        let folder = Folder::open(&self.path)?.ok_or(KeyError::NoIdentity)?;
        let text = folder.read(OWN)?.ok_or(KeyError::NoIdentity)?;
        let path = folder.path_of(OWN);
        Identity::from_pem(&text).map_err(|why| KeyError::Damaged { path, why })
    }

    /// Returns whom connections may come from and lead to.
    ///
    /// # Errors
    /// A file of the folder is damaged or open to others.
    pub fn pins(&self) -> Result<Pins, KeyError> {
        let mut pins = Pins::default();
        let Some(folder) = Folder::open(&self.path)? else { return Ok(pins) };
        for file in folder.names()? {
            match standing(&file) {
                Some(Standing::Pinned(name)) => pins.pinned.push((name, pinned(&folder, &file)?)),
                Some(Standing::Revoked(name)) => pins.revoked.push((name, pinned(&folder, &file)?)),
                // What is being written, or of somebody else, is no key.
                _ => {}
            }
        }
        Ok(pins)
    }

    /// Returns all keys: one's own first, then those that are pinned, then the revoked ones.
    ///
    /// # Errors
    /// As [`Keys::pins`] and [`Keys::identity`].
    pub fn list(&self) -> Result<Vec<(Standing, Certificate)>, KeyError> {
        let own = match self.identity() {
            Err(KeyError::NoIdentity) => None,
            other => Some((Standing::Own, other?.certificate().clone())),
        };
        let Pins { pinned, revoked } = self.pins()?;
        let pinned = pinned.into_iter().map(|(name, it)| (Standing::Pinned(name), it));
        let revoked = revoked.into_iter().map(|(name, it)| (Standing::Revoked(name), it));
        Ok(own.into_iter().chain(pinned).chain(revoked).collect())
    }

    /// Pins the certificate of a PEM text under a name.
    ///
    /// # Errors
    /// It is none, or has expired or been revoked; it or the name is pinned already.
    pub fn add(&self, name: &Name, text: &[u8]) -> Result<Certificate, KeyError> {
        let certificate = Certificate::from_pem(text)?;
        if certificate.has_expired(now()) {
            return Err(KeyError::Expired { on: date(certificate.valid_until()) });
        }
        let Pins { pinned, revoked } = self.pins()?;
        let is_it = |known: &&(Name, Certificate)| known.1.der() == certificate.der();
        if let Some((name, _)) = revoked.iter().find(is_it) {
            return Err(KeyError::Revoked(name.clone()));
        }
        if let Some((name, _)) = pinned.iter().find(is_it) {
            return Err(KeyError::Known(name.clone()));
        }
        if pinned.len() >= MAX_KEYS {
            return Err(KeyError::TooManyKeys { max: MAX_KEYS });
        }
        let folder = Folder::make(&self.path)?;
        match folder.write(&format!("{name}{PINNED}"), certificate.to_pem()?.as_bytes(), false)? {
            true => Ok(certificate),
            false => Err(KeyError::Taken(name.clone())),
        }
    }

    /// Takes a pinned certificate back: from the next connection on it is refused.
    ///
    /// # Errors
    /// None of the name is pinned.
    pub fn revoke(&self, name: &Name) -> Result<Certificate, KeyError> {
        let missing = || KeyError::Missing(name.clone());
        let folder = Folder::open(&self.path)?.ok_or_else(missing)?;
        let file = format!("{name}{PINNED}");
        if !folder.names()?.contains(&file) {
            return Err(missing());
        }
        let certificate = pinned(&folder, &file)?;
        // The fingerprint keeps apart what one name has had after another.
        let word = certificate.fingerprint().word();
        folder.rename(&file, &format!("{name}.{word}{REVOKED}"))?;
        Ok(certificate)
    }

    /// Returns how much a name may have of what is lent here.
    ///
    /// # Errors
    /// Its file is damaged, or open to others.
    pub fn limits(&self, name: &Name) -> Result<Limits, KeyError> {
        let Some(folder) = Folder::open(&self.path)? else { return Ok(Limits::default()) };
        let file = format!("{name}{LIMITS}");
        let Some(text) = folder.read(&file)? else { return Ok(Limits::default()) };
        let text = std::str::from_utf8(&text).unwrap_or("no text");
        text.parse().map_err(|bad: BadLimits| KeyError::BadLimits {
            path: folder.path_of(&file),
            name: name.clone(),
            why: bad.to_string(),
        })
    }

    /// Returns the user, by number, as whom proxies of a name run where root lends: one of the
    /// `range`, chosen for good when it is first asked for, and no other name's. `claim` says
    /// whether a user is no other folder's, and is that name's of this folder from then on.
    ///
    /// # Errors
    /// There are no more, or the name's is none of them or another folder's; a file is damaged or
    /// open to others.
    pub fn user(
        &self,
        name: &Name,
        range: RangeInclusive<u32>,
        claim: impl Fn(u32) -> io::Result<bool>,
    ) -> Result<u32, KeyError> {
        let claims = |user| claim(user).map_err(|source| KeyError::NotClaimed { user, source });
        let folder = Folder::open(&self.path)?.ok_or(KeyError::NoIdentity)?;
        // Of two servers that look at once, one waits.
        folder.lock()?;
        let own = format!("{name}{USER}");
        let mut taken = HashSet::new();
        for file in folder.names()?.into_iter().filter(|file| file.ends_with(USER)) {
            let path = folder.path_of(&file);
            let damaged = |why: &str| KeyError::Damaged { path: path.clone(), why: why.to_owned() };
            let text = folder.read(&file)?.ok_or_else(|| damaged("it has just gone"))?;
            let text = std::str::from_utf8(&text).ok().and_then(|text| text.strip_suffix('\n'));
            let user =
                text.and_then(|text| text.parse().ok()).ok_or_else(|| damaged("no number"))?;
            if file == own {
                if !range.contains(&user) {
                    return Err(KeyError::UserBeyond { path, user });
                }
                return if claims(user)? {
                    Ok(user)
                } else {
                    Err(KeyError::UserTaken { path, user })
                };
            }
            taken.insert(user);
        }
        let (first, last) = (*range.start(), *range.end());
        for user in range.filter(|user| !taken.contains(user)) {
            if claims(user)? {
                folder.write(&own, format!("{user}\n").as_bytes(), false)?;
                return Ok(user);
            }
        }
        Err(KeyError::NoUser { first, last })
    }

    /// Returns where the folder is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Says how much a pinned name may have: what another key of the name may have as well.
    ///
    /// # Errors
    /// None of the name is pinned, or it cannot be written.
    pub fn limit(&self, name: &Name, limits: &Limits) -> Result<(), KeyError> {
        let missing = || KeyError::Missing(name.clone());
        let folder = Folder::open(&self.path)?.ok_or_else(missing)?;
        if !folder.names()?.contains(&format!("{name}{PINNED}")) {
            return Err(missing());
        }
        let file = format!("{name}{LIMITS}");
        match limits.is_empty() {
            true => folder.remove(&file)?,
            false => folder.write(&file, limits.to_string().as_bytes(), true).map(drop)?,
        }
        folder.sync()
    }
}

/// Returns whose key a file has by its name, if it is one of others.
fn standing(file: &str) -> Option<Standing> {
    if let Some(name) = file.strip_suffix(PINNED) {
        return name.parse().ok().map(Standing::Pinned);
    }
    let (name, _) = file.strip_suffix(REVOKED)?.rsplit_once('.')?;
    name.parse().ok().map(Standing::Revoked)
}

fn pinned(folder: &Folder, file: &str) -> Result<Certificate, KeyError> {
    let path = folder.path_of(file);
    let damaged = |why: String| KeyError::Damaged { path: path.clone(), why };
    let text = folder.read(file)?.ok_or_else(|| damaged("it has just gone".into()))?;
    Certificate::from_pem(&text).map_err(|error| damaged(error.to_string()))
}

/// Returns the time, in seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{DAY, Place, certificate, name};
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_is_made_once_and_replaced_when_told() {
        let place = Place::new("own");
        let keys = place.keys();
        assert!(matches!(keys.identity(), Err(KeyError::NoIdentity)));
        assert!(keys.list().unwrap().is_empty());
        let first = keys.make("alice@here", 10 * DAY, false).unwrap();
        assert_eq!(first.subject(), "CN=alice@here");
        let lasts = first.valid_until() - now();
        assert!((10 * 86_400 - 60..=10 * 86_400).contains(&lasts), "{lasts}");
        assert!(matches!(keys.make("x", DAY, false), Err(KeyError::HasIdentity { .. })));
        assert_eq!(keys.identity().unwrap().certificate(), &first);
        let second = keys.make("alice@here", DAY, true).unwrap();
        assert_ne!(first.fingerprint(), second.fingerprint());
        assert_eq!(keys.list().unwrap(), [(Standing::Own, second)]);
        assert!(matches!(keys.make("x", 4_000_000 * DAY, true), Err(KeyError::NotMade { .. })));
    }

    #[test]
    fn keys_are_pinned_and_revoked_by_name() {
        let place = Place::new("pins");
        let keys = place.keys();
        let [alice, other] = ["alice", "other"].map(|of| certificate(of, 0, now() + 1000));
        let pem = alice.to_pem().unwrap();
        assert_eq!(keys.add(&name("alice"), pem.as_bytes()).unwrap(), alice);
        let known = keys.add(&name("bob"), pem.as_bytes());
        assert!(matches!(known, Err(KeyError::Known(of)) if of == name("alice")));
        let taken = keys.add(&name("alice"), other.to_pem().unwrap().as_bytes());
        assert!(matches!(taken, Err(KeyError::Taken(of)) if of == name("alice")));
        assert!(matches!(keys.revoke(&name("bob")), Err(KeyError::Missing(_))));

        assert_eq!(keys.revoke(&name("alice")).unwrap(), alice);
        assert!(matches!(keys.revoke(&name("alice")), Err(KeyError::Missing(_))));
        let again = keys.add(&name("bob"), pem.as_bytes());
        assert!(matches!(again, Err(KeyError::Revoked(of)) if of == name("alice")));
        // The name is free again, and what it had before stays revoked.
        keys.add(&name("alice"), other.to_pem().unwrap().as_bytes()).unwrap();
        keys.revoke(&name("alice")).unwrap();
        let standings = keys.list().unwrap().into_iter().map(|(standing, _)| standing);
        let revoked = Standing::Revoked(name("alice"));
        assert_eq!(standings.collect::<Vec<_>>(), [revoked.clone(), revoked]);
    }

    #[test]
    fn what_is_no_certificate_is_not_pinned() {
        let place = Place::new("nocert");
        let keys = place.keys();
        let add = |text: &[u8]| keys.add(&name("x"), text).unwrap_err();
        let own = Place::new("leaks");
        let good = own.keys().make("leaks", DAY, false).unwrap();
        let pem = good.to_pem().unwrap();
        let private = fs::read(own.path.join("keys/own.pem")).unwrap();
        assert!(matches!(add(&private), KeyError::PrivateInside));
        assert!(matches!(add(b""), KeyError::NoCertificate { .. }));
        assert!(matches!(add(&[0xff; 5000]), KeyError::NoCertificate { .. }));
        assert!(matches!(add(pem.repeat(2).as_bytes()), KeyError::NoCertificate { .. }));
        assert!(matches!(add(&pem.as_bytes()[..pem.len() / 2]), KeyError::NoCertificate { .. }));
        // Certificates of which a byte is another are none, or others, but nothing panics.
        let der = good.der();
        for at in 0..der.len() {
            let mut bytes = der.to_vec();
            bytes[at] ^= 0x55;
            if let Ok(read) = Certificate::from_der(bytes.into()) {
                assert_ne!(read.fingerprint(), good.fingerprint());
            }
        }
        let expired = certificate("old", 1_000_000, 1_000_100);
        let on = add(expired.to_pem().unwrap().as_bytes()).to_string();
        assert!(on.contains("expired on 1970-01-12T"), "{on}");
        assert!(keys.list().unwrap().is_empty());
    }

    #[test]
    fn limits_are_a_pinned_name_s_and_stay_with_it() {
        let place = Place::new("limits");
        let keys = place.keys();
        let alice = name("alice");
        let some = Limits { sessions: Some(3), ..Limits::default() };
        assert!(keys.limits(&alice).unwrap().is_empty());
        assert!(matches!(keys.limit(&alice, &some), Err(KeyError::Missing(_))));
        let pem = || certificate("alice", now() - 10, now() + 1000).to_pem().unwrap();
        keys.add(&alice, pem().as_bytes()).unwrap();
        keys.limit(&alice, &some).unwrap();
        assert_eq!(keys.limits(&alice).unwrap(), some);
        let file = place.path.join("keys/alice.limits");
        let mode = fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
        // Another key of the name is bound by them, too.
        keys.revoke(&alice).unwrap();
        assert_eq!(keys.limits(&alice).unwrap(), some);
        keys.add(&alice, pem().as_bytes()).unwrap();
        assert_eq!(keys.list().unwrap().len(), 2, "limits are no key");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(keys.limits(&alice), Err(KeyError::NotPrivate { .. })));
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("elsewhere", &file).unwrap();
        assert!(matches!(keys.limits(&alice), Err(KeyError::NotPrivate { .. })));
        fs::remove_file(&file).unwrap();
        keys.limit(&alice, &some).unwrap();
        fs::write(&file, "sessions many\n").unwrap();
        let said = keys.limits(&alice).unwrap_err().to_string();
        assert!(said.contains("alice.limits is damaged: line 1"), "{said}");
        keys.limit(&alice, &Limits::default()).unwrap();
        assert!(!file.exists() && keys.limits(&alice).unwrap().is_empty());
    }

    #[test]
    fn each_name_has_a_user_for_good() {
        let place = Place::new("users");
        let keys = place.keys();
        let user = |name: &Name, range| keys.user(name, range, |_| Ok(true));
        assert!(user(&name("alice"), 7..=8).is_err(), "no folder");
        keys.make("x", DAY, false).unwrap();
        assert_eq!(user(&name("bob"), 7..=8).unwrap(), 7);
        assert_eq!(user(&name("alice"), 7..=8).unwrap(), 8);
        assert_eq!(user(&name("bob"), 7..=8).unwrap(), 7);
        let none = user(&name("carol"), 7..=8).unwrap_err();
        assert!(matches!(none, KeyError::NoUser { first: 7, last: 8 }), "{none}");
        let beyond = user(&name("bob"), 8..=9).unwrap_err().to_string();
        assert!(beyond.contains("bob.user says 7"), "{beyond}");
        assert_eq!(user(&name("carol"), 7..=9).unwrap(), 9);
        let file = place.path.join("keys/bob.user");
        fs::write(&file, "0x7\n").unwrap();
        // Whose it is would not be known of the next one either.
        for of in ["bob", "dave"] {
            let said = user(&name(of), 7..=20).unwrap_err().to_string();
            assert!(said.contains("bob.user is damaged: no number"), "{said}");
        }
    }

    #[test]
    fn a_user_of_another_folder_is_passed_over() {
        let place = Place::new("claims");
        let keys = place.keys();
        keys.make("x", DAY, false).unwrap();
        let but = |of: &str, others: &[u32]| {
            keys.user(&name(of), 7..=9, |user| Ok(!others.contains(&user)))
        };
        assert_eq!((but("bob", &[7]).unwrap(), but("alice", &[7]).unwrap()), (8, 9));
        assert!(matches!(but("carol", &[7]), Err(KeyError::NoUser { .. })));
        // As of folders that were there before there were claims.
        assert!(matches!(but("bob", &[8]), Err(KeyError::UserTaken { user: 8, .. })));
        let broken = keys.user(&name("carol"), 7..=9, |_| Err(io::ErrorKind::Other.into()));
        assert!(matches!(broken, Err(KeyError::NotClaimed { user: 7, .. })));
    }

    #[test]
    fn keys_are_bounded_and_what_belongs_to_them_is_not() {
        let place = Place::new("many");
        let keys = place.keys();
        keys.make("x", DAY, false).unwrap();
        let put = |file: String, text: &[u8]| {
            let path = place.path.join("keys").join(file);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        };
        let [first, more] = ["first", "more"].map(|of| certificate(of, 0, now() + 1000));
        let pem = |of: &Certificate| of.to_pem().unwrap().into_bytes();
        // What names have that came and went.
        (0..MAX_KEYS).for_each(|number| put(format!("n{number}.limits"), b"sessions 1\n"));
        (0..50).for_each(|number| put(format!("n{number}.0f.revoked"), &pem(&first)));
        let add = |name: &str| keys.add(&name.parse().unwrap(), &pem(&more));
        assert_eq!(add("last").unwrap(), more);
        assert_eq!(keys.pins().unwrap().pinned.len(), 1);
        keys.revoke(&name("last")).unwrap();
        let other = pem(&certificate("other", 0, now() + 1000));
        (0..MAX_KEYS).for_each(|number| put(format!("n{number}.pinned"), &other));
        let third = pem(&certificate("third", 0, now() + 1000));
        let refused = keys.add(&name("beyond"), &third);
        assert!(matches!(refused, Err(KeyError::TooManyKeys { max: MAX_KEYS })));
        keys.revoke(&name("n7")).unwrap();
        keys.add(&name("beyond"), &third).unwrap();
    }

    #[test]
    fn a_damaged_file_is_named() {
        let place = Place::new("damage");
        let keys = place.keys();
        keys.make("x", DAY, false).unwrap();
        for file in ["own.pem", "alice.pinned", "alice.0f.revoked"] {
            let path = place.path.join("keys").join(file);
            let before = fs::read(&path).ok();
            let folder = Folder::open(&place.path.join("keys")).unwrap().unwrap();
            folder.write(file, b"-----BEGIN NONSENSE", true).unwrap();
            let said = keys.list().unwrap_err().to_string();
            assert!(said.contains(file) && said.contains("is damaged"), "{said}");
            match before {
                Some(before) => fs::write(&path, before).unwrap(),
                None => fs::remove_file(&path).unwrap(),
            }
        }
        // A key pair of which one half is another's is none.
        let other = Place::new("half");
        other.keys().make("y", DAY, false).unwrap();
        let text = |place: &Place| fs::read_to_string(place.path.join("keys/own.pem")).unwrap();
        let (certificate, key) = (text(&place), text(&other));
        let mixed = certificate.split_once("-----BEGIN PRIVATE").unwrap().0.to_owned()
            + key.split_once("-----END CERTIFICATE-----\n").unwrap().1;
        fs::write(place.path.join("keys/own.pem"), mixed).unwrap();
        assert!(matches!(keys.identity(), Err(KeyError::Damaged { .. })));
    }
}
