//! Kubernetes quantities ("250m", "1.5Gi", "1e3") as whole thousandths, rounded up. Pure.

use serde_json::Value;

/// Largest exponent worth computing; beyond it every quantity saturates.
const EXPONENT_LIMIT: i32 = 30;

/// Thousandths of the unit; `None` when the text is no quantity.
pub(crate) fn parse_milli(text: &str) -> Option<i128> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let end = digits
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(digits.len());
    let (number, suffix) = digits.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    // More than nine decimals are below what any quantity can express.
    let fraction = &fraction[..fraction.len().min(9)];
    let mantissa: i128 = format!("0{whole}{fraction}").parse().ok()?;
    let decimals = i32::try_from(fraction.len()).ok()?;
    let (binary, exponent) = scale(suffix)?;
    let value = mantissa.checked_mul(binary)?;
    let magnitude = power_of_ten(value, exponent + 3 - decimals);
    Some(if negative { -magnitude } else { magnitude })
}

/// The suffix as a binary factor and a power of ten.
fn scale(suffix: &str) -> Option<(i128, i32)> {
    let binary = |power: u32| Some((1_i128 << (10 * power), 0));
    match suffix {
        "" => Some((1, 0)),
        "Ki" => binary(1),
        "Mi" => binary(2),
        "Gi" => binary(3),
        "Ti" => binary(4),
        "Pi" => binary(5),
        "Ei" => binary(6),
        "n" => Some((1, -9)),
        "u" => Some((1, -6)),
        "m" => Some((1, -3)),
        "k" => Some((1, 3)),
        "M" => Some((1, 6)),
        "G" => Some((1, 9)),
        "T" => Some((1, 12)),
        "P" => Some((1, 15)),
        "E" => Some((1, 18)),
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E'])?.parse::<i32>().ok()?;
            Some((1, exponent.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)))
        }
    }
}

/// value × 10^exponent, rounded up, saturating.
fn power_of_ten(value: i128, exponent: i32) -> i128 {
    let factor = 10_i128
        .checked_pow(exponent.unsigned_abs())
        .unwrap_or(i128::MAX);
    if exponent >= 0 {
        value.saturating_mul(factor)
    } else {
        value.saturating_add(factor - 1) / factor
    }
}

/// A JSON quantity (text or number) in thousandths.
pub(crate) fn milli(value: &Value) -> Option<i64> {
    let milli = match value {
        Value::String(text) => parse_milli(text)?,
        Value::Number(number) => parse_milli(&number.to_string())?,
        _ => return None,
    };
    Some(i64::try_from(milli).unwrap_or(if milli < 0 { i64::MIN } else { i64::MAX }))
}

/// A JSON quantity in whole units, rounded up.
pub(crate) fn units(value: &Value) -> Option<i64> {
    let milli = match value {
        Value::String(text) => parse_milli(text)?,
        Value::Number(number) => parse_milli(&number.to_string())?,
        _ => return None,
    };
    let units = if milli >= 0 {
        (milli + 999) / 1000
    } else {
        milli / 1000
    };
    Some(i64::try_from(units).unwrap_or(if units < 0 { i64::MIN } else { i64::MAX }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_spelling_of_the_specification_is_read() {
        for (text, want) in [
            ("0", Some(0)),
            ("250m", Some(250)),
            ("1", Some(1000)),
            ("1.5", Some(1500)),
            (".5", Some(500)),
            ("0.0001", Some(1)),
            ("1k", Some(1_000_000)),
            ("1Ki", Some(1_024_000)),
            ("1.5Gi", Some(1_610_612_736_000)),
            ("1e3", Some(1_000_000)),
            ("12E2", Some(1_200_000)),
            ("-5", Some(-5000)),
            ("100n", Some(1)),
            ("1Zi", None),
            ("", None),
            ("abc", None),
            ("1.2.3", None),
        ] {
            assert_eq!(parse_milli(text), want, "{text}");
        }
    }

    proptest! {
        #[test]
        fn foreign_text_never_panics(text in ".{0,40}") {
            let _ = parse_milli(&text);
        }
    }
}
