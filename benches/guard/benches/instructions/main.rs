//! Instructions of the hot decisions. `benches/guard/check.sh` runs this and compares the counts with recorded ones.
//!
//! Only a bench's function is counted: its input is made before, and dropped after.

mod caching;
mod loads;
mod nested;
mod policies;
mod predictors;
mod routing;

use caching::cache;
use gungraun::{Callgrind, LibraryBenchmarkConfig, main};
use loads::load;
use nested::planes;
use policies::eviction;
use predictors::predict;
use routing::route;

/// glibc chooses its string and math functions by the processor's features. Without these it chooses the functions that
/// run on every x86-64.
const GLIBC_TUNABLES: &str = "glibc.cpu.hwcaps=-AVX,-AVX2,-AVX512F,-AVX512VL,-AVX512BW,-FMA,-FMA4,-BMI1,-BMI2,-LZCNT,\
    -MOVBE,-POPCNT,-SSE4_1,-SSE4_2,-SSSE3,-ERMS,-FSRM,-RTM,-AVX_Fast_Unaligned_Load,-Fast_Unaligned_Copy,\
    -Fast_Copy_Backward";

main!(
    config = LibraryBenchmarkConfig::default()
        .env("GLIBC_TUNABLES", GLIBC_TUNABLES)
        // Only instructions are compared: no caches are simulated.
        .tool(Callgrind::with_args(["--cache-sim=no"])),
    library_benchmark_groups = [eviction, cache, route, predict, load, planes]
);
