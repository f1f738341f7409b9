//! The questions and remarks of the simulated user, written for this project.

fn lines(text: &'static str) -> Vec<&'static str> {
    text.lines()
        .map(str::trim)
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
        .collect()
}

/// Questions that sessions begin with.
pub fn training() -> Vec<&'static str> {
    lines(include_str!("../data/brief-train.txt"))
}

/// Questions on other topics, never trained on.
pub fn held_out() -> Vec<&'static str> {
    lines(include_str!("../data/brief-heldout.txt"))
}

/// What the user says to a reply that is too long.
pub fn complaints() -> Vec<&'static str> {
    lines(include_str!("../data/complaints-brief.txt"))
}

/// What the user says when it fits.
pub fn thanks() -> Vec<&'static str> {
    lines(include_str!("../data/thanks.txt"))
}

/// Remarks about an unrelated preference, for the control.
pub fn unrelated() -> Vec<&'static str> {
    lines(include_str!("../data/coin-hints.txt"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn there_are_enough_and_none_is_in_both() {
        let train: HashSet<_> = training().into_iter().collect();
        let held: HashSet<_> = held_out().into_iter().collect();
        assert!(
            train.len() >= 150 && held.len() >= 100,
            "{} {}",
            train.len(),
            held.len()
        );
        assert_eq!(train.len(), training().len());
        assert_eq!(held.len(), held_out().len());
        assert!(train.is_disjoint(&held));
        assert!(complaints().len() >= 40 && thanks().len() >= 40 && unrelated().len() >= 40);
    }
}
