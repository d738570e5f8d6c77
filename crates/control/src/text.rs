//! Text of others that a terminal is shown.

/// Returns `text` with nothing in it that a terminal would obey.
pub fn harmless(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\t' { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terminals_are_given_no_orders() {
        assert_eq!(harmless("a\x1b[2Jb\tc\r"), "a [2Jb\tc ");
    }
}
