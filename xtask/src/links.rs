//! Links between the repository's pages lead somewhere: the file is there, and so is the heading.

use std::collections::{HashMap, HashSet};
use std::path::{Component, Path, PathBuf};
use std::process::Command;

/// Fails with the links of Markdown pages that lead nowhere.
///
/// # Errors
/// Names each such link with its page and line; or what could not be read.
pub(crate) fn check(root: &Path) -> Result<(), String> {
    let listed = Command::new("git").arg("-C").arg(root).arg("ls-files").output();
    let listed = listed.map_err(|error| format!("git ls-files: {error}"))?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let mut pages = HashMap::new();
    for page in listed.lines().filter(|file| file.ends_with(".md")) {
        // One that is removed and not yet committed is listed still.
        let Ok(text) = std::fs::read_to_string(root.join(page)) else { continue };
        pages.insert(PathBuf::from(page), text);
    }
    let exists = |path: &Path| root.join(path).exists();
    match dead(&pages, exists).as_slice() {
        [] => Ok(()),
        dead => Err(format!("links that lead nowhere:\n{}", dead.join("\n"))),
    }
}

/// Returns `page:line: link` for each link that leads nowhere, sorted.
fn dead(pages: &HashMap<PathBuf, String>, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let headings: HashMap<_, _> = pages.iter().map(|(page, text)| (page, headings(text))).collect();
    let mut dead = Vec::new();
    for (page, text) in pages {
        for (line, link) in links(text) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => page.clone(),
                file => normal(&page.parent().unwrap_or(Path::new("")).join(file)),
            };
            let is_known = headings.get(&target).is_none_or(|known| known.contains(heading));
            if !exists(&target) || !(heading.is_empty() || is_known) {
                dead.push(format!("{}:{line}: {link}", page.display()));
            }
        }
    }
    dead.sort();
    dead
}

/// A path without `..`, which leads out of no link's folder.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            part => normal.push(part),
        }
    }
    normal
}

/// Lines of a page that are no code, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        let is_prose = !code && !fence && !line.starts_with("    ");
        is_prose.then_some((index + 1, line))
    })
}

/// The links of a page to files and headings of the repository, with their lines.
fn links(text: &str) -> Vec<(usize, &str)> {
    let mut links = Vec::new();
    for (number, line) in prose(text) {
        // What stands between backquotes is code.
        for part in line.split('`').step_by(2) {
            let ends = part.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
            links.extend(ends.map(|(link, _)| (number, link)));
        }
        // A link whose text ends with code begins behind a backquote.
        let behind = line.split("`](").skip(1).filter_map(|rest| rest.split_once(')'));
        links.extend(behind.map(|(link, _)| (number, link)));
    }
    links.retain(|(_, link)| !link.contains("://") && !link.starts_with("mailto:"));
    links.sort_unstable();
    links.dedup();
    links
}

/// The headings of a page as links name them: lower case, words joined by dashes.
fn headings(text: &str) -> HashSet<String> {
    let titles = prose(text).filter_map(|(_, line)| line.strip_prefix('#'));
    let name = |title: &str| -> String {
        let title = title.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    titles.map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_that_lead_nowhere_are_told() {
        let a = "# A page\n[b](docs/b.md) [b](docs/b.md#two-words-c) [x](docs/b.md#none)\n\
                 [gone](gone.md) [web](https://a/b) `[code](x)` [`c`](docs/c.rs)\n\
                 ```\n[code](x)\n```\n[here](#a-page) [there](#there)\n";
        let b = "## Two words, (`C`)!\n[up](../a.md) [up](../../out.md)\n";
        let pages = HashMap::from([
            (PathBuf::from("a.md"), a.to_owned()),
            (PathBuf::from("docs/b.md"), b.to_owned()),
        ]);
        let there = ["a.md", "docs/b.md", "docs/c.rs"].map(PathBuf::from);
        let dead = dead(&pages, |path| there.iter().any(|one| one == path));
        let want = [
            "a.md:2: docs/b.md#none",
            "a.md:3: gone.md",
            "a.md:7: #there",
            "docs/b.md:2: ../../out.md",
        ];
        assert_eq!(dead, want);
    }
}
