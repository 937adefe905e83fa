//! Experts on an RPC server in another process: every logit is, bit for bit, that of stock llama.cpp with all layers on
//! the same server.

#[path = "../exactness/cases.rs"]
#[allow(dead_code)]
mod cases;
#[path = "../devices/check.rs"]
mod check;
#[path = "../exactness/compare.rs"]
#[allow(dead_code)]
mod compare;
#[path = "../fixture/mod.rs"]
mod fixture;
mod gone;
#[path = "../exactness/script.rs"]
#[allow(dead_code)]
mod script;
mod server;
#[path = "../exactness/stock.rs"]
#[allow(dead_code)]
mod stock;

use cases::Case;
use check::{SIZES, check};
use hobbit::DeviceOptions;
use hobbit::options::DeviceChoice;
use server::Server;

#[test]
fn rpc_device() {
    fixture::quiet_llama_cpp();
    let server = Server::start();
    let device = DeviceOptions { rpc: vec![server.endpoint()], ..DeviceOptions::default() };
    hobbit::devices(&device.rpc).unwrap();
    let device = DeviceOptions { devices: DeviceChoice::Named(vec!["RPC0".into()]), headroom: 0.0, ..device };
    let cases: Vec<Case> = cases::all_architectures().into_iter().take(2).collect();
    let failures: Vec<String> = cases.iter().flat_map(|case| check(case, &device, &SIZES)).collect();
    assert!(failures.is_empty(), "{} cases:\n{}", cases.len(), failures.join("\n"));
}
