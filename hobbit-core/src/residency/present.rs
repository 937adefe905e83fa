//! What can be used without another read.

use super::upgrades::Upgrades;
use crate::cache::Cache;
use crate::expert::{ExpertId, Version};
use crate::route::Rerouting;

/// As `Residency::is_present`.
pub(super) fn present(
    cache: &Cache,
    upgrades: &Upgrades,
    rerouting: &Rerouting,
    expert: ExpertId,
    is_elsewhere: &dyn Fn(Version) -> bool,
) -> bool {
    let high = Version::high(expert);
    let slot = cache.lookup(high).filter(|_| !upgrades.is_underway(high));
    is_elsewhere(high) || slot.is_some_and(|slot| !rerouting.only_present || cache.is_ready(slot))
}
