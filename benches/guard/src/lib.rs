//! The regression guard counts the instructions of hobbit's hot decisions. `check.sh` runs `benches/instructions` under
//! valgrind, and `compare.py` compares the counts with `instructions.json`.
//!
//! Instructions are counted instead of time: they are alike on a busy machine and an idle one, so a few percent show.

pub mod inputs;
