//! Timestamps and durations in the forms that API objects use.

use jiff::Timestamp;

/// Seconds precision, UTC: `metav1.Time`.
#[must_use]
pub fn format_time(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Microseconds precision, UTC: `metav1.MicroTime`.
#[must_use]
pub fn format_micro_time(time: Timestamp) -> String {
    let micros = time.subsec_microsecond().unsigned_abs();
    let seconds = if time.subsec_nanosecond() < 0 {
        // Before the epoch jiff counts the fraction downwards; the text counts upwards.
        return time.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string();
    } else {
        time.strftime("%Y-%m-%dT%H:%M:%S").to_string()
    };
    format!("{seconds}.{micros:06}Z")
}

/// RFC 3339 with any offset.
#[must_use]
pub fn parse_time(text: &str) -> Option<Timestamp> {
    // jiff also takes a blank for the T and minutes without seconds, which RFC 3339 readers in the field refuse.
    (text.len() >= 20 && text.as_bytes().get(10) == Some(&b'T')).then(|| text.parse().ok())?
}

/// Go's notation of a duration, for example `1h2m0.5s`, in nanoseconds.
#[must_use]
pub fn parse_duration(text: &str) -> Option<i64> {
    let (negative, mut rest) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    if rest == "0" {
        return Some(0);
    }
    let mut total: i128 = 0;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at(end);
        let unit_end = tail
            .find(|c: char| c.is_ascii_digit() || c == '.')
            .unwrap_or(tail.len());
        let (unit, next) = tail.split_at(unit_end);
        let nanos: i128 = match unit {
            "ns" => 1,
            "us" | "µs" | "μs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            _ => return None,
        };
        total = total.checked_add(scaled(number, nanos)?)?;
        rest = next;
    }
    i64::try_from(if negative { -total } else { total }).ok()
}

fn scaled(number: &str, nanos: i128) -> Option<i128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let whole: i128 = if whole.is_empty() {
        0
    } else {
        whole.parse().ok()?
    };
    let mut result = whole.checked_mul(nanos)?;
    let mut unit = nanos;
    for digit in fraction.bytes() {
        if !digit.is_ascii_digit() {
            return None;
        }
        unit /= 10;
        result = result.checked_add(i128::from(digit - b'0') * unit)?;
    }
    Some(result)
}

/// Go's notation of a duration.
#[must_use]
pub fn format_duration(nanos: i64) -> String {
    let sign = if nanos < 0 { "-" } else { "" };
    let total = nanos.unsigned_abs();
    if total == 0 {
        return "0s".into();
    }
    for (limit, unit, name) in [
        (1_000, 1, "ns"),
        (1_000_000, 1_000, "µs"),
        (1_000_000_000, 1_000_000, "ms"),
    ] {
        if total < limit {
            return format!("{sign}{}{name}", with_fraction(total, unit));
        }
    }
    let seconds = with_fraction(total % 60_000_000_000, 1_000_000_000);
    let minutes = total / 60_000_000_000;
    match (minutes / 60, minutes % 60) {
        (0, 0) => format!("{sign}{seconds}s"),
        (0, m) => format!("{sign}{m}m{seconds}s"),
        (h, m) => format!("{sign}{h}h{m}m{seconds}s"),
    }
}

fn with_fraction(amount: u64, unit: u64) -> String {
    let digits = unit.ilog10() as usize;
    let fraction = amount % unit;
    if fraction == 0 {
        return (amount / unit).to_string();
    }
    let text = format!("{fraction:0digits$}");
    format!("{}.{}", amount / unit, text.trim_end_matches('0'))
}

/// The age of something in the short form of `kubectl get`: 45s, 3m20s, 5h12m, 2d3h, 40d, 3y12d.
#[must_use]
pub fn human_duration(seconds: i64) -> String {
    // A clock that is slightly ahead must not show as an error.
    if seconds < -1 {
        return "<invalid>".into();
    }
    let seconds = seconds.max(0);
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let pair = |large: i64, unit: &str, small: i64, small_unit: &str| {
        if small == 0 {
            format!("{large}{unit}")
        } else {
            format!("{large}{unit}{small}{small_unit}")
        }
    };
    if seconds < 120 {
        format!("{seconds}s")
    } else if minutes < 10 {
        pair(minutes, "m", seconds % 60, "s")
    } else if minutes < 180 {
        format!("{minutes}m")
    } else if hours < 8 {
        pair(hours, "h", minutes % 60, "m")
    } else if hours < 48 {
        format!("{hours}h")
    } else if days < 8 {
        pair(days, "d", hours % 24, "h")
    } else if days < 365 * 2 {
        format!("{days}d")
    } else if days < 365 * 8 {
        pair(days / 365, "y", days % 365, "d")
    } else {
        format!("{}y", days / 365)
    }
}

/// The whole seconds from `text` to `now`.
#[must_use]
pub fn seconds_since(text: &str, now: Timestamp) -> Option<i64> {
    parse_time(text).map(|then| now.as_second() - then.as_second())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_round_trip() {
        for text in [
            "0s", "1s", "1m30s", "2h0m0s", "1h1m0.5s", "150ms", "1.5µs", "-3s",
        ] {
            let nanos = parse_duration(text).unwrap();
            assert_eq!(format_duration(nanos), text);
        }
        for bad in ["", "5", "s", "1x", "-", "1.2.3s"] {
            assert_eq!(parse_duration(bad), None, "{bad}");
        }
    }

    #[test]
    fn ages_read_like_kubectl() {
        for (seconds, text) in [
            (-5, "<invalid>"),
            (-1, "0s"),
            (119, "119s"),
            (120, "2m"),
            (200, "3m20s"),
            (600, "10m"),
            (3 * 3600 - 1, "179m"),
            (5 * 3600 + 720, "5h12m"),
            (40 * 3600, "40h"),
            (3 * 86_400 + 7200, "3d2h"),
            (40 * 86_400, "40d"),
            (800 * 86_400, "2y70d"),
            (3000 * 86_400, "8y"),
        ] {
            assert_eq!(human_duration(seconds), text, "{seconds}");
        }
    }

    #[test]
    fn times_are_normalised_to_utc() {
        let t = parse_time("2024-02-29T23:30:00.123456789-01:00").unwrap();
        assert_eq!(format_time(t), "2024-03-01T00:30:00Z");
        assert_eq!(format_micro_time(t), "2024-03-01T00:30:00.123456Z");
        assert_eq!(parse_time("2024-02-30T00:00:00Z"), None);
        assert_eq!(parse_time("now"), None);
    }
}
