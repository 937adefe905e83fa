//! Encodings of numbers in a trace: LEB128, little-endian, half precision.

use half::f16;

use crate::cursor::Cursor;

/// Appends an unsigned LEB128 number: seven bits a byte, least first, the top bit set on all but the last.
pub(super) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

pub(super) fn put_f16(out: &mut Vec<u8>, value: f32) {
    out.extend_from_slice(&f16::from_f32(value).to_le_bytes());
}

pub(super) fn put_f32(out: &mut Vec<u8>, value: f32) {
    out.extend_from_slice(&value.to_le_bytes());
}

/// Reads a record from front to back. Errors are texts; the caller, which knows file and offset, makes a
/// [`super::TraceError`].
pub(super) struct Fields<'a>(Cursor<'a>);

impl<'a> Fields<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(Cursor(bytes))
    }

    pub(super) fn left(&self) -> usize {
        self.0.0.len()
    }

    pub(super) fn u8(&mut self, what: &str) -> Result<u8, String> {
        let [byte] = self.array(what)?;
        Ok(byte)
    }

    pub(super) fn f16(&mut self, what: &str) -> Result<f32, String> {
        Ok(f16::from_le_bytes(self.array(what)?).to_f32())
    }

    /// A finite, non-negative number of seconds.
    pub(super) fn seconds(&mut self, what: &str) -> Result<f32, String> {
        let seconds = f32::from_le_bytes(self.array(what)?);
        let is_sound = (0.0..=f32::MAX).contains(&seconds);
        is_sound.then_some(seconds).ok_or_else(|| format!("{what} is {seconds} seconds, expected a number from 0 on"))
    }

    pub(super) fn varint(&mut self, what: &str) -> Result<u64, String> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8(what)?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(format!("{what} has more than 64 bits"))
    }

    /// A number below `limit`.
    pub(super) fn below(&mut self, limit: u64, what: &str) -> Result<u64, String> {
        let value = self.varint(what)?;
        if value < limit { Ok(value) } else { Err(format!("{what} is {value}, expected less than {limit}")) }
    }

    /// A count of items of at least `least` bytes each. It is bounded by the bytes left, so that allocations are too.
    pub(super) fn count(&mut self, least: usize, what: &str) -> Result<usize, String> {
        let count = self.varint(what)?;
        let room = self.left() / least.max(1);
        match usize::try_from(count) {
            Ok(count) if count <= room => Ok(count),
            _ => Err(format!("{what} is {count}, but only {} bytes of the record are left", self.left())),
        }
    }

    pub(super) fn bytes(&mut self, n: usize, what: &str) -> Result<&'a [u8], String> {
        self.0.take(n).ok_or_else(|| format!("it ends within {what}"))
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        self.0.array().ok_or_else(|| format!("it ends within {what}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_bounded() {
        for (value, bytes) in [
            (0u64, &[0u8][..]),
            (127, &[127]),
            (128, &[0x80, 1]),
            (300, &[0xac, 2]),
            (16384, &[0x80, 0x80, 1]),
            (u64::MAX, &[255, 255, 255, 255, 255, 255, 255, 255, 255, 1]),
        ] {
            let mut out = Vec::new();
            put_varint(&mut out, value);
            assert_eq!((&out[..], Fields::new(bytes).varint("n")), (bytes, Ok(value)));
        }
        for (bytes, error) in [
            (&[0x80][..], "it ends within n"),
            (&[0xff; 10], "n has more than 64 bits"),
            (&[0x80; 11], "n has more than 64 bits"),
        ] {
            assert_eq!(Fields::new(bytes).varint("n").unwrap_err(), error);
        }
        assert_eq!(Fields::new(&[2, 0, 0, 0, 0]).count(2, "n"), Ok(2));
        let error = Fields::new(&[3, 0, 0, 0, 0]).count(2, "n").unwrap_err();
        assert_eq!(error, "n is 3, but only 4 bytes of the record are left");
        assert_eq!(Fields::new(&[9]).below(9, "expert").unwrap_err(), "expert is 9, expected less than 9");
        let seconds = |value: f32| Fields::new(&value.to_le_bytes()).seconds("wait");
        assert_eq!(seconds(0.25), Ok(0.25));
        assert!([-1.0, f32::NAN, f32::INFINITY].into_iter().all(|wrong| seconds(wrong).is_err()));
    }
}
