//! Tests of hobbit-server, in one binary that is linked once.

// A part of it is used here.
#[allow(dead_code)]
#[path = "../../tests/fixture/shared.rs"]
mod fixture;
mod http;
mod media;
#[cfg(unix)]
mod page;
