//! What prefetching did.

/// Counted since the planner was made. Seconds are the planner's estimates; what was measured is in
/// [`super::GovernorReport`].
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct PrefetchCounters {
    /// Versions planned to be read.
    pub issued: u64,
    /// Their bytes.
    pub issued_bytes: u64,
    /// Of these, refused or failed.
    pub failed: u64,
    /// Of these, withdrawn before all of them was read: the router had chosen others.
    pub dropped: u64,
    /// Versions that were used and had landed when their layer began.
    pub useful: u64,
    /// Versions that were used and were still being read.
    pub late: u64,
    /// Versions that their layer did not use.
    pub wasted: u64,
    /// Their bytes, those never read included.
    pub wasted_bytes: u64,
    /// Seconds that nothing waited thanks to useful and late ones.
    pub saved_seconds: f64,
    /// Seconds that wasted ones may have stood before reads that were waited for.
    pub delayed_seconds: f64,
}
