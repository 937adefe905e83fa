//! `hobbit-cli` as its users meet it: the real binary, in a fresh directory, with a clean environment.

mod fitted;
mod presets;
mod prompts;
mod reports;
mod rig;
mod routing;
mod signals;
mod talk;
mod terminal;
mod thoughts;
mod usage;
