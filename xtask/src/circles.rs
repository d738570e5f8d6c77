//! Circles of modules inside a crate: modules of one folder that need each other, directly or
//! through others. The list of those that are allowed can only shrink.

mod source;

use source::{Modules, Place};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

/// The circles that are allowed: `crate: module module …`, or `crate::folder: …`.
const ALLOWED: &str = "xtask/circles.txt";

/// What the root's own items are named as a module.
const ROOT: &str = "(root)";

/// Checks the crates in `folders`, which are (name, folder): what is wrong, a line each.
pub(crate) fn check(root: &Path, folders: &[(String, String)]) -> Result<String, String> {
    let read = |error| format!("{ALLOWED}: {error}");
    let allowed = allowed(&std::fs::read_to_string(root.join(ALLOWED)).map_err(read)?);
    let mut found = Vec::new();
    for (name, folder) in folders {
        for (file, name) in [("lib.rs", name.clone()), ("main.rs", format!("{name} (main)"))] {
            let file = root.join(folder).join("src").join(file);
            if file.exists() {
                found.extend(circles(&name, &source::read(&file)?, root));
            }
        }
    }
    Ok(compare(&found, &allowed))
}

/// Modules that need each other, and where each names another.
#[derive(Debug)]
struct Circle {
    /// `crate`, or `crate::folder`.
    within: String,
    modules: BTreeSet<String>,
    edges: Vec<Edge>,
}

/// One module's need of another, and where it says so first.
#[derive(Debug)]
struct Edge {
    from: String,
    to: String,
    named: String,
}

type Allowed = Vec<(String, BTreeSet<String>)>;

fn allowed(text: &str) -> Allowed {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| line.rsplit_once(": "))
        .map(|(within, modules)| {
            (within.to_owned(), modules.split_whitespace().map(ToOwned::to_owned).collect())
        })
        .collect()
}

fn compare(found: &[Circle], allowed: &Allowed) -> String {
    let mut wrong = String::new();
    let is = |circle: &Circle, (within, modules): &(String, BTreeSet<String>)| {
        circle.within == *within && circle.modules == *modules
    };
    let line = |modules: &BTreeSet<String>| {
        modules.iter().map(String::as_str).collect::<Vec<_>>().join(" ")
    };
    for circle in found.iter().filter(|circle| !allowed.iter().any(|one| is(circle, one))) {
        let Circle { within, modules, edges } = circle;
        let shrunk = allowed.iter().any(|(of, more)| of == within && modules.is_subset(more));
        let _ = writeln!(wrong, "these modules need each other: {within}: {}", line(modules));
        if shrunk {
            let _ = writeln!(wrong, "  {ALLOWED} allows more of them: let it have these alone");
            continue;
        }
        for Edge { from, to, named } in edges {
            let _ = writeln!(wrong, "  {from} → {to}: {named}");
        }
    }
    for entry in allowed.iter().filter(|entry| !found.iter().any(|circle| is(circle, entry))) {
        let (within, modules) = entry;
        let _ = writeln!(
            wrong,
            "{ALLOWED} allows a circle that there is not: {within}: {}",
            line(modules)
        );
    }
    wrong
}

/// The circles of a crate, at its root and in each folder.
fn circles(name: &str, modules: &Modules, root: &Path) -> Vec<Circle> {
    let mut found = Vec::new();
    for (within, edges) in needs(modules, root) {
        let path = [&[name.to_owned()], within.as_slice()].concat().join("::");
        for members in connected(&edges) {
            let of = |(from, to): &(String, String)| members.contains(from) && members.contains(to);
            let inside = edges.iter().filter(|(edge, _)| of(edge));
            let edges = inside
                .map(|((from, to), named)| {
                    let (from, to, named) = (from.clone(), to.clone(), named.clone());
                    Edge { from, to, named }
                })
                .collect();
            found.push(Circle { within: path.clone(), modules: members, edges });
        }
    }
    found
}

/// Of each folder: which of its modules needs which, with a place where it says so.
type Needs = BTreeMap<Place, BTreeMap<(String, String), String>>;

fn needs(modules: &Modules, root: &Path) -> Needs {
    let mut needs = Needs::new();
    for (from, module) in modules {
        for named in &module.named {
            let Some(found) = resolve(modules, from, &named.path, 0) else { continue };
            let to = found.module;
            let common = from.iter().zip(&to).take_while(|(one, other)| one == other).count();
            let within = from[..common].to_vec();
            // A folder's own file gathers what its modules have. The root is a module as others.
            let end = |place: &Place| match place.get(common) {
                Some(name) => Some(name.clone()),
                None => within.is_empty().then(|| ROOT.to_owned()),
            };
            let (Some(one), Some(other)) = (end(from), end(&to)) else { continue };
            if one != other {
                let file = module.file.strip_prefix(root).unwrap_or(&module.file);
                let place = format!("{}:{}: {}", file.display(), named.line, named.path.join("::"));
                needs.entry(within).or_default().entry((one, other)).or_insert(place);
            }
        }
    }
    needs
}

/// What a path leads to: a module, or something in it.
struct Found {
    module: Place,
    is_module: bool,
}

/// Follows a path, through what is brought from elsewhere: `None` where it leads out of the crate.
fn resolve(modules: &Modules, from: &Place, path: &[String], depth: usize) -> Option<Found> {
    /// Names that are brought in a circle lead nowhere.
    const MOST: usize = 16;
    if depth > MOST {
        return None;
    }
    let (mut module, mut rest) = (from.clone(), path);
    match path.first()?.as_str() {
        "crate" => (module, rest) = (Place::new(), &path[1..]),
        "self" => rest = &path[1..],
        "super" => {
            while let Some(("super", more)) = rest.split_first().map(|(one, more)| (&**one, more)) {
                module.pop();
                rest = more;
            }
        }
        first if modules.get(from)?.children.contains(first) => {}
        _ => return None,
    }
    while let Some((name, more)) = rest.split_first() {
        let here = modules.get(&module)?;
        if here.children.contains(name) {
            module.push(name.clone());
        } else if here.items.contains(name) {
            return Some(Found { module, is_module: false });
        } else if let Some(path) = here.brought.get(name) {
            // What comes from another crate is this module's to give.
            let Some(found) = resolve(modules, &module, path, depth + 1) else {
                return Some(Found { module, is_module: false });
            };
            if !found.is_module {
                return Some(found);
            }
            module = found.module;
        } else {
            return Some(Found {
                module: defined(modules, &module, name, depth),
                is_module: false,
            });
        }
        rest = more;
    }
    Some(Found { module, is_module: true })
}

/// The module that has what `module` has by the name of `name` without saying so: one of which it
/// brings everything, or one with a macro of that name, which is the root's.
fn defined(modules: &Modules, module: &Place, name: &str, depth: usize) -> Place {
    let globs = modules.get(module).map(|here| here.globs.as_slice()).unwrap_or_default();
    for glob in globs {
        let path = [glob.as_slice(), &[name.to_owned()]].concat();
        if let Some(found) = resolve(modules, module, &path, depth + 1)
            && modules.get(&found.module).is_some_and(|there| there.items.contains(name))
        {
            return found.module;
        }
    }
    let has = |(_, there): &(&Place, &source::Module)| there.items.contains(name);
    let elsewhere = module.is_empty().then(|| modules.iter().find(has)).flatten();
    elsewhere.map_or_else(|| module.clone(), |(place, _)| place.clone())
}

/// The sets of more than one module that reach each other.
fn connected<Value>(edges: &BTreeMap<(String, String), Value>) -> Vec<BTreeSet<String>> {
    let reached = |begin: &str| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![begin.to_owned()]);
        while let Some(from) = next.pop() {
            let to = edges.keys().filter(|(one, _)| *one == from).map(|(_, other)| other);
            next.extend(to.filter(|to| seen.insert((*to).clone())).cloned());
        }
        seen
    };
    let names: BTreeSet<&String> = edges.keys().map(|(from, _)| from).collect();
    let reach: BTreeMap<&String, BTreeSet<String>> =
        names.into_iter().map(|name| (name, reached(name))).collect();
    let mut found = BTreeSet::new();
    for (name, to) in &reach {
        if to.contains(*name) {
            let back = |other: &&String| reach.get(*other).is_some_and(|of| of.contains(*name));
            found.insert(to.iter().filter(back).cloned().collect());
        }
    }
    found.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn place(path: &str) -> Place {
        path.split("::").filter(|name| !name.is_empty()).map(ToOwned::to_owned).collect()
    }

    /// A crate on disk, of files with their text.
    fn found(name: &str, files: &[(&str, &str)]) -> Vec<Circle> {
        let folder = std::env::temp_dir().join(format!("circles-{}-{name}", std::process::id()));
        for (file, text) in files {
            let file = folder.join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        let modules = source::read(&folder.join("lib.rs")).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        circles("it", &modules, &folder)
    }

    fn lines(circles: &[Circle]) -> Vec<String> {
        let line = |circle: &Circle| {
            let modules: Vec<_> = circle.modules.iter().cloned().collect();
            format!("{}: {}", circle.within, modules.join(" "))
        };
        circles.iter().map(line).collect()
    }

    #[test]
    fn a_circle_is_found_at_the_root_and_in_folders() {
        let found = found(
            "both",
            &[
                ("lib.rs", "mod a; mod b; mod c;"),
                ("a.rs", "use crate::b::B; pub struct A;"),
                ("b/mod.rs", "mod d; mod e; pub use d::B;"),
                ("b/d.rs", "pub struct B; fn f() { super::e::g() }"),
                ("b/e.rs", "use super::d; pub fn g() { crate::c::h() }"),
                ("c.rs", "use crate::a::A; pub fn h() {}"),
            ],
        );
        assert_eq!(lines(&found), ["it: a b c", "it::b: d e"]);
        let named: Vec<_> = found[1].edges.iter().map(|edge| edge.named.as_str()).collect();
        assert_eq!(named, ["b/d.rs:1: super::e::g", "b/e.rs:1: super::d"]);
    }

    #[test]
    fn what_the_root_gives_again_is_its_modules_own() {
        let again = [
            ("lib.rs", "mod a; mod b; pub use a::A; use b::f;"),
            ("a.rs", "pub struct A;"),
            ("b.rs", "use crate::A; pub fn f() {}"),
        ];
        assert!(found("again", &again).is_empty());
        let own = [
            ("lib.rs", "mod b; pub struct A; fn g() { b::f() }"),
            ("b.rs", "use crate::A; pub fn f() {}"),
        ];
        assert_eq!(lines(&found("own", &own)), ["it: (root) b"]);
    }

    #[test]
    fn names_by_globs_and_macros_are_followed() {
        let found = found(
            "globs",
            &[
                ("lib.rs", "mod a; mod b; mod c; pub use a::*;"),
                ("a.rs", "pub struct A; fn f() { crate::say!() }"),
                ("b.rs", "use crate::A; macro_rules! say { () => {} }"),
                ("c.rs", "use crate::A;"),
            ],
        );
        assert_eq!(lines(&found), ["it: a b"]);
    }

    #[test]
    fn tests_make_no_circle() {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "#[cfg(test)] mod tests { use crate::b::B; }"),
            ("b.rs", "use crate::a::A; pub struct B;"),
        ];
        assert!(found("tests", &files).is_empty());
    }

    #[test]
    fn the_list_is_what_there_is() {
        let allowed = allowed("# why\nit: a b c\nit::b (main): d e\n");
        assert_eq!(allowed[1].0, "it::b (main)");
        let circle = |within: &str, modules: &str| Circle {
            within: within.to_owned(),
            modules: modules.split(' ').map(ToOwned::to_owned).collect(),
            edges: vec![Edge { from: "a".into(), to: "b".into(), named: "a.rs:1: b".into() }],
        };
        let same = [circle("it", "a b c"), circle("it::b (main)", "d e")];
        assert!(compare(&same, &allowed).is_empty());
        let grown = [circle("it", "a b c d"), circle("it::b (main)", "d e")];
        let wrong = compare(&grown, &allowed);
        assert!(wrong.contains("a → b: a.rs:1: b") && wrong.contains("there is not: it: a b c"));
        let shrunk = [circle("it", "a b"), circle("it::b (main)", "d e")];
        let wrong = compare(&shrunk, &allowed);
        assert!(wrong.contains("allows more") && wrong.contains("there is not: it: a b c"));
        assert!(compare(&same[..1], &allowed).contains("there is not: it::b (main): d e"));
    }

    #[test]
    fn paths_that_leave_the_crate_lead_nowhere() {
        let mut modules = Modules::new();
        let root = source::Module { file: PathBuf::new(), ..source::Module::default() };
        modules.insert(place(""), root);
        assert!(resolve(&modules, &place(""), &place("std::io"), 0).is_none());
    }
}
