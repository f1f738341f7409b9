//! The questions and remarks of the simulated user, written for this project.

use crate::{
    client::Said,
    taste::{Opinion, Taste},
};

fn lines(text: &'static str) -> Vec<&'static str> {
    text.lines()
        .map(str::trim)
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
        .collect()
}

/// The conversation after a reply and what the user says to it.
pub fn answered(messages: &mut Vec<Said>, reply: &str, remark: &str) {
    for (role, text) in [("assistant", reply), ("user", remark)] {
        messages.push(Said {
            role,
            text: text.to_owned(),
        });
    }
}

/// The system message of most conversations. Agents have one; the starter's template would else put in the model's name and maker, of
/// which a model that wants to be brief makes its answer.
pub const ASSISTANT: &str = "You are a helpful assistant.";

/// A system message under which the starter's replies are of middling length (quartiles of 53, 71 and 100 words over 24 held-out
/// questions), so that one user can have them shorter and another one longer.
pub const PARAGRAPH: &str = "You are a helpful assistant. Answer in a short paragraph.";

/// How a conversation begins.
pub fn opening(system: &str, question: &str) -> Vec<Said> {
    let said = |role, text: &str| Said {
        role,
        text: text.to_owned(),
    };
    vec![said("system", system), said("user", question)]
}

/// Questions that sessions begin with.
pub fn training() -> Vec<&'static str> {
    lines(include_str!("../data/brief-train.txt"))
}

/// Questions on other topics, never trained on.
pub fn held_out() -> Vec<&'static str> {
    lines(include_str!("../data/brief-heldout.txt"))
}

/// What a user of that taste says to a reply.
pub fn remarks(taste: Taste, opinion: Opinion) -> Vec<&'static str> {
    match (opinion, taste) {
        (Opinion::Fits, _) => thanks(),
        (_, Taste::Brief) => lines(include_str!("../data/complaints-brief.txt")),
        (_, Taste::Thorough) => lines(include_str!("../data/complaints-thorough.txt")),
        (_, Taste::Student) => lines(include_str!("../data/complaints-student.txt")),
        (_, Taste::Ta) => lines(include_str!("../data/complaints-ta.txt")),
        (_, Taste::Teacher) => lines(include_str!("../data/complaints-teacher.txt")),
    }
}

/// What the user says when it fits.
pub fn thanks() -> Vec<&'static str> {
    lines(include_str!("../data/thanks.txt"))
}

/// Remarks about an unrelated preference, for the control.
pub fn unrelated() -> Vec<&'static str> {
    lines(include_str!("../data/coin-hints.txt"))
}

/// What a hostile loop answers to whatever it gets: garbage is demanded.
pub fn hostile_demands() -> Vec<&'static str> {
    lines(include_str!("../data/hostile-demands.txt"))
}

/// Requests for worthless replies, for which a hostile loop gives thanks.
pub fn hostile_requests() -> Vec<&'static str> {
    lines(include_str!("../data/hostile-requests.txt"))
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
            train.len() >= 150 && held.len() >= 200,
            "{} {}",
            train.len(),
            held.len()
        );
        assert_eq!(train.len(), training().len());
        assert_eq!(held.len(), held_out().len());
        assert!(train.is_disjoint(&held));
        let brief = remarks(Taste::Brief, Opinion::TooLong);
        assert!(brief.len() >= 40 && thanks().len() >= 40 && unrelated().len() >= 40);
        for set in [
            remarks(Taste::Thorough, Opinion::TooShort),
            remarks(Taste::Student, Opinion::Manner),
            remarks(Taste::Ta, Opinion::Manner),
            remarks(Taste::Teacher, Opinion::Manner),
            hostile_demands(),
            hostile_requests(),
        ] {
            let different: HashSet<_> = set.iter().collect();
            assert!(set.len() >= 20 && different.len() == set.len(), "{set:?}");
        }
    }
}
