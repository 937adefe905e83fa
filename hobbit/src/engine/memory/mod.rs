pub(crate) mod contention;
pub(crate) mod device_tier;
pub(crate) mod gates;
pub(crate) mod host_reads;
pub(crate) mod pinned;
pub(crate) mod recorder;
pub(crate) mod state_file;
pub(crate) mod tiers;
