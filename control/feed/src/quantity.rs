//! Kubernetes quantities (`apimachinery/pkg/api/resource`): 100m, 1.5, 2Gi, 1e3.

/// The value times `scale`, rounded up as Kubernetes does; `None` for text that is no quantity or does not fit.
#[must_use]
pub fn parse_scaled(text: &str, scale: i64) -> Option<i64> {
    let text = text.trim();
    let number_end = number_length(text);
    let (number, suffix) = text.split_at(number_end);
    let (multiplier, divisor) = suffix_factor(suffix)?;
    let (negative, number) = match number.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, number.strip_prefix('+').unwrap_or(number)),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    // More digits than this are below every unit in use.
    let fraction = fraction.get(..fraction.len().min(9))?;
    let digits: i128 = format!("0{whole}{fraction}").parse().ok()?;
    let denominator = 10i128
        .checked_pow(u32::try_from(fraction.len()).ok()?)?
        .checked_mul(divisor)?;
    let numerator = digits
        .checked_mul(multiplier)?
        .checked_mul(i128::from(scale))?;
    let value = numerator / denominator + i128::from(numerator % denominator != 0);
    i64::try_from(if negative { -value } else { value }).ok()
}

/// Thousandths: the unit of cpu.
#[must_use]
pub fn millis(text: &str) -> Option<i64> {
    parse_scaled(text, 1000)
}

/// Whole units: bytes of memory, counts.
#[must_use]
pub fn units(text: &str) -> Option<i64> {
    parse_scaled(text, 1)
}

fn number_length(text: &str) -> usize {
    text.bytes()
        .take_while(|b| b.is_ascii_digit() || matches!(b, b'.' | b'-' | b'+'))
        .count()
}

/// Multiplier and divisor of a suffix.
fn suffix_factor(suffix: &str) -> Option<(i128, i128)> {
    if let Some(exponent) = suffix
        .strip_prefix(['e', 'E'])
        .filter(|rest| !rest.is_empty())
    {
        let exponent: i32 = exponent.parse().ok()?;
        let power = 10i128.checked_pow(exponent.unsigned_abs())?;
        return Some(if exponent < 0 { (1, power) } else { (power, 1) });
    }
    Some(match suffix {
        "" => (1, 1),
        "n" => (1, 1_000_000_000),
        "u" => (1, 1_000_000),
        "m" => (1, 1000),
        "k" => (1000, 1),
        "M" => (1_000_000, 1),
        "G" => (1_000_000_000, 1),
        "T" => (1_000_000_000_000, 1),
        "P" => (1_000_000_000_000_000, 1),
        "E" => (1_000_000_000_000_000_000, 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::{millis, units};

    #[test]
    fn reads_what_kubernetes_writes() {
        for (text, expected) in [
            ("100m", Some(100)),
            ("1", Some(1000)),
            ("1.5", Some(1500)),
            (".5", Some(500)),
            ("0.1m", Some(1)),
            ("1e3", Some(1_000_000)),
            ("-1", Some(-1000)),
            ("", None),
            ("x", None),
            ("1.2.3", None),
            ("9E", None),
            ("1e99", None),
            ("--1", None),
        ] {
            assert_eq!(millis(text), expected, "{text:?}");
        }
        assert_eq!(units("2Gi"), Some(2 << 30));
        assert_eq!(units("1500m"), Some(2));
        assert_eq!(units("128974848"), Some(128_974_848));
        assert_eq!(units("1E"), Some(1_000_000_000_000_000_000));
        assert_eq!(units("1é"), None);
    }
}
