//! Experts on an RPC server in another process.

mod gone;
mod server;

use hobbit::options::DeviceChoice;
use hobbit::{DeviceOptions, ModelOptions};
use hobbit_core::plan::ExpertCache;

use crate::fixture::cases::all_architectures;
use crate::fixture::compare::{DEVICE_SIZES, check_on_device, each, options};
use crate::fixture::in_own_process;
use server::Server;

/// Every logit is, bit for bit, that of stock llama.cpp with all layers on the same server.
#[test]
fn rpc_device() {
    if !in_own_process("remote::rpc_device") {
        return;
    }
    let server = Server::start();
    let device = DeviceOptions { rpc: vec![server.endpoint()], ..DeviceOptions::default() };
    hobbit::devices(&device.rpc).unwrap();
    let device = DeviceOptions { devices: DeviceChoice::Named(vec!["RPC0".into()]), headroom: 0.0, ..device };
    let options = ModelOptions { device, ..options(ExpertCache::Auto) };
    each(all_architectures().into_iter().take(2), |case| check_on_device(&case, &options, &DEVICE_SIZES, &mut |_| ()));
}
