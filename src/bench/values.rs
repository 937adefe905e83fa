//! Values of flags with lists and ranges, in llama-bench's grammar.

/// Maximum values in one range: more is a mistake.
const VALUES_MAX: usize = 10_000;

/// `first[-last[(+|*)step]]`, comma-separated.
///
/// # Errors
/// The reason why a value is refused.
pub fn integers(text: &str, with_negative: bool) -> Result<Vec<i64>, String> {
    let mut values = Vec::new();
    for part in text.split(',') {
        let wrong = || format!("'{part}': expected a number, or a range such as 16-64, 16-64+16 or 16-64*2");
        let sign = if with_negative && part.starts_with('-') { 1 } else { 0 };
        let (first, rest) = match part[sign..].split_once('-') {
            Some((first, rest)) => (&part[..sign + first.len()], Some(rest)),
            None => (part, None),
        };
        let first = number(first).ok_or_else(wrong)?;
        let Some(rest) = rest else {
            values.push(first);
            continue;
        };
        let (last, step) = match rest.find(['+', '*']) {
            Some(at) => (&rest[..at], Some((rest.as_bytes()[at], number(&rest[at + 1..]).ok_or_else(wrong)?))),
            None => (rest, None),
        };
        let last = number(last).ok_or_else(wrong)?;
        let mut value = first;
        while value <= last {
            values.push(value);
            let next = match step {
                None => value.checked_add(1),
                Some((b'+', step)) => value.checked_add(step),
                Some((_, factor)) => value.checked_mul(factor),
            };
            let next = next.filter(|next| *next > value && values.len() < VALUES_MAX);
            value = next.ok_or_else(|| format!("'{part}': the range does not end"))?;
        }
    }
    Ok(values)
}

/// `pp,tg`.
pub fn pair(text: &str) -> Result<(u32, u32), String> {
    let wrong = || format!("'{text}': expected two numbers, as in 512,128");
    let (prompt, gen_) = text.split_once(',').ok_or_else(wrong)?;
    let number = |word: &str| word.trim().parse().map_err(|_| wrong());
    Ok((number(prompt)?, number(gen_)?))
}

/// Digits with an optional sign.
fn number(text: &str) -> Option<i64> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_ranges() {
        let all = |text| integers(text, false);
        assert_eq!(all("512"), Ok(vec![512]));
        assert_eq!(all("16,32"), Ok(vec![16, 32]));
        assert_eq!(all("1-3"), Ok(vec![1, 2, 3]));
        assert_eq!(all("0-4096+1024"), Ok(vec![0, 1024, 2048, 3072, 4096]));
        assert_eq!(all("16-64*2,7"), Ok(vec![16, 32, 64, 7]));
        assert_eq!(all("5-4"), Ok(vec![]), "as llama-bench");
        assert_eq!(integers("-1,99", true), Ok(vec![-1, 99]));
        for bad in ["", "a", "1,", "1-", "-1", "1-2+", "1-2x3", "1-4*1", "0-4*2", "1-4+0", "+1", "99999999999999999999"]
        {
            assert!(all(bad).is_err(), "{bad}");
        }
        assert!(all("0-9999999").unwrap_err().contains("does not end"));
    }

    #[test]
    fn pairs() {
        assert_eq!(pair("16,32"), Ok((16, 32)));
        for bad in ["", "16", "16,", "a,1", "1,2,3", "-1,2"] {
            assert!(pair(bad).is_err(), "{bad}");
        }
    }
}
