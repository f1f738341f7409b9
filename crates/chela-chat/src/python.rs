//! What Hugging Face's templates expect of Python: `json.dumps`, `strftime`.

use crate::encode::MARKS;
use minijinja::{
    Error, ErrorKind, Value,
    value::{Kwargs, ValueKind},
};
use std::time::{SystemTime, UNIX_EPOCH};

/// How JSON is written.
struct Style {
    ascii: bool,
    indent: Option<usize>,
    item: String,
    key: String,
    sort: bool,
}

/// The filter `tojson` as Transformers has it: Python's `json.dumps` with `ensure_ascii=False`, so `, ` and `: ` between, keys
/// in wire order at every depth, nothing escaped for HTML.
pub fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let part = |at: usize, default: &str| {
        let given = separators.as_ref().and_then(|s| s.get(at));
        given.map_or(default, String::as_str).to_owned()
    };
    let style = Style {
        ascii: options.get::<Option<bool>>("ensure_ascii")? == Some(true),
        sort: options.get::<Option<bool>>("sort_keys")? == Some(true),
        item: part(0, if indent.is_some() { "," } else { ", " }),
        key: part(1, ": "),
        indent,
    };
    options.assert_all_used()?;
    let mut out = String::new();
    style.write(value, 0, &mut out)?;
    Ok(Value::from(out))
}

impl Style {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => out.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth, out)?,
            ValueKind::Map => self.map(value, depth, out)?,
            other => {
                let what = format!("tojson: {other} is not JSON");
                return Err(Error::new(ErrorKind::BadSerialization, what));
            }
        }
        Ok(())
    }

    fn list(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        out.push('[');
        let mut empty = true;
        for item in value.try_iter()? {
            self.gap(&mut empty, depth, out);
            self.write(&item, depth + 1, out)?;
        }
        self.end(empty, depth, out);
        out.push(']');
        Ok(())
    }

    fn map(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.sort {
            keys.sort();
        }
        out.push('{');
        let mut empty = true;
        for key in keys {
            self.gap(&mut empty, depth, out);
            match key.as_str() {
                Some(text) => self.string(text, out),
                None => self.string(&key.to_string(), out),
            }
            out.push_str(&self.key);
            self.write(&value.get_item(&key)?, depth + 1, out)?;
        }
        self.end(empty, depth, out);
        out.push('}');
        Ok(())
    }

    fn gap(&self, empty: &mut bool, depth: usize, out: &mut String) {
        if !std::mem::replace(empty, false) {
            out.push_str(&self.item);
        }
        self.line(depth + 1, out);
    }

    fn end(&self, empty: bool, depth: usize, out: &mut String) {
        if !empty {
            self.line(depth, out);
        }
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                // Marks are taken out later and must stay what they are.
                c if c < ' ' || (self.ascii && c > '~' && !MARKS.contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// Python's `repr` of a float: the shortest digits, an exponent below 1e-4 and from 1e16 on.
fn float(x: f64) -> String {
    if x.is_nan() {
        return "NaN".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let text = format!("{x:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(rest) => ('-', rest),
                None => ('+', exponent),
            };
            format!("{digits}e{sign}{exponent:0>2}")
        }
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// From the day of 1970-01-01 on.
const DAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

/// A moment as the template wants it, in UTC. Only the directives that templates use; others are an error, not a guess.
pub fn strftime(now: SystemTime, format: &str) -> Result<String, Error> {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()) as i64;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let padded = directive != Some('-');
        if !padded {
            directive = chars.next();
        }
        let written = directive.and_then(|d| part(seconds, d, padded));
        out += &written.ok_or_else(|| {
            let directive = directive.map_or_else(String::new, String::from);
            let what = format!("strftime_now: directive %{directive} is not supported");
            Error::new(ErrorKind::InvalidOperation, what)
        })?;
    }
    Ok(out)
}

/// What one directive stands for.
fn part(seconds: i64, directive: char, padded: bool) -> Option<String> {
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let month_name = MONTHS[(month - 1) as usize];
    let day_name = DAYS[days.rem_euclid(7) as usize];
    let number = |n: i64| {
        if padded {
            format!("{n:02}")
        } else {
            n.to_string()
        }
    };
    Some(match directive {
        'Y' => year.to_string(),
        'y' => number(year % 100),
        'm' => number(month),
        'd' => number(day),
        'H' => number(hour),
        'I' => number((hour + 11) % 12 + 1),
        'M' => number(minute),
        'S' => number(second % 60),
        'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
        'b' => month_name[..3].to_owned(),
        'B' => month_name.to_owned(),
        'a' => day_name[..3].to_owned(),
        'A' => day_name.to_owned(),
        '%' => "%".to_owned(),
        _ => return None,
    })
}

/// Year, month, day of a day number since 1970 (H. Hinnant, "chrono-compatible low-level date algorithms").
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = doy - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dates() {
        let now = UNIX_EPOCH + Duration::from_secs(20_787 * 86_400 + 13 * 3600 + 5 * 60 + 9);
        let all = strftime(
            now,
            "on %A (%a) %d %B (%b) %Y (%y), %-m: %H:%M:%S %-I %p 100%%",
        );
        let want = "on Monday (Mon) 30 November (Nov) 2026 (26), 11: 13:05:09 1 PM 100%";
        assert_eq!(all.unwrap(), want);
        assert_eq!(civil(0), (1970, 1, 1));
        for bad in ["%Q", "%", "%é", "%-"] {
            assert!(strftime(now, bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn floats_are_written_as_python_writes_them() {
        let cases = [
            (1.0, "1.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-1.5e300, "-1.5e+300"),
        ];
        for (x, want) in cases {
            assert_eq!(float(x), want);
        }
    }
}
