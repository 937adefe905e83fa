//! Sizes, percentages and durations as people write and read them.

use std::fmt;

pub const KIB: u64 = 1 << 10;
/// 1024 KiB.
pub const MIB: u64 = 1 << 20;
/// 1024 MiB.
pub const GIB: u64 = 1 << 30;

/// Bytes: `2.5GiB`, `1800M`, `4096`. Prefixes are binary, whatever their spelling; `None` where it is no size.
pub fn parse_bytes(text: &str) -> Option<u64> {
    parse_size::Config::new().with_binary().parse_size(text).ok()
}

/// Percent from 0 to `most`: `40%`, `12.5 %`, `40`; `None` where it is none.
pub fn parse_percent(text: &str, most: f64) -> Option<f64> {
    let number = text.strip_suffix('%').unwrap_or(text).trim_end();
    number.parse().ok().filter(|percent| (0.0..=most).contains(percent))
}

/// Bytes for people, with two decimals: `1.10 GiB`, `300 B`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < KIB {
            return f.pad(&format!("{} B", self.0));
        }
        let (mut value, mut unit) = (self.0 as f64 / KIB as f64, 0);
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        f.pad(&format!("{value:.2} {}", UNITS[unit]))
    }
}

/// Bytes for people, as short as a plan needs them: `1.10 GiB`, `412 MiB`, `1.5 MiB`, `300 B`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShortBytes(pub u64);

impl fmt::Display for ShortBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        let text = match self.0 {
            0..KIB => format!("{} B", self.0),
            KIB..MIB => format!("{:.0} KiB", bytes / KIB as f64),
            _ if self.0 < 10 * MIB => format!("{:.1} MiB", bytes / MIB as f64),
            MIB..GIB => format!("{:.0} MiB", bytes / MIB as f64),
            _ => format!("{:.2} GiB", bytes / GIB as f64),
        };
        f.pad(&text)
    }
}

/// A share in percent: `75.3 %`, with the decimals that the format requests (default one), and with a sign on request.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Percent(pub f64);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decimals = f.precision().unwrap_or(1);
        let percent = 100.0 * self.0;
        if f.sign_plus() { write!(f, "{percent:+.decimals$} %") } else { write!(f, "{percent:.decimals$} %") }
    }
}

/// A duration: `0.05 s`, with as many decimals as the format asks for, else two.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Seconds(pub f64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.*} s", f.precision().unwrap_or(2), self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_shown() {
        for (n, text) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 << 29, "1.50 GiB"), (u64::MAX, "16.00 EiB")]
        {
            assert_eq!(Bytes(n).to_string(), text);
        }
        assert_eq!(format!("{:>10}|{:<10}|", Bytes(MIB), Bytes(7)), "  1.00 MiB|7 B       |");
        let table = [(300, "300 B"), (4096, "4 KiB"), (3 * MIB / 2, "1.5 MiB"), (412 * MIB, "412 MiB")];
        for (bytes, text) in table.into_iter().chain([(1181116006, "1.10 GiB")]) {
            assert_eq!(ShortBytes(bytes).to_string(), text);
        }
    }

    #[test]
    fn percentages_are_read_and_shown() {
        for (text, percent) in [("0%", 0.0), ("25%", 25.0), ("12.5 %", 12.5), ("100", 100.0)] {
            assert_eq!(parse_percent(text, 100.0), Some(percent));
        }
        for bad in ["", "%", "-1", "-0.1", "101%", "1.01e2", "nan", "inf", "x"] {
            assert_eq!(parse_percent(bad, 100.0), None, "{bad}");
        }
        assert_eq!(parse_percent("250%", 1e6), Some(250.0));
        assert_eq!([Percent(0.7531).to_string(), format!("{:.0}", Percent(0.25))], ["75.3 %", "25 %"]);
        assert_eq!(format!("{:+.2}", Percent(0.013)), "+1.30 %");
    }

    #[test]
    fn durations_are_shown() {
        assert_eq!([Seconds(0.046).to_string(), format!("{:.0}", Seconds(7.0))], ["0.05 s", "7 s"]);
    }

    #[test]
    fn sizes_are_read() {
        assert_eq!(
            (parse_bytes("2.5GB"), parse_bytes("64k"), parse_bytes("G")),
            (Some(5 * GIB / 2), Some(64 * KIB), None)
        );
    }
}
