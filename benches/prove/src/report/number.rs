//! Numbers as tables show them: three significant digits, `-` for what is not known.

use super::group::Spread;
use hobbit::units::Percent;

/// What is not known.
pub const UNKNOWN: &str = "-";

/// A figure that may not be known.
pub fn shown(value: Option<f64>, show: impl Fn(f64) -> String) -> String {
    value.map_or(UNKNOWN.into(), show)
}

/// Three significant digits.
pub fn digits(value: f64) -> String {
    if !value.is_finite() {
        return UNKNOWN.into();
    }
    if value == 0.0 {
        return "0".into();
    }
    // Rounded before the power is taken: 9.996 is 10.0.
    let rounded = format!("{value:.2e}");
    let power: i32 = rounded.split_once('e').and_then(|(_, power)| power.parse().ok()).unwrap_or(0);
    let value: f64 = rounded.parse().unwrap_or(value);
    let places = (2 - power).clamp(0, 12);
    format!("{value:.*}", usize::try_from(places).unwrap_or(0))
}

fn finite(value: f64, show: impl Fn(f64) -> String) -> String {
    shown(Some(value).filter(|value| value.is_finite()), show)
}

/// `35.2x`
pub fn ratio(value: f64) -> String {
    finite(value, |value| format!("{}x", digits(value)))
}

/// `75.3 %` of a share.
pub fn percent(share: f64) -> String {
    finite(share, |share| Percent(share).to_string())
}

/// `+1.30 %` of a change as a share.
pub fn change(share: f64) -> String {
    finite(share, |share| format!("{:+.2}", Percent(share))).replace("-0.00 %", "+0.00 %")
}

/// `1.69 GiB`
pub fn bytes(value: f64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    if !value.is_finite() {
        return UNKNOWN.into();
    }
    let (mut value, mut unit) = (value, 0);
    // Four digits are one too many.
    while value.abs() >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{} {}", digits(value), UNITS[unit])
}

/// `1.69 of 1.80 GiB (94 %)`
pub fn of_bytes(value: f64, whole: f64) -> String {
    let (found, all) = (bytes(value), bytes(whole));
    if found == UNKNOWN || all == UNKNOWN || whole <= 0.0 {
        return found;
    }
    let percent = percent(value / whole);
    match (found.split_once(' '), all.split_once(' ')) {
        (Some((number, unit)), Some((_, of_unit))) if unit == of_unit => format!("{number} of {all} ({percent})"),
        _ => format!("{found} of {all} ({percent})"),
    }
}

/// Stands between the least and the most of several runs.
pub const SPREAD: &str = "..";

/// The median, and from where to where where several were measured.
pub fn spread(spread: Option<Spread>, show: impl Fn(f64) -> String) -> String {
    match spread {
        None => UNKNOWN.into(),
        Some(spread) if spread.n == 1 => show(spread.median),
        Some(spread) => {
            format!("{} ({}{SPREAD}{})", show(spread.median), show(spread.least), show(spread.most))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_whatever_the_size() {
        let cases = [
            (0.0, "0"),
            (0.2712, "0.271"),
            (9.4, "9.40"),
            (9.996, "10.0"),
            (35.16, "35.2"),
            (999.6, "1000"),
            (2143.0, "2140"),
            (-5.7, "-5.70"),
            (0.000_123_4, "0.000123"),
            (1e-30, "0.000000000000"),
            (f64::NAN, "-"),
            (f64::INFINITY, "-"),
        ];
        for (value, expected) in cases {
            assert_eq!(digits(value), expected, "{value}");
        }
        assert_eq!(
            [ratio(35.16), ratio(f64::NAN), percent(0.7531), change(-0.0123)],
            ["35.2x", "-", "75.3 %", "-1.23 %"]
        );
    }

    #[test]
    fn no_change_has_no_minus() {
        assert_eq!([change(-1e-9), change(0.0), change(f64::NAN)], ["+0.00 %", "+0.00 %", "-"]);
    }

    #[test]
    fn bytes_change_units_before_a_fourth_digit() {
        let mib = 1048576.0;
        assert_eq!(
            [bytes(0.0), bytes(512.0), bytes(1732.0 * mib), bytes(999.0 * mib)],
            ["0 B", "512 B", "1.69 GiB", "999 MiB"]
        );
        assert_eq!(of_bytes(1732.0 * mib, 1843.2 * mib), "1.69 of 1.80 GiB (94.0 %)");
        assert_eq!(of_bytes(100.0 * mib, 1843.2 * mib), "100 MiB of 1.80 GiB (5.4 %)");
        assert_eq!(of_bytes(f64::NAN, 1.0), "-");
        assert_eq!(of_bytes(1024.0, 0.0), "1.00 KiB");
    }
}
