//! The syntax of cron schedules: five fields, names of months and days, steps and ranges, and the @ shorthands.

const SHORTHANDS: &[&str] = &[
    "@yearly",
    "@annually",
    "@monthly",
    "@weekly",
    "@daily",
    "@midnight",
    "@hourly",
];
const MONTHS: &[&str] = &[
    "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec",
];
const DAYS: &[&str] = &["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

/// Says what is wrong with a schedule.
pub(super) fn check(schedule: &str) -> Result<(), String> {
    if SHORTHANDS.contains(&schedule) {
        return Ok(());
    }
    if let Some(interval) = schedule.strip_prefix("@every ") {
        return match crate::apiserver::schema::time::parse_duration(interval) {
            Some(nanos) if nanos > 0 => Ok(()),
            _ => Err(format!("failed to parse duration {schedule}")),
        };
    }
    if schedule.starts_with('@') {
        return Err(format!("unrecognized descriptor: {schedule}"));
    }
    let fields: Vec<&str> = schedule.split_whitespace().collect();
    if fields.len() != 5 {
        return Err(format!(
            "expected exactly 5 fields, found {}: [{}]",
            fields.len(),
            fields.join(" ")
        ));
    }
    for (field, (low, high, names)) in fields.iter().zip([
        (0, 59, &[][..]),
        (0, 23, &[][..]),
        (1, 31, &[][..]),
        (1, 12, MONTHS),
        (0, 6, DAYS),
    ]) {
        for part in field.split(',') {
            check_range(part, low, high, names)?;
        }
    }
    Ok(())
}

fn check_range(part: &str, low: u32, high: u32, names: &[&str]) -> Result<(), String> {
    let (range, step) = match part.split_once('/') {
        Some((range, step)) => (range, Some(step)),
        None => (part, None),
    };
    if let Some(step) = step
        && step.parse::<u32>().ok().filter(|s| *s > 0).is_none()
    {
        return Err(format!("step of range should be a positive number: {part}"));
    }
    if range == "*" || range == "?" {
        return Ok(());
    }
    let number = |text: &str| -> Result<u32, String> {
        let named = names.iter().position(|n| n.eq_ignore_ascii_case(text));
        let value = match named {
            // Months count from one, days from zero: both from the field's lower bound.
            Some(index) => u32::try_from(index).unwrap_or_default() + low,
            None => text
                .parse()
                .map_err(|_| format!("failed to parse int from {text}"))?,
        };
        if value < low || value > high {
            return Err(format!("value {value} is outside of {low}..{high}: {part}"));
        }
        Ok(value)
    };
    match range.split_once('-') {
        None => number(range).map(|_| ()),
        Some((first, last)) => {
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(format!(
                    "beginning of range ({first}) beyond end of range ({last}): {part}"
                ));
            }
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn schedules() {
        for good in [
            "*/5 * * * *",
            "0 0 1 jan sun",
            "@daily",
            "@every 1h30m",
            "1,2-4/2 0 ? * MON-FRI",
        ] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for bad in [
            "never",
            "* * * *",
            "60 * * * *",
            "* * 0 * *",
            "*/0 * * * *",
            "5-1 * * * *",
            "@often",
            "@every x",
        ] {
            assert!(check(bad).is_err(), "{bad}");
        }
    }
}
