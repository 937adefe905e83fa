//! Faults are reported with the file and the remedy, and exit code 1: no crash, no abort, no wrong answer.

mod damage;
mod disk;
#[cfg(unix)]
mod refusals;
mod texts;
