//! Non-zero bytes of a plain model outside of its tensors: padding by another tool, or data appended to the file. They
//! are kept so that unpacking restores every file.
//!
//! `hobbit.gaps` is a sequence of: position in the plain file (u64), length (u64), bytes.

/// Maximum bytes of gaps in a pack.
pub(super) const GAP_BYTES_MAX: u64 = 64 << 20;

/// One run of such bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gap {
    /// First byte in the plain file.
    pub start: u64,
    /// Length in bytes, not 0.
    pub len: u64,
    /// First byte in `hobbit.gaps`.
    pub at: u64,
}

/// Appends a gap without its leading and trailing zeros; nothing if all bytes are zero.
pub(super) fn push(out: &mut Vec<u8>, start: u64, bytes: &[u8]) {
    let (Some(first), Some(last)) = (bytes.iter().position(|b| *b != 0), bytes.iter().rposition(|b| *b != 0)) else {
        return;
    };
    let kept = &bytes[first..=last];
    out.extend_from_slice(&(start + first as u64).to_le_bytes());
    out.extend_from_slice(&(kept.len() as u64).to_le_bytes());
    out.extend_from_slice(kept);
}

/// Parses `hobbit.gaps`; `None` if it is truncated, or a gap is empty or ends beyond the maximum file size. The caller
/// checks that gaps lie between the tensors.
pub(super) fn parse(bytes: &[u8]) -> Option<Vec<Gap>> {
    let word = |at: usize| Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
    let (mut gaps, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let (start, len) = (word(at)?, word(at + 8)?);
        at += 16;
        let end = start.checked_add(len)?;
        if len == 0 || len > (bytes.len() - at) as u64 || i64::try_from(end).is_err() {
            return None;
        }
        gaps.push(Gap { start, len, at: at as u64 });
        at += len as usize;
    }
    Some(gaps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_trimmed_and_found_again() {
        let mut bytes = Vec::new();
        push(&mut bytes, 100, &[0, 0, 7, 0, 8, 0]);
        push(&mut bytes, 200, &[0; 31]);
        push(&mut bytes, 300, &[1]);
        assert_eq!(bytes.len(), 16 + 3 + 16 + 1);
        let gaps = parse(&bytes).unwrap();
        assert_eq!(gaps, [Gap { start: 102, len: 3, at: 16 }, Gap { start: 300, len: 1, at: 35 }]);
        assert_eq!(bytes[16..19], [7, 0, 8]);
        for cut in 1..bytes.len() {
            assert!(parse(&bytes[..cut]).is_none() || cut == 19, "{cut}");
        }
        bytes[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(parse(&bytes), None);
    }
}
