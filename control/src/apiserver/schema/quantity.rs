//! Quantities (`500m`, `1Gi`, `1e3`): parsing, comparison and the canonical text, as the API documentation of
//! `resource.Quantity` defines them.

use std::cmp::Ordering;
use std::fmt;

/// The text that a malformed quantity is answered with.
pub const MALFORMED: &str =
    "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'";

const NANOS: i128 = 1_000_000_000;
/// Larger amounts are capped, as 64-bit clients do.
const MAX_NANOS: i128 = (i64::MAX as i128) * NANOS;
/// Digits that can matter below the cap; more are refused rather than guessed at.
const MAX_TEXT: usize = 128;
/// Exponents beyond these leave the range on either side.
const MAX_EXPONENT: i32 = 60;

/// Which family of suffixes the author used; the canonical text keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Decimal,
    Binary,
    Exponent,
}

/// An amount in billionths.
#[derive(Clone, Copy, Debug)]
pub struct Quantity {
    nanos: i128,
    format: Format,
}

impl Quantity {
    /// Parses the text of a quantity; fractions below a billionth are rounded up.
    ///
    /// # Errors
    /// [`MALFORMED`].
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        if text.len() > MAX_TEXT {
            return Err(MALFORMED);
        }
        let (negative, rest) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        let end = rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(rest.len());
        let (number, suffix) = rest.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(MALFORMED);
        }
        let (format, base, exponent) = parse_suffix(suffix).ok_or(MALFORMED)?;
        let magnitude = scale(whole, fraction, base, exponent);
        let nanos = if negative { -magnitude } else { magnitude };
        Ok(Self { nanos, format })
    }

    /// A JSON string or number.
    ///
    /// # Errors
    /// [`MALFORMED`].
    pub fn from_json(value: &serde_json::Value) -> Result<Self, &'static str> {
        match value {
            serde_json::Value::String(text) => Self::parse(text.trim()),
            serde_json::Value::Number(number) => Self::parse(&number.to_string()),
            _ => Err(MALFORMED),
        }
    }

    #[must_use]
    pub fn zero() -> Self {
        Self {
            nanos: 0,
            format: Format::Decimal,
        }
    }

    /// A number of whole things.
    #[must_use]
    pub fn whole(count: i64) -> Self {
        Self {
            nanos: i128::from(count) * NANOS,
            format: Format::Decimal,
        }
    }

    /// For ratios only.
    #[must_use]
    #[allow(
        clippy::cast_precision_loss,
        reason = "a ratio is compared and shown with fewer digits than are kept"
    )]
    pub fn as_f64(self) -> f64 {
        self.nanos as f64 / NANOS as f64
    }

    #[must_use]
    pub fn is_negative(self) -> bool {
        self.nanos < 0
    }

    #[must_use]
    pub fn is_zero(self) -> bool {
        self.nanos == 0
    }

    #[must_use]
    pub fn is_integer(self) -> bool {
        self.nanos % NANOS == 0
    }

    /// Whole units, rounded up.
    #[must_use]
    pub fn value(self) -> i64 {
        i64::try_from(round_up(self.nanos, NANOS) / NANOS).unwrap_or(i64::MAX)
    }

    /// Thousandths, rounded up.
    #[must_use]
    pub fn millis(self) -> i64 {
        i64::try_from(round_up(self.nanos, NANOS / 1000) / (NANOS / 1000)).unwrap_or(i64::MAX)
    }

    /// Rounded up to thousandths, as resource lists are.
    #[must_use]
    pub fn rounded_to_millis(self) -> Self {
        Self {
            nanos: round_up(self.nanos, NANOS / 1000),
            format: self.format,
        }
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}
impl Eq for Quantity {}
impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

impl std::ops::Add for Quantity {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        let nanos = (self.nanos + other.nanos).clamp(-MAX_NANOS, MAX_NANOS);
        // Nothing has no spelling of its own.
        let format = if self.nanos == 0 {
            other.format
        } else {
            self.format
        };
        Self { nanos, format }
    }
}

impl std::ops::Sub for Quantity {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        self + Self {
            nanos: -other.nanos,
            format: other.format,
        }
    }
}

/// The canonical text: the largest suffix that leaves an integer.
impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const DECIMAL: [&str; 10] = ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"];
        const BINARY: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
        if self.nanos == 0 {
            return f.write_str("0");
        }
        let whole = round_up(self.nanos, NANOS) / NANOS;
        if self.format == Format::Binary && whole.abs() >= 1024 {
            let (amount, steps) = strip_factor(whole, 1024, BINARY.len() - 1);
            return write!(f, "{amount}{}", BINARY[steps]);
        }
        let (amount, steps) = strip_factor(self.nanos, 1000, DECIMAL.len() - 1);
        if self.format == Format::Exponent && steps != 3 {
            let exponent = i32::try_from(steps).unwrap_or_default() * 3 - 9;
            return write!(f, "{amount}e{exponent}");
        }
        write!(f, "{amount}{}", DECIMAL[steps])
    }
}

fn strip_factor(mut amount: i128, factor: i128, limit: usize) -> (i128, usize) {
    let mut steps = 0;
    while steps < limit && amount % factor == 0 {
        amount /= factor;
        steps += 1;
    }
    (amount, steps)
}

/// Away from zero to a multiple of `unit`.
fn round_up(nanos: i128, unit: i128) -> i128 {
    let rest = nanos % unit;
    if rest == 0 {
        nanos
    } else {
        nanos - rest + unit * nanos.signum()
    }
}

/// Format, base and exponent of a suffix.
fn parse_suffix(suffix: &str) -> Option<(Format, i128, i32)> {
    Some(match suffix {
        "" => (Format::Decimal, 10, 0),
        "n" => (Format::Decimal, 10, -9),
        "u" => (Format::Decimal, 10, -6),
        "m" => (Format::Decimal, 10, -3),
        "k" => (Format::Decimal, 10, 3),
        "M" => (Format::Decimal, 10, 6),
        "G" => (Format::Decimal, 10, 9),
        "T" => (Format::Decimal, 10, 12),
        "P" => (Format::Decimal, 10, 15),
        "E" => (Format::Decimal, 10, 18),
        "Ki" => (Format::Binary, 2, 10),
        "Mi" => (Format::Binary, 2, 20),
        "Gi" => (Format::Binary, 2, 30),
        "Ti" => (Format::Binary, 2, 40),
        "Pi" => (Format::Binary, 2, 50),
        "Ei" => (Format::Binary, 2, 60),
        _ => {
            let digits = suffix.strip_prefix(['e', 'E'])?;
            let exponent: i32 = digits.parse().ok()?;
            (
                Format::Exponent,
                10,
                exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT),
            )
        }
    })
}

/// `whole.fraction * base^exponent` in billionths, rounded up and capped.
fn scale(whole: &str, fraction: &str, base: i128, exponent: i32) -> i128 {
    let digits = format!("{whole}{fraction}");
    let digits = digits.trim_start_matches('0');
    let decimals = i32::try_from(fraction.len()).unwrap_or(i32::MAX);
    let mut amount: i128 = 0;
    // 30 digits fit with room; what is cut off below can only round up, what overflows above is capped.
    let kept = digits.len().min(30);
    for digit in digits[..kept].bytes() {
        amount = amount * 10 + i128::from(digit - b'0');
    }
    let cut = i32::try_from(digits.len() - kept).unwrap_or(i32::MAX);
    let sticky = digits[kept..].bytes().any(|d| d != b'0');
    let (factor, mut power) = if base == 2 {
        (1_i128 << exponent.clamp(0, 60), 9)
    } else {
        (1, 9 + exponent)
    };
    power += cut - decimals;
    let Some(mut amount) = amount.checked_mul(factor) else {
        return MAX_NANOS;
    };
    while power > 0 {
        match amount.checked_mul(10) {
            Some(larger) => amount = larger,
            None => return MAX_NANOS,
        }
        power -= 1;
    }
    let mut lost = sticky;
    while power < 0 && amount > 0 {
        lost |= amount % 10 != 0;
        amount /= 10;
        power += 1;
    }
    (amount + i128::from(lost)).min(MAX_NANOS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn canonical_forms() {
        for (given, expected) in [
            ("0.5", "500m"),
            ("1000m", "1"),
            ("1024Mi", "1Gi"),
            ("2048Mi", "2Gi"),
            ("1000000", "1M"),
            ("1073741824", "1073741824"),
            ("010", "10"),
            ("0.0001", "100u"),
            ("1e3", "1e3"),
            ("1.5Gi", "1536Mi"),
            ("100Ki", "100Ki"),
            ("0.5Ki", "512"),
            ("1536", "1536"),
            ("-1", "-1"),
            ("0", "0"),
            ("0Gi", "0"),
            ("0.0000000001", "1n"),
            ("16Gi", "16Gi"),
            ("1E", "1E"),
            ("12e-3", "12e-3"),
            ("9999999999999999999999", "9223372036854775807"),
            (".5", "500m"),
            ("5.", "5"),
        ] {
            let q = Quantity::parse(given).map(|q| q.to_string());
            assert_eq!(q.as_deref(), Ok(expected), "{given}");
        }
    }

    #[test]
    fn malformed_texts_are_refused() {
        for text in [
            "", "lots", "1 Gi", "1.2.3", "Gi", "-", "1ki", "1e", "1ee3", "+",
        ] {
            assert!(Quantity::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn resource_lists_round_up_to_millis() {
        let q = Quantity::parse("0.0001").map(|q| q.rounded_to_millis().to_string());
        assert_eq!(q.as_deref(), Ok("1m"));
    }

    proptest! {
        #[test]
        fn the_canonical_text_is_a_fixpoint(
            number in "-?[0-9]{1,12}(\\.[0-9]{1,6})?",
            suffix in "(|n|u|m|k|M|G|Ki|Mi|Gi|e3|e-3)",
        ) {
            let first = Quantity::parse(&format!("{number}{suffix}")).unwrap();
            let text = first.to_string();
            let second = Quantity::parse(&text).unwrap();
            prop_assert_eq!(second.to_string(), text);
        }

        #[test]
        fn no_text_panics(text in ".{0,40}") {
            let _ = Quantity::parse(&text).map(|q| q.to_string());
        }
    }
}
