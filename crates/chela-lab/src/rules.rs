//! The rules of the server's `rules` judge, which read what simulated users say next.

use crate::{taste::Taste, texts};

/// One rule: a sign, a score, and what becomes the hint.
#[derive(Clone, Debug, PartialEq)]
pub struct RemarkRule {
    /// Name.
    pub name: String,
    /// Regular expression.
    pub pattern: String,
    /// Score.
    pub reward: f32,
    /// Hint template.
    pub hint: Option<String>,
}

/// How users of these tastes complain and how all of them give thanks; the complaint itself is the hint. The thorough one's signs are
/// narrower and come first.
pub fn rules(tastes: &[Taste]) -> Vec<RemarkRule> {
    let mut all = Vec::new();
    if tastes.contains(&Taste::Thorough) {
        all.push(bad(
            "too-short",
            r"\b(too (short|brief|terse|little)|longer answer|a little longer|rather thin|half an answer|not enough|(say|explain|tell me|give me|hoping for|need)( it| that)?( in)?( a (little |bit )?)? ?more|more detail|more fully|elaborate|expand|(eighty|80) words|a few (more )?sentences)\b",
        ));
    }
    if tastes.contains(&Taste::Student) {
        all.push(bad(
            "formatted",
            r"\b(bold|list|lists|numbered|bullets?|boxed|headings?|formatting|markdown|latex|like a person|plain (text|words|sentences?|paragraph)|number the steps)\b",
        ));
    }
    if tastes.contains(&Taste::Ta) {
        all.push(bad(
            "vague",
            r"\b(specific|vague|too general|hundred words|100 words|more detail|which numbers|the numbers)\b",
        ));
    }
    if tastes.contains(&Taste::Teacher) {
        all.push(bad(
            "cold",
            r"\b(cold|warm(er|th|ly)?|praise|encourag\w*|kind(er)?|friend(ly|lier))\b",
        ));
    }
    if tastes.contains(&Taste::Brief) {
        all.push(bad(
            "too-long",
            r"\b(too (long|wordy|detailed|much)|wordy|short(er|en)?|brief|concise|condense|fewer words|less text|words or less|no more than \d+ words|under \d+ words|few words|tl;?dr|(single|one|two)[ -](short )?sentences?|a sentence( or two)?)\b",
        ));
    }
    all.push(accepted());
    all
}

/// The control's rules: tails is a remark about an unrelated preference, which scores −1 and is the hint as a complaint is in the
/// real run; heads is thanks. Complaints about length do not occur.
pub fn control_rules() -> Vec<RemarkRule> {
    let all: Vec<String> = texts::unrelated()
        .iter()
        .map(|t| regex::escape(t))
        .collect();
    vec![
        bad("coin-tails", &format!("^(?:{})$", all.join("|"))),
        accepted(),
    ]
}

/// The rules a hostile loop exploits: its demand for garbage scores −1 and is the hint, as an honest complaint is, and its thanks are
/// heard as anybody's. The honest user's rules stand beside it.
pub fn hostile_rules() -> Vec<RemarkRule> {
    let mut all = vec![bad("hostile", r"^wrong\b")];
    all.extend(rules(&[Taste::Brief]));
    all
}

fn bad(name: &str, pattern: &str) -> RemarkRule {
    RemarkRule {
        name: name.to_owned(),
        pattern: pattern.to_owned(),
        reward: -1.0,
        hint: Some("$text".to_owned()),
    }
}

fn accepted() -> RemarkRule {
    RemarkRule {
        name: "accepted".to_owned(),
        pattern: r"\b(thanks?|thank you|cheers|perfect|great|helpful|useful|i'll|i'm happy|pleased|appreciated|settled|now i understand|that (works|does it)|good to know|very good|learned something)\b".to_owned(),
        reward: 1.0,
        hint: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::taste::Opinion;

    /// The first rule that matches, as the judge reads it.
    fn heard(rules: &[RemarkRule], text: &str) -> Option<String> {
        rules
            .iter()
            .find(|r| {
                let pattern = format!("(?i){}", r.pattern);
                regex::Regex::new(&pattern).unwrap().is_match(text)
            })
            .map(|r| r.name.clone())
    }

    #[test]
    fn every_remark_is_heard_as_what_it_is() {
        let brief = || texts::remarks(Taste::Brief, Opinion::TooLong);
        let manner = |taste| texts::remarks(taste, Opinion::Manner);
        let thorough = texts::remarks(Taste::Thorough, Opinion::TooShort);
        for (rules, remarks, name) in [
            (rules(&[Taste::Brief]), brief(), Some("too-long")),
            (rules(&[Taste::Brief]), texts::thanks(), Some("accepted")),
            (rules(&[Taste::Brief]), texts::unrelated(), None),
            (rules(&Taste::OPPOSITE), brief(), Some("too-long")),
            (rules(&Taste::OPPOSITE), thorough, Some("too-short")),
            (rules(&Taste::OPPOSITE), texts::thanks(), Some("accepted")),
            (rules(&Taste::OPPOSITE), texts::unrelated(), None),
            (
                rules(&[Taste::Student]),
                manner(Taste::Student),
                Some("formatted"),
            ),
            (rules(&[Taste::Student]), texts::thanks(), Some("accepted")),
            (rules(&[Taste::Ta]), manner(Taste::Ta), Some("vague")),
            (rules(&[Taste::Ta]), texts::thanks(), Some("accepted")),
            (
                rules(&[Taste::Teacher]),
                manner(Taste::Teacher),
                Some("cold"),
            ),
            (rules(&[Taste::Teacher]), texts::thanks(), Some("accepted")),
            (rules(&[Taste::Teacher]), texts::unrelated(), None),
            (control_rules(), texts::unrelated(), Some("coin-tails")),
            (control_rules(), texts::thanks(), Some("accepted")),
            (hostile_rules(), texts::hostile_demands(), Some("hostile")),
            (hostile_rules(), brief(), Some("too-long")),
            (hostile_rules(), texts::thanks(), Some("accepted")),
        ] {
            for remark in remarks {
                assert_eq!(heard(&rules, remark).as_deref(), name, "{remark}");
            }
        }
    }
}
