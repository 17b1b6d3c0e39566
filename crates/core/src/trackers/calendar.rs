//! Times as dates, in UTC.

/// A second of the calendar.
#[derive(Debug, PartialEq)]
pub(super) struct Date {
    /// Year, month and day.
    day: [u64; 3],
    /// Hour, minute and second.
    time: [u64; 3],
}

impl Date {
    /// Returns the date of seconds since 1970.
    ///
    /// Source: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`.
    pub(super) fn of(seconds: u64) -> Self {
        let (days, time) = (seconds / 86400, seconds % 86400);
        // Counted from 0000-03-01, so that a leap day is the last of its year.
        let days = days + 719_468;
        let (era, day) = (days / 146_097, days % 146_097);
        let year = (day - day / 1460 + day / 36524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let month = if month < 10 { month + 3 } else { month - 9 };
        Self {
            day: [era * 400 + year + u64::from(month <= 2), month, day],
            time: [time / 3600, time / 60 % 60, time % 60],
        }
    }

    /// Returns `YYYYMMDD_HHMMSS`.
    pub(super) fn compact(&self) -> String {
        let ([year, month, day], [hour, minute, second]) = (self.day, self.time);
        format!("{year:04}{month:02}{day:02}_{hour:02}{minute:02}{second:02}")
    }

    /// Returns `YYYY-MM-DDTHH:MM:SS`, as ISO 8601 has it, without a time zone.
    #[cfg_attr(
        not(feature = "trackio"),
        allow(dead_code, reason = "Trackio's store has such dates")
    )]
    pub(super) fn iso(&self) -> String {
        let ([year, month, day], [hour, minute, second]) = (self.day, self.time);
        format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        // As `date --utc --date=@SECONDS` has them.
        for (seconds, expected) in [
            (0, "19700101_000000"),
            (951_782_399, "20000228_235959"),
            (951_782_400, "20000229_000000"),
            (1_796_131_729, "20261201_132849"),
            (4_107_542_400, "21000301_000000"),
        ] {
            assert_eq!(Date::of(seconds).compact(), expected, "{seconds}");
        }
        assert_eq!(Date::of(1_796_131_729).iso(), "2026-12-01T13:28:49");
    }
}
