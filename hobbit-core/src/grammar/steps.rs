//! What finding out takes, counted before it is done.

/// One more state, stack or place in memory, in steps.
pub(super) const MADE: u64 = 32;

/// More would have been done than was allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooMany;

/// Steps of about 2 ns.
pub(super) struct Steps {
    limit: u64,
    left: u64,
}

impl Steps {
    pub(super) fn new(limit: u64) -> Self {
        Self { limit, left: limit }
    }

    pub(super) fn take(&mut self, n: u64) -> Result<(), TooMany> {
        self.left = self.left.checked_sub(n).ok_or(TooMany)?;
        Ok(())
    }

    pub(super) fn taken(&self) -> u64 {
        self.limit - self.left
    }
}
