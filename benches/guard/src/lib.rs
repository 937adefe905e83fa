//! The regression guard: how many instructions hobbit's hot decisions take, against what was recorded.
//!
//! ```text
//! inputs ─► benches/instructions ─► valgrind ─► counts ─┐
//!                                 instructions.json ────┴► compare ─► report, exit code
//! ```
//!
//! Instructions are counted instead of time: they are alike on a busy machine and an idle one, so a few percent show.

pub mod compare;
pub mod counts;
pub mod inputs;
pub mod recorded;
