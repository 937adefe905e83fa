//! What goes wrong is reported, with the file and the remedy, and exit code 1: no crash, no abort, no wrong answer.

mod damage;
mod disk;
mod limits;
mod signals;
mod texts;

#[path = "../fixture/cli.rs"]
mod cli;
#[path = "../fixture/mod.rs"]
mod fixture;
