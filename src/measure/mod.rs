//! Tools of benchmarks: what machine this is, memory limits, cold page caches, what a process costs.

pub mod cgroup;
pub mod disk;
pub mod energy;
pub mod host;
pub mod page_cache;
pub mod process;
