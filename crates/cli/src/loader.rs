//! What the dynamic loader knows without being told.

use std::path::PathBuf;
use std::process::Command;

/// The libraries in `ldconfig -p`'s list for this kind of machine: name and path, in its order.
/// None of them where there is no such list.
pub(crate) fn libraries() -> Vec<(String, PathBuf)> {
    let list = |program| Command::new(program).arg("-p").output();
    let output = list("ldconfig").or_else(|_| list("/sbin/ldconfig"));
    output.map(|output| listed(&String::from_utf8_lossy(&output.stdout))).unwrap_or_default()
}

fn listed(text: &str) -> Vec<(String, PathBuf)> {
    let lines = text.lines().filter(|line| line.contains("x86-64"));
    let pairs = lines.filter_map(|line| {
        let (name, path) = line.split_once(" => ")?;
        let name = name.split_whitespace().next()?;
        Some((name.to_owned(), PathBuf::from(path.trim())))
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loader_s_list_is_understood() {
        let list = "3 libs found in cache\n\
                    \tlibm.so.6 (libc6,x86-64, OS ABI: Linux 3.2.0) => /lib/libm.so.6\n\
                    \tlibm.so.6 (libc6,x86-64) => /opt/libm.so.6\n\
                    \tlibm.so.6 (libc6) => /lib/i386-linux-gnu/libm.so.6\n";
        let named = |path: &str| ("libm.so.6".to_owned(), PathBuf::from(path));
        assert_eq!(listed(list), [named("/lib/libm.so.6"), named("/opt/libm.so.6")]);
    }
}
