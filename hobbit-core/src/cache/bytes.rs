//! Numbers as a saved state has them: little-endian, lists behind their length.

pub(in crate::cache) use crate::cursor::Cursor;

/// Writes from front to back.
#[derive(Debug, Default)]
pub(super) struct Writer(pub(super) Vec<u8>);

impl Writer {
    pub(super) fn put<const N: usize>(&mut self, bytes: [u8; N]) {
        self.0.extend_from_slice(&bytes);
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.put(value.to_le_bytes());
    }

    pub(super) fn f32s(&mut self, values: &[f32]) {
        values.iter().for_each(|value| self.put(value.to_le_bytes()));
    }

    /// How many entries follow.
    pub(super) fn count(&mut self, n: usize) {
        self.put(u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes());
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.0.extend_from_slice(bytes);
    }
}

// Values of a saved state that are no plain numbers.
impl<'a> Cursor<'a> {
    /// A number of events: far enough from the largest one that counting goes on.
    pub(super) fn events(&mut self) -> Option<u64> {
        self.u64().filter(|value| *value <= 1 << 53)
    }

    /// A finite number.
    pub(super) fn f32(&mut self) -> Option<f32> {
        self.array().map(f32::from_le_bytes).filter(|value| value.is_finite())
    }

    pub(super) fn f32s<const N: usize>(&mut self) -> Option<[f32; N]> {
        let mut values = [0.0; N];
        for value in &mut values {
            *value = self.f32()?;
        }
        Some(values)
    }

    /// Finite numbers that are not negative.
    pub(super) fn amounts<const N: usize>(&mut self) -> Option<[f32; N]> {
        self.f32s().filter(|values| values.iter().all(|value| *value >= 0.0))
    }

    /// How many entries of at least `least` bytes follow, so that no more is allocated than was read.
    pub(super) fn count(&mut self, least: usize) -> Option<usize> {
        let n = u32::from_le_bytes(self.array()?) as usize;
        (n <= self.0.len() / least.max(1)).then_some(n)
    }

    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let n = self.count(1)?;
        self.take(n)
    }
}
