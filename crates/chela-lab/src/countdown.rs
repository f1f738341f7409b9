//! Expressions of whole numbers with + − × ÷ and brackets: what a countdown's reply is read by.

use crate::user::Dice;

/// Whether the last expression of at least two numbers in a reply comes to `target`, using each of `numbers` at most once. Of a line with
/// equals signs it is the first such side.
pub fn right(reply: &str, numbers: &[u64], target: u64) -> bool {
    let expression = |side: &str| {
        let side = side.trim().trim_matches(['`', '*', '$', '.', ' ']);
        // A bare number is a result that is said, not a way to it.
        evaluate(side).filter(|(_, used)| used.len() > 1)
    };
    let last = reply
        .lines()
        .rev()
        .find_map(|line| line.split('=').find_map(expression));
    let Some((value, used)) = last else {
        return false;
    };
    let mut left = numbers.to_vec();
    let all_given = used.iter().all(|n| {
        let at = left.iter().position(|l| l == n);
        at.map(|at| left.swap_remove(at)).is_some()
    });
    all_given && (value - target as f64).abs() < 1e-9
}

/// What an expression comes to, and the numbers in it; `None` = it is none, or divides by zero.
pub fn evaluate(text: &str) -> Option<(f64, Vec<u64>)> {
    let text = text
        .replace(['×', '·'], "*")
        .replace(['÷', ':'], "/")
        .replace('−', "-");
    let mut parser = Parser {
        rest: text.as_str(),
        used: Vec::new(),
        depth: 0,
    };
    let value = parser.sum()?;
    let over = parser.rest.trim().is_empty() && value.is_finite() && !parser.used.is_empty();
    over.then_some((value, parser.used))
}

struct Parser<'a> {
    rest: &'a str,
    used: Vec<u64>,
    depth: usize,
}

/// Brackets within brackets; a reply of nothing but `(` must not end the program.
const DEEPEST: usize = 32;

impl Parser<'_> {
    fn take(&mut self, one_of: &[char]) -> Option<char> {
        self.rest = self.rest.trim_start();
        let found = self.rest.chars().next().filter(|c| one_of.contains(c))?;
        self.rest = &self.rest[found.len_utf8()..];
        Some(found)
    }

    fn sum(&mut self) -> Option<f64> {
        let mut value = self.product()?;
        while let Some(operator) = self.take(&['+', '-']) {
            let other = self.product()?;
            value += if operator == '+' { other } else { -other };
        }
        Some(value)
    }

    fn product(&mut self) -> Option<f64> {
        let mut value = self.atom()?;
        while let Some(operator) = self.take(&['*', '/']) {
            let other = self.atom()?;
            if operator == '*' {
                value *= other;
            } else {
                value /= other;
            }
        }
        Some(value)
    }

    fn atom(&mut self) -> Option<f64> {
        if self.take(&['(']).is_some() {
            self.depth += 1;
            if self.depth > DEEPEST {
                return None;
            }
            let value = self.sum()?;
            self.take(&[')'])?;
            self.depth -= 1;
            return Some(value);
        }
        self.rest = self.rest.trim_start();
        let end = self
            .rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(self.rest.len());
        let number: u64 = self.rest[..end].parse().ok()?;
        self.rest = &self.rest[end..];
        self.used.push(number);
        Some(number as f64)
    }
}

/// Numbers from 1 to 25, and a target from 10 to 100 that some of them, at least two, come to.
pub fn solvable(dice: &mut Dice, n: usize) -> (Vec<u64>, u64) {
    loop {
        let numbers: Vec<u64> = (0..n).map(|_| dice.within(1..26)).collect();
        let mut value = numbers[0];
        for next in &numbers[1..] {
            value = match dice.within(0..3) {
                0 => value + next,
                1 if value > *next => value - next,
                _ => value * next,
            };
        }
        if (10..=100).contains(&value) && !numbers.contains(&value) {
            let mut given = numbers;
            // The order would give it away.
            for at in (1..given.len()).rev() {
                given.swap(at, dice.within(0..at as u64 + 1) as usize);
            }
            return (given, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn expressions_come_to_what_the_books_say() {
        for (text, value) in [
            ("1 + 2 * 3", Some(7.0)),
            ("(1+2)*3", Some(9.0)),
            ("8 / 4 / 2", Some(1.0)),
            ("10 - 3 - 2", Some(5.0)),
            ("3 × (4 − 1)", Some(9.0)),
            ("1 / 0", None),
            ("1 +", None),
            ("(1", None),
            ("", None),
            ("two", None),
            ("99999999999999999999", None),
        ] {
            assert_eq!(evaluate(text).map(|e| e.0), value, "{text}");
        }
        assert!(evaluate(&"(".repeat(100_000)).is_none());
    }

    #[test]
    fn a_reply_is_right_by_its_last_expression() {
        let given = [3, 5, 7];
        for (reply, is) in [
            ("First 3 * 5 = 15.\n3 * 5 + 7", true),
            ("(3 * 5) + 7 = 22", true),
            ("`3*5+7`", true),
            ("3 * 5 + 5 + 2", false),
            ("3 * 7 + 1", false),
            ("22", false),
            ("I cannot.", false),
            ("3 * 5 + 7\nThat is it!", true),
            ("22 = 3 * 5 + 7", true),
            ("3 * 5 + 7 = 22\n22", true),
        ] {
            assert_eq!(right(reply, &given, 22), is, "{reply}");
        }
        // A number that is given once cannot be used twice, one given twice can.
        assert!(!right("11 + 11", &[11, 3], 22));
        assert!(right("11 + 11", &[11, 11], 22));
    }

    proptest! {
        #[test]
        fn no_text_is_too_odd(text in ".{0,80}") {
            right(&text, &[1, 2, 3], 6);
        }

        #[test]
        fn what_is_made_can_be_solved(seed: u64, n in 2usize..6) {
            let (numbers, target) = solvable(&mut Dice::new(seed), n);
            prop_assert!(numbers.len() == n && (10..=100).contains(&target) && !numbers.contains(&target));
        }
    }
}
