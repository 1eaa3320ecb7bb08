//! Cron schedules: five fields, names, lists, ranges, steps, and the usual macros. Pure.

use jiff::civil::{Date, Time};
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};

/// Days searched for the next match: enough for every 29th of February.
const SEARCH_DAYS: u32 = 366 * 9;

const MONTHS: [&str; 12] = [
    "jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec",
];
const DAYS: [&str; 7] = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

/// A set of small numbers as bits, and whether it was written as "*".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Field {
    bits: u64,
    any: bool,
}

impl Field {
    fn has(self, n: i8) -> bool {
        u32::try_from(n).is_ok_and(|n| n < u64::BITS && self.bits & (1 << n) != 0)
    }
}

/// A parsed schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Schedule {
    minute: Field,
    hour: Field,
    day: Field,
    month: Field,
    weekday: Field,
}

fn number(text: &str, names: &[&str], offset: u32) -> Option<u32> {
    let lower = text.to_ascii_lowercase();
    if let Some(at) = names.iter().position(|n| *n == lower) {
        return Some(u32::try_from(at).ok()? + offset);
    }
    text.parse().ok()
}

fn field(text: &str, first: u32, last: u32, names: &[&str]) -> Option<Field> {
    let mut bits = 0_u64;
    for part in text.split(',') {
        let (range, step) = match part.split_once('/') {
            Some((range, step)) => (range, step.parse::<u32>().ok().filter(|s| *s > 0)?),
            None => (part, 1),
        };
        let (from, to) = if range == "*" || range == "?" {
            (first, last)
        } else if let Some((from, to)) = range.split_once('-') {
            (number(from, names, first)?, number(to, names, first)?)
        } else {
            let from = number(range, names, first)?;
            // "5/15" means from 5 on.
            (from, if part.contains('/') { last } else { from })
        };
        if from < first || to > last || from > to {
            return None;
        }
        let mut n = from;
        while n <= to {
            bits |= 1 << n;
            n = n.checked_add(step)?;
        }
    }
    Some(Field {
        bits,
        any: text.starts_with(['*', '?']),
    })
}

impl Schedule {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let text = match text.trim() {
            "@yearly" | "@annually" => "0 0 1 1 *",
            "@monthly" => "0 0 1 * *",
            "@weekly" => "0 0 * * 0",
            "@daily" | "@midnight" => "0 0 * * *",
            "@hourly" => "0 * * * *",
            other => other,
        };
        let fields: Vec<&str> = text.split_whitespace().collect();
        let [minute, hour, day, month, weekday] = fields.as_slice() else {
            return None;
        };
        let mut weekday = field(weekday, 0, 7, &DAYS)?;
        // Sunday has two numbers.
        if weekday.bits & (1 << 7) != 0 {
            weekday.bits |= 1;
        }
        Some(Self {
            minute: field(minute, 0, 59, &[])?,
            hour: field(hour, 0, 23, &[])?,
            day: field(day, 1, 31, &[])?,
            month: field(month, 1, 12, &MONTHS)?,
            weekday,
        })
    }

    fn is_day(&self, date: Date) -> bool {
        let day = self.day.has(date.day());
        let weekday = self.weekday.has(date.weekday().to_sunday_zero_offset());
        // Both given: one of them is enough, as cron has always done it.
        let matches = if self.day.any || self.weekday.any {
            day && weekday
        } else {
            day || weekday
        };
        self.month.has(date.month()) && matches
    }

    /// The first time after `after`; `None` when there is none for years.
    pub(super) fn next(&self, after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        let start = zone.to_datetime(after);
        let mut date = start.date();
        for _ in 0..SEARCH_DAYS {
            if self.is_day(date)
                && let Some(found) = self.next_on(date, after, zone)
            {
                return Some(found);
            }
            date = date.checked_add(1.day()).ok()?;
        }
        None
    }

    fn next_on(&self, date: Date, after: Timestamp, zone: &TimeZone) -> Option<Timestamp> {
        let hours = (0..24_i8).filter(|h| self.hour.has(*h));
        hours
            .flat_map(|hour| (0..60_i8).map(move |minute| (hour, minute)))
            .filter(|(_, minute)| self.minute.has(*minute))
            .filter_map(|(hour, minute)| {
                let time = Time::new(hour, minute, 0, 0).ok()?;
                let zoned = zone
                    .to_ambiguous_zoned_datetime(date.to_datetime(time))
                    .compatible()
                    .ok()?;
                // A time that the clock skips on this day does not happen.
                (zoned.hour() == hour && zoned.minute() == minute).then(|| zoned.timestamp())
            })
            .find(|time| *time > after)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn next(schedule: &str, after: &str) -> String {
        let schedule = Schedule::parse(schedule).unwrap();
        let next = schedule.next(after.parse().unwrap(), &TimeZone::UTC);
        next.unwrap().to_string()
    }

    #[test]
    fn the_next_time_is_found() {
        let after = "2024-02-27T23:59:30Z";
        for (schedule, want) in [
            ("* * * * *", "2024-02-28T00:00:00Z"),
            ("*/5 * * * *", "2024-02-28T00:00:00Z"),
            ("10-20/5 3 * * *", "2024-02-28T03:10:00Z"),
            ("0 0 29 2 *", "2024-02-29T00:00:00Z"),
            ("30 4 1 * fri", "2024-03-01T04:30:00Z"),
            ("0 12 * * MON-WED", "2024-02-28T12:00:00Z"),
            ("0 0 * * 7", "2024-03-03T00:00:00Z"),
            ("@monthly", "2024-03-01T00:00:00Z"),
            ("5/20 1 * jan,mar *", "2024-03-01T01:05:00Z"),
        ] {
            assert_eq!(next(schedule, after), want, "{schedule}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for schedule in [
            "",
            "never",
            "* * * *",
            "60 * * * *",
            "* * 0 * *",
            "*/0 * * * *",
            "5-1 * * * *",
            "* * * * 8",
        ] {
            assert_eq!(Schedule::parse(schedule), None, "{schedule}");
        }
        let never = Schedule::parse("0 0 31 2 *").unwrap();
        assert_eq!(
            never.next("2024-01-01T00:00:00Z".parse().unwrap(), &TimeZone::UTC),
            None
        );
    }

    proptest! {
        #[test]
        fn foreign_text_never_panics(text in ".{0,40}") {
            let _ = Schedule::parse(&text);
        }

        #[test]
        fn the_next_time_is_the_first_that_matches(
            minute in 0..60_u32, hour in 0..24_u32, start in 1_600_000_000..1_800_000_000_i64,
        ) {
            let schedule = Schedule::parse(&format!("{minute} {hour} * * *")).unwrap();
            let start = Timestamp::from_second(start).unwrap();
            let next = schedule.next(start, &TimeZone::UTC).unwrap();
            prop_assert!(next > start && next.as_second() - start.as_second() <= 86_400);
            prop_assert_eq!(next.as_second() % 86_400, i64::from(hour * 3600 + minute * 60));
        }
    }
}
