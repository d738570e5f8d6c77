//! The keys: what each does, and what the help says of it.

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// What a key does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Up,
    Down,
    First,
    Last,
    Checkpoint,
    Swap,
    End,
    Order,
    Reverse,
    All,
    Redraw,
    Help,
    Quit,
    /// As [`Action::Quit`], whatever is asked just now.
    Interrupt,
}

/// A row of the table.
pub(crate) struct Key {
    codes: &'static [KeyCode],
    control: bool,
    /// As the help names them.
    pub(crate) shown: &'static str,
    /// In one word, for the last line; nothing where that has no room for it.
    pub(crate) word: &'static str,
    pub(crate) does: &'static str,
    action: Action,
}

const fn key(
    codes: &'static [KeyCode],
    shown: &'static str,
    word: &'static str,
    does: &'static str,
    action: Action,
) -> Key {
    Key { codes, control: false, shown, word, does, action }
}

const fn control(
    codes: &'static [KeyCode],
    shown: &'static str,
    does: &'static str,
    action: Action,
) -> Key {
    Key { codes, control: true, shown, word: "", does, action }
}

/// All of them, in the order of the help.
pub(crate) const KEYS: [Key; 14] = [
    key(&[KeyCode::Up, KeyCode::Char('k')], "Up k", "", "choose the job above", Action::Up),
    key(&[KeyCode::Down, KeyCode::Char('j')], "Down j", "", "choose the job below", Action::Down),
    key(&[KeyCode::Home, KeyCode::Char('g')], "Home g", "", "choose the first", Action::First),
    key(&[KeyCode::End, KeyCode::Char('G')], "End G", "", "choose the last", Action::Last),
    key(&[KeyCode::Char('c')], "c", "checkpoint", "checkpoint the job", Action::Checkpoint),
    key(
        &[KeyCode::Char('s')],
        "s",
        "swap",
        "swap its device memory out, or in again",
        Action::Swap,
    ),
    key(&[KeyCode::Char('x')], "x", "end", "end the job; asks first", Action::End),
    key(&[KeyCode::Char('o')], "o", "order", "sort by the next column", Action::Order),
    key(&[KeyCode::Char('r')], "r", "", "turn the order round", Action::Reverse),
    key(&[KeyCode::Char('a')], "a", "all", "ended jobs too, or not", Action::All),
    control(&[KeyCode::Char('l')], "Ctrl-L", "draw the screen anew", Action::Redraw),
    key(&[KeyCode::Char('?'), KeyCode::Char('h')], "? h", "help", "this help", Action::Help),
    key(&[KeyCode::Char('q')], "q", "quit", "quit", Action::Quit),
    control(&[KeyCode::Char('c')], "Ctrl-C", "quit", Action::Interrupt),
];

/// What a key does, if anything.
pub(crate) fn action(key: KeyEvent) -> Option<Action> {
    if key.kind == KeyEventKind::Release || key.modifiers.contains(KeyModifiers::ALT) {
        return None;
    }
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    let row = KEYS.iter().find(|row| row.control == control && row.codes.contains(&key.code));
    row.map(|row| row.action)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn press(code: KeyCode, modifiers: KeyModifiers) -> Option<Action> {
        action(KeyEvent::new(code, modifiers))
    }

    #[test]
    fn each_key_does_one_thing() {
        let mut all: Vec<(KeyCode, bool)> = Vec::new();
        for row in &KEYS {
            for code in row.codes {
                assert!(!all.contains(&(*code, row.control)), "{code:?} is there twice");
                all.push((*code, row.control));
            }
        }
    }

    #[test]
    fn a_modifier_makes_another_key() {
        let (none, control) = (KeyModifiers::NONE, KeyModifiers::CONTROL);
        assert_eq!(press(KeyCode::Char('c'), none), Some(Action::Checkpoint));
        assert_eq!(press(KeyCode::Char('c'), control), Some(Action::Interrupt));
        assert_eq!(press(KeyCode::Char('G'), KeyModifiers::SHIFT), Some(Action::Last));
        assert_eq!(press(KeyCode::Char('x'), KeyModifiers::ALT), None);
        assert_eq!(press(KeyCode::Char('k'), none), Some(Action::Up), "k kills nothing");
        assert_eq!(press(KeyCode::Esc, none), None);
    }
}
