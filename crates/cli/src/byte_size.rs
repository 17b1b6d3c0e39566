//! Sizes in bytes as people write and read them.

use std::fmt;
use std::str::FromStr;

/// A number of bytes, written as `24GiB`, `512MB` or `1024`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ByteSize(pub(crate) u64);

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let expected = || format!("{text:?} is no size; write it as 24GiB, 512MB or a number of bytes");
        let end = text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(text.len());
        let number: f64 = text[..end].parse().map_err(|_| expected())?;
        let unit: u64 = match text[end..].trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "kb" => 1_000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            "tb" => 1_000_000_000_000,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            _ => return Err(expected()),
        };
        let bytes = number * unit as f64;
        if bytes < 1.0 || bytes > (1u64 << 60) as f64 {
            return Err(format!("{text:?} is not between one byte and an exbibyte"));
        }
        Ok(Self(bytes as u64))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&in_units(self.0, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]))
    }
}

/// Returns a size as Accelerate writes it: units of 1024, with the names of those of 1000.
pub(crate) fn as_accelerate_writes(bytes: u64) -> String {
    in_units(bytes, ["bytes", "KB", "MB", "GB", "TB", "PB"])
}

fn in_units(bytes: u64, units: [&str; 6]) -> String {
    let mut size = bytes as f64;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < units.len() {
        size /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} {}", units[0]),
        _ => format!("{size:.2} {}", units[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_units_of_1000_and_of_1024() {
        for (text, bytes) in [
            ("24GiB", 24 << 30),
            ("24 gib", 24 << 30),
            ("24G", 24 << 30),
            ("1.5GB", 1_500_000_000),
            ("512MB", 512_000_000),
            ("1024", 1024),
            ("80KiB", 80 << 10),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in ["", "GiB", "-1GiB", "1XB", "1e9", "nan", "0", "9999999999TiB"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn accelerates_figures_are_written_as_accelerate_does() {
        for (bytes, written) in [
            (90_669_056, "86.47 MB"),
            (433_249_280, "413.18 MB"),
            (4 * 433_249_280, "1.61 GB"),
            (2 * 433_249_280, "826.36 MB"),
            (433_249_280 / 8, "51.65 MB"),
            (100, "100 bytes"),
        ] {
            assert_eq!(as_accelerate_writes(bytes), written);
        }
        assert_eq!(ByteSize(24 << 30).to_string(), "24.00 GiB");
    }
}
